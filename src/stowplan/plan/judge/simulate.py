"""Simulation: the exact memory curve and the seconds of a list of steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stowplan.ir import Graph, Op, Phase, Role
from stowplan.plan.judge.engines import Engines, Stall, Transfer
from stowplan.plan.judge.memory import Memory
from stowplan.plan.pricing import Pricing, Tier
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Step, Store


@dataclass(frozen=True, slots=True)
class Simulation:
    """Bytes alive while each step runs (a Free shows what is left after it), and the seconds of all.

    `extra_seconds` are spent on runs that are not an op's first; what is waited for is in `stalls`.
    """

    curve_bytes: tuple[int, ...]
    seconds: float
    extra_seconds: float
    transfers: tuple[Transfer, ...] = ()
    stalls: tuple[Stall, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max(self.curve_bytes, default=0)

    @property
    def stall_seconds(self) -> float:
        """The seconds that ops and frees wait for transfers in all."""
        return sum((stall.seconds for stall in self.stalls), 0.0)


def simulate(graph: Graph, steps: Sequence[Step], pricing: Pricing) -> Simulation:
    """Walk the steps, binding and freeing; raises IllegalPlan at a step that cannot run."""
    memory, tally = Memory(graph), Tally(graph, steps, pricing)
    for number, step in enumerate(steps):
        tally.add(number, step, memory.take(number, step), memory)
    return tally.simulation()


class Tally:
    """The curve and the seconds of steps. Mutable on purpose: it receives one step after the other."""

    def __init__(self, graph: Graph, steps: Sequence[Step], pricing: Pricing) -> None:
        self._pricing, self._engines = pricing, Engines(pricing.tier)
        self._beside_bytes = transfer_bytes(graph, steps, pricing.tier)
        moves = any(isinstance(step, Store | Load) for step in steps)
        self._waits_for = {op.id: _touched(op) for op in graph.ops} if moves else {}
        self._curve: list[int] = []
        self._first, self._again = list[float](), list[float]()

    def add(self, number: int, step: Step, level: int, memory: Memory) -> None:
        """A step, with the bytes alive while it is taken and the memory after it."""
        level += self._beside_bytes
        match step:
            case Compute(op) | RecomputeOp(op):
                seconds = self._pricing.seconds[op]
                self._engines.run(number, seconds, self._waits_for.get(op, ()))
                (self._again if isinstance(step, RecomputeOp) else self._first).append(seconds)
                level += self._pricing.workspace_bytes.get(op, 0)
            case Free(tensors):
                self._engines.wait(number, tensors)
            case Store(tensors):
                self._engines.store(number, tensors, memory.size_of(tensors[0]))
            case Load(tensors):
                self._engines.load(number, tensors, memory.size_of(tensors[0]))
        self._curve.append(level)

    def simulation(self) -> Simulation:
        """The figures of all steps together."""
        engines = self._engines
        engines.finish(len(self._curve))
        # by `sum`, as the planner adds the baseline's: since Python 3.12 its bits are not those of a loop
        extra_seconds = sum(self._again, 0.0)
        total = sum(self._first, 0.0) + extra_seconds + engines.stall_seconds
        moved, stalls = tuple(engines.transfers), tuple(engines.stalls)
        return Simulation(tuple(self._curve), total, extra_seconds, moved, stalls)


def peaks_by_device(graph: Graph, steps: Sequence[Step], pricing: Pricing) -> dict[str, int]:
    """The most bytes alive at once on each device that the graph has tensors on.

    A device's curve is that of the same steps in a graph whose tensors elsewhere take nothing. The workspace
    of an op counts on each device that it touches, and what a tier takes beside tensors on every device.
    """
    devices = sorted({tensor.device for tensor in graph.tensors.values() if tensor.device})
    return {device: _simulated_on(device, graph, steps, pricing).peak_bytes for device in devices}


def _simulated_on(device: str, graph: Graph, steps: Sequence[Step], pricing: Pricing) -> Simulation:
    def is_there(name: str) -> bool:
        return graph.tensors[name].device in (device, "")

    tensors = {
        name: tensor if is_there(name) else replace(tensor, nbytes=0)
        for name, tensor in graph.tensors.items()
    }
    workspace = {
        op.id: pricing.workspace_bytes.get(op.id, 0)
        for op in graph.ops
        if op.device in (device, "") or any(map(is_there, (*op.reads(), *op.writes())))
    }
    return simulate(replace(graph, tensors=tensors), steps, replace(pricing, workspace_bytes=workspace))


def transfer_bytes(graph: Graph, steps: Sequence[Step], tier: Tier | None) -> int:
    """The bytes that offloading takes throughout the steps, in addition to tensors; 0 without Store steps."""
    moves = any(isinstance(step, Store) for step in steps)
    return bytes_beside(graph, tier) if tier and moves else 0


def bytes_beside(graph: Graph, tier: Tier) -> int:
    """The memory that offloading needs: the engines' staging, and copies of the buffers that the step
    changes, which are restored if a transfer fails."""
    writes = (name for op in graph.ops if op.phase is Phase.UPDATE for name in op.writes())
    changed = {graph.storage_of(name) for name in writes}
    return tier.staging_bytes + sum(graph.tensors[name].nbytes or 0 for name in changed)


def _touched(op: Op) -> tuple[str, ...]:
    """Whatever must be there when the op runs."""
    return (*op.reads(), *(use.tensor for use in op.outputs if use.role is Role.ACCUMULATE))


def alive_at(graph: Graph, steps: Sequence[Step], number: int) -> tuple[str, ...]:
    """The tensors that own a storage while step `number` runs, largest first; without constants."""
    memory = Memory(graph)
    for position, step in enumerate(steps[: number + 1]):
        memory.take(position, step)
    return memory.largest_first()
