"""What an op does beside its values: storages it shares or overwrites, side effects, and the work it takes.

Aliasing is which input's storage an output can share: always (a view), or when that input dies (in place).
Side effects are random numbers, buffer updates and reads outside the graph. Work is multiply-accumulates and
bytes moved; pointwise ops, pooling and copies count no multiply-accumulates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from math import prod

from stowplan.errors import MissingRule
from stowplan.ir import Tensor
from stowplan.ops import aten
from stowplan.ops.table import Site, Table, elements_of, shape_of


@dataclass(frozen=True, slots=True)
class Aliasing:
    """By output position: the input position it is a view of, and those it may overwrite if they die.

    `adds_in_place`: an accumulated result is added directly into the tensor, without a temporary.
    """

    view_of: Mapping[int, int] = field(default_factory=dict)
    in_place_of: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    adds_in_place: bool = False


def shares_nothing(_: Site) -> Aliasing:
    """The stated default: every output has its own storage."""
    return Aliasing()


aliasing_of: Table[Aliasing] = Table("aliasing", default=shares_nothing)


@aliasing_of.entry("Elemwise")
def pointwise(site: Site) -> Aliasing:
    """The output may overwrite an input of its own shape; a broadcast input is too small."""
    shape = site.outputs[0].shape
    return Aliasing(
        in_place_of={0: tuple(i for i, tensor in enumerate(site.inputs) if tensor.shape == shape)}
    )


@aliasing_of.entry("onnx.Reshape", "onnx.Flatten", "onnx.Squeeze", "onnx.Unsqueeze", "onnx.Identity")
@aliasing_of.entry("Reshape")
def reshape(site: Site) -> Aliasing:
    """The same elements under another shape."""
    return _first_of_first(site)


@aliasing_of.entry("Identity")
def identity(site: Site) -> Aliasing:
    """TensorFlow's read of a variable is the variable."""
    return _first_of_first(site)


def _first_of_first(site: Site) -> Aliasing:
    """The first output is a view of the first input, if the op has both."""
    return Aliasing(view_of={0: 0} if site.inputs and site.outputs else {})


@aliasing_of.entry("ReLU", "Dropout")
@aliasing_of.entry("Relu", "BiasAdd")
@aliasing_of.entry("filterA", "filterNL")
@aliasing_of.entry("ReLU.backward", "Dropout.backward")
@aliasing_of.entry("ReluGrad")
def overwrites_first(site: Site) -> Aliasing:
    """Elementwise in its first input: the value itself forward, the gradient backward (if one is wanted)."""
    return Aliasing(in_place_of={0: (0,)} if site.inputs and site.outputs else {})


@aliasing_of.entry("GetItem.backward")
def adds_into_a_slice(_: Site) -> Aliasing:
    """The gradient of a slice is an addition to that slice."""
    return Aliasing(adds_in_place=True)


@aliasing_of.entry(*aten.VIEWS)
def view_of_first(site: Site) -> Aliasing:
    """Every output is a view of the first input."""
    return Aliasing(view_of=dict.fromkeys(range(len(site.outputs)), 0) if site.inputs else {})


@aliasing_of.entry(*aten.POINTWISE)
def overwrites_any(site: Site) -> Aliasing:
    """The output may overwrite any input that looks alike and that no other input overlaps."""
    return Aliasing(
        in_place_of={0: tuple(filter(lambda i: _may_overwrite(site, i), range(len(site.inputs))))}
    )


@aliasing_of.entry(*aten.POINTWISE_FIRST, *aten.ROWWISE, *aten.SCATTERS, *aten.FILLS)
def overwrites_first_if_alike(site: Site) -> Aliasing:
    """The output may overwrite the first input if both look alike and no other input overlaps it."""
    return Aliasing(in_place_of={0: (0,)} if _may_overwrite(site, 0) else {})


@aliasing_of.entry("stowplan.sweep.default", "stowplan.sweep_backward.default")
def overwrites_as_told(site: Site) -> Aliasing:
    """`over` has for each output the input or gradient that it may overwrite, or -1."""
    over = site.attributes.get("over")
    if site.attributes.get("swayed") or not isinstance(over, tuple) or len(over) != len(site.outputs):
        return Aliasing()  # some outputs are unused, and it is not known which
    places = {output: place for output, place in enumerate(over) if isinstance(place, int) and place >= 0}
    return Aliasing(
        in_place_of={
            o: (p,) for o, p in places.items() if _is_given_once(site, p) and _look_alike(site, p, o)
        }
    )


def _is_given_once(site: Site, position: int) -> bool:
    storages = [tensor.alias_of or tensor.id for tensor in site.inputs]
    return storages.count(storages[position]) == 1


