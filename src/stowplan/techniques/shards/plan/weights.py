"""Which weights a `model` axis cuts around a hidden dim: those on both sides of it, between two products.

A product of an activation and a weight runs over its inner dim. If each worker has a span of that dim, it
adds up its part of the product, and the parts are summed over the workers (`ShardingKind.SUMS`). Region rules
say what it needs for its span, from the inner dim backward:

    reshape                           the dim that holds the same digit of the flat index, such as heads
    pointwise, transpose, attention   the dim that is followed index by index, or by groups of heads
    another product                   columns of its weight: each worker makes its columns of the product

If every op before such products follows the dim, their weights and biases are cut along it, and so is the
weight of the product that sums. An op that runs over the dim, as a norm does, ends the search: every worker
along the axis computes that product whole. No names of modules are looked at.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from stowplan.errors import BadUse
from stowplan.ir import Graph, Kind, Op, Phase, Shape
from stowplan.ops import aten
from stowplan.ops.regions import DimKind, Need
from stowplan.ops.regions.maps import Grouped
from stowplan.ops.regions.relation import DimMap
from stowplan.ops.table import shape_of
from stowplan.ops.tiling import RESHAPES
from stowplan.techniques.shards.plan.alike import AlikeOps
from stowplan.techniques.shards.plan.cell_relation import followed_dim, sliced_dim
from stowplan.techniques.shards.plan.cells import Cells
from stowplan.techniques.shards.plan.layout import Layout
from stowplan.techniques.shards.plan.mesh import MeshAxes

MODEL = "model"
"""The name of an axis that cuts weights."""


class Factors(NamedTuple):
    """The positions of a product's inputs: what is added to it, if anything, and its two factors."""

    added: int | None
    left: int
    right: int


PRODUCTS: Mapping[str, Factors] = {
    "aten.mm.default": Factors(None, 0, 1),
    "aten.addmm.default": Factors(0, 1, 2),
}
"""Products whose inner dim may be cut: [m, k] by [k, n]."""


_OF_WEIGHTS = frozenset({*aten.VIEWS, "aten._to_copy.default", "aten.clone.default"})
"""Ops between a weight and a product that reads it."""


def model_axis(mesh: MeshAxes) -> int | None:
    """The axis that cuts weights, if the mesh has one."""
    found = [number for number, axis in enumerate(mesh.axes) if axis.name == MODEL]
    if len(found) > 1:
        raise BadUse(f"mesh {mesh} has {len(found)} axes {MODEL!r}; give it one, such as {MODEL}=4")
    return found[0] if found and mesh.axes[found[0]].size > 1 else None


