"""Options: the divisions of a step over workers. The fastest that fits is used.

The same number of workers can form several meshes, which cut different dims. On each mesh a stage may be cut
along other dims than its inputs if that saves at least the share `_PAYS` of the time. Projections are not
accurate enough for less, and gathered tensors take memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from stowplan.errors import BadUse, TooManyWorkers
from stowplan.ir import Graph
from stowplan.plan.pricing import Machine
from stowplan.techniques.shards.plan.choice import meshes_of
from stowplan.techniques.shards.plan.mesh import MeshAxes
from stowplan.techniques.shards.plan.projection import MeshProjection, Network, project
from stowplan.techniques.shards.plan.propagation import Chosen
from stowplan.techniques.shards.plan.relayout import MOST_WORKERS, LayoutState, choose_layouts

_PAYS = 0.05
_RELAID = 2  # meshes, the fastest, whose stages are looked at


@dataclass(frozen=True, slots=True)
class Option:
    """A mesh, the op outputs that are cut along other dims than their inputs, and the projection."""

    mesh: MeshAxes
    projection: MeshProjection
    chosen: Chosen = field(default_factory=dict)
    states: Mapping[str, LayoutState] = field(default_factory=dict)  # by opening op of a stage

    def expected_seconds(self, scale: float = 1.0) -> float:
        """As projected, if computing takes `scale` times as long."""
        waiting = self.projection.step_seconds - self.projection.compute_seconds
        return scale * self.projection.compute_seconds + waiting

    def __str__(self) -> str:
        relaid = [
            f"{state} from {name}" for name, state in self.states.items() if state is not LayoutState.FOLLOW
        ]
        return f"{self.mesh}{' with stages ' if relaid else ''}{', '.join(relaid)}"


@dataclass(frozen=True, slots=True)
class Environment:
    """The fixed part of a projection: how a mesh cuts inputs, the step's outputs, machine and network."""

    seeds: Callable[[MeshAxes], Chosen]
    ends: Sequence[str]
    machine: Machine
    network: Network


def options_of(graph: Graph, meshes: Iterable[MeshAxes], around: Environment) -> tuple[Option, ...]:
    """All that are worth a look, the fastest as projected first; BadUse if no mesh is one."""
    plain = sorted(_plain(graph, meshes, around), key=Option.expected_seconds)
    if not plain:
        raise BadUse("no mesh of this number of workers gives each of them work; use fewer workers")
    relaid = (found for option in plain[:_RELAID] if (found := _relaid(graph, option, around)))
    return tuple(sorted((*plain, *relaid), key=Option.expected_seconds))


def meshes_for(graph: Graph, workers: int) -> tuple[MeshAxes, ...]:
    """All meshes of this number of workers. An axis of one worker shows which dims of space others cut."""
    if workers < 2:
        raise BadUse(f"{workers} workers are no mesh: leave mesh out for a step in one process")
    kept = (
        (axis for axis in mesh.axes if axis.size > 1 or axis.name == "space")
        for mesh in meshes_of(graph, workers)
    )
    return tuple(MeshAxes(tuple(axes)) for axes in kept)


def _plain(graph: Graph, meshes: Iterable[MeshAxes], around: Environment) -> Iterator[Option]:
    for mesh in meshes:
        with suppress(TooManyWorkers):
            seeds = around.seeds(mesh)
            yield Option(mesh, project(graph, mesh, seeds, around.ends, around.machine, around.network))


def _relaid(graph: Graph, option: Option, around: Environment) -> Option | None:
    """The same mesh with stages cut otherwise, if that pays."""
    mesh, ends = option.mesh, around.ends
    cuts_space = any(axis.name == "space" and axis.size > 1 for axis in mesh.axes)
    if not cuts_space or mesh.size > MOST_WORKERS:
        return None
    if not any(op.type == "aten.convolution.default" for op in graph.ops):
        return None
    found = choose_layouts(graph, mesh, around.seeds(mesh), ends, around.machine, around.network)
    pays = found.projection.step_seconds <= (1 - _PAYS) * option.projection.step_seconds
    return Option(mesh, found.projection, found.chosen, found.states) if found.chosen and pays else None