def _may_overwrite(site: Site, position: int) -> bool:
    if site.attributes.get("swayed"):  # a gradient may come in that leaves the result with another layout
        return False
    victim = site.inputs[position]
    if victim.dtype is not None and victim.dtype.is_complex:  # rounded differently in place
        return False
    storage = victim.alias_of or victim.id
    others = (other for other in site.inputs if other.id != victim.id)
    return _look_alike(site, position, 0) and all((other.alias_of or other.id) != storage for other in others)


def _look_alike(site: Site, position: int, output: int) -> bool:
    one, other = site.inputs[position], site.outputs[output]
    return (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)


class Effect(Flag):
    """The reason why an op may not simply be recomputed."""

    NONE = 0
    RANDOM = auto()
    BUFFER_UPDATE = auto()
    OUTSIDE = auto()  # reads what the graph does not hold


def no_effect(site: Site) -> Effect:
    """The stated default: an op without a rule only computes its outputs.

    An op with unknown operands, as in a history of allocations, cannot be recomputed.
    """
    return Effect.OUTSIDE if site.attributes.get("operands") == "unknown" else Effect.NONE


FUSED = "stowplan.fused.default"  # a group of ops as one op, which a compiled kernel computes
RELAID = "relaid"  # the attribute of ops that run in another memory layout than the user's model has
SECOND_FORWARD = "what a second forward begins with"  # a tensor of steps whose forward and backward run twice
UPDATE = "stowplan.update.default"  # of parameters, by an optimizer: they hold other values from then on
UPDATES = ("update", UPDATE)  # the same in any format: they change the parameters that they read

# Ops that make whole parameters of shards: one begins the messages, the other waits for them. If workers have
# plans of their own, a token keeps messages in order, and an op that gathers parts of parameters does both.
BEGIN_GATHER, END_GATHER = "stowplan.begin_gather.default", "stowplan.end_gather.default"
BEGIN_IN_ORDER = "stowplan.begin_gather_in_order.default"
GATHER_IN_ORDER = "stowplan.gather_in_order.default"

UNDER_WAY = frozenset(
    ("stowplan.begin_sums.default", "stowplan.begin_exchange_back.default", BEGIN_GATHER, BEGIN_IN_ORDER)
)
"""Ops that begin messages in their first output: it must stay where it is until the next op that reads it,
which waits for them."""

ONCE = Effect.BUFFER_UPDATE | Effect.OUTSIDE  # no way to run it a second time; random draws can be replayed

_GENERATOR = (
    "stowplan.generator_state.default",
    "stowplan.set_generator_state.default",
    "stowplan.seed_generator.default",
)

effect_of: Table[Effect] = Table("effects", default=no_effect)


@effect_of.entry("Dropout", "onnx.Dropout")
@effect_of.entry(*aten.RANDOM, "stowplan.draw.default", *_GENERATOR)
def draws_random_numbers(_: Site) -> Effect:
    """A second run would draw another mask."""
    return Effect.RANDOM


@effect_of.entry("data")
def draws_another_batch(_: Site) -> Effect:
    """A second run would read the next batch."""
    return Effect.OUTSIDE


@effect_of.entry(*aten.ATTENTIONS)
def draws_for_dropout(site: Site) -> Effect:
    """Attention draws a mask only if it drops anything."""
    return Effect.RANDOM if site.attributes.get("dropout_p") else Effect.NONE


@effect_of.entry("stowplan.update_buffer")
def updates_a_buffer(_: Site) -> Effect:
    """Writes the new contents into a buffer: once a step."""
    return Effect.BUFFER_UPDATE


@effect_of.entry(*UPDATES)
def updates_parameters(_: Site) -> Effect:
    """Changes a parameter in place: a second run would take the step twice."""
    return Effect.BUFFER_UPDATE


@effect_of.entry(
    *(f"stowplan.{name}.default" for name in ("exchange", "exchange_back", "total", "norm", "norm_back")),
    "stowplan.softmax.default",
    "stowplan.softmax_back.default",
    "stowplan.scatter_sum_in_order.default",
    BEGIN_IN_ORDER,
    GATHER_IN_ORDER,
    *(
        f"stowplan.{name}.default"
        for name in ("first_token", "bring", "begin_sums", "end_sums", "scatter_sum")
    ),
    *(f"stowplan.{name}.default" for name in ("begin_exchange_back", "end_exchange_back")),
)
def involves_other_workers(_: Site) -> Effect:
    """Other workers take part in it, once: a worker that repeated it would wait for them forever."""
    return Effect.OUTSIDE


