"""Visit: a graph's run within a step, and what the graphs of a step have in memory together.

The runs are nested: a graph's backward comes after those of all graphs that follow it. While it runs, what
those before it keep is there, and of those after it what their backward left behind.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stowplan.run.backend.ladder import Rung
from stowplan.run.backend.living import LivingStorages
from stowplan.run.backend.member import Member


@dataclass(frozen=True, slots=True)
class Visit:
    """In bytes: what of a graph's inputs no other graph made, what others made that wait for their backward,
    and the gradients that it leaves behind."""

    member: Member
    own_bytes: int
    handed_bytes: int
    gradient_bytes: int

    @property
    def left_bytes(self) -> int:
        """What stays when its backward is done: gradients, and results that the caller holds on to."""
        return self.gradient_bytes + self.member.lingering_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A visit by one plan, which waits for its backward, and the results that it made."""

    visit: Visit
    rung: Rung
    results: LivingStorages = field(default_factory=LivingStorages)


def most_bytes(runs: Sequence[Run], standing_bytes: int) -> Iterator[int]:
    """For each of these nested runs, what is there at most while either of its halves runs.

    `standing_bytes` are all along there: parameters and inputs.
    """
    kept, left = 0, sum(run.visit.left_bytes for run in runs)
    for run in runs:
        left -= run.visit.left_bytes
        outside = standing_bytes - run.visit.own_bytes + kept - run.visit.handed_bytes
        yield outside + max(run.rung.forward_bytes, run.rung.backward_bytes + left)
        kept += run.rung.kept_bytes
