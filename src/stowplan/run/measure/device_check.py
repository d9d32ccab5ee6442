"""A device checked in two minutes: what stowplan promises, measured on eight small networks.

For each network: the peak of eager as projected and as measured (requested, allocated and reserved bytes on a
CUDA device), plans at three budgets with their peak, bits and time, and the time of checkpointing around each
block. Then the tier that offloading uses: its rates, and how far a transfer runs beside ops. What does not
apply to a device, or did not fit the time, is said so.
"""

import gc
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stowplan import __version__
from stowplan.capture import Captured
from stowplan.errors import BadUse, BudgetTooSmall, StowplanError, nearest
from stowplan.plan.allocator.projection import figures_of
from stowplan.plan.allocator.settings import AllocatorSettings
from stowplan.plan.options import PlanOptions, Search
from stowplan.plan.progress import showing_progress
from stowplan.plan.record import Record
from stowplan.run.cost.machine import least_seconds, platform_of
from stowplan.run.measure.check import check, eager_peak_bytes
from stowplan.run.measure.eager_requests import requests_of_eager
from stowplan.run.measure.measure import device_bytes
from stowplan.run.measure.sample_networks import NETWORKS, mean_of_squares
from stowplan.run.planning.planner import DraftedStep, Subject, draft_step, price_captured
from stowplan.run.step.function import tier_for
from stowplan.run.target import Target, subject_of
from stowplan.watch import tell_phase

SHARES = (0.9, 0.75, 0.6)  # of eager's projected peak
_STEPS, _REPEATS = 2, 3
_MOVES, _GAP = 50, 0.5  # short searches: plans are checked here, not how good they are
_MOVED_BYTES = 2**25
_COMPILED = ("gpt",)
_NO_TIME = "not run: the time was over"


@dataclass(frozen=True, slots=True)
class Bytes:
    """A peak in the three measures of a device; None where the device has no such measure."""

    requested: int
    allocated: int | None = None
    reserved: int | None = None


@dataclass(frozen=True, slots=True)
class PlanFinding:
    """A plan at one budget: whether its peak held and the bits are eager's, and its time over eager's.

    `worst_relative` is the largest difference over the largest number; `agrees` if rounding explains it.
    """

    share: float
    budget_bytes: int
    projected_peak_bytes: int
    measured_peak_bytes: int
    held: bool
    claimed: str
    same_bits: bool
    worst_relative: float
    agrees: bool
    time_ratio: float | None


@dataclass(slots=True)
class NetworkFinding:
    """One network. Times are seconds of a step, or the reason why there is none."""

    name: str
    projected: Bytes | None = None
    measured: Bytes | None = None
    plans: list[PlanFinding] = field(default_factory=list)
    seconds: dict[str, float | str] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every plan that ran kept its budget and gave the gradients that it claims."""
        return all(plan.held and plan.agrees for plan in self.plans)


@dataclass(frozen=True, slots=True)
class TransferFinding:
    """The tier of the device, and the share of a transfer that was hidden beside ops."""

    tier: str
    store_bytes_per_second: float
    load_bytes_per_second: float
    hidden_share: float


@dataclass(frozen=True, slots=True)
class DeviceFindings:
    """All that was found."""

    device: str
    versions: dict[str, str]
    networks: tuple[NetworkFinding, ...]
    transfer: TransferFinding | str
    seconds: float
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return all(network.holds for network in self.networks) and any(n.plans for n in self.networks)


def default_device() -> torch.device:
    """The accelerator, if PyTorch sees one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def device_named(device: torch.device | str) -> torch.device:
    """A device of this machine; BadUse if there is no such one."""
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as fault:  # AssertionError: PyTorch was built without its kind
        first = str(fault).splitlines()[0]
        raise BadUse(
            f"device {str(device)!r} cannot be used here: {first}; `stowplan doctor` lists devices"
        ) from fault
    return chosen


