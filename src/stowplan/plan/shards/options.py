"""Options: the ways that a step could be handed out to workers, of which the fastest that fits is taken.

A number of workers may stand in several meshes, which is to say cut several dims. On each, stages of a net
may be cut otherwise than its inputs are, where that pays: by less than `_PAYS` it does not, for projections
are not that good, and what is gathered takes memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from stowplan.errors import BadUse, TooManyWorkers
from stowplan.ir import Graph
from stowplan.plan.pricing import Machine
from stowplan.plan.shards.choice import meshes_of
from stowplan.plan.shards.mesh import Mesh
from stowplan.plan.shards.projection import Network, Projection, project
from stowplan.plan.shards.relayout import MOST_WORKERS, State, choose_layouts
from stowplan.plan.shards.spread import Chosen

_PAYS = 0.05
_RELAID = 2  # meshes, the fastest, whose stages are looked at


@dataclass(frozen=True, slots=True)
class Option:
    """A mesh, the outputs of ops that are cut otherwise than what they are made from, and what that takes."""

    mesh: Mesh
    projection: Projection
    chosen: Chosen = field(default_factory=dict)
    states: Mapping[str, State] = field(default_factory=dict)  # by opening op of a stage

    def expected_seconds(self, scale: float = 1.0) -> float:
        """As projected, if computing takes `scale` times as long."""
        talking = self.projection.step_seconds - self.projection.compute_seconds
        return scale * self.projection.compute_seconds + talking

    def __str__(self) -> str:
        relaid = [f"{state} from {name}" for name, state in self.states.items() if state is not State.FOLLOW]
        return f"{self.mesh}{' with stages ' if relaid else ''}{', '.join(relaid)}"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a step is projected for: how inputs are cut on a mesh, what comes out, machine and network."""

    seeds: Callable[[Mesh], Chosen]
    ends: Sequence[str]
    machine: Machine
    network: Network


def options_of(graph: Graph, meshes: Iterable[Mesh], around: Surroundings) -> tuple[Option, ...]:
    """All that are worth a look, the fastest as projected first; BadUse if no mesh is one."""
    plain = sorted(_plain(graph, meshes, around), key=Option.expected_seconds)
    if not plain:
        raise BadUse("on no mesh of so many workers would each have something to do")
    relaid = (found for option in plain[:_RELAID] if (found := _relaid(graph, option, around)))
    return tuple(sorted((*plain, *relaid), key=Option.expected_seconds))


def meshes_for(graph: Graph, workers: int) -> tuple[Mesh, ...]:
    """All meshes of so many workers. Axes of one worker tell which dims of space the others cut."""
    if workers < 2:
        raise BadUse(f"{workers} workers are no mesh: leave mesh out for a step in one process")
    kept = (
        (axis for axis in mesh.axes if axis.size > 1 or axis.name == "space")
        for mesh in meshes_of(graph, workers)
    )
    return tuple(Mesh(tuple(axes)) for axes in kept)


def _plain(graph: Graph, meshes: Iterable[Mesh], around: Surroundings) -> Iterator[Option]:
    for mesh in meshes:
        with suppress(TooManyWorkers):
            seeds = around.seeds(mesh)
            yield Option(mesh, project(graph, mesh, seeds, around.ends, around.machine, around.network))


def _relaid(graph: Graph, option: Option, around: Surroundings) -> Option | None:
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
