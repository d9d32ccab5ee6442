"""The graph of a training step of any size: residual blocks of four ops, a loss, and the way back."""

from collections.abc import Iterable

from stowplan.ir import DType, Graph, Kind, Op, Phase, Role, Shape, Tensor, Use, bytes_of_shape

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