def reads_for_values(_: Site) -> bool:
    """The stated default: the results of an op depend on the buffers it reads."""
    return False


only_updates_statistics: Table[bool] = Table("whether buffers are read only to update them", reads_for_values)


@only_updates_statistics.entry("aten._native_batch_norm_legit_functional.default")
def running_statistics(site: Site) -> bool:
    """In training, running statistics go into the new running statistics and nowhere else."""
    return site.attributes.get("training") is True


@only_updates_statistics.entry(FUSED)
def running_statistics_in_a_kernel(site: Site) -> bool:
    """Whoever fused the ops has asked each of them."""
    return site.attributes.get("statistics") is True


def no_macs(_: Site) -> int:
    """The stated default: an op without a rule multiplies nothing."""
    return 0


macs_of: Table[int] = Table("macs", default=no_macs)


@macs_of.entry("Convolution2DFunction", "ConvolutionForward", "conv2d")
def channels_first_convolution(site: Site) -> int:
    """Each output takes one weight [.., in, kh, kw]; with groups, `in` is already a group's share."""
    return elements_of(site.outputs[0]) * prod(shape_of(site.inputs[1])[-3:])


@macs_of.entry("MatrixMul")
def matrix_multiplication(site: Site) -> int:
    """Each output takes a row of the left matrix."""
    rows, columns = shape_of(site.inputs[0])[-2:]
    return elements_of(site.outputs[0]) * (rows if site.attributes.get("transposeA") else columns)


@macs_of.entry("Deconvolution2DFunction")
def channels_first_deconvolution(site: Site) -> int:
    """Each input spreads one weight [.., out, kh, kw]."""
    return elements_of(site.inputs[0]) * prod(shape_of(site.inputs[1])[-3:])


@macs_of.entry("Convolution2DFunction.backward")
def convolution_adjoint(site: Site) -> int:
    """Inputs (gradient, image, weight, ..): one forward's worth for each of the two gradients it makes."""
    if len(site.inputs) < 3:
        raise MissingRule(f"macs: {site.op.id!r} lists no image and weight")
    forward = elements_of(site.inputs[0]) * prod(shape_of(site.inputs[2])[-3:])
    return forward * _gradients_of(site, site.inputs[1:3])


@macs_of.entry("Deconvolution2DFunction.backward")
def deconvolution_adjoint(site: Site) -> int:
    """Inputs (gradient, image, weight, ..): one forward's worth for each of the two gradients it makes."""
    if len(site.inputs) < 3:
        raise MissingRule(f"macs: {site.op.id!r} lists no image and weight")
    forward = elements_of(site.inputs[1]) * prod(shape_of(site.inputs[2])[-3:])
    return forward * _gradients_of(site, site.inputs[1:3])


def _gradients_of(site: Site, operands: tuple[Tensor, ...]) -> int:
    """How many of these operands the op makes a gradient of."""
    names = {tensor.id for tensor in operands}
    return sum(tensor.gradient_of in names for tensor in site.outputs)


@macs_of.entry("Conv2D")
def tensorflow_convolution(site: Site) -> int:
    """Each output takes one filter [kh, kw, in]."""
    return elements_of(site.outputs[0]) * prod(shape_of(site.inputs[1])[:3])


@macs_of.entry("Conv2DBackpropFilter")
def tensorflow_filter_gradient(site: Site) -> int:
    """Inputs (image, filter sizes, gradient): each gradient element meets one filter [kh, kw, in]."""
    return elements_of(site.inputs[-1]) * prod(shape_of(site.outputs[0])[:3])


@macs_of.entry("Conv2DBackpropInput")
def tensorflow_input_gradient(site: Site) -> int:
    """Inputs (image sizes, filter, gradient): each gradient element meets one filter [kh, kw, in]."""
    return elements_of(site.inputs[-1]) * prod(shape_of(site.inputs[-2])[:3])


@macs_of.entry("filter", "linear")
def untied_weights(site: Site) -> int:
    """Each weight, of [out, 1, 1, in, kh, kw, h, w] or [classes, channels, h, w], meets each sample once."""
    return shape_of(site.inputs[0])[0] * elements_of(site.inputs[1])


@macs_of.entry("filter.grad", "linear.grad")
def untied_adjoint(site: Site) -> int:
    """Inputs (gradient, image, weights): one forward's worth for each of the two gradients it adds to."""
    forward = shape_of(site.inputs[1])[0] * elements_of(site.inputs[2])
    return forward * _gradients_of(site, site.inputs[1:3])


