"""A plan through the caching allocator: allocated and reserved peaks beside the requested one.

For a device the budget limits reserved bytes. A plan whose blocks fragment is repaired first: a *held
segment*, allocated and freed once before the model is loaded, lets later requests share one segment instead
of many. If the step still reserves more than the budget, it is planned for fewer requested bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from stowplan.errors import BudgetTooSmall, IllegalPlan
from stowplan.plan.allocator.arena import ArenaLayout
from stowplan.plan.allocator.caching import CachingAllocator, HeapFigures
from stowplan.plan.allocator.requests import Request, Requests, requests_of
from stowplan.plan.allocator.settings import OWN_SEGMENT, SEGMENT_STEP, SMALL_REQUEST, AllocatorSettings
from stowplan.plan.plan import Compute, Free, Plan
from stowplan.units import format_bytes

ITERATIONS = 3  # growth after the first shows in the second; the third shows that it has ended
_BUDGETS = 16  # of requested bytes that are planned for, from the baseline's peak down


@dataclass(frozen=True, slots=True)
class HeapProjection:
    """What a plan takes from a device, iteration by iteration.

    `unrepaired_bytes` is the reserved peak without the held segment, equal to the reserved peak if none is
    held. Peaks count everything alive during the step except constants, as the plan's own do.
    """

    settings: AllocatorSettings
    iterations: tuple[HeapFigures, ...]
    held_bytes: int
    unrepaired_bytes: int
    floor_bytes: int  # the peaks of both pools, which the allocator cannot share: no placement reserves less

    @property
    def figures(self) -> HeapFigures:
        """Those of the last iteration: peaks are over all of them."""
        return self.iterations[-1]

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved bytes beyond the requested ones, at the peaks."""
        return self.figures.reserved_peak_bytes - self.figures.requested_peak_bytes


def project(
    plan: Plan,
    settings: AllocatorSettings,
    *,
    repair: bool = True,
    lasting: tuple[int, ...] = (),
    arena: ArenaLayout | None = None,
) -> HeapProjection:
    """Run the plan's requests through the allocator; OutOfDeviceMemory if the device is too small.

    `lasting` are the bytes of blocks that libraries keep beside the plan's tensors. With an `arena`, the
    requests are those of a step that runs in it.
    """
    requests = requests_of(plan, lasting, arena)
    unlimited = _unlimited(settings)
    plain = _run(requests, unlimited, 0)
    held = _best_held(requests, unlimited, plain[-1]) if repair and not settings.expandable_segments else 0
    iterations = _run(requests, settings, held)
    expected = (arena.use.peak_bytes if arena else plan.requested_peak_bytes) + sum(lasting)
    if iterations[0].requested_peak_bytes != expected:
        raise IllegalPlan(
            f"its requests add up to {iterations[0].requested_peak_bytes} bytes at most, its projected peak"
            f" and what libraries keep to {expected}"
        )
    return HeapProjection(
        settings, iterations, held, plain[-1].reserved_peak_bytes, _floor(requests, settings)
    )


def _floor(requests: Requests, settings: AllocatorSettings) -> int:
    """The most that the blocks of each pool take at once, in whole segments."""
    sizes: dict[int, int] = {}
    live, most = [0, 0], [0, 0]
    for block, nbytes in (*requests.before, *requests.iteration):
        if nbytes:
            sizes[block] = settings.block_bytes(nbytes)
        is_large = sizes[block] > SMALL_REQUEST
        live[is_large] += sizes[block] if nbytes else -sizes[block]
        most[is_large] = max(most[is_large], live[is_large])
    return sum(-(-size // SEGMENT_STEP) * SEGMENT_STEP for size in most)


def _unlimited(settings: AllocatorSettings) -> AllocatorSettings:
    """The settings on a device without end, where sizes of held segments can be compared."""
    return replace(settings, garbage_collection_threshold=0.0, capacity_bytes=None, fraction=None)


def _run(requests: Requests, settings: AllocatorSettings, held_bytes: int) -> tuple[HeapFigures, ...]:
    allocator = CachingAllocator(settings)
    addresses: dict[int, int] = {}
    allocator.free(allocator.malloc(held_bytes))
    allocator.reset_peaks()
    _issue(allocator, requests.before, addresses)
    return tuple(_issue(allocator, requests.iteration, addresses) for _ in range(ITERATIONS))


def _issue(
    allocator: CachingAllocator, requests: tuple[Request, ...], addresses: dict[int, int]
) -> HeapFigures:
    for block, nbytes in requests:
        if nbytes:
            addresses[block] = allocator.malloc(nbytes)
        else:
            allocator.free(addresses.pop(block))
    return allocator.figures()


def _best_held(requests: Requests, settings: AllocatorSettings, plain: HeapFigures) -> int:
    """The size of a held segment with which least is reserved; 0 if none makes a difference.

    Sizes are shares of the requested peak, in per cent, then in tenths of a per cent around the best of them.
    """
    best, least = 0, plain.reserved_peak_bytes
    for shares in (range(900, 1201, 10), range(-9, 10)):
        middle = best
        for share in shares:
            held = (middle + plain.requested_peak_bytes * share // 1000) // SEGMENT_STEP * SEGMENT_STEP
            if OWN_SEGMENT <= held < least:
                reserved = _run(requests, settings, held)[-1].reserved_peak_bytes
                if reserved < least:
                    best, least = held, reserved
        if not best:
            break
    return best


def plan_for_device(
    plan_of: Callable[[int], Plan],
    allowed_bytes: int,
    settings: AllocatorSettings,
    *,
    lasting: tuple[int, ...] = (),
) -> tuple[Plan, HeapProjection]:
    """The fastest of some plans that reserves at most `allowed_bytes`; BudgetTooSmall names the least found.

    The plans are those for sixteenths of the baseline's peak and for the smallest budget, whatever is
    allowed: a larger budget is never answered by a slower plan. `lasting` is the option of `project`.
    """
    roomiest = plan_of(allowed_bytes)  # refuses what even the requested bytes do not fit into
    least: tuple[int, Plan] | None = None
    keeps_all = (roomiest,) if all(isinstance(s, Compute | Free) for s in roomiest.steps) else ()
    for plan in chain(keeps_all, _smaller_and_smaller(plan_of, roomiest.plain_peak_bytes)):
        if plan.projected_peak_bytes > allowed_bytes:
            continue
        heap = project(plan, settings, lasting=lasting)
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


def _smaller_and_smaller(plan_of: Callable[[int], Plan], peak_bytes: int) -> Iterator[Plan]:
    """Plans for smaller and smaller budgets, down to the smallest."""
    for share in range(_BUDGETS, 0, -1):
        try:
            yield plan_of(peak_bytes * share // _BUDGETS)
        except BudgetTooSmall as refusal:
            yield plan_of(refusal.minimum_bytes)
            return