def check_device(
    device: torch.device | str | None = None,
    *,
    time_limit: float = 120.0,
    names: Iterable[str] = tuple(NETWORKS),
    size: int | None = None,
) -> DeviceFindings:
    """Check a device; after `time_limit` seconds nothing new begins."""
    chosen = device_named(device) if device is not None else default_device()
    wanted = tuple(names)
    if unknown := set(wanted) - set(NETWORKS):
        raise BadUse(
            f"no network {min(unknown)!r}{nearest(min(unknown), NETWORKS)}; there is {', '.join(NETWORKS)}"
        )
    started = perf_counter()
    is_over = partial(_is_over, started + time_limit)
    factor = size or (1 if chosen.type == "cpu" else 8)
    _warm_up(chosen)
    networks = []
    for name in wanted:
        with showing_progress(f"checking {name} on {chosen}"):
            networks.append(_network(name, factor, chosen, is_over))
    tell_phase("timing transfers")
    transfer = _NO_TIME if is_over() else _transfer(chosen)
    versions = _versions(chosen)
    return DeviceFindings(
        str(chosen), versions, tuple(networks), transfer, perf_counter() - started, tuple(_notes(chosen))
    )


def _is_over(end: float) -> bool:
    return perf_counter() > end


def _versions(device: torch.device) -> dict[str, str]:
    here = platform_of(device)
    found = {
        "stowplan": __version__,
        "torch": here.torch,
        "python": platform.python_version(),
        "cpu": here.cpu,
        "device": here.device,
    }
    if device.type == "cuda":
        cudnn_version: Callable[[], object] = torch.backends.cudnn.version
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn_version())}
    return found


def _notes(device: torch.device) -> Iterator[str]:
    if not _counts_reserved(device):
        yield f"allocated and reserved bytes do not apply: {device.type} has no caching allocator"
    if device.type == "cpu":
        yield "torch.compile was not timed: compiling on a CPU takes longer than the whole check"


def _counts_reserved(device: torch.device) -> bool:
    return device.type != "cpu" and "reserved_bytes.all.peak" in torch.accelerator.memory_stats(device)


def _warm_up(device: torch.device) -> None:
    """Let libraries take what they keep, in the threads of forward and backward, before bytes are counted."""
    matrix = torch.ones(64, 64, device=device, requires_grad=True)
    torch.autograd.backward((matrix @ matrix).sum())


def _network(name: str, size: int, device: torch.device, is_over: Callable[[], bool]) -> NetworkFinding:
    found = NetworkFinding(name)
    if is_over():
        found.not_run.append(_NO_TIME)
        return found
    _forget(device)
    there = [device_bytes(device, what).current for what in _MEASURES] if device.type != "cpu" else [0] * 3
    torch.manual_seed(0)
    target = _on(NETWORKS[name](size), device)
    try:
        found.measured = _measured(target, device, there)
        subject = subject_of(target)
        found.projected = _projected(subject.captured, device)
        for share in SHARES:
            if is_over():
                found.not_run.append(f"plan at {share}: {_NO_TIME}")
                continue
            planning = partial(_planned, int(found.projected.requested * share))
            record = check(target, planning, steps=_STEPS, rounds=_REPEATS, subject=subject)
            found.plans.append(_plan_finding(record, share))
            found.seconds["eager"] = record.plain_measured_seconds or 0.0
            found.seconds[f"plan at {share}"] = record.measured_seconds
        _time_others(found, target, device, is_over)
    except StowplanError as refusal:
        found.not_run.append(f"{type(refusal).__name__}: {refusal}")
    return found


_MEASURES = ("requested", "allocated", "reserved")


def _on(target: Target, device: torch.device) -> Target:
    args = tuple(arg.to(device) if isinstance(arg, Tensor) else arg for arg in target.args)
    return Target(target.model.to(device), args, loss=target.loss)


def _forget(device: torch.device) -> None:
    """Give back what earlier networks left in the allocator."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def _measured(target: Target, device: torch.device, there: list[int]) -> Bytes:
    """One eager step; on a device by its statistics, less what was there before the model."""
    peak_bytes = eager_peak_bytes(target)
    if device.type == "cpu":
        return Bytes(peak_bytes)
    peaks = [device_bytes(device, what).peak for what in _MEASURES]
    requested, allocated, reserved = (peak - before for peak, before in zip(peaks, there, strict=True))
    target.model.zero_grad(set_to_none=True)
    return Bytes(requested, allocated, reserved)


def _projected(captured: Captured, device: torch.device) -> Bytes:
    """Eager's peak from the capture, and what the model of the allocator takes for the same storages."""
    workspace_bytes = price_captured(captured).workspace_bytes
    requested = captured.eager.peak_bytes(workspace_bytes)
    if not _counts_reserved(device):
        return Bytes(requested)
    workspaces = {op: (nbytes,) for op, nbytes in workspace_bytes.items() if nbytes}
    heap = figures_of(requests_of_eager(captured, workspaces), AllocatorSettings())
    return Bytes(requested, heap.allocated_peak_bytes, heap.reserved_peak_bytes)


