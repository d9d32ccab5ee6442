"""Graphs of training steps: a large one of residual blocks, and small ones that branch and join at random."""

from collections.abc import Iterable
from random import Random

from stowplan.ir import DType, Graph, Kind, Op, Phase, Role, Shape, Tensor, Use, bytes_of_shape
from stowplan.plan.pricing import Basis, Pricing

IMAGE: Shape = (8, 16, 32, 32)
WEIGHT: Shape = (16, 16, 3, 3)
CHANNELS: Shape = (16,)


def training_step(ops: int) -> Graph:
    """A step of about `ops` ops, with three tensors for each of them."""
    step = _Step()
    blocks = [f"block{number}" for number in range(ops // 8)]
    images = [step.make("data", Kind.INPUT, IMAGE)]
    for block in blocks:
        images.append(_forward_block(step, block, images[-1]))
    step.run("loss", "sum", images[-1:], [step.make("loss", Kind.ACTIVATION, ())])
    step.make("loss.grad", Kind.GRADIENT, (), of="loss")
    step.differentiate("loss", "loss", [], images[-1:])
    for block, image, result in reversed([*zip(blocks, images, images[1:], strict=False)]):
        _backward_block(step, block, image, result)
    return step.graph()


def _forward_block(step: "_Step", block: str, image: str) -> str:
    """conv, norm, relu, and the sum with the block's image, which is returned."""
    weights = [
        step.make(f"{block}.weight", Kind.PARAMETER, WEIGHT),
        *step.vectors(block, Kind.PARAMETER, "bias"),
    ]
    scales = step.vectors(block, Kind.PARAMETER, "gamma", "beta")
    running = step.vectors(block, Kind.BUFFER, "running_mean", "running_var")
    moments = step.vectors(block, Kind.ACTIVATION, "mean", "rstd")
    conv, norm, relu, total = step.images(block, Kind.ACTIVATION, "conv", "norm", "relu", "total")
    step.run(
        f"{block}.conv", "conv2d", [image, *weights], [conv, *step.images(block, Kind.WORKSPACE, "unfolded")]
    )
    step.run(f"{block}.norm", "batch_norm", [conv, *scales, *running], [norm, *moments])
    step.run(f"{block}.relu", "relu", [norm], [relu, *step.images(block, Kind.MASK, "mask")])
    step.run(f"{block}.add", "add", [relu, image], [total])
    return total


def _backward_block(step: "_Step", block: str, image: str, result: str) -> None:
    """The four adjoints; the image gets its gradient from the sum, then the convolution's added into it."""
    conv, norm, relu, mask, mean, rstd = (
        f"{block}.{name}" for name in ("conv", "norm", "relu", "mask", "mean", "rstd")
    )
    weight, bias, gamma, beta = (f"{block}.{name}" for name in ("weight", "bias", "gamma", "beta"))
    step.differentiate(f"{block}.add", result, [], [relu, image])
    step.differentiate(f"{block}.relu", relu, [mask], [norm])
    step.differentiate(f"{block}.norm", norm, [conv, gamma, mean, rstd], [conv, gamma, beta])
    step.differentiate(f"{block}.conv", conv, [image, weight], [image, weight, bias])


class _Step:
    """Tensors and ops of a step being written down."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._ops: list[Op] = []
        self._types: dict[str, str] = {}

    def make(self, name: str, kind: Kind, shape: Shape, of: str | None = None) -> str:
        size = bytes_of_shape(shape, DType.FLOAT32)
        self._tensors[name] = Tensor(name, kind, shape, DType.FLOAT32, size, gradient_of=of)
        return name

    def vectors(self, block: str, kind: Kind, *names: str) -> list[str]:
        return [self.make(f"{block}.{name}", kind, CHANNELS) for name in names]

    def images(self, block: str, kind: Kind, *names: str) -> list[str]:
        return [self.make(f"{block}.{name}", kind, IMAGE) for name in names]

    def run(self, name: str, op_type: str, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """A forward op."""
        self._types[name] = op_type
        self._ops.append(Op(name, op_type, Phase.FORWARD, tuple(map(Use, inputs)), tuple(map(Use, outputs))))

    def differentiate(self, op: str, result: str, saved: Iterable[str], operands: Iterable[str]) -> None:
        """The adjoint of `op`: from its result's gradient and what was saved, its operands' gradients."""
        inputs = (Use(f"{result}.grad"), *(Use(name, Role.SAVED) for name in saved))
        space = self.make(f"{op}.backward.space", Kind.WORKSPACE, CHANNELS)
        outputs = (*map(self._contribution, operands), Use(space))
        op_type = f"{self._types[op]}.backward"
        self._ops.append(Op(f"{op}.backward", op_type, Phase.BACKWARD, inputs, outputs, adjoint_of=op))

    def _contribution(self, operand: str) -> Use:
        """A part of the gradient of `operand`: the first makes it, the others are added."""
        name = f"{operand}.grad"
        if name in self._tensors:
            return Use(name, Role.ACCUMULATE)
        return Use(self.make(name, Kind.GRADIENT, self._tensors[operand].shape or (), of=operand))

    def graph(self) -> Graph:
        """The step; parameter gradients and the loss are held."""
        held = {f"{name}.grad" for name, tensor in self._tensors.items() if tensor.kind is Kind.PARAMETER}
        return Graph(self._tensors, tuple(self._ops), frozenset(held | {"loss"}), f"{len(self._ops)} ops")


def random_step(seed: int, *, layers: int, plain: bool = False) -> Graph:
    """A forward half of `layers` ops that branch and join, and its backward half in reverse.

    `plain`: every op has one output and shares no storage, as exact solvers want it.
    """
    return _Builder(Random(seed), plain).build(layers)


def uneven_prices(graph: Graph, seed: int) -> Pricing:
    """Seconds that differ by up to a hundred times, in whole numbers to be exact; views are free."""
    random = Random(seed)
    seconds = {op.id: float(random.choice((1, 5, 20, 100))) for op in graph.ops}
    return Pricing(seconds | {op.id: 0.0 for op in graph.ops if op.type == "View"}, Basis.MEASURED)


class _Builder:
    def __init__(self, random: Random, plain: bool) -> None:
        self._random, self._plain = random, plain
        self._tensors: dict[str, Tensor] = {}
        self._ops: list[Op] = []
        self._forward: list[tuple[str, tuple[str, ...], str]] = []  # op, what it reads, its main output

    def build(self, layers: int) -> Graph:
        self._add("x", Kind.INPUT, 16)
        self._add("w", Kind.PARAMETER, 8)
        values = ["x"]
        for layer in range(layers):
            values.append(self._layer(layer, values))
        self._backward(values[-1])
        held = {"x", "gw", values[-1]} & self._tensors.keys()
        return Graph(self._tensors, tuple(self._ops), frozenset(held))

    def _add(self, name: str, kind: Kind, nbytes: int, alias_of: str | None = None) -> str:
        self._tensors[name] = Tensor(name, kind, nbytes=nbytes, alias_of=alias_of)
        return name

    def _layer(self, layer: int, values: list[str]) -> str:
        reads = [values[-1]]
        kind = "Wide" if self._plain else self._random.choice(("Wide", "Wide", "Relu", "Split", "View"))
        if kind != "View" and len(values) > 2 and self._random.random() < 0.4:
            reads.append(self._random.choice(values[:-1]))
        size = self._random.randint(1, 9) * 16
        if kind in ("Relu", "View"):
            size = self._tensors[reads[0]].nbytes or 0
        base = reads[0] if kind == "View" else None
        outputs = [Use(self._add(f"v{layer}", Kind.ACTIVATION, size, base))]
        if kind == "Split":
            outputs.append(Use(self._add(f"m{layer}", Kind.MASK, size // 4)))
        inputs = (*(Use(name) for name in reads), Use("w"))
        self._ops.append(Op(f"f{layer}", kind, Phase.FORWARD, inputs, tuple(outputs)))
        self._forward.append((f"f{layer}", tuple(reads), f"v{layer}"))
        return f"v{layer}"

    def _backward(self, loss: str) -> None:
        gradients = {loss: self._add(f"g_{loss}", Kind.GRADIENT, 16)}
        for number, (op, reads, output) in enumerate(reversed(self._forward)):
            if output not in gradients:
                continue
            saved = [name for name in (*reads, output) if self._random.random() < 0.7]
            mask = f"m{op[1:]}"
            saved += [mask] if mask in self._tensors else []
            made = tuple(self._contribution(gradients, read) for read in reads if read != "x")
            role = Role.ACCUMULATE if "gw" in self._tensors else Role.DATA
            weight = Use("gw" if "gw" in self._tensors else self._add("gw", Kind.GRADIENT, 8), role)
            inputs = (Use(gradients[output]), *(Use(name, Role.SAVED) for name in saved))
            self._ops.append(Op(f"b{number}", "Back", Phase.BACKWARD, inputs, (*made, weight), adjoint_of=op))

    def _contribution(self, gradients: dict[str, str], name: str) -> Use:
        if name in gradients:
            return Use(gradients[name], Role.ACCUMULATE)
        gradients[name] = self._add(f"g_{name}", Kind.GRADIENT, self._tensors[name].nbytes or 0)
        return Use(gradients[name])
