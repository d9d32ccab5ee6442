"""Which input's storage an output can share: always (a view), or when that input dies (in place)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stowplan.ops.table import Site, Table


@dataclass(frozen=True, slots=True)
class Aliasing:
    """By output position: the input position it is a view of, and those it may overwrite if they die."""

    view_of: Mapping[int, int] = field(default_factory=dict)
    in_place_of: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def shares_nothing(_: Site) -> Aliasing:
    """The stated default: every output has its own storage."""
    return Aliasing()


aliasing_of: Table[Aliasing] = Table("aliasing", default=shares_nothing)


@aliasing_of.entry("Elemwise")
def pointwise(site: Site) -> Aliasing:
    """The output may overwrite an input of its own shape; one that is broadcast is too small."""
    shape = site.outputs[0].shape
    return Aliasing(
        in_place_of={0: tuple(i for i, tensor in enumerate(site.inputs) if tensor.shape == shape)}
    )


@aliasing_of.entry("Reshape")
def reshape(_: Site) -> Aliasing:
    """The same elements under another shape."""
    return Aliasing(view_of={0: 0})


@aliasing_of.entry("Identity")
def identity(_: Site) -> Aliasing:
    """TensorFlow's read of a variable is the variable."""
    return Aliasing(view_of={0: 0})


@aliasing_of.entry("ReLU", "Dropout")
@aliasing_of.entry("Relu", "BiasAdd")
@aliasing_of.entry("ReLU.backward", "Dropout.backward")
@aliasing_of.entry("ReluGrad")
def overwrites_first(site: Site) -> Aliasing:
    """Elementwise in its first input: the value itself forward, the gradient backward (if one is wanted)."""
    return Aliasing(in_place_of={0: (0,)} if site.outputs else {})
