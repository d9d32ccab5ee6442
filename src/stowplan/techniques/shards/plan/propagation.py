"""Op sharding: layouts propagate from the inputs of each op to its outputs, in the order of the ops.

An axis follows a dim through every op that keeps the dim. An op that reduces over a cut dim is computed from
partial sums, if its type is known to allow it; so is a product whose inner dim is cut by an axis of weights,
and a lookup in a table whose rows are cut. A softmax over a cut dim needs the greatest value and a sum of all
workers. Otherwise the axis is dropped: the op's inputs are gathered, every worker along that axis computes
the whole op, and the reason is recorded. All of these are exact.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TypeAlias

from stowplan.errors import BadUse
from stowplan.ir import Graph, Op, Phase
from stowplan.ops.regions import Need, Partial, Regions, Relation
from stowplan.ops.regions.rules import dim_of, identity
from stowplan.ops.table import Site, shape_of, site_of
from stowplan.ops.tiling import RESHAPES
from stowplan.techniques.shards.plan.alike import AlikeOps
from stowplan.techniques.shards.plan.allowed import allowed
from stowplan.techniques.shards.plan.cell_relation import CellRelation, cell_relation, sliced_dim
from stowplan.techniques.shards.plan.cells import Cells, regrouped
from stowplan.techniques.shards.plan.layout import Layout
from stowplan.techniques.shards.plan.mesh import MeshAxes
from stowplan.techniques.shards.plan.weights import PRODUCTS, is_plain_product, model_axis

Chosen: TypeAlias = Mapping[str, Sequence[int | None]]
"""By tensor, the dim that each axis cuts, or None."""


class ShardingKind(StrEnum):
    """How the workers compute one op."""

    ANYWHERE = "anywhere"  # reads nothing that is cut: each worker makes what it needs of it
    PARTS = "parts"  # each worker makes its part
    SUMS = "sums"  # each worker sums over its part, the sums are added up
    NORM = "norm"  # the same for statistics, then each worker normalises its part
    SOFTMAX = "softmax"  # the same with the greatest value and a sum along the dim


TOGETHER = (ShardingKind.SUMS, ShardingKind.NORM, ShardingKind.SOFTMAX)
"""Kinds in which all workers along the summed axes take part, whatever each needs."""


CLASS_LOSSES = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
"""Losses that pick a class along the second dim of their first input."""

SUMMED = ("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default")
LOSSES = (
    *(f"aten.{name}_loss.default" for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin")),
    "aten.binary_cross_entropy.default",
    "aten.binary_cross_entropy_with_logits.default",
    *CLASS_LOSSES,
)
LOOKUPS = ("aten.embedding.default",)
"""Ops that pick rows of their first input, a table."""

SOFTMAXES = ("aten._softmax.default", "aten._log_softmax.default")
NORMS = (
    "aten._native_batch_norm_legit_functional.default",
    "aten.native_batch_norm.default",
    "aten.native_group_norm.default",
)


@dataclass(frozen=True, slots=True)
class OpSharding:
    """How one op is divided over a mesh: the kind, the axes that its sums run along, rules between cells.

    `alike` is the same number for ops of a propagation that look alike and have the same layouts.
    """

    op: Op
    kind: ShardingKind
    rules: tuple[CellRelation, ...]
    summed_axes: tuple[int, ...] = ()
    gathered: str = ""  # why an axis was dropped here
    alike: int = field(default=-1, compare=False)


@dataclass(slots=True)
class ShardPropagation:
    """The layouts of all forward tensors and the shardings of all forward ops found so far."""

    graph: Graph
    mesh: MeshAxes
    layouts: dict[str, Layout]
    chosen: Chosen
    shardings: list[OpSharding] = field(default_factory=list)
    ops: AlikeOps = field(init=False)
    _alike: dict[Hashable, int] = field(default_factory=dict)  # by look and layouts, the number of such ops
    _known: dict[int, tuple[OpSharding, Sequence[Layout]]] = field(default_factory=dict)  # by that number

    def __post_init__(self) -> None:
        self.ops = AlikeOps(self.graph)

    def run(self) -> None:
        for op in forward_ops(self.graph):
            self.take(op)

    def take(self, op: Op) -> None:
        """The sharding of one op, whose inputs have layouts, and the layouts of its outputs."""
        if not op.outputs:
            raise BadUse(f"not sharded: op {op.id!r} makes nothing that could be cut")
        inputs = tuple([self._layout_read(op, use.tensor) for use in op.inputs])
        chosen = self.chosen.get(op.outputs[0].tensor)
        look = self.ops.number(op), inputs, None if chosen is None else tuple(chosen)
        number = self._alike.setdefault(look, len(self._alike))
        if number not in self._known:
            sharding, outputs = self._divided(op, inputs)
        else:
            sharding, outputs = self._known[number]
        sharding = OpSharding(
            op, sharding.kind, sharding.rules, sharding.summed_axes, sharding.gathered, number
        )
        if not sharding.gathered:  # that reason names the op
            self._known[number] = sharding, outputs
        self.layouts.update(zip(op.writes(), outputs, strict=True))
        self.shardings.append(sharding)

    def _layout_read(self, op: Op, name: str) -> Layout:
        if name not in self.layouts:
            maker = next((each for each in self.graph.ops if name in each.writes()), None)
            made = f"made by {maker.id!r}, an op of {maker.phase}" if maker else "made by no op"
            raise BadUse(
                f"not sharded: forward op {op.id!r} reads {name!r}, which is {made}, and only ops of"
                " forward are divided over workers; give the step as MODULE:FUNCTION, or a file whose forward"
                " ops read from each other"
            )
        return self.layouts[name]

    def _divided(self, op: Op, inputs: Sequence[Layout]) -> "_Divided":
        site, regions = site_of(self.graph, op), self.ops.regions(op)
        axes = _reduced_axes(site, regions.outputs[0], inputs)
        inner = _inner_axes(op, inputs, self.mesh) or _looked_up_axes(op, inputs)
        cut = [number for number, layout in enumerate(inputs) if not layout.is_everywhere]
        is_read = any(_is_read(regions, number) for number in cut)
        if not is_read and not any(dim is not None for dim in self.chosen.get(op.outputs[0].tensor, ())):
            outputs, rules = _everywhere(site, regions, inputs, self.mesh)
            return OpSharding(op, ShardingKind.ANYWHERE, tuple(rules)), outputs
        if inner:
            return self._sums(site, regions, inputs, inner)
        if (along := _softmax_axes(site, inputs)) and op.outputs[0].tensor not in self.chosen:
            return _softmax(site, regions, inputs[0], along)
        if axes and op.type in NORMS:
            return self._norm(site, regions, inputs, axes)
        if axes and op.type in (*SUMMED, *LOSSES) and _operands_match(regions.outputs[0], inputs):
            return self._sums(site, regions, inputs, axes)
        return self._parts(site, regions, inputs)

    def _norm(
        self, site: Site, regions: Regions, inputs: Sequence[Layout], axes: tuple[int, ...]
    ) -> "_Divided":
        """The output is cut like the input; statistics are the same all along the axes they run over."""
        reduction = regions.outputs[0].reduction
        assert reduction is not None
        relation = reduction.after or regions.outputs[0]
        cells = [layout.cells for layout in inputs]
        outputs, rules = [inputs[0]], [cell_relation(site, relation, cells, inputs[0].cells)]
        for statistic in regions.outputs[1:]:
            layout, rule = self._following(site, statistic, inputs, skipped=axes)
            outputs.append(layout)
            rules.append(rule)
        return OpSharding(site.op, ShardingKind.NORM, tuple(rules), axes), outputs

    def _sums(
        self, site: Site, regions: Regions, inputs: Sequence[Layout], axes: tuple[int, ...]
    ) -> "_Divided":
        found = [self._following(site, relation, inputs, skipped=axes) for relation in regions.outputs]
        return OpSharding(site.op, ShardingKind.SUMS, tuple(f[1] for f in found), axes), [f[0] for f in found]

    def _parts(self, site: Site, regions: Regions, inputs: Sequence[Layout]) -> "_Divided":
        outputs, rules, why = [], [], ""
        for number, relation in enumerate(regions.outputs):
            layout, rule = self._following(site, relation, inputs)
            if number == 0:
                layout = self._as_chosen(site.op, layout)
            layout, reason = allowed(site, number, rule, layout, inputs, self.mesh)
            why = reason if number == 0 else why
            outputs.append(layout)
            rules.append(rule)
        return OpSharding(site.op, ShardingKind.PARTS, tuple(rules), gathered=why), outputs

    def _as_chosen(self, op: Op, layout: Layout) -> Layout:
        """The layout of an op's first output: the chosen one if there is one, else that of its inputs."""
        name = op.outputs[0].tensor
        if name not in self.chosen:
            return layout
        if not layout.cells.is_plain:
            raise BadUse(f"{op.id} keeps the cells of merged dims, so that no other layout can be chosen")
        axes = without_single(self.mesh, self.chosen[name])
        check_seed(name, layout.cells.sizes, axes, self.mesh)
        return Layout(layout.cells, axes)

    def _following(
        self, site: Site, relation: Relation, inputs: Sequence[Layout], skipped: Sequence[int] = ()
    ) -> tuple[Layout, CellRelation]:
        """Each axis on the output cell that follows what it cuts, of the first input that has one."""
        cells = _output_cells(site, relation, inputs)
        rule = cell_relation(site, relation, [layout.cells for layout in inputs], cells)
        taken: set[int] = set()
        axes: list[int | None] = []
        for axis in range(len(self.mesh.axes)):
            found = None if axis in skipped else _follower(rule, inputs, axis, taken)
            axes.append(found)
            taken.update(() if found is None else (found,))
        return Layout(cells, tuple(axes)), rule


