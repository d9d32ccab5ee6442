"""The socket for whole iterations: steps with the updates of their optimizer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stowplan.plan.sockets import Socket

if TYPE_CHECKING:
    from stowplan.techniques.iteration.run.iteration import RunningIteration
    from stowplan.techniques.iteration.run.one_by_one import UpdateBook
    from stowplan.techniques.iteration.run.planner import IterationPlanner


@dataclass(frozen=True, slots=True)
class Iterations:
    """What makes an iteration from its request.

    A `planner` reads the optimizer and changes nothing of it, a `running` one updates in backward, and a
    `book` has the bytes of each update.
    """

    planner: "type[IterationPlanner]"
    running: "type[RunningIteration]"
    book: "type[UpdateBook]"


ITERATIONS: Socket[Iterations] = Socket("run", "optimizer")
"""Whole iterations are one technique."""


def iterations() -> Iterations:
    """What the technique offers; BadUse if it is not installed."""
    return ITERATIONS.of("optimizer")
