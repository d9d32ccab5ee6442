"""Ops that compute each output element from the elements at its place: arithmetic, activations, dropout."""

from stowplan.ops.regions.relation import Need, Regions, Relation
from stowplan.ops.regions.rules import broadcast, identity, rules
from stowplan.ops.table import Site, shape_of

_UNARY = (
    "abs bernoulli.p bitwise_not ceil celu clamp clamp.Tensor clamp_max clamp_min clone cos elu erf exp "
    "expm1 floor gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log log1p log2 "
    "log_sigmoid_forward logical_not mish neg reciprocal relu relu6 round rsqrt selu sigmoid "
    "sign silu sin softplus sqrt tan tanh threshold trunc"
)
_BINARY = "add bitwise_and bitwise_or div eq ge gt le lt mul ne remainder rsub sub"
_SAME_PLACE = (
    "_prelu_kernel "
    "_to_copy addcdiv addcmul alias atan2 copy detach div.Scalar_mode div.Tensor_mode gelu_backward "
    "hardsigmoid_backward hardswish_backward leaky_relu_backward lerp.Scalar lerp.Tensor lift_fresh_copy "
    "logical_and logical_or masked_fill.Scalar masked_fill.Tensor maximum minimum native_dropout_backward "
    "pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor sigmoid_backward silu_backward softplus_backward "
    "tanh_backward threshold_backward tril triu where.ScalarOther where.ScalarSelf where.self"
)


def _spelled(names: str) -> list[str]:
    """ATen's spellings of these ops; without an overload, the default one is meant."""
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split()]


@rules.entry(*_spelled(_UNARY), *_spelled(_SAME_PLACE))
@rules.entry(*(f"aten.{name}.{kind}" for name in _BINARY.split() for kind in ("Tensor", "Scalar")))
@rules.entry("ReLU", "Dropout", "ReLU.backward", "Dropout.backward")
@rules.entry("Elemwise", "Relu", "ReluGrad", "Identity", "MEMCPYDtoH", "filterA", "filterNL")
def pointwise(site: Site) -> Regions:
    """Every input is read at the output's own place, or broadcast to it."""
    return Regions(
        tuple(
            Relation(
                shape_of(output),
                tuple(Need(broadcast(shape_of(tensor), shape_of(output))) for tensor in site.inputs),
            )
            for output in site.outputs
        )
    )


@rules.entry("aten.native_dropout.default")
def dropout(site: Site) -> Regions:
    """The output is read at its own place; the mask is drawn without reading anything."""
    shape = shape_of(site.outputs[0])
    return Regions((Relation(shape, (Need(identity(shape)),)), Relation(shape, (None,))))


_CREATED = (
    "zeros ones empty.memory_format full arange arange.start arange.start_step scalar_tensor rand randn"
)
_CREATED_LIKE = "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full"


@rules.entry(*_spelled(_CREATED), *_spelled(_CREATED_LIKE), "set_zero")
def created(site: Site) -> Regions:
    """Nothing is read but, at most, a shape."""
    return Regions(tuple(Relation(shape_of(tensor), (None,) * len(site.inputs)) for tensor in site.outputs))