def _planned(allowed_bytes: int, subject: Subject) -> DraftedStep:
    """A plan that recomputes for the budget, or for the smallest if that is larger."""
    options = PlanOptions(("recompute",), Search(moves=_MOVES, gap=_GAP))
    try:
        return draft_step(subject, allowed_bytes, options)
    except BudgetTooSmall as refusal:
        return draft_step(subject, refusal.minimum_bytes, options)


def _plan_finding(record: Record, share: float) -> PlanFinding:
    plan, differences = record.plan, record.differences
    scale = max((difference.scale for difference in differences), default=0.0)
    return PlanFinding(
        share=share,
        budget_bytes=plan.allowed_bytes,
        projected_peak_bytes=plan.projected_peak_bytes,
        measured_peak_bytes=record.measured_peak_bytes,
        held=record.measured_peak_bytes <= plan.allowed_bytes,
        claimed=str(plan.exactness),
        same_bits=all(difference.largest == 0 for difference in differences),
        worst_relative=max((d.largest for d in differences), default=0.0) / (scale or 1.0),
        agrees=all(difference.largest <= difference.allowed for difference in differences),
        time_ratio=record.measured_time_ratio,
    )


def _time_others(
    found: NetworkFinding, target: Target, device: torch.device, is_over: Callable[[], bool]
) -> None:
    """Checkpointing around each block and, on an accelerator, `torch.compile`."""
    tell_phase("timing other ways")
    found.seconds["checkpointing"] = (
        _NO_TIME if is_over() else _step_seconds(target, partial(_checkpointed, target), device)
    )
    if device.type == "cpu" or found.name not in _COMPILED:
        return
    if is_over():
        found.seconds["torch.compile"] = _NO_TIME
        return
    compiled = torch.compile(target.model)
    try:
        seconds: float | str = _step_seconds(target, lambda: compiled(*target.args), device)
    except (RuntimeError, AssertionError, ImportError, OSError) as fault:  # no compiler, or none for it
        seconds = f"not run: {type(fault).__name__}: {str(fault).partition(chr(10))[0]}"
    found.seconds["torch.compile"] = seconds


def _step_seconds(target: Target, forward: Callable[[], object], device: torch.device) -> float:
    def step() -> None:
        target.model.zero_grad(set_to_none=True)
        torch.autograd.backward(mean_of_squares(forward()))

    return least_seconds(step, device, repeats=_REPEATS)


def _checkpointed(target: Target) -> object:
    rows = target.args[0]
    for block in target.model.children():
        rows = checkpoint(block, rows, use_reentrant=False)
    return rows


def _transfer(device: torch.device) -> TransferFinding | str:
    """Rates of the device's tier, and how much of a transfer ops hide."""
    try:
        tier = tier_for(device)
        described = tier.described()
        data = torch.zeros(_MOVED_BYTES, dtype=torch.uint8, device=device)
        matrix = torch.ones(512, 512, device=device)

        def move() -> None:
            tier.store(data).wait()

        def compute() -> None:
            for _ in range(times):
                torch.mm(matrix, matrix)

        def both() -> None:
            away = tier.store(data)
            compute()
            away.wait()

        times = 1
        seconds = partial(_wall_seconds, device=device)
        moving = seconds(move)
        times = max(1, int(moving / max(seconds(compute), 1e-6)))
        computing = seconds(compute)
        hidden = (moving + computing - seconds(both)) / min(moving, computing)
    except (StowplanError, OSError) as refusal:
        return f"not run: {refusal}"
    rates = described.store_bytes_per_second, described.load_bytes_per_second
    return TransferFinding(described.name, *rates, min(1.0, max(0.0, hidden)))


def _wall_seconds(run: Callable[[], object], *, device: torch.device) -> float:
    """The least of several calls, by the clock on the wall: a transfer's thread has a clock of its own."""
    found = []
    for _ in range(_REPEATS + 1):
        started = perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append(perf_counter() - started)
    return min(found)
