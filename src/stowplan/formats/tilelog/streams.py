"""The log interleaves two streams: the tiling program's lines, and autograd's, which cut those in half."""

from dataclasses import dataclass

_ENGINE = "[torch/csrc/autograd/engine.cpp] call_function "


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the program's stream and the number of the file's line it starts on."""

    number: int
    text: str

    @property
    def where(self) -> str:
        return f"line {self.number}"


def separate(text: str) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """The program's lines, made whole again, and the functions that autograd called."""
    lines: list[Line] = []
    calls: list[str] = []
    fragments: list[str] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        before, engine, called = raw.partition(_ENGINE)
        fragments.append(before)
        if engine:
            calls.append(called)
        else:
            lines.append(Line(number - len(fragments) + 1, "".join(fragments)))
            fragments = []
    if "".join(fragments):
        lines.append(Line(number - len(fragments) + 1, "".join(fragments)))
    return tuple(lines), tuple(calls)
