"""Engines: the clock of a step whose storages move to a tier and back.

Ops run one after the other. Each copy engine takes its transfers in the order they were begun; a load also
waits for the store of the same bytes. What frees a tensor on its way out, or uses one on its way in, waits.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from stowplan.errors import IllegalPlan
from stowplan.plan.pricing import Tier


@dataclass(frozen=True, slots=True)
class Transfer:
    """One way of one storage, in seconds from the beginning of the step; `step` is its place in the plan."""

    step: int
    tensors: tuple[str, ...]
    nbytes: int
    is_store: bool
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A step that waits before it begins."""

    step: int
    tensor: str
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


class Engines:
    """Mutable on purpose: it receives one step after the other."""

    def __init__(self, tier: Tier | None) -> None:
        self._given = tier
        self.now_seconds = 0.0
        self.transfers: list[Transfer] = []
        self.stalls: list[Stall] = []
        self._busy_until = {True: 0.0, False: 0.0}  # by direction: True writes
        self._under_way: dict[str, float] = {}  # tensor -> when its transfer ends
        self._written: dict[tuple[str, ...], float] = {}  # when the tier has a storage, by all its names

    @property
    def stall_seconds(self) -> float:
        """The seconds that steps have waited so far."""
        return sum((stall.seconds for stall in self.stalls), 0.0)

    def run(self, step: int, seconds: float, uses: Iterable[str]) -> None:
        """An op: waits for what it uses and is still on the way."""
        self.wait(step, uses)
        self.now_seconds += seconds

    def wait(self, step: int, tensors: Iterable[str]) -> None:
        """Let time pass until none of the tensors is on the way."""
        for name in tensors:
            end = self._under_way.pop(name, 0.0)
            if end > self.now_seconds:
                self.stalls.append(Stall(step, name, self.now_seconds, end))
                self.now_seconds = end

    def store(self, step: int, tensors: tuple[str, ...], nbytes: int) -> None:
        """Begin to write."""
        end = self._begin(step, tensors, nbytes, self._tier(step).store_seconds(nbytes), is_store=True)
        self._written[tensors] = end

    def load(self, step: int, tensors: tuple[str, ...], nbytes: int) -> None:
        """Begin to read, as soon as it is written."""
        if tensors not in self._written:
            raise IllegalPlan(f"step {step} loads {', '.join(tensors)}, which was not stored by these names")
        self._begin(step, tensors, nbytes, self._tier(step).load_seconds(nbytes), is_store=False)

    def finish(self, step: int) -> None:
        """The end of the plan: whatever is on the way arrives first."""
        self.wait(step, list(self._under_way))

    def _tier(self, step: int) -> Tier:
        if self._given is None:
            raise IllegalPlan(f"step {step} offloads a tensor, but the plan names no tier")
        return self._given

    def _begin(
        self, step: int, names: tuple[str, ...], nbytes: int, seconds: float, *, is_store: bool
    ) -> float:
        ready = self.now_seconds if is_store else max(self.now_seconds, self._written[names])
        start = max(ready, self._busy_until[is_store])
        self._busy_until[is_store] = start + seconds
        self._under_way.update(dict.fromkeys(names, start + seconds))
        self.transfers.append(Transfer(step, names, nbytes, is_store, start, start + seconds))
        return start + seconds
