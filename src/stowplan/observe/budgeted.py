"""A script within a budget: its outermost modules are planned in place, at their first call with gradients.

The budget B is for all tensors on the device of the modules. A module m is planned within

    B - beside - to come - outside

    beside    tensors that are alive when m is called, without those of its call and of steps that wait
    to come   optimizer state that there is not yet, and gradients of other trained modules
    outside   what a loss outside of m takes, estimated before the first iteration and measured in it

Several modules share what is left of B by what each takes in eager, times its forwards that were seen to wait
for their backward at once. All this is read before each of the first calls, and later at most 1 % of the
time; a plan that no longer fits gives way to another. What is refused runs as it is or, with `strict`, ends
the run before that call.
"""

import atexit
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stowplan.capture import Ref
from stowplan.errors import BudgetTooSmall, PlanTooSlow, StowplanError
from stowplan.observe.compiling import concerns_the_script
from stowplan.observe.counting import TensorBytes, bytes_of, storages_of
from stowplan.observe.frames import hide_own_frames
from stowplan.observe.launch import BudgetedRun, LaunchSettings, script_name
from stowplan.observe.outermost import OutermostCalls
from stowplan.observe.record import ModuleFigures, PlanFigures, RunRecord
from stowplan.plan.options import TECHNIQUES
from stowplan.plan.plan import Plan
from stowplan.run.beside import state_to_come
from stowplan.run.fit import fit
from stowplan.run.fitting import FittedModule, Fitting
from stowplan.run.in_place import Installed, install
from stowplan.run.instances import instances_of, with_subclasses
from stowplan.run.step.function import waiting_of
from stowplan.torch_private import FakeTensor, gradient_of, pytree, running_backward
from stowplan.units import format_bytes, format_seconds

_MEASURED = 3  # steps of each optimizer in which ops are followed
_MOST_MEASURED = 24  # steps of all of them
_MOST_REFUSED = 3  # times that a module is refused another plan; then it is left as it is
_LOSS_BYTES = 2  # times the output, that a loss outside is taken to need until it was measured


def begin(settings: LaunchSettings, run: BudgetedRun) -> None:
    """Run this process within the budget from now on."""
    BudgetedScript(settings, run).begin()


@dataclass(slots=True, weakref_slot=True, eq=False)
class TrainedModule:
    """An outermost module: its plan in place, and its part of the budget.

    `need_bytes` is what its step takes in eager beyond what it trains and is given, `least_bytes` the same of
    its smallest plan once a share was too small. `waits` of its forwards at most wait when another begins.
    """

    figures: ModuleFigures
    fitted: nn.Module | None = None
    installed: Installed | None = None
    need_bytes: int = 0
    least_bytes: int = 0
    loss_bytes: int = 0
    asked_bytes: int = 0  # what it was last planned within
    refused_bytes: int = 0  # and the most that was too small
    waits: int = 0
    refusals: int = 0
    is_left: bool = False  # to run as it is
    is_opened: bool = False  # the modules inside are looked at instead


class _NothingLeft(BudgetTooSmall):
    """What there is without activations takes the whole budget, or more."""

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            "nothing is left", allowed_bytes=budget_bytes, minimum_bytes=needed_bytes, binding=()
        )


@dataclass(slots=True)
class _Call:
    """A call that is about to begin, and the bytes of what it trains and is given."""

    module: nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    there_bytes: int
    gradient_bytes: int

    @property
    def own_bytes(self) -> int:
        """What any plan of it takes."""
        return self.there_bytes + self.gradient_bytes


