"""Account: what the graphs of the step under way have in memory."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from stowplan.plan.plan import Plan
from stowplan.run.backend.living import LivingStorages
from stowplan.run.backend.member import Member
from stowplan.run.backend.visit import Run, Visit, most_bytes


class Account:
    """A step is over when no run waits for its backward any more."""

    def __init__(self) -> None:
        self.waiting: dict[Run, None] = {}  # in running order
        self.sequence: list[Visit] = []
        self.plans: list[Plan] = []
        self.standing_bytes = 0  # the most so far of parameters, buffers and inputs
        self._standing = LivingStorages()
        self._left_bytes = 0  # by runs that are closed
        self._latest: Run | None = None  # of those

    def visit(self, member: Member, inputs: Sequence[Tensor], wanted: Iterable[Tensor]) -> Visit:
        """Note a graph that is about to run. `wanted` are the inputs whose gradients stay when it is done."""
        made = [run.results for run in self.waiting]
        self._standing.add(tensor for tensor in inputs if not any(tensor in results for results in made))
        self.standing_bytes = max(self.standing_bytes, self._standing.nbytes)
        return Visit(
            member,
            own_bytes=self._standing.bytes_among(inputs),
            handed_bytes=sum(results.bytes_among(inputs) for results in made),
            gradient_bytes=sum(tensor.nbytes for tensor in wanted),
        )

    def room_bytes(self, visit: Visit, allowed_bytes: int) -> int:
        """What is left for a graph besides the inputs of others."""
        return allowed_bytes - self._standing.nbytes + visit.own_bytes

    def needed_bytes(self, newcomer: Run) -> list[int]:
        """By each run that waits for its backward, and by one that would follow them."""
        return list(most_bytes([*self.waiting, newcomer], self._standing.nbytes + self._left_bytes))

    def opened(self, run: Run, results: Iterable[Tensor]) -> None:
        """The run's forward is done; what it keeps counts until it is closed or dropped."""
        run.results.add(tensor for tensor in results if tensor not in self._standing)
        self.waiting[run] = None
        self.sequence.append(run.visit)
        self.plans.append(run.rung.plan)

    def turned(self) -> None:
        """A backward begins. What is there now of the results of the one before is held by the caller."""
        if self._latest:
            member, held = self._latest.visit.member, self._latest.results.nbytes
            member.lingering_bytes = max(member.lingering_bytes, held)
            self._left_bytes += held
            self._latest = None

    def closed(self, run: Run) -> None:
        """The run's backward is done."""
        if run in self.waiting:
            self._left_bytes += run.visit.gradient_bytes
            self._latest = run
            self.dropped(run)

    def dropped(self, run: Run) -> None:
        """The run's backward will not come any more."""
        self.waiting.pop(run, None)