_Divided: TypeAlias = tuple[OpSharding, Sequence[Layout]]
"""How an op is divided, and the layouts of its outputs."""


def _softmax(site: Site, regions: Regions, scores: Layout, axes: tuple[int, ...]) -> _Divided:
    """Once the line's greatest value and sum are known, each element follows from itself."""
    shape = regions.outputs[0].shape
    pointwise = Relation(shape, (Need(identity(shape)),))
    rule = cell_relation(site, pointwise, [scores.cells], scores.cells)
    return OpSharding(site.op, ShardingKind.SOFTMAX, (rule,), axes), [scores]


def forward_ops(graph: Graph) -> Iterator[Op]:
    """The ops of the forward half that compute something another op or the caller sees."""
    return (op for op in graph.ops if op.phase is Phase.FORWARD)


def without_single(mesh: MeshAxes, axes: Sequence[int | None]) -> tuple[int | None, ...]:
    """Axes of one worker cut nothing."""
    return tuple(None if axis.size == 1 else dim for axis, dim in zip(mesh.axes, axes, strict=True))


def check_seed(name: str, shape: tuple[int, ...], axes: tuple[int | None, ...], mesh: MeshAxes) -> None:
    cut = [dim for dim in axes if dim is not None]
    if len(axes) != len(mesh.axes) or len(set(cut)) != len(cut) or any(not 0 <= d < len(shape) for d in cut):
        raise BadUse(f"{name!r} of shape {shape} cannot be cut along dims {axes} by the mesh {mesh}")


