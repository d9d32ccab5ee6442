"""Which input's storage an output can share: always (a view), or when that input dies (in place)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stowplan.ops import aten
from stowplan.ops.table import Site, Table


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
    storage = victim.alias_of or victim.id
    others = (other for other in site.inputs if other.id != victim.id)
    return _look_alike(site, position, 0) and all((other.alias_of or other.id) != storage for other in others)


def _look_alike(site: Site, position: int, output: int) -> bool:
    one, other = site.inputs[position], site.outputs[output]
    return (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
