"""A plan through the caching allocator: allocated and reserved peaks beside the requested one.

For a device the budget limits reserved bytes. A plan whose blocks fragment is repaired first: *held
segments*, allocated and freed once before the model is loaded, let later requests share few large segments
instead of many. *Held blocks*, which the code of the step allocates and frees, bring its blocks to given
places in one such segment (`held_blocks.py`). If the step still reserves more than the budget, it is planned
for fewer requested bytes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

from stowplan.errors import BudgetTooSmall, IllegalPlan
from stowplan.plan.allocator.caching import CachingAllocator, HeapFigures
from stowplan.plan.allocator.held_blocks import HeldBlocks, held_blocks_of
from stowplan.plan.allocator.requests import InOneBlock, MemoryRequest, Requests, pools_at_most, requests_of
from stowplan.plan.allocator.settings import OWN_SEGMENT, SEGMENT_STEP, AllocatorSettings
from stowplan.plan.draft import Draft, Schedule
from stowplan.plan.steps import Compute, Free
from stowplan.units import format_bytes

ITERATIONS = 3  # growth after the first shows in the second; the third shows that it has ended
_MOST_HELD = 6  # segments
_TRIED = 600  # sets of held segments, and at most this many requests, about three seconds:
_REQUESTS = 2_000_000
_BUDGETS = 16  # of requested bytes that are planned for, from the baseline's peak down


@dataclass(frozen=True, slots=True)
class HeapProjection:
    """What a plan takes from a device, iteration by iteration.

    `held_segments` are their sizes, to be allocated together and then freed. `unrepaired_bytes` is the
    reserved peak without them, equal to the reserved peak if none is held. Peaks count everything alive
    during the step except constants, as the plan's own do; those of allocated and active bytes count
    `held_blocks` too.
    """

    settings: AllocatorSettings
    iterations: tuple[HeapFigures, ...]
    held_segments: tuple[int, ...]
    unrepaired_bytes: int
    floor_bytes: int  # the peaks of both pools, which the allocator cannot share: no placement reserves less
    held_blocks: HeldBlocks | None = None

    @property
    def figures(self) -> HeapFigures:
        """Those of the last iteration: peaks are over all of them."""
        return self.iterations[-1]

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved bytes beyond the requested ones, at the peaks."""
        return self.figures.reserved_peak_bytes - self.figures.requested_peak_bytes


def project(
    plan: Schedule,
    settings: AllocatorSettings,
    *,
    repair: bool = True,
    lasting: tuple[int, ...] = (),
    arena: InOneBlock | None = None,
    enough_bytes: int = 0,
    held_blocks: bool = False,
) -> HeapProjection:
    """Run the plan's requests through the allocator; OutOfDeviceMemory if the device is too small.

    `lasting` are the bytes of blocks that libraries keep beside the plan's tensors. With an `arena`, the
    requests are those of a step that runs in it. If one held segment does not bring the reserved bytes to
    `enough_bytes`, several are tried. `held_blocks` are for a step whose code holds them, without an arena.
    """
    requests = requests_of(plan, lasting, arena)
    unlimited = _unlimited(settings)
    plain = _run(requests, unlimited, ())
    floor = pools_at_most(requests, settings)
    expected = (arena.use.peak_bytes if arena else plan.requested_peak_bytes) + sum(lasting)
    if plain[0].requested_peak_bytes != expected:
        raise IllegalPlan(
            f"its requests add up to {plain[0].requested_peak_bytes} bytes at most, its projected peak"
            f" and what libraries keep to {expected}"
        )
    unrepaired = plain[-1].reserved_peak_bytes
    blocks = held_blocks_of(plan, lasting, unlimited) if held_blocks and arena is None else None
    held = tuple[int, ...]()
    if blocks is not None:
        held, enlarged = (blocks.segment_bytes,), requests_of(plan, lasting, enlarged=blocks.enlarged)
        among = blocks.among(enlarged)
        if _run(among, unlimited, held)[-1].reserved_peak_bytes < unrepaired:
            figures = _run(among, settings, held)
            iterations = tuple(replace(each, requested_peak_bytes=expected) for each in figures)
            floor = pools_at_most(enlarged, settings)
            return HeapProjection(settings, iterations, held, unrepaired, floor, blocks)
    if repair and not settings.expandable_segments:
        most = 1 if 0 < enough_bytes < floor else _MOST_HELD  # more would be in vain
        held = _best_held(requests, unlimited, plain[-1], max(floor, enough_bytes), most)
    else:
        held = ()
    return HeapProjection(settings, _run(requests, settings, held), held, unrepaired, floor)


