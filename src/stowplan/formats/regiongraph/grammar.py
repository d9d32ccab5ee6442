"""The names a drawn training graph can contain, and what each one means.

The drawing names everything after its layers: `L0.filterA.output.grad.set_zero` says which layer, which of
its ops, that it is about the result, its gradient, and the zeroing of that. Given the layers of a page, the
grammar makes every name the page can hold: a lexicon no one had to write down.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from types import MappingProxyType


class Sort(Enum):
    """The kind of a name: a tensor, drawn as a box, or an op, drawn as an ellipse."""

    PARAMETER = auto()
    ACTIVATION = auto()
    GRADIENT = auto()
    FORWARD = auto()
    BACKWARD = auto()
    SET_ZERO = auto()
    UPDATE = auto()

    @property
    def is_tensor(self) -> bool:
        return self in (Sort.PARAMETER, Sort.ACTIVATION, Sort.GRADIENT)


@dataclass(frozen=True, slots=True)
class OpDrawing:
    """How ops of one type are drawn: the ports they read and make, and their fields.

    `saves` are the ports of the forward op whose tensors its gradient reads.
    """

    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ("output",)
    saves: tuple[str, ...] = ()
    fields: tuple[str, ...] = ("result_dim", "dist_result")


OP_DRAWINGS: Mapping[str, OpDrawing] = MappingProxyType(
    {
        "data": OpDrawing(makes=("raw_data", "labels")),
        "filter": OpDrawing(
            reads=("input", "filters"),
            saves=("input", "filters"),
            fields=("result_dim", "dist_input", "dist_filters", "dist_result"),
        ),
        "filterA": OpDrawing(reads=("input", "a", "b"), saves=("input", "a", "b")),
        "filterNL": OpDrawing(reads=("input",), saves=("output",)),
        "linear": OpDrawing(
            reads=("input", "weights"), saves=("input", "weights"), fields=("read_rect", "write_rect")
        ),
        # No arrow takes the labels to the softmax's gradient, though their place on the page is readable.
        "softmax": OpDrawing(
            reads=("input", "labels"), makes=("probability", "output"), saves=("input", "probability")
        ),
        "evaluate": OpDrawing(reads=("input", "probability")),
        "accuracy": OpDrawing(reads=("input",), makes=(), fields=("result_dim",)),
        "set_zero": OpDrawing(fields=()),
        "update": OpDrawing(reads=("params", "gradient"), makes=()),
    }
)
TENSOR_FIELDS = ("dim", "read_rect", "write_rect")


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of the lexicon.

    `stem` is its subject: a gradient's tensor, a backward op's forward op, a set_zero's and an update's
    gradient. `near` is the name drawn next to it. `ports` gives the tensors of a forward op, without the
    `input` of a chain op, which is the result of the op before it on the page.
    """

    name: str
    sort: Sort
    type: str = ""
    stem: str = ""
    near: str = ""
    layer: str = ""
    ports: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields in its box, in the order they are written."""
        return TENSOR_FIELDS if self.sort.is_tensor else OP_DRAWINGS[self.type].fields

    @property
    def form(self) -> str:
        """Its name with marks in place of the layer: what the same thing is called in every layer."""
        return self.name.replace(self.layer, "??", 1) if self.layer else self.name

    @property
    def gives_dims(self) -> bool:
        return any(key.endswith("dim") for key in self.fields)


def lexicon_of(layers: Iterable[int], linears: Iterable[int]) -> dict[str, Entry]:
    """Every name of a network with these layers and matrices; forward ops in the order of their chain."""
    entries: list[Entry] = [*_data()]
    for layer in sorted(layers):
        entries += (replace(entry, layer=f"L{layer}") for entry in _layer(f"L{layer}"))
    for number in sorted(linears):
        entries += _linear(number)
    entries += _classifier()
    return {entry.name: entry for entry in entries}


def _data() -> Iterator[Entry]:
    ports = {"raw_data": "data.raw_output", "labels": "data.labels_output"}
    yield Entry("data", Sort.FORWARD, "data", ports=ports)
    for name in ports.values():
        yield Entry(name, Sort.ACTIVATION, near="data")


def _layer(layer: str) -> Iterator[Entry]:
    parameters = {"filters": f"{layer}.W", "a": f"{layer}.a", "b": f"{layer}.b"}
    for op_type in ("filter", "filterA", "filterNL"):
        ports = {port: parameters[port] for port in OP_DRAWINGS[op_type].reads if port in parameters}
        yield from _trained_op(f"{layer}.{op_type}", op_type, ports)
        for name in ports.values():
            yield from _parameter(name, f"{layer}.{op_type}", f"update_{name}")


def _linear(number: int) -> Iterator[Entry]:
    weights = f"classifier.weights{number}"
    yield from _trained_op(f"classifier.linear{number}", "linear", {"weights": weights})
    yield from _parameter(weights, f"classifier.linear{number}", f"update_W{number}")


def _classifier() -> Iterator[Entry]:
    softmax, evaluate = "classifier.softmax", "classifier.evaluate"
    probability = f"{softmax}.probability"
    yield from _trained_op(softmax, "softmax", {"labels": "data.labels_output", "probability": probability})
    yield Entry(probability, Sort.ACTIVATION, near=softmax)
    ports = {"input": f"{softmax}.output", "probability": probability, "output": f"{evaluate}.output"}
    yield Entry(evaluate, Sort.FORWARD, "evaluate", near=f"{evaluate}.output", ports=ports)
    yield Entry(f"{evaluate}.output", Sort.ACTIVATION, near=evaluate)
    ports = {"input": f"{evaluate}.output"}
    yield Entry(f"{evaluate}.accuracy", Sort.FORWARD, "accuracy", near=f"{evaluate}.output", ports=ports)


def _trained_op(name: str, op_type: str, ports: Mapping[str, str]) -> Iterator[Entry]:
    """An op of the chain from the data to the loss, with its result and its backward half."""
    output = f"{name}.output"
    yield Entry(name, Sort.FORWARD, op_type, near=output, ports={**ports, "output": output})
    yield Entry(output, Sort.ACTIVATION, near=name)
    yield from _gradient(output)
    yield Entry(f"{name}.grad", Sort.BACKWARD, op_type, stem=name, near=gradient_of(output))


def _parameter(name: str, op: str, update: str) -> Iterator[Entry]:
    yield Entry(name, Sort.PARAMETER, near=op)
    yield from _gradient(name)
    yield Entry(update, Sort.UPDATE, "update", stem=gradient_of(name), near=gradient_of(name))


def gradient_of(tensor: str) -> str:
    """The name of a tensor's gradient."""
    return f"{tensor}.grad"


def _gradient(name: str) -> Iterator[Entry]:
    gradient = gradient_of(name)
    zeroing = f"{gradient}.set_zero"
    yield Entry(gradient, Sort.GRADIENT, stem=name, near=zeroing)
    yield Entry(zeroing, Sort.SET_ZERO, "set_zero", stem=gradient, near=gradient)
