"""Which mesh a number of workers should be: all ways to hand them out to dims, each projected exactly."""

from collections.abc import Iterator, Sequence

from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.ir import Graph, Kind
from stowplan.ops.table import shape_of
from stowplan.plan.pricing import Machine
from stowplan.plan.shards.mesh import Axis, Mesh
from stowplan.plan.shards.projection import Network, Projection, project
from stowplan.plan.shards.seeds import seeds_for
from stowplan.units import format_bytes

_MOST_SPACE = 2  # dims of space that are cut: more cost more neighbours than they save halo


def choose_mesh(
    graph: Graph,
    workers: int,
    ends: Sequence[str],
    machine: Machine,
    network: Network,
    allowed_bytes: int | None = None,
) -> Projection:
    """The fastest mesh whose every worker stays within `allowed_bytes`.

    Raises BudgetTooSmall with the smallest peak that any mesh has.
    """
    found = [
        project(graph, m, seeds_for(graph, m), ends, machine, network) for m in meshes_of(graph, workers)
    ]
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


def meshes_of(graph: Graph, workers: int) -> Iterator[Mesh]:
    """All meshes of so many workers whose axes are no longer than the dims they cut."""
    shapes = [shape_of(t) for t in graph.tensors.values() if t.kind is Kind.INPUT]
    image = max(shapes, key=len, default=())
    is_image = len(image) > 3
    names = ["data", *(["space"] * min(_MOST_SPACE, len(image) - 2) if is_image else ["sequence"])]
    sizes = [*image[:1], *(image[2:] if is_image else image[1:2])]
    for parts in _factors(workers, len(names)):
        if all(part <= size for part, size in zip(parts, sizes, strict=False)):
            yield Mesh(tuple(map(Axis, names, parts)))


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors, in order."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, count - 1))
