"""What plans reserve on a CUDA device: five networks through the model of the caching allocator.

    python -m benchmarks.reserved [NET=BATCH ...]

Each network is captured without memory and planned for 70 % of the baseline's peak, or the smallest budget.
Ratios are to the requested peak: reserved as it is, with held segments, with held blocks (and how many in an
iteration, and the seconds of both searches), with expandable segments; the floor
that no placement of blocks passes, because the small and the large pool share nothing; the step in an arena
as `Execution(arena=True)` runs it, requested and reserved with held segments; and the bytes of one arena for
everything, if every op wrote to given memory and needed no other. The kernels that write to given memory are
those of the CPU, and are not probed here. The last column is the growth after the first iteration.
"""

import argparse
from time import perf_counter

import torch

from benchmarks.results import Study
from stowplan.capture import capture
from stowplan.plan.allocator.projection import project
from stowplan.plan.allocator.settings import AllocatorSettings
from stowplan.plan.explain.timeline import packed_bytes_of, timeline_of_plan
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine
from stowplan.techniques.arena.plan.layout import lay_out
from stowplan.techniques.arena.run.code import placements_of
from tests.support.nets import NETS

_NETS = ("gpt=4", "llama=4", "resnet50=32", "vit=32", "unet=1")
_STUDY = Study("reserved")


def main() -> None:
    """Print a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(_NETS), metavar="NET=BATCH")
    options = parser.parse_args()
    columns = (
        "reserved",
        "held segments",
        "held blocks",
        "expandable",
        "floor",
        "arena",
        "arena reserved",
        "packed",
    )
    print(f"| network | requested MiB | {' | '.join(columns)} | growth MiB | blocks | seconds |")
    print("|---" * (len(columns) + 5) + "|")
    for word in options.nets:
        name, _, batch = word.partition("=")
        print(_row(name, int(batch)), flush=True)


def _row(name: str, batch: int) -> str:
    example = NETS[name].build("real", device="meta", batch=batch)
    captured = capture(example.model, example.args)
    graph = captured.graph
    planner = Planner.of(graph, price_by_roofline(graph, Machine()))
    plan = planner.plan(max(planner.minimum_bytes, planner.plain_peak_bytes * 7 // 10))
    requested = plan.projected_peak_bytes
    begun = perf_counter()
    held = project(plan, AllocatorSettings())
    half = perf_counter()
    steered = project(plan, AllocatorSettings(), held_blocks=True)
    seconds = f"{half - begun:.1f} and {perf_counter() - half:.1f}"
    expandable = project(plan, AllocatorSettings(expandable_segments=True))
    placements = placements_of(captured, plan.steps, {}, torch.device("cpu"), probed=False)
    layout = lay_out(timeline_of_plan(plan), placements, alignment=512)
    in_arena = project(plan, AllocatorSettings(), arena=layout)
    figures = {
        "reserved": held.unrepaired_bytes,
        "held segments": held.figures.reserved_peak_bytes,
        "held blocks": steered.figures.reserved_peak_bytes,
        "expandable": expandable.figures.reserved_peak_bytes,
        "floor": held.floor_bytes,
        "arena": layout.use.peak_bytes,
        "arena reserved": in_arena.figures.reserved_peak_bytes,
        "packed": packed_bytes_of(plan),
    }
    case = f"{name}, batch {batch}"
    for way, nbytes in figures.items():
        _STUDY.tell(case, way, "of requested", nbytes / requested, "ratio")
    ratios = " | ".join(f"{nbytes / requested:.3f}" for nbytes in figures.values())
    growth = steered.figures.reserved_peak_bytes - steered.iterations[0].reserved_peak_bytes
    blocks = steered.held_blocks.count if steered.held_blocks else 0
    return f"| {case} | {requested >> 20:,} | {ratios} | {growth >> 20} | {blocks} | {seconds} |"


if __name__ == "__main__":
    main()
