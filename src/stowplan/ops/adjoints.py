"""What the adjoint of an op saves, and which inputs it makes a gradient of.

Used for forward-only graphs. No rule means that no training step can be derived through the op.
"""

from dataclasses import dataclass

from stowplan.ops.onnx_shapes import NORMS, REDUCTIONS, onnx
from stowplan.ops.table import Site, Table


@dataclass(frozen=True, slots=True)
class Adjoint:
    """By position: the inputs with a gradient, and the inputs and outputs saved for it.

    `mask`: the op makes a mask for its adjoint, of the output's shape: the draws of a dropout, the positions
    of a pool's maxima.
    """

    gradients: tuple[int, ...]
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    mask: bool = False


adjoint_of: Table[Adjoint] = Table("adjoint")


@adjoint_of.entry(*onnx("Conv", "ConvTranspose", "Gemm", "MatMul"))
def product(site: Site) -> Adjoint:
    """Each factor's gradient needs the other factor; a bias needs neither."""
    return Adjoint(tuple(range(len(site.inputs))), saved_inputs=(0, 1))


@adjoint_of.entry(*onnx("Mul", "Div", "Pow", "PRelu"))
def both_operands(_: Site) -> Adjoint:
    """Like a product, elementwise."""
    return Adjoint((0, 1), saved_inputs=(0, 1))


@adjoint_of.entry(*onnx("Relu", "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Exp", "Sqrt", "Reciprocal"))
def from_its_output(_: Site) -> Adjoint:
    """The derivative is a function of the result."""
    return Adjoint((0,), saved_outputs=(0,))


@adjoint_of.entry(*onnx("Gelu", "Erf", "Log", "LeakyRelu", "Elu", "Selu", "Celu", "Softplus", "Softsign"))
@adjoint_of.entry(
    *onnx("HardSigmoid", "HardSwish", "Mish", "Clip", "Abs", "Sin", "Cos", "Swish", "QuickGelu")
)
def from_its_input(_: Site) -> Adjoint:
    """The derivative is a function of the operand."""
    return Adjoint((0,), saved_inputs=(0,))


@adjoint_of.entry("onnx.AveragePool")
def average_pool(_: Site) -> Adjoint:
    """As PyTorch does: saves the image, though its shape would suffice."""
    return Adjoint((0,), saved_inputs=(0,))


@adjoint_of.entry(*onnx("Add", "Sub", "Sum", "Mean", "Concat"))
def every_operand_alike(site: Site) -> Adjoint:
    """The gradient, or a part of it, is passed on."""
    return Adjoint(tuple(range(len(site.inputs))))


@adjoint_of.entry(*onnx("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand"))
@adjoint_of.entry(*onnx("Neg", "Cast", "Resize", "Upsample", "GlobalAveragePool", "Trilu"))
@adjoint_of.entry("onnx.ReduceMean", "onnx.ReduceSum")
def nothing_saved(_: Site) -> Adjoint:
    """Linear in its first operand: only its shape is needed."""
    return Adjoint((0,))


@adjoint_of.entry(*(name for name in REDUCTIONS if name not in ("onnx.ReduceMean", "onnx.ReduceSum")))
def reduction(_: Site) -> Adjoint:
    """Comparing input and result shows which elements gave the result."""
    return Adjoint((0,), saved_inputs=(0,), saved_outputs=(0,))


@adjoint_of.entry("onnx.MaxPool")
def max_pool(_: Site) -> Adjoint:
    """As PyTorch keeps it: the image, and where each maximum was found."""
    return Adjoint((0,), saved_inputs=(0,), mask=True)


@adjoint_of.entry("onnx.Dropout")
def dropout(_: Site) -> Adjoint:
    """The mask it drew."""
    return Adjoint((0,), mask=True)


@adjoint_of.entry(*NORMS, "onnx.BatchNormalization")
def norm(site: Site) -> Adjoint:
    """The image and the scale. Statistics, one number per row or channel, are not counted."""
    return Adjoint(tuple(range(min(3, len(site.inputs)))), saved_inputs=(0, 1)[: len(site.inputs)])


@adjoint_of.entry("onnx.Gather")
def gather(_: Site) -> Adjoint:
    """Rows go back to where they came from."""
    return Adjoint((0,), saved_inputs=(1,))


@adjoint_of.entry("onnx.Where")
def choice(_: Site) -> Adjoint:
    """Each side gets its part."""
    return Adjoint((1, 2), saved_inputs=(0,))
