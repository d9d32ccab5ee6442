"""ShardPlan: a training step over a mesh of workers: who owns, makes and holds which rect of a tensor.

Outline: of a mesh of thousands the few workers whose shards tell those of all others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from stowplan.errors import IllegalPlan
from stowplan.geometry import Rect
from stowplan.ir import Graph, Kind
from stowplan.techniques.shards.plan.cuts import propagate
from stowplan.techniques.shards.plan.even import CutSizes, is_followed, kinds_of, outline, places_on
from stowplan.techniques.shards.plan.layout import Layout
from stowplan.techniques.shards.plan.mesh import Axis, MeshAxes
from stowplan.techniques.shards.plan.propagation import Chosen, OpSharding, ShardPropagation, forward_ops
from stowplan.techniques.shards.plan.shard import Pulling, Shard


def outlined(found: ShardPropagation, ends: Sequence[str]) -> dict[int, Shard]:
    """The shards of workers on the axes, and of one in the middle."""
    cut = cut_sizes(found)
    while True:
        workers = sorted({*outline(found.mesh, cut), found.mesh.middle})
        shards = Pulling(found, ends, workers).run()
        bent = [axis for axis in cut if _is_bent(found, axis, cut, shards)]
        if not bent:
            return shards
        cut = {axis: sizes for axis, sizes in cut.items() if axis not in bent}


def cut_sizes(found: ShardPropagation) -> CutSizes:
    """The axes that all ops follow, with the sizes of the dims that they cut."""
    axes = set(range(len(found.mesh.axes)))
    for sharding in {sharding.alike: sharding for sharding in found.shardings}.values():
        for use, rule in zip(sharding.op.outputs, sharding.rules, strict=True):
            layout = found.layouts[use.tensor]
            axes = {axis for axis in axes if is_followed(axis, rule, layout)}
    layouts = set(found.layouts.values())
    return {axis: frozenset(_cut_size(layout, axis) for layout in layouts) for axis in axes}


def _cut_size(layout: Layout, axis: int) -> int:
    """The size of the dim that an axis cuts; 0, of which all places have as much, if it cuts none."""
    cell = layout.axes[axis]
    return 0 if cell is None else layout.cells.sizes[cell]


def _is_bent(found: ShardPropagation, axis: int, cut: CutSizes, shards: Mapping[int, Shard]) -> bool:
    """Whether places of a kind hold parts of some tensor whose bounds do not lie on a line."""
    mesh = found.mesh
    places = places_on(mesh.axes[axis], cut[axis])
    if len(places) == mesh.axes[axis].size:
        return False
    held = {place: shards[mesh.on_axis(axis, place)].held for place in places}
    names = {name for rects in held.values() for name in rects}
    sizes = {name: _cut_size(found.layouts[name], axis) for name in names}
    alike = {(sizes[name], tuple(rects.get(name) for rects in held.values())): name for name in names}
    for (size, _), name in alike.items():
        kinds = kinds_of(mesh.axes[axis], frozenset([size]) if size else cut[axis])
        starts = mesh.axes[axis].bounds(size or max(cut[axis]))
        for kind in kinds:
            worked_out = [place for place in kind if place in held]
            if _bends([starts[place] for place in worked_out], [held[p].get(name) for p in worked_out]):
                return True
    return False


def _bends(starts: Sequence[int], rects: Sequence[Rect | None]) -> bool:
    known = [rect for rect in rects if rect is not None]
    if known and len(known) != len(rects):
        return True
    bounds = zip(*((*rect.lo, *rect.hi) for rect in known), strict=True)
    return not all(_on_a_line(starts, numbers) for numbers in bounds)


def _on_a_line(starts: Sequence[int], numbers: Sequence[int]) -> bool:
    run, rise = starts[-1] - starts[0], numbers[-1] - numbers[0]
    pairs = zip(starts, numbers, strict=True)
    if not run:
        return len(set(numbers)) == 1
    return all((number - numbers[0]) * run == (start - starts[0]) * rise for start, number in pairs)


RESIDENT = (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)
"""Kinds of tensors that every worker has whole. Gradients of parameters are summed over the mesh once."""


@dataclass(frozen=True, slots=True)
class RectTransfer:
    """A rect of a tensor's cells that `source` owns and `target` needs. Backward, its gradient goes back."""

    tensor: str
    source: int
    target: int
    rect: Rect


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A step on a mesh. `shards` are by worker: of all, or of a large mesh those on its axes.

    `differentiated` are the tensors whose gradients flow.
    """

    graph: Graph
    mesh: MeshAxes
    layouts: Mapping[str, Layout]
    shardings: tuple[OpSharding, ...]
    shards: Mapping[int, Shard]
    differentiated: frozenset[str]
    exchanged: tuple[str, ...]  # of these, in the order they are made, some worker needs more than it makes

    @property
    def gathered(self) -> Mapping[str, str]:
        """The ops before which something is gathered, and why."""
        return {sharding.op.id: sharding.gathered for sharding in self.shardings if sharding.gathered}

    @property
    def cut_weights(self) -> Sequence[str]:
        """The parameters that an axis cuts and some op reads."""
        tensors = ((name, self.graph.tensors[name]) for name in self.layouts)
        cut = (n for n, t in tensors if t.kind is Kind.PARAMETER and not self.layouts[n].is_everywhere)
        read = {use.tensor for sharding in self.shardings for use in sharding.op.inputs}
        return [name for name in cut if name in read]

    @property
    def is_alike(self) -> bool:
        """Whether all workers do the same on equal parts: they share the samples evenly, and nothing else."""
        axes = self.mesh.axes
        return [(axis.name, axis.weights) for axis in axes] == [("data", ())] and not any(
            layout.cells.sizes[cell] % self.mesh.size
            for layout in self.layouts.values()
            for cell in layout.cut_cells
        )

    @property
    def made_in_order(self) -> Sequence[str]:
        """The first output of every op."""
        return [sharding.op.outputs[0].tensor for sharding in self.shardings if sharding.op.outputs]

    def received(self, worker: int) -> Iterator[RectTransfer]:
        """All that a worker must be sent forward, by tensor in the order of the graph."""
        shard = self.shards[worker]
        for name in self.exchanged:
            rect = shard.held.get(name)
            if rect is not None:
                for holder, part in self.layouts[name].holders(self.mesh, worker, rect):
                    if holder != worker:
                        yield RectTransfer(name, holder, worker, part)


def shard_plan(
    graph: Graph, mesh: MeshAxes, seeds: Chosen, ends: Sequence[str], chosen: Chosen | None = None
) -> ShardPlan:
    """The step over a mesh whose axes cut the dims `seeds` of its inputs. `ends` are what it returns.

    `chosen` are outputs of ops that are cut otherwise than what they are made from, which is sent around.
    """
    propagated = propagate(graph, mesh, seeds, ends, chosen)
    return _planned(propagated, Pulling(propagated, ends, range(mesh.size)).run())


def outline_plan(graph: Graph, mesh: MeshAxes, seeds: Chosen, ends: Sequence[str]) -> ShardPlan:
    """The same with the shards of a few workers, who tell what the others have."""
    propagated = propagate(graph, mesh, seeds, ends)
    return _planned(propagated, outlined(propagated, ends))


def glance_plan(graph: Graph, mesh: MeshAxes, seeds: Chosen, ends: Sequence[str]) -> ShardPlan:
    """The same with the shards of workers at the ends and in the middle of axes, alike or not."""
    propagated = propagate(graph, mesh, seeds, ends)
    workers = {*outline(mesh, dict.fromkeys(range(len(mesh.axes)), frozenset[int]())), mesh.middle}
    return _planned(propagated, Pulling(propagated, ends, sorted(workers)).run())


def _planned(propagated: ShardPropagation, shards: Mapping[int, Shard]) -> ShardPlan:
    plan = ShardPlan(
        propagated.graph,
        propagated.mesh,
        propagated.layouts,
        tuple(propagated.shardings),
        shards,
        _differentiated(propagated),
        tuple(_exchanged(propagated, shards)),
    )
    check(plan)
    return plan


def _exchanged(found: ShardPropagation, shards: Mapping[int, Shard]) -> Iterator[str]:
    inputs = [name for name, tensor in found.graph.tensors.items() if tensor.kind is Kind.INPUT]
    for name in (*inputs, *(use.tensor for sharding in found.shardings for use in sharding.op.outputs)):
        layout = found.layouts[name]
        if not layout.is_everywhere and any(
            _lacks(shard, name, layout, found.mesh, worker) for worker, shard in shards.items()
        ):
            yield name


def _lacks(shard: Shard, name: str, layout: Layout, mesh: MeshAxes, worker: int) -> bool:
    held, made = shard.held.get(name), shard.made.get(name)
    if held is None or held is made:
        return False
    return not (layout.share(mesh, worker) if made is None else made).contains(held)


def check(plan: ShardPlan) -> None:
    """IllegalPlan unless the shares of every tensor are disjoint and cover it.

    They are products of spans, so it is enough that the spans of each axis follow each other from end to end
    of the cell it cuts, and that no cell is cut twice.
    """
    for name, layout in plan.layouts.items():
        cut = layout.cut_cells
        if len(set(cut)) != len(cut) or not all(
            _follow_each_other(plan.mesh.axes[axis], layout.cells.sizes[cell])
            for axis, cell in zip(layout.cut_axes, cut, strict=True)
        ):
            raise IllegalPlan(f"the shares of {name!r} do not partition {Rect.of_shape(layout.cells.sizes)}")


@cache
def _follow_each_other(axis: Axis, size: int) -> bool:
    bounds = axis.bounds(size)
    return bounds[0] == 0 and bounds[-1] == size and all(low <= high for low, high in pairwise(bounds))


def _differentiated(propagated: ShardPropagation) -> frozenset[str]:
    """Forward tensors that depend on something whose gradient the step makes."""
    graph = propagated.graph
    wanted = {tensor.gradient_of for tensor in graph.tensors.values() if tensor.gradient_of is not None}
    found = {n for n in wanted if graph.tensors[n].kind in (Kind.PARAMETER, Kind.INPUT)}
    for op in forward_ops(graph):
        relations = propagated.ops.regions(op).outputs
        for position, use in enumerate(op.inputs):
            if use.tensor in found and any(relation.needs[position] is not None for relation in relations):
                found.update(o for o in op.writes() if _is_inexact(graph, o))
    return frozenset(found)


def _is_inexact(graph: Graph, name: str) -> bool:
    dtype = graph.tensors[name].dtype
    return dtype is not None and dtype.is_inexact
