"""Lockstep: a case is run in eager and through `fit`, step by step, and gets a verdict."""

import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from random import Random

import torch
from torch import Tensor

from stowplan import Search
from stowplan.errors import BudgetTooSmall, StowplanError
from stowplan.plan.draft import Exactness
from stowplan.plan.steps import RecomputeOp, Store
from stowplan.run.fit import fit, plans_of
from stowplan.run.measure.measure import measure
from tests.support.machine import forget_plans

from .actions import ACTIONS, Halt, Interrupt
from .batches import loss_of, tensors_of
from .cases import Case, Turn
from .comparing import differences
from .iterations import OPTIMIZERS
from .sides import Side, bytes_of, seed_generators

_EXAMPLE = 11  # the seed of the batch that `fit` is given
_LOSSES = frozenset(
    {"square", "sum", "mse_loss", "smooth_l1", "classes", "pixels"}
)  # outputs that are a loss


class Verdict(StrEnum):
    """What became of a case. All but the first three are findings."""

    OK = "ok"
    REFUSED = "refused"  # by a typed error, at `fit` or where an action asks for another plan
    VOID = "void"  # eager cannot run it either
    WRONG = "wrong"  # something differs from eager
    OVER = "over"  # more memory than the budget
    UNTYPED = "untyped"  # an error that is none of stowplan's, where eager raises none
    UNRAISED = "unraised"  # no error where eager raises one
    LATE = "late"  # refused in the very step that was planned, or at the budget that the refusal named
    SLOW = "slow"  # not decided within `LIMIT_SECONDS`
    CRASHED = "crashed"  # the process is gone


_A_LITTLE = 100.0  # times the bound on rounding; float64 decides until there
_UNTIL_IN_TILES = (1.0, 0.8, 0.6, 0.4)  # of the share of the budget: float64 may fit without tiles at first
LIMIT_SECONDS = 60.0  # of the processor; a case takes a fraction of one
HARMLESS = frozenset({Verdict.OK, Verdict.REFUSED, Verdict.VOID})


@dataclass(slots=True)
class Result:
    """The verdict, where it was reached, why, and what the plans were like."""

    verdict: Verdict = Verdict.OK
    stage: str = ""
    message: str = ""
    trace: str = ""
    budget: int = 0
    tiles: bool = False
    transfers: bool = False
    recomputes: bool = False
    turns: int = 0  # actions that were compared
    rounding: str = ""  # the first stage and tensor that is a little outside of the bound on rounding
    cpu_seconds: float = 0.0

    @property
    def is_finding(self) -> bool:
        return self.verdict not in HARMLESS

    @property
    def likeness(self) -> tuple[str, str, str]:
        """Equal for failures of one kind: the verdict, where it came up, the first word of the message."""
        where, _, _ = self.stage.partition(" (")
        return self.verdict, where, self.message.replace(":", " ").partition(" ")[0]


class _Ended(BaseException):
    """The case is decided. Not an Exception, so that nobody on the way takes it for one of the model's."""

    def __init__(self, verdict: Verdict, message: str, trace: str = "") -> None:
        self.verdict, self.message, self.trace = verdict, message, trace
        super().__init__(message)


def judge(case: Case) -> Result:
    """Run a case from its beginning to its verdict.

    Sums that cancel have no bound on rounding that is both safe and useful. Where tiles are a little outside
    of it, the case is run in float64 as well: rounding vanishes there, a wrong number stays.
    """
    result = _judged(case)
    if result.verdict is Verdict.OK and result.rounding:
        network = replace(case.network, dtype=torch.float64)
        again = Result()
        for smaller in () if network == case.network else _UNTIL_IN_TILES:
            again = _judged(replace(case, network=network, share=smaller * case.share))
            result.cpu_seconds += again.cpu_seconds
            if again.verdict is not Verdict.OK or again.tiles:
                break
        if again.verdict is not Verdict.OK or again.rounding or not again.tiles:
            result.verdict = Verdict.WRONG
            result.stage, _, result.message = result.rounding.partition(": ")
    return result


def _judged(case: Case) -> Result:
    started = time.process_time()
    run = _Run(case)
    forget_plans()
    try:
        with _settings(case), _within(LIMIT_SECONDS):
            run.to_the_end()
    except _Ended as end:
        run.result.verdict, run.result.message, run.result.trace = end.verdict, end.message, end.trace
    run.result.cpu_seconds = time.process_time() - started
    return run.result