@macs_of.entry("onnx.Conv", "onnx.ConvTranspose")
def onnx_convolution(site: Site) -> int:
    """Each output, or each input if transposed, takes one weight [in or out, k..] of its group."""
    met = site.inputs[0] if site.op.type == "onnx.ConvTranspose" else site.outputs[0]
    return elements_of(met) * prod(shape_of(site.inputs[1])[1:])


@macs_of.entry("onnx.Conv.backward", "onnx.ConvTranspose.backward")
def onnx_convolution_adjoint(site: Site) -> int:
    """Inputs (gradient, image, weight): a forward's worth for the gradient of each of the two."""
    met = site.inputs[1] if site.op.type == "onnx.ConvTranspose.backward" else site.inputs[0]
    forward = elements_of(met) * prod(shape_of(site.inputs[2])[1:])
    return forward * _gradients_of(site, site.inputs[1:3])


@macs_of.entry("onnx.MatMul", "onnx.Gemm")
def onnx_matrix_multiplication(site: Site) -> int:
    """Each output takes a row of the left matrix."""
    rows, columns = shape_of(site.inputs[0])[-2:]
    return elements_of(site.outputs[0]) * (rows if site.attributes.get("transA") else columns)


@macs_of.entry("onnx.MatMul.backward", "onnx.Gemm.backward")
def onnx_matrix_multiplication_adjoint(site: Site) -> int:
    """Inputs (gradient, left, right): a forward's worth for the gradient of each of the two."""
    rows, columns = shape_of(site.inputs[1])[-2:]
    forward = elements_of(site.inputs[0]) * (rows if site.attributes.get("transA") else columns)
    return forward * _gradients_of(site, site.inputs[1:3])


@macs_of.entry("aten.convolution.default")
def aten_convolution(site: Site) -> int:
    """Each output, or each input if transposed, takes one weight [in or out, k..] of its group."""
    met = site.inputs[0] if site.attributes["transposed"] else site.outputs[0]
    return elements_of(met) * prod(shape_of(site.inputs[1])[1:])


@macs_of.entry("aten.convolution_backward.default")
def aten_convolution_adjoint(site: Site) -> int:
    """Inputs (gradient, image, weight): a forward's worth for the gradient of each of the two."""
    met = site.inputs[1] if site.attributes["transposed"] else site.inputs[0]
    wanted = site.attributes["output_mask"]
    gradients = sum(map(bool, wanted[:2])) if isinstance(wanted, tuple) else 0
    return elements_of(met) * prod(shape_of(site.inputs[2])[1:]) * gradients


@macs_of.entry("aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default")
@macs_of.entry("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def aten_matrix_multiplication(site: Site) -> int:
    """Each output takes a row of the left matrix, which may come after a tensor to add to."""
    return elements_of(site.outputs[0]) * shape_of(site.inputs[-2])[-1]


@macs_of.entry(*aten.ATTENTIONS)
def aten_attention(site: Site) -> int:
    """Inputs (queries, keys, values): every query meets every key, every weight every value."""
    return _pairs_of_positions(site.inputs[0], site.inputs[1]) * _features(site.inputs[0], site.inputs[2])


@macs_of.entry(*aten.ATTENTION_ADJOINTS)
def aten_attention_adjoint(site: Site) -> int:
    """Inputs (gradient, queries, keys, values): the weights again, their gradient, and those of all three."""
    _, queries, keys, values, *_ = site.inputs
    return _pairs_of_positions(queries, keys) * _features(queries, values, values, queries, keys)


def _pairs_of_positions(queries: Tensor, keys: Tensor) -> int:
    *batch, count, _ = shape_of(queries)
    return prod(batch) * count * shape_of(keys)[-2]


def _features(*tensors: Tensor) -> int:
    return sum(shape_of(tensor)[-1] for tensor in tensors)


def each_tensor_once(site: Site) -> int:
    """The stated default: every tensor read or written passes through memory once."""
    return sum(tensor.nbytes or 0 for tensor in (*site.inputs, *site.outputs))


traffic_of: Table[int] = Table("traffic", default=each_tensor_once)


@traffic_of.entry("Reshape", "Identity")
@traffic_of.entry("onnx.Reshape", "onnx.Flatten", "onnx.Squeeze", "onnx.Unsqueeze", "onnx.Identity")
@traffic_of.entry(*aten.VIEWS)
def nothing_moves(_: Site) -> int:
    """A view costs no traffic."""
    return 0


@traffic_of.entry("GetItem")
def only_the_slice(site: Site) -> int:
    """A slice reads no more than it writes."""
    return 2 * sum(tensor.nbytes or 0 for tensor in site.outputs)