def project_unplanned(requests: Requests, settings: AllocatorSettings) -> HeapProjection:
    """What requests take as they are, iteration by iteration: nothing is held to bring them closer."""
    iterations = _run(requests, settings, ())
    floor = pools_at_most(requests, settings)
    return HeapProjection(settings, iterations, (), iterations[-1].reserved_peak_bytes, floor)


def figures_of(requests: Requests, settings: AllocatorSettings) -> HeapFigures:
    """What requests take from a device in one iteration, as they are."""
    allocator, addresses = begun(requests, settings, ())
    return _issue(allocator, requests.iteration, addresses)


def project_in_turn(
    plans: Iterable[Schedule], settings: AllocatorSettings, *, held_segments: Sequence[int] = ()
) -> tuple[HeapFigures, ...]:
    """The figures after an iteration of each plan, one after the other on one device, as shapes change.

    What exists before a step stays for the next plan if that has a tensor of its size there, such as a
    parameter. The rest, such as inputs of another shape, is freed, and that of the next plan is allocated.
    """
    allocator, _ = begun(Requests((), ()), settings, held_segments)
    there: dict[int, list[int]] = {}  # addresses by size
    figures = []
    for requests in map(requests_of, plans):
        needed = Counter(nbytes for _, nbytes in requests.before)
        for nbytes, addresses in there.items():
            while len(addresses) > needed[nbytes]:
                allocator.free(addresses.pop())
        for _, nbytes in requests.before:
            addresses = there.setdefault(nbytes, [])
            if len(addresses) < needed[nbytes]:
                addresses.append(allocator.malloc(nbytes))
        figures.append(_issue(allocator, requests.iteration, {}))
    return tuple(figures)


def _unlimited(settings: AllocatorSettings) -> AllocatorSettings:
    """The settings on a device without end, where sizes of held segments can be compared."""
    return replace(settings, garbage_collection_threshold=0.0, capacity_bytes=None, fraction=None)


def _run(requests: Requests, settings: AllocatorSettings, held: Sequence[int]) -> tuple[HeapFigures, ...]:
    allocator, addresses = begun(requests, settings, held)
    first = _issue(allocator, requests.first_iteration, addresses)
    return first, *(_issue(allocator, requests.iteration, addresses) for _ in range(ITERATIONS - 1))


def begun(
    requests: Requests, settings: AllocatorSettings, held: Sequence[int]
) -> tuple[CachingAllocator, dict[int, int]]:
    """An allocator before the first iteration, and the addresses of the blocks that are there."""
    allocator = CachingAllocator(settings)
    for address in [allocator.malloc(nbytes) for nbytes in held]:
        allocator.free(address)
    allocator.reset_peaks()
    addresses: dict[int, int] = {}
    _issue(allocator, requests.before, addresses)
    return allocator, addresses


def _issue(
    allocator: CachingAllocator,
    requests: tuple[MemoryRequest, ...],
    addresses: dict[int, int],
    most: int = 2**63,
) -> HeapFigures:
    """The figures after the requests, or as soon as more than `most` bytes are reserved."""
    for block, nbytes in requests:
        if nbytes:
            addresses[block] = allocator.malloc(nbytes)
            if allocator.reserved_bytes > most:
                break
        else:
            allocator.free(addresses.pop(block))
    return allocator.figures()


