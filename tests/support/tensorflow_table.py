"""TensorFlow op tables made by hand: a chain of layers whose edges are known, as rows that show none."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class ChainLayer:
    """A convolution with bias and ReLU; then, if asked for, normalisation, and pooling by two."""

    channels: int
    normalised: bool = False
    pooled: bool = False


@dataclass
class Table:
    """Rows, the shape of each row's output, and by row the producers of its inputs."""

    rows: list[str] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    edges: dict[str, list[str]] = field(default_factory=dict)

    def text(self) -> str:
        """The table, sorted by name as TensorFlow writes it."""
        return "\n".join(sorted(self.rows)) + "\n"

    def variable(self, name: str, shape: Shape) -> str:
        """A variable and its read, which is what ops use."""
        self._row(name, ["(1)"], shape)
        self._row(f"{name}/read", [_shown(shape)], shape)
        self.edges[f"{name}/read"] = [name]
        return f"{name}/read"

    def op(self, name: str, kernel: str, producers: Sequence[str], shape: Shape) -> str:
        """An op and its kernel."""
        self._row(name, [_shown(self.shapes[producer]) for producer in producers], shape)
        self.rows.append(f"{name}:{kernel}, (no input), (no output), GPU, 0")
        self.edges[name] = list(producers)
        return name

    def sizes(self, op: str, index: int, operands: Sequence[str]) -> str:
        """The shape of one operand, folded to a constant that waits for all."""
        name = f"ConstantFolding/gradients/{op}_grad/ShapeN-matshapes-{index}"
        self._row(name, [f"^{operand}" for operand in operands], (4,))
        return name

    def _row(self, name: str, inputs: Sequence[str], shape: Shape) -> None:
        self.rows.append(", ".join([name, *inputs, _shown(shape), "GPU", "0"]))
        self.shapes[name] = shape


def _shown(shape: Shape) -> str:
    """As the table writes it: a vector ends in x1, and one of four numbers holds the sizes of an image."""
    sizes = "x".join(map(str, shape if len(shape) > 1 else (*shape, 1)))
    return f"(int32 {sizes})" if shape == (4,) else f"({sizes})"


def chain(image: Shape, layers: Sequence[ChainLayer]) -> Table:
    """Forward and backward of a chain over NHWC images, with the loss half the square of its result."""
    table = Table()
    value = table.variable("Variable", image)
    for number, layer in enumerate(layers, start=1):
        value = _forward(table, number, layer, value)
    gradient = value
    for number, layer in reversed(list(enumerate(layers, start=1))):
        gradient = _backward(table, number, layer, gradient)
    return table


def _forward(table: Table, number: int, layer: ChainLayer, value: str) -> str:
    name = f"conv{number}"
    batch, height, width, channels = table.shapes[value]
    shape = (batch, height, width, layer.channels)
    weights = table.variable(f"{name}/weights", (3, 3, channels, layer.channels))
    biases = table.variable(f"{name}/biases", (layer.channels,))
    value = table.op(f"{name}/Conv2D", "Conv2D", [value, weights], shape)
    value = table.op(f"{name}/BiasAdd", "BiasAdd", [value, biases], shape)
    value = table.op(name, "Relu", [value], shape)
    if layer.normalised:
        value = table.op(f"lrn{number}/LRN", "LRN", [value], shape)
    if layer.pooled:
        value = table.op(
            f"pool{number}", "MaxPool", [value], (batch, height // 2, width // 2, layer.channels)
        )
    return value


def _backward(table: Table, number: int, layer: ChainLayer, gradient: str) -> str:
    name = f"conv{number}"
    relu, lrn, pool = name, f"lrn{number}/LRN", f"pool{number}"
    shape = table.shapes[relu]
    if layer.pooled:
        source = table.edges[pool][0]
        gradient = table.op(
            f"gradients/{pool}_grad/MaxPoolGrad", "MaxPoolGrad", [source, pool, gradient], shape
        )
    if layer.normalised:
        gradient = table.op(f"gradients/{lrn}_grad/LRNGrad", "LRNGrad", [gradient, relu, lrn], shape)
    gradient = table.op(f"gradients/{relu}_grad/ReluGrad", "ReluGrad", [gradient, relu], shape)
    table.op(f"gradients/{name}/BiasAdd_grad/BiasAddGrad", "BiasAddGrad", [gradient], shape[3:])
    return _convolution_gradients(table, f"{name}/Conv2D", gradient, wants_input=number > 1)


def _convolution_gradients(table: Table, op: str, gradient: str, wants_input: bool) -> str:
    image, weights = table.edges[op]
    scope = f"gradients/{op}_grad"
    sizes = table.sizes(op, 1, [weights, image])
    kernel = "Conv2DBackpropFilter"
    table.op(f"{scope}/{kernel}", kernel, [image, sizes, gradient], table.shapes[weights])
    if not wants_input:
        return gradient
    sizes = table.sizes(op, 0, [weights, image])
    kernel = "Conv2DBackpropInput"
    return table.op(f"{scope}/{kernel}", kernel, [sizes, weights, gradient], table.shapes[image])
