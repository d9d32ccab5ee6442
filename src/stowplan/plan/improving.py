"""Looking for a better plan in a process of its own: `python -m stowplan.plan.improving FOLDER OPTIONS`.

The plan to improve is a file in the folder; a better one is written beside it, whole or not at all. Only
graph and prices come over: PyTorch is not imported, and no model is touched. The process runs at the lowest
priority, and ends when its standard input does: that is how it learns that whoever asked is gone.
"""

import os
import sys
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from shutil import rmtree
from threading import Thread

import msgspec

from stowplan.plan.bound import bound_of
from stowplan.plan.draft import Draft
from stowplan.plan.files import plan_file
from stowplan.plan.frontier import Frontier, focus_on, frontier_of
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.select import problem_in_order
from stowplan.watch import limited_to

FIRST, BETTER = "first.plan.json", "better.plan.json"
_FURTHER = 8  # other random numbers that the asked budget is searched with, while nobody waits


@dataclass(frozen=True, slots=True)
class Improvement:
    """What is asked of the process: `room_bytes` is the budget without what is no tensor of the graph."""

    room_bytes: int
    gap: float
    moves: int | None = None
    seconds: float | None = None


def improved(plan: Plan, asked: Improvement) -> Draft | None:
    """A faster draft for the plan's graph, prices and budget; None if none is found."""
    problem = problem_in_order(plan.graph, plan.pricing)
    plain, room = sum(problem.seconds), asked.room_bytes
    with limited_to(asked.seconds):
        focused, bound = focus_on(problem, room, asked.moves, gap=asked.gap, further=_FURTHER)
        points = [focused.at(room)]
        if points[0] is None or plain + points[0].extra_seconds > (1 + asked.gap) * (plain + bound):
            points.append(frontier_of(problem, asked.moves).at(room))
    best = min(filter(None, points), key=lambda point: point.extra_seconds, default=None)
    if best is None or plain + best.extra_seconds >= plan.projected_seconds:
        return None
    enough = (plain + best.extra_seconds) / (1 + asked.gap) - plain if asked.gap else inf
    bounds = {plan.allowed_bytes: max(bound, bound_of(problem, room, enough=enough))}
    planner = Planner(
        problem, plan.pricing, Frontier((best,)), plan.plain_peak_bytes, is_searched=False, bounds=bounds
    )
    draft = planner.draft_at(best, plan.allowed_bytes)
    return replace(draft, plain_seconds=plan.plain_seconds, against_eager=plan.against_eager)


def _end_with(folder: Path) -> None:
    """Wait for the end of standard input, and take the folder along: nobody is there to read it."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    rmtree(folder, ignore_errors=True)
    os._exit(1)


def main(folder: Path, asked: Improvement) -> None:
    """Improve the plan in the folder."""
    Thread(target=_end_with, args=(folder,), daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(19)
    better = improved(plan_file.read((folder / FIRST).read_text(encoding="utf-8")), asked)
    if better is not None:
        written = folder / f"{BETTER}.part"
        written.write_text(plan_file.write(better), encoding="utf-8")
        written.replace(folder / BETTER)


if __name__ == "__main__":
    main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Improvement))