def is_plain_product(op: Op) -> bool:
    """Whether an op is a product of two matrices, without factors beside them."""
    return op.type in PRODUCTS and all(op.attributes.get(key, 1) == 1 for key in ("alpha", "beta"))


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim of a tensor as cells, and which of them is cut."""

    dim: int
    group: tuple[int, ...]
    cell: int = 0

    @property
    def size(self) -> int:
        return self.group[self.cell]


@dataclass(frozen=True, slots=True)
class _Met:
    """A cut of a tensor that the search has come to; `inner` is the same cut of the inner dim it began with.

    `inner` is None behind heads that are shared by groups of others.
    """

    tensor: str
    cut: Cut
    inner: Cut | None


@dataclass(slots=True)
class WeightSearch:
    """The parameters cut so far; a product whose search would cut one in another way is left whole."""

    graph: Graph
    size: int  # of the axis
    cut: dict[str, Cut] = field(default_factory=dict)
    makers: dict[str, tuple[Op, int]] = field(init=False)
    ops: AlikeOps = field(init=False)

    def __post_init__(self) -> None:
        self.ops = AlikeOps(self.graph)
        forward = (op for op in self.graph.ops if op.phase is Phase.FORWARD)
        self.makers = {use.tensor: (op, n) for op in forward for n, use in enumerate(op.outputs)}

    def around_hidden_dims(self) -> bool:
        """Cut the weights on both sides of every hidden dim between two products; whether there is one."""
        for op in self.graph.ops:
            if op.phase is Phase.FORWARD and is_plain_product(op):
                self._take(op)
        return bool(self.cut)

    def _take(self, product: Op) -> None:
        """Cut the weights around the inner dim of a product, if all before it follows."""
        left, right = (product.inputs[n].tensor for n in PRODUCTS[product.type][1:])
        inner = shape_of(self.graph.tensors[left])[1]
        start = Cut(1, (inner,))
        walk = _Walk(self)
        if not walk.run([_Met(left, start, start)]) or not walk.products or inner < self.size:
            return
        widest = max(walk.inner, key=lambda cut: len(cut.group), default=start)
        weight = _Walk(self, dict(walk.cut))
        if weight.run([_Met(right, replace(widest, dim=0), None)], weights_alone=True):
            self.cut.update(weight.cut)

    def columns(self, product: Op) -> dict[str, Cut] | None:
        """The cuts of a product's weight and bias that make its columns parts; None if it has none."""
        made = product.outputs[0].tensor
        met = _Met(made, Cut(1, (shape_of(self.graph.tensors[made])[1],)), None)
        walk = _Walk(self)
        biases = walk.columns(product, met)
        return walk.cut if biases is not None and walk.run(biases, weights_alone=True) else None

    def layouts(self, mesh: MeshAxes, axis: int) -> dict[str, Layout]:
        """By parameter that is cut, its layout on a mesh whose `model` axis has this number."""
        return {name: _layout(self.graph, name, cut, axis, mesh) for name, cut in self.cut.items()}


@dataclass(slots=True)
class _Walk:
    """One search backward, and what it would cut."""

    search: WeightSearch
    cut: dict[str, Cut] = field(default_factory=dict)
    products: int = 0
    inner: list[Cut] = field(default_factory=list)  # of the inner dim, as products before it see it

    def run(self, waiting: list[_Met], *, weights_alone: bool = False) -> bool:
        """Whether everything follows up to other products and parameters; `weights_alone`, to parameters."""
        seen: set[_Met] = set()
        for met in waiting:  # which grows
            if met in seen:
                continue
            seen.add(met)
            tensor = self.search.graph.tensors[met.tensor]
            if tensor.kind is Kind.PARAMETER:
                if self._known(met.tensor) not in (None, met.cut):
                    return False
                self.cut[met.tensor] = met.cut
            elif met.tensor not in self.search.makers:
                if tensor.kind is Kind.INPUT or weights_alone:
                    return False
            else:
                op, output = self.search.makers[met.tensor]
                if weights_alone and op.type not in _OF_WEIGHTS:
                    return False
                found = self._before(op, output, met)
                if found is None:
                    return False
                waiting += found
        return True

    def _known(self, name: str) -> Cut | None:
        return self.cut.get(name) or self.search.cut.get(name)

    def _before(self, op: Op, output: int, met: _Met) -> list[_Met] | None:
        """The cuts of an op's inputs that follow from a cut of its output; None if it runs over that dim."""
        if op.type in RESHAPES:
            return self._before_reshape(op, met)
        regions, dim = self.search.ops.regions(op), met.cut.dim
        relation = regions.outputs[output]
        is_feature = op.type in aten.ATTENTIONS and dim >= len(relation.shape) - 2
        if regions.barrier or dim in relation.whole or is_feature:
            return None
        if is_plain_product(op):
            return self.columns(op, met)
        found: list[_Met] = []
        for use, need in zip(op.inputs, relation.needs, strict=True):
            if need is None:
                continue
            if need.within is not None and need.within[0] == dim:
                return None
            for number, dim_map in enumerate(need.dims):
                if dim_map.kind_of(dim) is DimKind.SHARED:
                    continue
                same = isinstance(dim_map, Grouped) and dim_map.outputs == dim_map.inputs == 1
                if same or followed_dim(need, number) == dim:
                    found.append(replace(met, tensor=use.tensor, cut=replace(met.cut, dim=number)))
                elif (piece := _as_piece(need, number, met, relation.shape[dim])) is not None:
                    found.append(replace(met, tensor=use.tensor, cut=piece))
                elif not _is_shared_by_heads(dim_map, met):
                    return None
                elif dim_map.size >= self.search.size:
                    found.append(_Met(use.tensor, Cut(number, (dim_map.size,)), None))
        return found

    def columns(self, product: Op, met: _Met) -> list[_Met] | None:
        """The weight and the bias of another product: its other factor is needed whole."""
        if met.cut.dim != 1 or met.cut.size < self.search.size:
            return None
        self.products += 1
        self.inner += [] if met.inner is None else [met.inner]
        added, _, right = PRODUCTS[product.type]
        weight = _Walk(self.search, dict(self.cut))
        start = _Met(product.inputs[right].tensor, met.cut, None)
        if not weight.run([start], weights_alone=True):
            return None
        self.cut = weight.cut
        if added is None:
            return []
        bias = product.inputs[added].tensor
        dims = len(shape_of(self.search.graph.tensors[bias]))
        return [_Met(bias, replace(met.cut, dim=dims - 1), None)]

    def _before_reshape(self, op: Op, met: _Met) -> list[_Met] | None:
        source, made = (shape_of(self.search.graph.tensors[u.tensor]) for u in (op.inputs[0], op.outputs[0]))
        found = _in_other_shape(source, made, met.cut)
        if found is None:
            return None
        cut, rest = found
        inner = met.inner
        if rest > 1 and inner is not None:
            group = (*inner.group[: inner.cell], cut.size, rest, *inner.group[inner.cell + 1 :])
            inner = replace(inner, group=group)
        return [_Met(op.inputs[0].tensor, cut, inner)]