def _best_held(
    requests: Requests, settings: AllocatorSettings, plain: HeapFigures, target: int, most: int
) -> tuple[int, ...]:
    """Sizes of up to `most` held segments with which least is reserved, as far as was found; or none.

    One segment comes first: shares of the requested peak, in per cent, then in tenths of a per cent around
    the best of them. Then segments are split, merged and resized at random until `target` is reached: blocks
    of unlike size or life fragment less if segments keep them apart. A smaller target is searched like a
    larger one, for longer, and so never ends with more.
    """
    least, best = plain.reserved_peak_bytes, tuple[int, ...]()

    def reserved_with(held: Sequence[int]) -> int:
        """The reserved peak, or more than `least` as soon as it is that."""
        allocator, addresses = begun(requests, settings, held)
        for _ in range(ITERATIONS):
            reserved = _issue(allocator, requests.iteration, addresses, least).reserved_peak_bytes
            if reserved > least:
                break
        return reserved

    for shares in (range(900, 1201, 10), range(-9, 10)):
        middle = sum(best)
        for share in shares:
            held = _whole(middle + plain.requested_peak_bytes * share // 1000)
            if OWN_SEGMENT <= held < least and (reserved := reserved_with((held,))) < least:
                least, best = reserved, (held,)
        if not best:
            break
    random, sizes = Random(0), best or (_whole(plain.requested_peak_bytes),)
    for _ in range(min(_TRIED, _REQUESTS // max(1, len(requests.iteration)))):
        if least <= target or most == 1:
            break
        varied = _varied(sizes, random, most)
        if sum(varied) < least and (reserved := reserved_with(varied)) <= least:
            least, best = reserved, varied
        sizes = best or varied
    return best


def _whole(nbytes: int) -> int:
    return nbytes // SEGMENT_STEP * SEGMENT_STEP


def _varied(held: tuple[int, ...], random: Random, most: int) -> tuple[int, ...]:
    """Other sizes: one segment split, two merged, or one resized, with or without another in its place."""
    sizes, at, kind = list(held), random.randrange(len(held)), random.random()
    if kind < 0.35 and len(held) < most:
        front = _whole(int(sizes[at] * random.random()))
        sizes[at : at + 1] = [front, sizes[at] - front]
    elif kind < 0.5 and at:
        sizes[at - 1 : at + 1] = [sizes[at - 1] + sizes[at]]
    else:
        step = SEGMENT_STEP * random.choice((-16, -8, -4, -2, -1, 1, 2, 4, 8))
        sizes[at] += step
        if random.random() < 0.5:
            sizes[random.randrange(len(held))] -= step
    return tuple(size for size in sizes if size >= OWN_SEGMENT) or held


def plan_for_device(
    plan_of: Callable[[int], Draft],
    allowed_bytes: int,
    settings: AllocatorSettings,
    *,
    lasting: tuple[int, ...] = (),
    held_blocks: bool = False,
) -> tuple[Draft, HeapProjection]:
    """The fastest of some plans that reserves at most `allowed_bytes`; BudgetTooSmall names the least found.

    The plans are those for sixteenths of the baseline's peak and for the smallest budget, whatever is
    allowed: a larger budget is never answered by a slower plan. `lasting` and `held_blocks` are
    the options of `project`.
    """
    roomiest = plan_of(allowed_bytes)  # refuses what even the requested bytes do not fit into
    least: tuple[int, Draft] | None = None
    keeps_all = (roomiest,) if all(isinstance(s, Compute | Free) for s in roomiest.steps) else ()
    for plan in chain(keeps_all, _smaller_and_smaller(plan_of, roomiest.plain_peak_bytes)):
        if plan.projected_peak_bytes > allowed_bytes:
            continue
        heap = project(plan, settings, lasting=lasting, enough_bytes=allowed_bytes, held_blocks=held_blocks)
        reserved = heap.figures.reserved_peak_bytes
        if reserved <= allowed_bytes:
            return plan, heap
        if least is None or reserved < least[0]:
            least = reserved, plan
    assert least is not None, "the smallest plan is within the budget"
    reserved, plan = least
    wasted = reserved - plan.projected_peak_bytes
    raise BudgetTooSmall(
        f"{format_bytes(allowed_bytes)} allowed, but the plan that takes least from the device reserves"
        f" {format_bytes(reserved)} ({reserved} bytes), of which {format_bytes(wasted)} are fragmentation in"
        " the caching allocator; other settings, such as expandable_segments:True, may waste less",
        allowed_bytes=allowed_bytes,
        minimum_bytes=reserved,
        binding=(),
    )


def _smaller_and_smaller(plan_of: Callable[[int], Draft], peak_bytes: int) -> Iterator[Draft]:
    """Plans for smaller and smaller budgets, down to the smallest."""
    for share in range(_BUDGETS, 0, -1):
        try:
            yield plan_of(peak_bytes * share // _BUDGETS)
        except BudgetTooSmall as refusal:
            yield plan_of(refusal.minimum_bytes)
            return
