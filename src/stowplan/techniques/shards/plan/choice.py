"""Which mesh a number of workers should be, of all ways to hand them out to dims of inputs and weights.

Each is projected exactly; of many workers, whose meshes are many, those that look best at a glance.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from math import inf

from stowplan.errors import BadUse, BudgetTooSmall, TooManyWorkers
from stowplan.ir import Graph, Kind
from stowplan.ops.table import shape_of
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine
from stowplan.techniques.shards.plan.mesh import Axis, MeshAxes
from stowplan.techniques.shards.plan.plan import ShardPlan, glance_plan
from stowplan.techniques.shards.plan.projection import MeshProjection, Network, project, slowest_seconds
from stowplan.techniques.shards.plan.seeds import seeds_for
from stowplan.techniques.shards.plan.traffic import itemsize_of
from stowplan.techniques.shards.plan.weights import MODEL, WeightSearch
from stowplan.units import format_bytes

_ALL_PROJECTED = 64  # workers up to which every mesh is projected
_PROJECTED = 3  # of more, the meshes that look best
_MOST_MODEL = 16  # workers along a `model` axis, which sum every layer: beyond that they are far apart
_MOST_SPACE = 2  # dims of space that are cut: more cost more neighbours than they save halo


def choose_mesh(
    graph: Graph,
    workers: int,
    ends: Sequence[str],
    machine: Machine,
    network: Network,
    allowed_bytes: int | None = None,
) -> MeshProjection:
    """The fastest mesh whose every worker stays within `allowed_bytes`.

    Raises BudgetTooSmall with the smallest peak that any mesh has.
    """
    meshes: Sequence[MeshAxes] = list(meshes_of(graph, workers))
    if workers > _ALL_PROJECTED:
        meshes = _most_promising_first(graph, meshes, ends, machine, network)
    projected = _projected(graph, meshes, ends, machine, network)
    found = list(projected if workers <= _ALL_PROJECTED else islice(projected, _PROJECTED))
    if not found:
        raise BadUse(f"no dims of the inputs can be cut into {workers} parts")
    fitting = [p for p in found if allowed_bytes is None or p.peak_bytes <= allowed_bytes]
    if fitting:
        return min(fitting, key=lambda projection: (projection.step_seconds, projection.peak_bytes))
    smallest = min(found, key=lambda projection: projection.peak_bytes)
    assert allowed_bytes is not None
    raise BudgetTooSmall(
        f"{format_bytes(allowed_bytes)} allowed, but each of {workers} workers needs"
        f" {format_bytes(smallest.peak_bytes)}, on mesh {smallest.mesh}; try more workers",
        allowed_bytes=allowed_bytes,
        minimum_bytes=smallest.peak_bytes,
        binding=(),
    )


def _projected(
    graph: Graph, meshes: Sequence[MeshAxes], ends: Sequence[str], machine: Machine, network: Network
) -> Iterator[MeshProjection]:
    """Those on which everyone has something to do."""
    for mesh in meshes:
        with suppress(TooManyWorkers):
            yield project(graph, mesh, seeds_for(graph, mesh), ends, machine, network)


def _most_promising_first(
    graph: Graph, meshes: Sequence[MeshAxes], ends: Sequence[str], machine: Machine, network: Network
) -> list[MeshAxes]:
    """By what a few workers at the ends and in the middle of each would take."""
    whole = price_by_roofline(graph, machine).seconds

    def seconds(mesh: MeshAxes) -> float:
        try:
            plan = glance_plan(graph, mesh, seeds_for(graph, mesh), ends)
        except TooManyWorkers:
            return inf
        received = max(_received_seconds(plan, worker, network) for worker in plan.shards)
        return slowest_seconds(plan, whole, machine) + received

    return sorted(meshes, key=seconds)


def _received_seconds(plan: ShardPlan, worker: int, network: Network) -> float:
    received = list(plan.received(worker))
    nbytes = sum(t.rect.volume * itemsize_of(plan.graph, t.tensor) for t in received)
    return len(received) * network.latency_seconds + nbytes / network.bytes_per_second


def meshes_of(graph: Graph, workers: int) -> Iterator[MeshAxes]:
    """All meshes of this number of workers whose axes are no longer than the dims they cut."""
    shapes = [shape_of(t) for t in graph.tensors.values() if t.kind is Kind.INPUT]
    image = max(shapes, key=len, default=())
    is_image = len(image) > 3
    has_hidden_dims = WeightSearch(graph, 2).around_hidden_dims()
    names = ["data", *(["space"] * min(_MOST_SPACE, len(image) - 2) if is_image else ["sequence"])]
    sizes = [*image[:1], *(image[2:] if is_image else image[1:2])]
    if has_hidden_dims:
        names, sizes = [*names, MODEL], [*[*sizes, 1][: len(names)], _MOST_MODEL]
    for parts in _factors(workers, len(names)):
        if all(part <= size for part, size in zip(parts, sizes, strict=False)):
            yield MeshAxes(tuple(map(Axis, names, parts)))


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ordered products of `count` factors that equal a number."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, count - 1))