def _is_shared_by_heads(dim_map: DimMap, met: _Met) -> bool:
    """Whether heads of keys or values serve several heads of queries each, which are the cut."""
    return isinstance(dim_map, Grouped) and dim_map.inputs == 1 and len(met.cut.group) == 1


def _as_piece(need: Need, dim: int, met: _Met, size: int) -> Cut | None:
    """The cut of a dim of which a piece of this size is the dim that is cut, as in one weight for several."""
    found, whole = sliced_dim(need, dim), need.dims[dim].size
    if found is None or found[0] != met.cut.dim or found[1] % size or whole % size:
        return None
    return Cut(dim, (whole // size, *met.cut.group), met.cut.cell + 1)


def _in_other_shape(source: Shape, made: Shape, cut: Cut) -> tuple[Cut, int] | None:
    """A cut of a reshaped tensor as a cut of what it was reshaped from; None if no dim holds it.

    The second number is above 1 where a dim of `source` is the leading part of the cell that was cut: how
    many indices of the cell each of the dim's is.
    """
    below = prod(made[cut.dim + 1 :]) * prod(cut.group[cut.cell + 1 :])
    end = below * cut.size
    for dim, size in enumerate(source):
        low = prod(source[dim + 1 :])
        high = low * size
        if size > 1 and low <= below and end <= high and below % low == 0 and high % end == 0:
            group = [high // end, cut.size, below // low]
            kept = [(number, cell) for number, cell in enumerate(group) if cell > 1 or number == 1]
            cells = tuple(cell for _, cell in kept)
            return Cut(dim, cells, [number for number, _ in kept].index(1)), 1
        if size > 1 and high == end and low > below:
            return Cut(dim, (size,)), low // below
    return None


def _layout(graph: Graph, name: str, cut: Cut, axis: int, mesh: MeshAxes) -> Layout:
    shape = shape_of(graph.tensors[name])
    groups = tuple(cut.group if dim == cut.dim else (size,) for dim, size in enumerate(shape))
    cells = Cells(groups)
    axes = tuple(cells.first(cut.dim) + cut.cell if n == axis else None for n in range(len(mesh.axes)))
    return Layout(cells, axes)