def _is_read(regions: Regions, number: int) -> bool:
    return any(relation.needs[number] is not None for relation in regions.outputs)


def _everywhere(
    site: Site, regions: Regions, inputs: Sequence[Layout], mesh: MeshAxes
) -> tuple[list[Layout], list[CellRelation]]:
    outputs = [Layout.everywhere(shape_of(tensor), mesh) for tensor in site.outputs]
    cells = [layout.cells for layout in inputs]
    return outputs, [
        cell_relation(site, r, cells, o.cells) for r, o in zip(regions.outputs, outputs, strict=True)
    ]


def _reduced_axes(site: Site, relation: Relation, inputs: Sequence[Layout]) -> tuple[int, ...]:
    """The axes that cut a dim of the first input which the op runs over."""
    reduction = relation.reduction
    if reduction is None or 0 not in reduction.dims:
        return ()
    dims = reduction.dims[0]
    if site.op.type in LOSSES and relation.shape != ():
        return ()
    if reduction.partial is Partial.MOMENTS and site.op.type == "aten.native_group_norm.default":
        dims = tuple(range(2, len(inputs[0].cells.groups)))
    if site.op.type in CLASS_LOSSES and len(inputs[0].cells.groups[1]) == 1:
        dims = (*dims, 1)
    return _axes_along(inputs[0], dims)