@contextmanager
def _settings(case: Case) -> Iterator[None]:
    """One thread, for kernels depend on their number; the case's dtype, in which layers are built."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(case.network.dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """A case that takes longer, by the processor's time, ends wherever it is."""

    def end(*_: object) -> None:
        raise _Ended(Verdict.SLOW, f"more than {seconds:.0f} s")

    if threading.current_thread() is not threading.main_thread():  # signals are for the main thread alone
        yield
        return
    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass(slots=True)
class _Run:
    """A case under way."""

    case: Case
    result: Result = field(default_factory=Result)
    eager: Side = field(init=False)
    fitted: Side = field(init=False)

    def to_the_end(self) -> None:
        self.result.stage = "eager"
        with _ending_with(Verdict.VOID, Verdict.VOID):
            self.eager, self.fitted = self._prepared(), self._prepared()
            before_bytes, peak_bytes = self._measured_step(self.eager)
        self._fit(before_bytes, peak_bytes)
        self._planned_step()
        for number, turn in enumerate(self.case.after):
            rounds = ACTIONS[turn.action].rounds
            self._together(f"{turn.action} ({number})", turn.seed, partial(_perform, turn), rounds=rounds)
            self._together(f"step after {turn.action} ({number})", turn.seed, partial(_step, turn))
            self.result.turns += 1

    def _prepared(self) -> Side:
        """A new model, as it is before `fit`."""
        side = Side(self.case.network.build(self.case.seed), self.case.network, self.case.feed)
        for turn in self.case.before:
            seed_generators(turn.seed)
            _perform(turn, side)
        if self.case.optimizer:
            side.optimizer = OPTIMIZERS[self.case.optimizer](list(side.model.parameters()))
        return side

    def _measured_step(self, side: Side) -> tuple[int, int]:
        """The step that is planned, from clean gradients; bytes before it and at its peak."""
        side.record.clear()
        side.clear()
        batch = side.batch(_EXAMPLE)
        args, kwargs = side.arguments(batch)
        seed_generators(self.case.seed)

        def step() -> list[Tensor]:
            output = side.model(*args, **kwargs)
            torch.autograd.backward(loss_of(output, self.case.network.output))
            if side.optimizer is not None:
                side.optimizer.step()
                side.optimizer.zero_grad()
            return list(tensors_of(output))

        measured = measure(step, before=[*side.standing(), *batch])
        for position, tensor in enumerate(measured.result):
            side.note(f"output {position}", tensor)
        side.note_inputs(batch)
        side.note_state()
        return measured.before_bytes, measured.measured_peak_bytes

    def _fit(self, before_bytes: int, peak_bytes: int) -> None:
        """Fit one side; where the budget drawn is too small, at the smallest that the refusal names."""
        self.result.stage = "fit"
        gradients = bytes_of(p for p in self.eager.model.parameters() if p.requires_grad)
        floor = before_bytes + gradients
        budget = max(1, floor + round(self.case.share * (peak_bytes - floor)))
        for _ in range(3):
            self.result.budget = budget
            try:
                self._fit_within(budget)
            except BudgetTooSmall as refusal:
                if refusal.minimum_bytes <= budget:
                    raise _Ended(Verdict.LATE, f"{budget} refused, {refusal.minimum_bytes} named") from None
                budget = refusal.minimum_bytes
            else:
                return
        raise _Ended(Verdict.LATE, f"smallest budget rises when asked for, to {budget} at last")

    def _fit_within(self, budget: int) -> None:
        case, side = self.case, self.fitted
        args, kwargs = side.arguments(side.batch(_EXAMPLE))
        state = torch.get_rng_state()
        with _ending_with(Verdict.REFUSED, Verdict.UNTYPED, but=(BudgetTooSmall,)):
            side.model = fit(
                side.model,
                args,
                kwargs,
                budget=budget,
                allow=case.techniques,
                search=Search(prefer=case.prefer, moves=case.moves),
                optimizer=side.optimizer,
            )
        if not torch.equal(state, torch.get_rng_state()):
            raise _Ended(Verdict.WRONG, "generator: fit has drawn from it")

    def _planned_step(self) -> None:
        """The step that was planned: measured against its budget, and compared with eager."""
        self.result.stage = "step"
        # A hook that was there before `fit` may hand on other tensors than `fit` was shown.
        typed = Verdict.REFUSED if self.case.before else Verdict.LATE
        with _ending_with(typed, Verdict.UNTYPED):
            _, peak_bytes = self._measured_step(self.fitted)
        self._compare()
        self._align()
        if self._is_counted() and peak_bytes > self.result.budget:
            raise _Ended(Verdict.OVER, f"measured {peak_bytes} bytes, {self.result.budget} allowed")

    def _is_counted(self) -> bool:
        """Whether nothing but the plan and its loss allocates: hooks and a `__call__` of the class may."""
        network = self.case.network
        return network.output in _LOSSES and not network.has_own_call and not self.case.before

    def _together(self, stage: str, seed: int, run: Callable[[Side], None], *, rounds: bool = False) -> None:
        """Both sides do the same, from the same generators, and have to see the same."""
        self.result.stage = stage
        raised = []
        for side in (self.eager, self.fitted):
            side.record.clear()
            side.clear()
            seed_generators(seed)
            raised.append(_raised_by(partial(run, side)))
            with _ending_with(Verdict.REFUSED, Verdict.UNTYPED):  # no state is told of half an iteration
                side.note_state()
        in_eager, in_fitted = raised
        if in_eager is None and in_fitted is not None:
            typed = isinstance(in_fitted, StowplanError)
            trace = "".join(traceback.format_exception(in_fitted))
            raise _Ended(Verdict.REFUSED if typed else Verdict.UNTYPED, _told(in_fitted), trace)
        if in_eager is not None and in_fitted is None and not self._needs_no_weights(in_eager):
            raise _Ended(Verdict.UNRAISED, f"{type(in_eager).__name__} in eager alone: {in_eager}")
        if in_eager is None:  # else what was done until then may differ
            self._compare(rounds=rounds)
        self._align()

    def _needs_no_weights(self, in_eager: BaseException) -> bool:
        """Whether eager alone missed a changed tensor: a loss in tiles has made its gradients with it."""
        plans = plans_of(self.fitted.model)
        ahead = any(op.type == "stowplan.sweep_loss.default" for plan in plans for op in plan.graph.ops)
        return ahead and "modified by an inplace operation" in str(in_eager)

    def _compare(self, *, rounds: bool = False) -> None:
        exact = self._look_at_plans() and not rounds
        in_order = "offload-gradients" not in self.case.techniques and not self.result.tiles
        compare = partial(differences, self.eager.record, self.fitted.record, exact=exact, in_order=in_order)
        unlike = list(compare())
        if not unlike:
            return
        message = "; ".join(unlike[:5])
        if exact or any(compare(tolerance=_A_LITTLE)):
            raise _Ended(Verdict.WRONG, message)
        self.result.rounding = self.result.rounding or f"{self.result.stage}: {message}"

    def _look_at_plans(self) -> bool:
        """Whether all plans so far promise eager's bits."""
        plans = plans_of(self.fitted.model)
        steps = [step for plan in plans for step in plan.steps]
        result = self.result
        result.tiles = any(plan.tile_maps for plan in plans)
        result.transfers = any(isinstance(step, Store) for step in steps)
        result.recomputes = any(isinstance(step, RecomputeOp) for step in steps)
        return all(plan.exactness is Exactness.BITWISE for plan in plans)

    def _align(self) -> None:
        """Give the fitted side eager's numbers: what differs from here on has its cause in what follows."""
        with torch.no_grad():
            for side_tensors in (
                zip(self.eager.model.parameters(), self.fitted.model.parameters(), strict=True),
                zip(self.eager.model.buffers(), self.fitted.model.buffers(), strict=True),
            ):
                for source, target in side_tensors:
                    if not torch.equal(source, target):
                        target.copy_(source)


def _perform(turn: Turn, side: Side) -> None:
    ACTIONS[turn.action].perform(side, Random(turn.seed))


def _step(turn: Turn, side: Side) -> None:
    side.iteration(turn.seed) if side.optimizer is not None else side.step(turn.seed)


def _raised_by(run: Callable[[], None]) -> BaseException | None:
    try:
        run()
    except (Exception, Interrupt, Halt) as error:
        return error
    return None


@contextmanager
def _ending_with(
    typed: Verdict, untyped: Verdict, but: tuple[type[StowplanError], ...] = ()
) -> Iterator[None]:
    """Errors in this block decide the case, but for those that are the caller's affair."""
    try:
        yield
    except but:
        raise
    except StowplanError as error:
        raise _Ended(typed, _told(error), traceback.format_exc()) from None
    except Exception as error:
        raise _Ended(untyped, _told(error), traceback.format_exc()) from None


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
