"""Small networks as the region graph's drawing system would name and measure them, written as clean text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Net:
    """A chain of untied filter layers (channels, kernel) on square images, then a classifier."""

    batch: int
    channels: int
    size: int
    layers: tuple[tuple[int, int], ...]
    classes: int

    def text(self, *, trained: bool = True) -> str:
        """The drawing's text; without the backward half if the net is not trained."""
        blocks = [*self._forward()]
        return "\n\n".join((*blocks, *(self._backward() if trained else ()))) + "\n"

    def _forward(self) -> Iterator[str]:
        image = (self.batch, self.channels, self.size, self.size)
        yield op("data", image)
        yield tensor("data.raw_output", image)
        yield tensor("data.labels_output", (self.batch, 1, 1, 1))
        for name, before, after, filters in self._layers():
            yield tensor(f"{name}.W", filters, written=False)
            yield op(f"{name}.filter", after, dist_input=before, dist_filters=filters)
            yield tensor(f"{name}.filter.output", after)
            yield tensor(f"{name}.a", (1,), written=False)
            yield tensor(f"{name}.b", (1, *after[1:]), written=False)
            for kind in ("filterA", "filterNL"):
                yield op(f"{name}.{kind}", after)
                yield tensor(f"{name}.{kind}.output", after)
        yield from self._classifier()

    def _classifier(self) -> Iterator[str]:
        *_, (_, _, image, _) = self._layers()
        scores, one = (self.batch, self.classes, 1, 1), (1, 1, 1, 1)
        yield tensor("classifier.weights1", (self.classes, *image[1:]), written=False)
        yield f"classifier.linear1\nread_rect={rect(image)}\nwrite_rect={rect(scores)}"
        yield tensor("classifier.linear1.output", scores)
        yield op("classifier.softmax", one)
        yield tensor("classifier.softmax.probability", scores)
        yield tensor("classifier.softmax.output", one)
        yield op("classifier.evaluate", (4, 1, 1, 1))
        yield tensor("classifier.evaluate.output", (4, 1, 1, 1))
        yield "classifier.evaluate.accuracy\nresult_dim=[1]"

    def _backward(self) -> Iterator[str]:
        layers = [*self._layers()]
        image, scores, one = layers[-1][2], (self.batch, self.classes, 1, 1), (1, 1, 1, 1)
        weights = (self.classes, *image[1:])
        yield from zeroed("classifier.softmax.output", one)
        yield from zeroed("classifier.linear1.output", scores)
        yield op("classifier.softmax.grad", scores)
        yield from zeroed("classifier.weights1", weights)
        yield from zeroed(f"{layers[-1][0]}.filterNL.output", image)
        yield f"classifier.linear1.grad\nread_rect={rect(scores)}\nwrite_rect={rect(image)}"
        yield op("update_W1", weights)
        for index, (name, before, after, filters) in reversed([*enumerate(layers)]):
            yield from zeroed(f"{name}.filterA.output", after)
            yield op(f"{name}.filterNL.grad", after)
            bias = (1, *after[1:])
            for what, shape in ((f"{name}.filter.output", after), (f"{name}.a", (1,)), (f"{name}.b", bias)):
                yield from zeroed(what, shape)
            yield op(f"{name}.filterA.grad", after)
            yield op(f"update_{name}.a", (1,))
            yield op(f"update_{name}.b", bias)
            yield from zeroed(f"{name}.W", filters)
            if index:
                yield from zeroed(f"{layers[index - 1][0]}.filterNL.output", before)
            yield op(f"{name}.filter.grad", after, dist_input=before, dist_filters=filters)
            yield op(f"update_{name}.W", filters)

    def _layers(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """Name, input, output and filter of each layer."""
        channels, size = self.channels, self.size
        for number, (wider, kernel) in enumerate(self.layers):
            before = (self.batch, channels, size, size)
            rest = size - kernel + 1
            filters = (wider, 1, 1, channels, kernel, kernel, rest, rest)
            channels, size = wider, rest
            yield f"L{number}", before, (self.batch, channels, size, size), filters


def rect(shape: Sequence[int]) -> str:
    """The rect of a whole tensor, as the drawing writes it."""
    lo, hi = ", ".join("0" for _ in shape), ", ".join(map(str, shape))
    return f"Rect(array([{lo}], dtype=int32), array([{hi}], dtype=int32))"


def tensor(name: str, shape: Sequence[int], *, written: bool = True) -> str:
    """A tensor's box, read whole and, unless it is a parameter, written whole."""
    rects = f"read_rect={rect(shape)}\nwrite_rect={rect(shape) if written else None}"
    return f"{name}\ndim=[{' '.join(map(str, shape))}]\n{rects}"


def op(name: str, shape: Sequence[int], **reads: Sequence[int]) -> str:
    """An op's ellipse, with the rects of what it reads if it shows them."""
    rects = [*reads.items(), ("dist_result", shape)]
    lines = "\n".join(f"{key}={rect(of)}" for key, of in rects)
    return f"{name}\nresult_dim=[{' '.join(map(str, shape))}]\n{lines}"


def zeroed(name: str, shape: Sequence[int]) -> Iterator[str]:
    """A gradient and the op that sets it to zero."""
    yield f"{name}.grad.set_zero"
    yield tensor(f"{name}.grad", shape)


_ROW = 3  # boxes that a line of the page may cut through


def read_by_ocr(text: str, random: Random) -> str:
    """`text` as OCR would give it back."""
    blocks = _side_by_side(text.rstrip("\n").split("\n\n"), random)
    return (
        "\n\n".join("\n".join(_misread(line, random) for line in block.split("\n")) for block in blocks)
        + "\n"
    )


def _side_by_side(blocks: list[str], random: Random) -> list[str]:
    """Runs of neighbouring tensors drawn in one row: their lines are read across."""
    rows: list[list[str]] = []
    for block in blocks:
        fits = rows and _is_tensor(block) and _is_tensor(rows[-1][-1]) and len(rows[-1]) < _ROW
        if fits and random.random() < 0.7:
            rows[-1].append(block)
        else:
            rows.append([block])
    return ["\n".join(map(" ".join, zip(*(block.split("\n") for block in row), strict=True))) for row in rows]


def _is_tensor(block: str) -> bool:
    return "\ndim=" in block


def _misread(line: str, random: Random) -> str:
    if line.endswith(".set_zero"):
        return _torn(line, random)
    line = re.sub(r"\b(?:update_)?L\d+\.\S+|classifier\.\S+", lambda m: _confused(m[0], random), line)
    line = re.sub(r"(?<=dim=\[)[^]]*", lambda m: _run_together(m[0], random), line)
    line = re.sub(r"(?<=array\(\[)[^]]*", lambda m: _lost_blanks(_confused(m[0], random), random), line)
    return _without_head(line, random) if "->" in line else line


def _confused(text: str, random: Random) -> str:
    """O for 0 and l for 1, now and then."""
    shapes = {"0": "O", "1": "l"}
    return "".join(shapes.get(char, char) if random.random() < 0.3 else char for char in text)


def _run_together(dims: str, random: Random) -> str:
    """Digits of neighbouring sizes without the blank between them."""
    return "".join(char for char in dims if char != " " or random.random() > 0.15)


def _lost_blanks(numbers: str, random: Random) -> str:
    return "".join(char for char in numbers if char != " " or random.random() > 0.3)


def _torn(name: str, random: Random) -> str:
    """The name in an ellipse: whole, with blanks for dots, without its layer, or with its ends unreadable."""
    choice = random.randrange(4 if name.startswith("L") else 2)
    if choice == 0:
        return _confused(name, random)
    if choice == 1:
        return name.replace("_", " ").replace(".grad.", " grad ")
    if choice == 2:
        return name[name.index(".") :].replace("set_zero", "set zero")
    return f"<:::::::§§{name[name.index('.') :].removesuffix('ro')}%§:::::::>"


def _without_head(line: str, random: Random) -> str:
    """Labels that lost the first character or two: `utput->`, `>input`."""
    words = (word[1:] if random.random() < 0.1 and len(word) > 5 else word for word in line.split())
    return " ".join(words)