def _axes_along(layout: Layout, dims: Sequence[int | None]) -> tuple[int, ...]:
    """The axes that cut one of these dims."""
    pairs = enumerate(layout.axes)
    return tuple(axis for axis, cell in pairs if cell is not None and layout.cells.dim_of(cell) in dims)


def _softmax_axes(site: Site, inputs: Sequence[Layout]) -> tuple[int, ...]:
    """The axes that cut the dim which a softmax runs over."""
    if site.op.type not in SOFTMAXES or not shape_of(site.inputs[0]):
        return ()
    return _axes_along(inputs[0], (dim_of(site, len(shape_of(site.inputs[0]))),))


def _looked_up_axes(op: Op, inputs: Sequence[Layout]) -> tuple[int, ...]:
    """The axes that cut the rows of a table: each worker looks up in its own, and adds zeros for others."""
    counts = any(op.attributes.get(key) for key in ("scale_grad_by_freq", "sparse"))
    if op.type not in LOOKUPS or counts or len(inputs[0].cells.groups[0]) > 1:
        return ()
    return _axes_along(inputs[0], (0,))


def _inner_axes(op: Op, inputs: Sequence[Layout], mesh: MeshAxes) -> tuple[int, ...]:
    """The axis of weights, if it cuts the inner dim of both factors of a product in the same way."""
    axis = model_axis(mesh)
    if axis is None or not is_plain_product(op):
        return ()
    found = []
    for number, dim in zip(PRODUCTS[op.type][1:], (1, 0), strict=True):
        cells, cell = inputs[number].cells, inputs[number].axes[axis]
        if cell is None or cells.dim_of(cell) != dim:
            return ()
        group = cells.groups[dim]
        if cell != cells.first(dim):
            return ()
        found.append([bound * prod(group[1:]) for bound in mesh.axes[axis].bounds(group[0])])
    return (axis,) if found[0] == found[1] else ()


def _operands_match(relation: Relation, inputs: Sequence[Layout]) -> bool:
    """Whether the dims that a loss runs over have the same cells in all its operands."""
    reduction = relation.reduction
    assert reduction is not None
    first = inputs[0].cells.groups
    for number, dims in reduction.dims.items():
        groups = inputs[number].cells.groups
        for own, dim in zip(reduction.dims[0], dims, strict=True):
            if own is not None and dim is not None and groups[dim] != first[own]:
                return False
    return True


def _output_cells(site: Site, relation: Relation, inputs: Sequence[Layout]) -> Cells:
    """The cells of an output: those of the first input, among those cut, that a dim goes along with."""
    if site.op.type in RESHAPES:
        return regrouped(inputs[0].cells, relation.shape, inputs[0].cut_cells)
    groups: list[tuple[int, ...]] = [(size,) for size in relation.shape]
    for need, layout in zip(relation.needs, inputs, strict=True):
        if need is None:
            continue
        for dim, group in enumerate(layout.cells.groups):
            found = sliced_dim(need, dim)
            if len(group) > 1 and found is not None and len(groups[found[0]]) == 1:
                along, start = found
                size = relation.shape[along]
                if start == 0 and size == prod(group):
                    groups[along] = group
                elif size == prod(group[1:]) and start % size == 0:
                    groups[along] = group[1:]
    return Cells(tuple(groups))


def _follower(rule: CellRelation, inputs: Sequence[Layout], axis: int, taken: set[int]) -> int | None:
    for number, layout in enumerate(inputs):
        cell = layout.axes[axis]
        found = None if cell is None else rule.follower(number, cell)
        if found is not None and found not in taken:
            return found
    return None