class BudgetedScript:
    """Plans the modules of one script."""

    def __init__(self, settings: LaunchSettings, run: BudgetedRun) -> None:
        self._settings, self._run = settings, run
        self.record = RunRecord(script_name(), os.environ.get("RANK", ""), run.budget_bytes)
        self._calls = OutermostCalls(self._before)
        self._known: WeakKeyDictionary[nn.Module, TrainedModule] = WeakKeyDictionary()
        self._bytes: TensorBytes | None = None
        self._outside_bytes = 0  # of the peaks so far, beyond what was counted
        self._most = 0  # since the last step of an optimizer
        self._step_depth = 0
        self._is_planning = False  # before a call; a call that is unlike the first is planned within
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._to_come: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._process = os.getpid()

    def begin(self) -> None:
        """Notice calls and steps from now on."""
        hide_own_frames()
        self._calls.begin()
        self._hooks = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        own = torch.compile

        def compile_(*args: Any, **kwargs: Any) -> Any:
            if not concerns_the_script(args, kwargs, sys._getframe(1)):
                return own(*args, **kwargs)
            torch.compile = own
            self._say("the script calls torch.compile: modules that are not planned yet run as they are")
            self._calls.end()
            return own(*args, **kwargs)

        torch.compile = compile_
        self.record.write(self._settings.folder)
        atexit.register(self._exit)

    def _exit(self) -> None:
        if os.getpid() == self._process:
            if not self.record.modules and not self.record.told:
                self.record.told = "no call of a module with gradients was seen"
            self.record.write(self._settings.folder)

    def _say(self, sentence: str) -> None:
        """Once, on standard error; of several workers the first one speaks."""
        if sentence not in self.record.notes:
            self.record.notes.append(sentence)
            if self.record.rank in ("", "0"):
                print(f"stowplan run: {sentence}", file=sys.stderr, flush=True)
            self.record.write(self._settings.folder)  # for a process may be killed without another word

    # Calls

    def _before(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Plan a module at its first call, and again where its plan no longer fits."""
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not parameters or isinstance(parameters[0], FakeTensor) or parameters[0].is_meta:
            return False
        known = self._known.get(module)
        if known is None:
            if isinstance(module, FittedModule):
                return True  # the script plans itself
            known = self._known[module] = TrainedModule(ModuleFigures(self._name_of(module)))
            self.record.modules.append(known.figures)
        if known.is_left or known.is_opened:
            return known.is_left
        device = parameters[0].device.type
        if self._bytes is None:
            self._bytes = TensorBytes(device)
            self._bytes.follow()
        waiting = len(waiting_of(module).held_bytes()) if known.installed else 0
        known.waits = max(known.waits, waiting)
        self._remove_hooks()
        if self._bytes.is_time():
            self._is_planning = True
            try:
                call = _call_of(module, args, kwargs, device)
                self._fit_within(known, call, self._allowed(known, call))
            except Exception as error:  # of counting; those of planning are refusals
                self._refused(known, module, error)
            finally:
                self._is_planning = False
        return not known.is_opened

    def _name_of(self, module: nn.Module) -> str:
        name = type(module).__name__
        others = sum(each.figures.name.partition(" #")[0] == name for each in self._known.values())
        return f"{name} #{others + 1}" if others else name

    def _allowed(self, known: TrainedModule, call: _Call) -> int:
        """The bytes for the step of this call."""
        assert self._bytes is not None
        alive = self._bytes.alive()
        waiting = sum(sum(waiting_of(each).held_bytes()) for each in self._known)
        beside = alive - waiting - call.there_bytes
        to_come = self._state_to_come() + self._gradients_to_come(call.module)
        known.figures.beside_bytes = beside + to_come + self._outside_bytes + known.loss_bytes
        room = self._run.budget_bytes - known.figures.beside_bytes
        sharers = self._sharers(known)
        if not known.need_bytes or not (sharers or known.waits):
            return room
        everyone = [known, *sharers]
        weights = [(each.waits + 1) * each.need_bytes for each in everyone]
        spare = room - call.own_bytes - sum((each.waits + 1) * each.least_bytes for each in everyone)
        return call.own_bytes + known.least_bytes + spare * known.need_bytes // sum(weights)

    def _state_to_come(self) -> int:
        total = 0
        for optimizer in instances_of(with_subclasses(Optimizer)):
            if not vars(optimizer).get("state") and vars(optimizer).get("param_groups"):
                if optimizer not in self._to_come:
                    self._to_come[optimizer] = state_to_come(optimizer)
                total += self._to_come[optimizer]
        return total

    def _gradients_to_come(self, module: nn.Module) -> int:
        own = {id(parameter) for parameter in module.parameters()}
        others = {id(p): p for each in self._known for p in each.parameters() if id(p) not in own}
        return sum(p.nbytes for p in others.values() if p.requires_grad and gradient_of(p) is None)

    def _remove_hooks(self) -> None:
        """They cannot be taken away within a step."""
        if self._hooks and self._bytes is not None and not self._bytes.is_followed and self._bytes.has_left:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    # Planning

    def _fit_within(self, known: TrainedModule, call: _Call, allowed: int) -> None:
        """See that the module's plans take no more than is allowed."""
        if known.installed is not None:
            fitting = _fitting_of(call.module)
            if all(planned.taken_bytes <= allowed for planned in fitting.planned):
                fitting.planner.allowed_bytes = min(fitting.planner.allowed_bytes, max(allowed, 0))
                return
            if allowed <= known.refused_bytes or known.refusals >= _MOST_REFUSED:
                return
        fault = self._plan(known, call, allowed)
        if fault is None:
            again = self._allowed_again(known, call)
            if again < allowed and any(p.taken_bytes > again for p in _fitting_of(call.module).planned):
                allowed, fault = again, self._plan(known, call, again)
        if isinstance(fault, BudgetTooSmall) and (known.need_bytes or self._sharers(known)):
            lifted = self._lifted(known, call, fault)
            if lifted > allowed:
                allowed, fault = lifted, self._plan(known, call, lifted)
        if fault is not None:
            known.refused_bytes = max(known.refused_bytes, allowed)
            self._refused(known, call.module, fault)

    def _sharers(self, known: TrainedModule) -> list[TrainedModule]:
        """The other modules with a plan."""
        return [each for each in self._known.values() if each.installed is not None and each is not known]

    def _allowed_again(self, known: TrainedModule, call: _Call) -> int:
        """The same once the step is known: with an estimate for a loss outside, and as a share."""
        planned = _fitting_of(call.module).planned[-1]
        graph, program = planned.step.captured.graph, planned.step.captured.program
        outputs = [
            graph.tensors[leaf.tensor].nbytes or 0
            for leaf, is_attached in zip(program.outputs, program.attached, strict=True)
            if isinstance(leaf, Ref) and is_attached
        ]
        known.loss_bytes = _LOSS_BYTES * sum(outputs)
        known.need_bytes = max(1, planned.step.plan.plain_peak_bytes - call.own_bytes)
        return self._allowed(known, call)

    def _lifted(self, known: TrainedModule, call: _Call, refusal: BudgetTooSmall) -> int:
        """The same once its share is known to be too small: the smallest plan of each comes first."""
        reserve = self._run.budget_bytes - known.asked_bytes
        known.least_bytes = max(0, refusal.minimum_bytes - reserve - call.own_bytes)
        known.need_bytes = known.need_bytes or known.least_bytes
        return self._allowed(known, call)

    def _plan(self, known: TrainedModule, call: _Call, allowed: int) -> Exception | None:
        """Plan the step of a call and put the plan in place; a former plan stays if there is no other."""
        budget, begun = self._run.budget_bytes, time.perf_counter()
        before = known.fitted if known.installed is not None else None
        if known.installed is not None:
            known.installed.remove()
            known.installed = None
        if not sys.stderr.isatty() and before is None:
            self._say(f"planning {known.figures.name} within {format_bytes(max(0, allowed))}")
        known.asked_bytes = allowed
        try:
            if allowed <= 0:
                raise _NothingLeft(known.figures.beside_bytes + call.own_bytes, budget)
            fitted = fit(
                call.module,
                call.args,
                call.kwargs,
                budget=budget,
                reserve=max(0, budget - allowed),
                allow=self._run.allow,
                outputs="all",
                search=self._run.search,
            )
        except Exception as fault:
            if before is not None:
                self._install(known, call.module, before)
            return fault
        self._install(known, call.module, fitted)
        self._tell(known, _fitting_of(call.module).plans[-1], call, time.perf_counter() - begun)
        return None

    def _install(self, known: TrainedModule, module: nn.Module, fitted: nn.Module) -> None:
        known.fitted = fitted
        known.installed = install(fitted, module, otherwise=lambda fault: self._refused(known, module, fault))
        waiting_of(module).are_counted = True
        _fitting_of(module).beside.budget_bytes = sys.maxsize  # what is beside is counted here

    def _tell(self, known: TrainedModule, plan: Plan, call: _Call, seconds: float) -> None:
        leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)
        ratio, exactness = plan.time_ratio, str(plan.exactness)
        known.figures.plans.append(
            PlanFigures(shapes, plan.plain_peak_bytes, plan.projected_peak_bytes, ratio, exactness)
        )
        self._say(
            f"{known.figures.name} is planned: {format_bytes(plan.projected_peak_bytes)} instead of"
            f" {format_bytes(plan.plain_peak_bytes)}, in {ratio:.2f} of eager's time ({exactness});"
            f" planning took {format_seconds(seconds)}"
        )

    def _refused(self, known: TrainedModule, module: nn.Module, fault: Exception) -> None:
        """Say why something is not planned, and leave it alone; with `strict` the run ends."""
        is_small = isinstance(fault, BudgetTooSmall)
        if known.installed is None and not is_small and _is_around_one(module):
            known.is_opened = True
            self.record.modules.remove(known.figures)
            return
        if known.installed is None:
            known.is_left = True
            then = "runs as it is"
        elif is_small and self._is_planning:
            known.refusals += 1
            then = "keeps its plan"
        else:
            known.refusals += 1
            then = "runs this call as it is"
            if running_backward() >= 0 or (known.refusals >= _MOST_REFUSED and not is_small):
                known.installed.remove()
                known.installed, known.is_left = None, True
                then = "runs as it is from now on"
        why = self._reason(fault, is_training=known.installed is not None)
        if why not in known.figures.refusals:
            known.figures.refusals.append(why)
        self._say(f"{known.figures.name} {then}: {why}")
        if self._run.strict:
            self._say("--strict ends the run here")
            raise SystemExit(1)

    def _reason(self, fault: Exception, *, is_training: bool) -> str:
        """In one line."""
        budget = format_bytes(self._run.budget_bytes)
        if isinstance(fault, PlanTooSlow):
            return (
                f"a plan within {budget} takes {fault.time_ratio:.1f} times eager's time, and"
                f" {format_bytes(fault.minimum_bytes)} is the smallest known budget with one of at most"
                f" {fault.slowest:g} times; --allow {','.join(TECHNIQUES)} takes the slow one"
            )
        if isinstance(fault, _NothingLeft):
            return (
                f"{budget} is too small: parameters, gradients, optimizer state and all else that is alive"
                f" beside activations take {format_bytes(fault.minimum_bytes)}"
            )
        if isinstance(fault, BudgetTooSmall):
            least = fault.known_minimum_bytes if is_training else fault.minimum_bytes  # which may search
            smallest = f", and {format_bytes(least)} ({least:,} bytes) is the smallest found" if least else ""
            return f"{budget} is too small{smallest}"
        first = str(fault).partition("\n")[0]
        return first if isinstance(fault, StowplanError) else f"{type(fault).__name__}: {first}"

    # Steps of optimizers

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if _is_without_data(optimizer):
            return
        self._step_depth += 1
        if self._step_depth == 1 and self._bytes is not None and self._bytes.is_followed:
            self._most = self._bytes.most_since()

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if _is_without_data(optimizer):
            return
        self._step_depth -= 1
        if self._step_depth or self._bytes is None or not self._bytes.is_followed:
            return
        within, budget = self._bytes.most_since(), self._run.budget_bytes
        self.record.peaks.append(max(self._most, within))
        self.record.step_peaks.append(within)
        if self._most > budget and not any(known.figures.refusals for known in self._known.values()):
            self._outside_bytes += self._most - budget
            self._say(
                f"an iteration took {format_bytes(self._most)}, {format_bytes(self._most - budget)} more than"
                " the budget, outside of what is planned: plans leave room for that from now on"
            )
        if within > budget >= self._most:
            self._say(
                f"the step of {type(optimizer).__name__} itself takes {format_bytes(within)}, more than the"
                " budget, and no plan of forward and backward changes that; try foreach=False or fused=True"
            )
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if min(self._steps.values()) >= _MEASURED or sum(self._steps.values()) >= _MOST_MEASURED:
            self._bytes.stop()


def _is_without_data(optimizer: Optimizer) -> bool:
    """Whether this is a step that planning takes, to see what it needs."""
    return any(isinstance(p, FakeTensor) for group in optimizer.param_groups for p in group["params"])


def _fitting_of(module: nn.Module) -> Fitting:
    fitting = vars(module)["_fitting"]
    assert isinstance(fitting, Fitting)
    return fitting


def _call_of(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], device: str) -> _Call:
    held = [*module.parameters(), *module.buffers()]
    own = storages_of(held, device)
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    storages = storages_of(given, device)
    inputs = sum(
        min(t.nbytes, s.nbytes()) for t in given for n, s in storages_of([t], device).items() if n not in own
    )
    inputs = min(inputs, sum(storage.nbytes() for storage in storages.values()))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return _Call(module, args, kwargs, bytes_of(held, device) + inputs, sum(p.nbytes for p in trained))


def _is_around_one(module: nn.Module) -> bool:
    """Whether one module inside has all parameters, as within a wrapper."""
    own = {id(parameter) for parameter in module.parameters()}
    return any({id(parameter) for parameter in child.parameters()} == own for child in module.children())
