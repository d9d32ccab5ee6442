"""Where the caching allocator of a device places the tensors of a plan, with its segments, for reports."""

from bisect import bisect_right
from itertools import accumulate

from stowplan.analyse.timeline import Offsets
from stowplan.ir import Reserved
from stowplan.plan.allocator.projection import ITERATIONS, begun, project
from stowplan.plan.allocator.requests import requests_of
from stowplan.plan.allocator.settings import AllocatorSettings
from stowplan.plan.draft import Schedule
from stowplan.plan.explain.timeline import timeline_of_plan


def placed_by_allocator(plan: Schedule, settings: AllocatorSettings) -> Offsets:
    """The addresses of a plan's tensors in a later iteration, with held segments if they help.

    Segments lie side by side, in order of address. Workspace has no place: it comes and goes within an op.
    """
    requests, timeline = requests_of(plan), timeline_of_plan(plan)
    held = project(plan, settings).held_segments
    allocator, addresses = begun(requests, settings, held)
    for block, nbytes in requests.iteration * ITERATIONS:
        if nbytes:
            addresses[block] = allocator.malloc(nbytes)  # and stays known after it is freed
        else:
            allocator.free(addresses[block])
    segments = allocator.segments()
    begins = [segment.address for segment in segments]
    starts = [0, *accumulate(segment.nbytes for segment in segments)]

    def offset(place: int) -> int | None:
        if place not in addresses:
            return None
        at = bisect_right(begins, addresses[place]) - 1
        return starts[at] + addresses[place] - begins[at]

    last = len(timeline.runs) - 1
    return Offsets(
        tuple(offset(stay.place) for stay in timeline.stays),
        {},
        starts[-1],
        recorded=False,
        segments=tuple(Reserved(starts[at], each.nbytes, 0, last) for at, each in enumerate(segments)),
    )
