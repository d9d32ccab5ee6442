"""The requests of a plan, in the order in which its steps allocate and free, for several iterations.

One stream: the copy streams of a tier use blocks of the main stream, which waits for them before it frees
(`techniques/offload/run/host.py`). Tensors that exist before the step are allocated once. What the step
leaves to others, such as gradients, is freed before the next iteration, as with
`zero_grad(set_to_none=True)`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from stowplan.analyse.facts import is_resident
from stowplan.plan.allocator.settings import LARGE_BLOCK, SEGMENT_STEP, SMALL_REQUEST, AllocatorSettings
from stowplan.plan.draft import ArenaUse, Schedule
from stowplan.plan.explain.timeline import timeline_of_plan
from stowplan.plan.judge.simulate import transfer_bytes


class MemoryRequest(NamedTuple):
    """Allocate `nbytes` for a block, or free it if `nbytes` is 0."""

    block: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Requests:
    """What is allocated before the first iteration, and what each iteration does.

    `runs` has the place of each run's first request. In a run, requests to free come last. `once` are blocks
    that the first iteration makes and that stay, by the place of the request before which each is made.
    """

    before: tuple[MemoryRequest, ...]
    iteration: tuple[MemoryRequest, ...]
    runs: tuple[int, ...] = ()
    once: tuple[tuple[int, MemoryRequest], ...] = ()

    def end_of(self, run: int) -> int:
        """The place after what a run allocates."""
        end = self.runs[run + 1] if run + 1 < len(self.runs) else len(self.iteration)
        places = range(self.runs[run], end)
        return next((place for place in places if not self.iteration[place].nbytes), end)

    @property
    def first_iteration(self) -> tuple[MemoryRequest, ...]:
        """With the blocks that it makes once."""
        made = list(self.iteration)
        for place, request in sorted(self.once, reverse=True):
            made.insert(place, request)
        return tuple(made)


class RequestLifetime(NamedTuple):
    """A storage from one event to another, inclusive; `is_there` before the first iteration, and stays."""

    nbytes: int
    first: int
    last: int
    is_there: bool = False


def requests_of_lifetimes(
    lifetimes: Iterable[RequestLifetime], workspaces: Sequence[Sequence[int]]
) -> Requests:
    """What a step without a plan allocates.

    `workspaces` are what the kernels of each event ask for, in order: `n` allocates, `-n` frees a block of
    n bytes, and what is left is freed with the event.
    """
    before, begun, ended = (
        list[MemoryRequest](),
        dict[int, list[MemoryRequest]](),
        dict[int, list[MemoryRequest]](),
    )
    most = max(map(len, workspaces), default=0)  # blocks from 0 on are workspace
    for block, life in enumerate(lifetimes, start=most):
        if life.nbytes and life.is_there:
            before.append(MemoryRequest(block, life.nbytes))
        elif life.nbytes:
            begun.setdefault(life.first, []).append(MemoryRequest(block, life.nbytes))
            ended.setdefault(life.last, []).append(MemoryRequest(block, 0))
    iteration, runs = list[MemoryRequest](), list[int]()
    for event, workspace in enumerate(workspaces):
        runs.append(len(iteration))
        iteration += begun.get(event, ())
        iteration += _requests_of_workspace(workspace)
        iteration += ended.get(event, ())
    return Requests(tuple(before), tuple(iteration), tuple(runs))


def _requests_of_workspace(workspace: Sequence[int]) -> Iterator[MemoryRequest]:
    alive = dict[int, int]()  # bytes by block
    for block, nbytes in enumerate(workspace):
        if nbytes > 0:
            alive[block] = nbytes
            yield MemoryRequest(block, nbytes)
        elif nbytes < 0:
            freed = next(each for each in reversed(alive) if alive[each] == -nbytes)
            del alive[freed]
            yield MemoryRequest(freed, 0)
    yield from (MemoryRequest(block, 0) for block in alive)


def pools_at_most(requests: Requests, settings: AllocatorSettings) -> int:
    """The most that the blocks of each pool take at once, in whole segments: no placement reserves less."""
    sizes: dict[int, int] = {}
    live, most = [0, 0], [0, 0]
    for block, nbytes in (*requests.before, *requests.iteration):
        if nbytes:
            sizes[block] = settings.block_bytes(nbytes)
        is_large = sizes[block] > SMALL_REQUEST
        live[is_large] += sizes[block] if nbytes else -sizes[block]
        most[is_large] = max(most[is_large], live[is_large])
    return sum(-(-size // SEGMENT_STEP) * SEGMENT_STEP for size in most)


class PlacedBlock(Protocol):
    """The place of one storage in a block of many."""

    @property
    def nbytes(self) -> int: ...

    @property
    def is_copied(self) -> bool:
        """Whether the op allocates its result, which is then copied to the place."""


class InOneBlock(Protocol):
    """One block for storages of a step: their places, by tensor and how often it was computed before."""

    @property
    def slots(self) -> Mapping[tuple[str, int], PlacedBlock]: ...

    @property
    def use(self) -> ArenaUse: ...


def requests_of(
    plan: Schedule,
    lasting_bytes: tuple[int, ...] = (),
    arena: InOneBlock | None = None,
    enlarged: Collection[str] = (),
) -> Requests:
    """All that a plan allocates. A tensor that is written over another takes no block of its own.

    `lasting_bytes` are blocks that others keep. An `arena` is one block for the whole iteration; what is
    copied into it has a block of its own while it is computed. Tensors that are `enlarged` have a block of
    the large pool, which their op finds there, and are copied into it.
    """
    timeline, pricing = timeline_of_plan(plan), plan.pricing
    staged = transfer_bytes(plan.graph, plan.steps, pricing.tier)
    sizes, first, last = dict[int, int](), dict[int, int](), dict[int, int]()
    lasting: set[int] = set()
    large: set[int] = set()
    inside: set[int] = set()
    copied: list[list[int]] = [[] for _ in timeline.runs]
    for stay in timeline.stays:
        if slot := arena.slots.get((stay.tensor, stay.copy)) if arena else None:
            inside.add(stay.place)
            if slot.is_copied:
                copied[stay.first].append(slot.nbytes)
        if stay.place in inside:
            continue
        sizes[stay.place] = max(stay.nbytes, sizes.get(stay.place, 0))
        if stay.tensor in enlarged:
            sizes[stay.place] = LARGE_BLOCK
            copied[stay.first].append(stay.nbytes)
            large.add(stay.place)
        first[stay.place] = min(stay.first, first.get(stay.place, stay.first))
        last[stay.place] = max(stay.last, last.get(stay.place, stay.last))
        if not stay.made and is_resident(plan.graph.tensors[stay.tensor]):
            lasting.add(stay.place)
    begun: list[list[int]] = [[] for _ in timeline.runs]
    ended: list[list[int]] = [[] for _ in timeline.runs]
    for place in sorted(sizes, key=lambda place: (place not in large, place)):
        if place not in lasting and sizes[place]:
            begun[first[place]].append(place)
            ended[last[place]].append(place)
    before = [MemoryRequest(place, sizes[place]) for place in sorted(lasting) if sizes[place]]
    fresh = 1 + max((stay.place for stay in timeline.stays), default=0)
    whole = fresh + 2 + len(lasting_bytes) + 1
    iteration = [MemoryRequest(whole, arena.use.nbytes)] if arena and arena.use.nbytes else []
    runs = list[int]()
    for number, run in enumerate(timeline.runs):
        runs.append(len(iteration))
        iteration += [MemoryRequest(place, sizes[place]) for place in begun[number]]
        iteration += [MemoryRequest(whole + 1 + i, size) for i, size in enumerate(copied[number])]
        workspace = pricing.workspace_bytes.get(run.op, 0)
        aside = [size for size in (run.aside_bytes - workspace - staged, workspace) if size]
        iteration += [MemoryRequest(fresh + i, size) for i, size in enumerate(aside)]
        iteration += [MemoryRequest(fresh + i, 0) for i in range(len(aside))]
        iteration += [MemoryRequest(whole + 1 + i, 0) for i in range(len(copied[number]))]
        iteration += [MemoryRequest(place, 0) for place in ended[number]]
    iteration += [MemoryRequest(whole, 0)] if iteration and iteration[0].block == whole else []
    others = filter(None, (staged, *lasting_bytes))
    before += [MemoryRequest(fresh + 2 + i, size) for i, size in enumerate(others)]
    return Requests(tuple(before), tuple(iteration), tuple(runs))
