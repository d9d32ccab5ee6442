"""ShardPlan: a training step over a mesh of workers: who owns, makes and holds which rect of a tensor."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stowplan.errors import IllegalPlan
from stowplan.geometry import Rect, are_disjoint, covers
from stowplan.ir import Graph, Kind
from stowplan.ops.regions import regions_of
from stowplan.ops.table import site_of
from stowplan.plan.shards.layout import Layout
from stowplan.plan.shards.mesh import Mesh
from stowplan.plan.shards.shard import Pulling, Shard
from stowplan.plan.shards.spread import Spread, forward_ops, spread_over

RESIDENT = (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)
"""What every worker has whole. Gradients of parameters are partial sums, added up over the mesh once."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A rect of a tensor's cells that `source` owns and `target` needs. Backward, its gradient goes back."""

    tensor: str
    source: int
    target: int
    rect: Rect


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A step on a mesh. `shards` are by worker; `differentiated` are the tensors whose gradients flow."""

    graph: Graph
    mesh: Mesh
    layouts: Mapping[str, Layout]
    spreads: tuple[Spread, ...]
    shards: tuple[Shard, ...]
    differentiated: frozenset[str]

    @property
    def gathered(self) -> Mapping[str, str]:
        """The ops before which something is gathered, and why."""
        return {spread.op.id: spread.gathered for spread in self.spreads if spread.gathered}

    def received(self, worker: int) -> Iterator[Transfer]:
        """All that a worker must be sent forward, by tensor in the order of the graph."""
        shard = self.shards[worker]
        for name in self.exchanged:
            rect = shard.held.get(name)
            if rect is not None:
                for holder, part in self.layouts[name].holders(self.mesh, worker, rect):
                    if holder != worker:
                        yield Transfer(name, holder, worker, part)

    @property
    def exchanged(self) -> tuple[str, ...]:
        """The tensors of which some worker needs more than it makes, in the order they are made."""
        inputs = [name for name, tensor in self.graph.tensors.items() if tensor.kind is Kind.INPUT]
        made = (use.tensor for spread in self.spreads for use in spread.op.outputs)
        workers = range(self.mesh.size)
        return tuple(name for name in (*inputs, *made) if any(self._lacks(w, name) for w in workers))

    def _lacks(self, worker: int, name: str) -> bool:
        shard = self.shards[worker]
        if name not in shard.held or self.layouts[name].is_everywhere:
            return False
        made = shard.made.get(name) or self.layouts[name].share(self.mesh, worker)
        return not made.contains(shard.held[name])


def shard_plan(
    graph: Graph, mesh: Mesh, seeds: Mapping[str, Sequence[int | None]], ends: Iterable[str]
) -> ShardPlan:
    """The step over a mesh whose axes cut the dims `seeds` of its inputs. `ends` are what it returns."""
    spreading = spread_over(graph, mesh, seeds)
    shards = Pulling(spreading, tuple(ends)).run()
    plan = ShardPlan(graph, mesh, spreading.layouts, tuple(spreading.spreads), shards, _differentiated(graph))
    check(plan)
    return plan


def check(plan: ShardPlan) -> None:
    """IllegalPlan unless the shares of every tensor are disjoint and cover it, and all needs can be met."""
    for name, layout in plan.layouts.items():
        owned = [
            layout.share(plan.mesh, worker)
            for worker in range(plan.mesh.size)
            if layout.is_first(plan.mesh, worker)
        ]
        whole = Rect.of_shape(layout.cells.sizes)
        if not (are_disjoint(owned) and covers(owned, whole)):
            raise IllegalPlan(f"the shares of {name!r} do not partition {whole}")


def _differentiated(graph: Graph) -> frozenset[str]:
    """Forward tensors that depend on something whose gradient the step makes."""
    wanted = {tensor.gradient_of for tensor in graph.tensors.values() if tensor.gradient_of is not None}
    found = {n for n in wanted if graph.tensors[n].kind in (Kind.PARAMETER, Kind.INPUT)}
    for op in forward_ops(graph):
        relations = regions_of(site_of(graph, op)).outputs
        for position, use in enumerate(op.inputs):
            if use.tensor in found and any(relation.needs[position] is not None for relation in relations):
                found.update(o for o in op.writes() if _is_inexact(graph, o))
    return frozenset(found)


def _is_inexact(graph: Graph, name: str) -> bool:
    dtype = graph.tensors[name].dtype
    return dtype is not None and dtype.startswith(("float", "bfloat", "complex"))
