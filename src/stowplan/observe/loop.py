"""What repeats in a training loop, from what can be seen outside it.

A loop is a row of tokens: `F name` is a call of an outermost module with gradients, `B` a backward, `g` a
torch.autograd.grad, `S n` a step of the n-th optimizer. A segment ends with a step. A call that no backward
of its segment reaches is struck out, and runs of a pattern count as one, since accumulation and closures
differ in length. An iteration is the smallest number p of segments that came twice in a row, in which each
known optimizer steps. If no p does, there is no period: nothing is guessed.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

LONGEST = 16  # segments of an iteration
LIMIT = 2 * LONGEST + 1
_PATTERN = 6  # tokens of a run at most
_MANUAL = 9  # backwards without a step, after which a loop updates its parameters by hand

Segment: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A token, when it began on the observer's clock, and the number of the call, if it is one."""

    text: str
    clock: int
    call: int = -1


class Loop:
    """Reads tokens one by one."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.raw: list[Segment] = []  # with every repetition
        self.ends: list[int] = []  # the clock at the end of each
        self.stepped: set[str] = set()
        self._tokens: list[Token] = []
        self._calls: set[int] = set()
        self._used: set[int] = set()
        self._by_hand = False

    def add(self, token: Token) -> bool:
        """Take a token; whether a segment has ended."""
        was = len(self.segments)
        if token.call >= 0:
            self._calls.add(token.call)
        if token.text.startswith("S"):
            self.stepped.add(token.text)
            self._end([*self._tokens, token], token.clock)
            self._tokens = []
        elif token.text.startswith("F") and self._is_by_hand():
            self._split(token)
        else:
            self._tokens.append(token)
        return len(self.segments) > was

    def _is_by_hand(self) -> bool:
        """Whether this loop updates its parameters without an optimizer, as it seems."""
        if not self.stepped and not self._by_hand:
            self._by_hand = sum(token.text == "B" for token in self._tokens) >= _MANUAL
        return self._by_hand

    def use(self, calls: Collection[int]) -> None:
        """A backward reaches the outputs of these calls."""
        self._used.update(calls)

    def waiting(self) -> set[int]:
        """The calls that no backward has reached."""
        return self._calls - self._used

    def is_used(self, call: int) -> bool:
        """Whether a backward has reached a call."""
        return call in self._used

    def period(self, optimizers: Collection[str]) -> int:
        """The segments of an iteration; 0 while there is none. `optimizers` are all that exist."""
        found = self.segments
        for length in range(1, LONGEST + 1):
            last = found[-length:]
            if len(found) > 2 * length and last == found[-2 * length : -length]:
                if self.stepped and not set(optimizers) <= {text for each in last for text in each}:
                    continue
                return length
        return self._of_all() if self.is_over else 0

    @property
    def is_over(self) -> bool:
        """Whether enough was seen."""
        return len(self.segments) >= LIMIT

    def _of_all(self) -> int:
        """An optimizer that exists never stepped: all that was seen after the first segment must repeat."""
        found = self.segments[1:]
        return next(
            (p for p in range(1, LONGEST + 1) if found[p:] == found[:-p] and self._steps_in(found[:p])), 0
        )

    def _steps_in(self, segments: Sequence[Segment]) -> bool:
        return self.stepped <= {text for segment in segments for text in segment}

    def _split(self, last: Token) -> None:
        """Without an optimizer a segment ends where forward follows a backward."""
        begun: list[Token] = []
        for token in [*self._tokens, last]:
            if token.text.startswith("F") and any(each.text == "B" for each in begun):
                self._end(begun, token.clock)
                begun = []
            begun.append(token)
        self._tokens = begun

    def _end(self, tokens: Sequence[Token], clock: int) -> None:
        kept = tuple(token.text for token in tokens if token.call < 0 or token.call in self._used)
        self.raw.append(kept)
        self.segments.append(tuple(_shortened(kept)))
        self.ends.append(clock)


def in_order(segments: Sequence[Segment], period: int) -> list[Segment]:
    """The last iteration, beginning with the segment that came first in the script."""
    last, begun = list(segments[-period:]), -len(segments) % period
    return [*last[begun:], *last[:begun]]


def folded(tokens: Sequence[str]) -> Iterator[tuple[Sequence[str], int]]:
    """The tokens as patterns and how often each comes in a row."""
    at = 0
    while at < len(tokens):
        best, times = 1, 1
        for length in range(1, _PATTERN + 1):
            pattern, count = tokens[at : at + length], 1
            while tokens[at + count * length : at + (count + 1) * length] == pattern:
                count += 1
            if count > 1 and count * length > best * times:
                best, times = length, count
        yield tokens[at : at + best], times
        at += best * times


def _shortened(tokens: Sequence[str]) -> Iterator[str]:
    for pattern, times in folded(tokens):
        yield from pattern
        if times > 1:
            yield "*"


def described(segments: Sequence[Segment], optimizers: Sequence[str]) -> str:
    """One iteration in words, by its segments with every repetition."""
    texts = [_in_words(segment, optimizers) for segment in segments]
    parts = [(text, len(list(same))) for text, same in groupby(texts)]
    return ", ".join(text if count == 1 else f"{count} x ({text})" for text, count in parts)


def _in_words(segment: Segment, optimizers: Sequence[str]) -> str:
    parts = []
    for pattern, times in folded(segment):
        text = ", ".join(_word(token, optimizers) for token in pattern)
        parts.append(text if times == 1 else f"{times} x ({text})")
    return ", ".join(parts)


def _word(token: str, optimizers: Sequence[str]) -> str:
    kind, _, name = token.partition(" ")
    if kind == "F":
        return f"{name} forward"
    if kind == "S":
        return f"{optimizers[int(name)]} step"
    return {"B": "backward", "g": "autograd.grad"}[kind]
