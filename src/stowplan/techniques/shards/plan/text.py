"""A plan as region text: what every worker reads and writes of each tensor, in the words of region graphs.

    worker  := "worker" number "of" mesh
    tensor  := name "dim=[" n.. "]" "read_rect=" (rect | "None") "write_rect=" (rect | "None")
    op      := name "result_dim=[" n.. "]" "dist_result=" rect
    rect    := "Rect(array([lo..], dtype=int32), array([hi..], dtype=int32))"      half-open, over cells

`write_rect` is what a worker owns: over all workers disjoint, and together the tensor; None for one that has
a copy only. `read_rect` is what it holds once it has received what it needs, `dist_result` what its op makes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stowplan.errors import BadInput, IllegalPlan
from stowplan.formats.regiongraph.page import Field, Words, dims_text, rect_of, rect_text, tokens_of
from stowplan.geometry import Rect
from stowplan.ir import Graph, Kind, RegionLists, TensorRegion
from stowplan.techniques.shards.plan.mesh import MeshAxes, parse_mesh
from stowplan.techniques.shards.plan.plan import ShardPlan, shard_plan
from stowplan.techniques.shards.plan.propagation import Chosen


@dataclass(frozen=True, slots=True)
class Sheet:
    """The content of region text: the mesh, and for every worker the rects of its tensors and ops."""

    mesh: MeshAxes
    workers: tuple[RegionLists, ...]


def sheet_of(plan: ShardPlan) -> Sheet:
    """The rects of a plan."""
    return Sheet(plan.mesh, tuple(_regions(plan, worker) for worker in range(plan.mesh.size)))


def _regions(plan: ShardPlan, worker: int) -> RegionLists:
    shard = plan.shards[worker]
    tensors = {}
    for name, layout in plan.layouts.items():
        owned = layout.share(plan.mesh, worker) if layout.is_first(plan.mesh, worker) else None
        tensors[name] = TensorRegion(shard.held.get(name), owned)
    ops = {level.name: {"result": level.made} for level in shard.levels}
    return RegionLists(tensors, ops)


def write_sheet(plan: ShardPlan) -> str:
    """The text of all workers."""
    sheet = sheet_of(plan)
    blocks: list[str] = []
    for number, regions in enumerate(sheet.workers):
        blocks.append(f"worker {number} of {sheet.mesh}")
        blocks += _blocks(plan, regions)
    return "\n\n".join(blocks) + "\n"


def _blocks(plan: ShardPlan, regions: RegionLists) -> Iterator[str]:
    for name, region in regions.tensors.items():
        sizes = dims_text(plan.layouts[name].cells.sizes)
        read, write = rect_text(region.read), rect_text(region.write)
        yield f"{name}\ndim={sizes}\nread_rect={read}\nwrite_rect={write}"
        if name in regions.ops:
            result = rect_text(regions.ops[name]["result"])
            yield f"{name}\nresult_dim={sizes}\ndist_result={result}"


def read_sheet(text: str) -> Sheet:
    """The rects in region text."""
    reading = _Reading()
    for token in tokens_of(text):
        if isinstance(token, Words):
            reading.words(token)
        elif isinstance(token, Field):
            reading.field(token)
    return reading.sheet()


class _Reading:
    """Blocks as they come: a worker's heading, a name, the fields of what it names."""

    def __init__(self) -> None:
        self._mesh: MeshAxes | None = None
        self._tensors: list[dict[str, TensorRegion]] = []
        self._ops: list[dict[str, dict[str, Rect]]] = []
        self._name = ""
        self._read: Rect | None = None

    def words(self, token: Words) -> None:
        if token.words[0] == "worker" and len(token.words) == 4:
            self._mesh = parse_mesh(token.words[3])
            self._tensors.append({})
            self._ops.append({})
        self._name = token.words[0]

    def field(self, token: Field) -> None:
        if not self._tensors:
            raise BadInput(f"{token.key} of no worker", where=f"line {token.line}")
        if token.key == "read_rect":
            self._read = rect_of(token)
        elif token.key == "write_rect":
            self._tensors[-1][self._name] = TensorRegion(self._read, rect_of(token))
        elif token.key == "dist_result" and (made := rect_of(token)) is not None:
            self._ops[-1][self._name] = {"result": made}

    def sheet(self) -> Sheet:
        if self._mesh is None or len(self._tensors) != self._mesh.size:
            told = "of no mesh" if self._mesh is None else f"of the {self._mesh.size} of mesh {self._mesh}"
            raise BadInput(f"the text has {len(self._tensors)} workers, {told}")
        return Sheet(self._mesh, tuple(map(RegionLists, self._tensors, self._ops)))


def load_plan(text: str, graph: Graph, ends: Sequence[str]) -> ShardPlan:
    """The plan of a graph that region text describes; IllegalPlan if the graph cannot have these rects."""
    sheet = read_sheet(text)
    inputs = [name for name, tensor in graph.tensors.items() if tensor.kind is Kind.INPUT]
    plan = _with_owners(sheet, graph, {name: _seed(sheet, name) for name in inputs}, ends)
    for worker, (found, told) in enumerate(zip(sheet_of(plan).workers, sheet.workers, strict=True)):
        wrong = next((name for name in found.tensors if not _agree(found, told, name)), None)
        if wrong is not None:
            raise IllegalPlan(f"worker {worker} cannot have these rects of {wrong!r}: its ops need others")
    return plan


def _with_owners(sheet: Sheet, graph: Graph, seeds: Chosen, ends: Sequence[str]) -> ShardPlan:
    """The plan in which ops begin another layout wherever the text has other owners than would follow."""
    chosen: dict[str, tuple[int | None, ...]] = {}
    while True:
        plan = shard_plan(graph, sheet.mesh, seeds, ends, chosen)
        workers = sheet_of(plan).workers
        changed = next((name for name in plan.made_in_order if _owners_differ(workers, sheet, name)), None)
        if changed is None or changed in chosen:
            return plan
        chosen[changed] = _seed(sheet, changed)


def _owners_differ(workers: Sequence[RegionLists], sheet: Sheet, name: str) -> bool:
    pairs = zip(workers, sheet.workers, strict=True)
    return any(
        name in told.tensors and own.tensors[name].write != told.tensors[name].write for own, told in pairs
    )


def _agree(one: RegionLists, other: RegionLists, name: str) -> bool:
    return one.tensors[name] == other.tensors.get(name) and one.ops.get(name) == other.ops.get(name)


def _seed(sheet: Sheet, name: str) -> tuple[int | None, ...]:
    """The dim that each axis cuts, seen in what the next worker along the axis owns."""
    return tuple(_cut_dim(sheet, name, axis) for axis in range(len(sheet.mesh.axes)))


def _cut_dim(sheet: Sheet, name: str, axis: int) -> int | None:
    if sheet.mesh.axes[axis].size == 1:
        return None
    place = tuple(int(number == axis) for number in range(len(sheet.mesh.axes)))
    here, there = (sheet.workers[w].tensors[name].write for w in (0, sheet.mesh.worker(place)))
    if here is None or there is None:
        return None
    return next((dim for dim in range(here.ndim) if here.lo[dim] != there.lo[dim]), None)
