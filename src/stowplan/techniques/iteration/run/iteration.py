"""What happens between one `optimizer.step()` and the next, in the user's own loop.

In the last backward of an iteration each parameter is updated when its gradient has been accumulated, and the
gradient ends there. `optimizer.step()` then finds no gradient for it and does the rest. Whatever the user's
loop does to gradients, parameters or options in between would come too late; it is seen and refused, and so
is a look at a gradient that is gone. The first iteration keeps all gradients if they fit the budget; without
state yet, they need no more memory than the state will. So a loop that clips is refused before anything was
updated.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stowplan.capture import Captured
from stowplan.errors import BadUse
from stowplan.request import Iteration
from stowplan.run.step.function import Leaving
from stowplan.techniques.iteration.run.between import Between
from stowplan.techniques.iteration.run.changes import Seen, is_called_by_scaler
from stowplan.techniques.iteration.run.one_by_one import (
    OneByOne,
    OwnHook,
    UpdateBook,
    groups_by_parameter,
    hooks_before_steps,
    options_of,
)
from stowplan.techniques.iteration.run.planner import IterationPlanner, Variant, live_tier
from stowplan.techniques.iteration.run.repeat import Repeat
from stowplan.techniques.iteration.run.state_elsewhere import StateElsewhere, bring_back, state_elsewhere
from stowplan.techniques.iteration.run.updates import state_of
from stowplan.torch_private import after_backward, inside_ddp, running_backward, version_of, will_accumulate

_LOGGER = logging.getLogger("stowplan")
_RESUME = "load the parameters and the optimizer's state as they were saved last (load_state_dict of both)"


@dataclass(slots=True)
class _Progress:
    """How far the iteration is."""

    backwards: int = 0
    task: int | None = None  # the call of backward that is running, or ran last
    counted: int | None = None  # the last one that brought gradients
    is_last: bool = False  # whether that is the one that updates
    updated: dict[Tensor, int | None] = field(default_factory=dict)  # with their versions after that
    gradients: dict[Tensor, Seen] = field(default_factory=dict)  # that shall not change
    options: list[dict[str, object]] = field(default_factory=list)  # of the groups, at the first update
    is_open: bool = False  # a backward has begun and has not ended
    is_first_of_two: bool = False  # it only finds the norm


class RunningIteration:
    """One optimizer and the fitted module whose parameters it updates."""

    def __init__(self, asked: Iteration, *, offloads: bool = False, on_workers: bool = False) -> None:
        """The options are those of its planner."""
        self.planner = IterationPlanner(asked, offloads=offloads, on_workers=on_workers)
        optimizer = self.planner.optimizer
        self.norm_over_workers: Callable[[Tensor], Tensor] | None = None  # from the norm of this worker's
        self.sum_over_workers: Callable[[], None] | None = None  # of gradients that no backward has summed
        bring_back(optimizer)
        self.optimizer, self.accumulate = optimizer, asked.accumulate
        self._clip_norm, self._clip_value = asked.clip_norm, asked.clip_value
        self._single = OneByOne(optimizer)
        self._model: weakref.ref[nn.Module] | None = None
        self._progress = _Progress()
        self._handles: list[RemovableHandle] = []
        self._hooked: set[Tensor] = set()
        self._groups: dict[Tensor, dict[str, Any]] = {}
        self._consumed: set[Tensor] = set()  # those that the plan which runs lets be updated in backward
        self._watched: Tensor | None = None  # the parameter whose gradient stays
        self._first_fits = False  # whether all gradients of the first iteration fit the budget
        self._seen_a_step = False
        self._between = Between(self._gradient_asked)
        self._asked: list[Tensor] = []  # parameters whose gradients the loop looks at in the first iteration
        self._norms: dict[Tensor, Tensor] = {}  # of gradients, if there are two backwards
        self._total_norm: Tensor | None = None  # in the second of them
        self._repeat: Callable[[], None] | None = None
        self._elsewhere: StateElsewhere | None = None
        self._moved: dict[Tensor, None] = {}  # the parameters whose state waits there
        self._broken = ""
        self._to_load: dict[Tensor, int] = {}  # parameters that belong to the state that was loaded last
        self._is_stepping = False  # `optimizer.step()` has begun and has not ended
        self._states_in_order = len(optimizer.state)  # the first of its entries, which are as in eager
        self._told = False
        own = weakref.ref(self)
        optimizer.register_step_pre_hook(_StepHook(own))
        optimizer.register_step_post_hook(lambda *_: _stepped(own))
        optimizer.register_load_state_dict_post_hook(lambda _: _loaded(own))
        optimizer.register_state_dict_pre_hook(lambda _: _saves(own))

    def belongs_to(self, model: nn.Module) -> None:
        """The fitted module whose parameters are trained."""
        self._model = weakref.ref(model)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if unknown := sorted(self.planner.kept_names - names):
            raise BadUse(f"keep_gradients names {unknown[0]!r}, which is no parameter of the model")

    def takes(self, variant: Variant, step: Captured, model: nn.Module, room_bytes: int) -> None:
        """Run the iteration by a plan for this step, in this variant, from now on.

        `room_bytes` of the budget are left.
        """
        trained, tensors = self.planner.trained_in(step, model), step.graph.tensors
        self._watched = self.planner.watched_among(trained)
        has_state = any(self.optimizer.state.get(each.parameter) for each in trained.values())
        fits_in_state = not (variant.state_away or has_state) and all(
            (tensors[state_of(name)].nbytes or 0) >= each.parameter.nbytes for name, each in trained.items()
        )
        fits_beside = sum(each.parameter.nbytes for each in trained.values()) <= room_bytes
        self._first_fits = fits_in_state or fits_beside
        if not variant.state_away:
            return
        by_name = dict(model.named_parameters(remove_duplicate=False))
        book, tier = UpdateBook(self.optimizer), live_tier(model)
        groups = groups_by_parameter(self.optimizer)
        kept = {by_name[name] for name in self.planner.kept_names} | {self._watched}
        moved = {by_name[names[0]]: None for names in step.program.parameters.values() if names[0] in by_name}
        self._moved = {p: None for p in moved if p in groups and p not in kept}
        tier.reserve([n for p in self._moved for n in book.of(p, groups[p]).movable_bytes])
        self._elsewhere = state_elsewhere(self.optimizer, tier)
        self.planner.is_state_away = True

    # What a planned backward tells.

    def repeat_for(
        self, run: Callable[[], Sequence[Tensor]], given: Iterable[Tensor], written: Iterable[Tensor]
    ) -> Callable[[Sequence[Tensor | None]], None] | None:
        """Called before forward."""
        return Repeat(run, given, written).backward if self.planner.repeats else None

    @property
    def is_last_backward(self) -> bool:
        """Within a backward: whether it is the last one before the step."""
        progress = self._progress
        if progress.counted == progress.task:
            return progress.is_last
        return progress.backwards + 1 >= self.accumulate

    def begins(self, leaving: Leaving) -> None:
        """Called within backward, before the first gradient leaves."""
        self._between.close()
        self.planner.refuse_surroundings()
        self.refuse_between()
        if self.sum_over_workers is not None and not all(map(will_accumulate, leaving.differentiated)):
            raise BadUse(
                "accumulate= on a mesh adds up gradients over the workers in the last backward alone, with"
                " those of earlier ones: call backward() for all parameters, not torch.autograd.grad"
            )
        self._refuse_updated_by_others(leaving.differentiated)
        task = running_backward()
        if self._progress.task != task:
            self._begins_anew(task)
        if leaving.repeat is not None:
            if self._repeat is not None and self._progress.is_first_of_two:
                raise BadUse("clip_norm in this budget is for one forward before each backward")
            self._repeat, self._progress.is_first_of_two = leaving.repeat, True
        for parameter in leaving.differentiated:
            if parameter not in self._groups or parameter in self._hooked:
                continue
            self._hooked.add(parameter)
            registered: Any = parameter
            self._handles.append(registered.register_post_accumulate_grad_hook(self._arrives))
        self._consumed.update(leaving.consumed)

    def _begins_anew(self, task: int) -> None:
        """Another call of backward."""
        self._groups = groups_by_parameter(self.optimizer)
        self._remove_hooks()
        nothing_left = all(parameter.grad is None for parameter in self._groups)
        self._norms.clear()
        self._repeat = None
        if self._progress.is_open or nothing_left:  # it failed and updated nothing, or the step was skipped
            self._progress = _Progress()
        if self._progress.backwards == 0 and self._watched is not None:
            self._refuse_old(self._watched)
        self._progress.task, self._progress.is_open = task, True
        self._progress.gradients.clear()
        after_backward(self._ends)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._consumed.clear()

    def _arrives(self, parameter: Tensor) -> None:
        """A gradient has been accumulated in this backward, or in one that is not ours."""
        progress = self._progress
        if running_backward() != progress.task or not progress.is_open:
            return
        if progress.counted != progress.task:
            self._counts()
        if parameter not in self._consumed or not progress.is_last or parameter.grad is None:
            return
        if progress.is_first_of_two:
            self._norms[parameter] = torch.linalg.vector_norm(parameter.grad)
            parameter.grad = None
        elif self._total_norm is not None and self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameter, self._clip_norm, self._total_norm)
            self._update(parameter)
        elif not self._waits:
            if self._clip_value is not None:
                nn.utils.clip_grad_value_(parameter, self._clip_value)
            self._update(parameter)

    def _update(self, parameter: Tensor) -> None:
        """Update a parameter and free its gradient."""
        updated = self._progress.updated
        try:
            if self._elsewhere:
                self._elsewhere.load(parameter)
            updated[parameter] = None  # from now on it is not what it was, even if this is interrupted
            self._single.update(parameter, self._groups[parameter])
            updated[parameter] = version_of(parameter)
            parameter.grad = None
            if self._elsewhere and parameter in self._moved:
                self._elsewhere.store([parameter])
        except BaseException as fault:
            if parameter in updated:
                updated[parameter] = version_of(parameter)
            self.fails(fault)
            raise

    def _counts(self) -> None:
        """One more backward brought gradients."""
        progress = self._progress
        if progress.backwards == self.accumulate:
            raise BadUse(
                f"backward was called {progress.backwards + 1} times before optimizer.step(), and the plan is"
                f" for {self.accumulate}: give fit the number of micro-batches, as in"
                f" optimizer=Iteration(optimizer, accumulate={progress.backwards + 1})"
            )
        progress.counted, progress.backwards = progress.task, progress.backwards + 1
        progress.is_last = progress.backwards == self.accumulate
        if progress.is_last:
            progress.options = [options_of(group) for group in self.optimizer.param_groups]

    @property
    def _waits(self) -> bool:
        """Whether updates wait for `optimizer.step()`."""
        return self._updates_late or (not self._seen_a_step and self._first_fits)

    @property
    def _updates_late(self) -> bool:
        """Whether they always do, so that the loop may change gradients before."""
        return self._clip_norm is not None or self.planner.keeps_all

    def _ends(self) -> None:
        """Backward is done."""
        progress = self._progress
        self._remove_hooks()
        if progress.is_last and (self._repeat is not None or not self._updates_late):
            watched = self._groups if self._waits else () if self._watched is None else (self._watched,)
            progress.gradients = {p: Seen.of(p.grad) for p in watched if p.grad is not None}
        elif self.sum_over_workers is not None and not progress.is_last:
            progress.gradients = {p: Seen.of(p.grad) for p in self._groups if p.grad is not None}
        progress.is_open = False
        if progress.is_last:
            self._watch_from_now_on()
        if progress.updated and not self._told:
            self._told = True
            _LOGGER.info(
                "%d parameters are updated in backward: their .grad is None after it, as after"
                " zero_grad(set_to_none=True); keep_gradients= keeps those that you want to see",
                len(progress.updated),
            )

    def _watch_from_now_on(self) -> None:
        """Until `optimizer.step()`: parameters whose gradients are gone now, or will be from now on."""
        self._between.forget()
        self._asked.clear()
        if self._repeat is not None:
            self._between.open(self._norms)
        elif not self._updates_late:
            model = self._model() if self._model else None
            assert model is not None, "its backward runs"
            kept = self._kept(model)
            self._between.open(p for p in self._groups if p not in kept)

    def _gradient_asked(self, parameter: Tensor, is_set: bool) -> None:
        """The loop asks for a gradient, or sets it, between backward and `optimizer.step()`."""
        if not self._is_gone(parameter):
            self._asked.append(parameter)  # it is there, and will not be in the next iteration
            return
        raise self._too_late(
            f"the gradient of {self._name_of(parameter)} was {'set' if is_set else 'read'}", spoils=is_set
        )

    def _is_gone(self, parameter: Tensor) -> bool:
        return parameter in self._progress.updated or parameter in self._norms

    def _name_of(self, parameter: Tensor) -> str:
        model = self._model() if self._model else None
        named = model.named_parameters() if model is not None else ()
        return next((repr(name) for name, each in named if each is parameter), "a parameter")

    def fails(self, fault: BaseException) -> None:
        """A backward ended in between."""
        if self._progress.updated:
            self._broken = (
                f"backward failed after {len(self._progress.updated)} parameters had been updated, so the"
                f" parameters are neither those of before nor those of after the iteration: {_RESUME}"
            )
            fault.add_note(self._broken)

    # What the user's loop tells.

    def forward_begins(self) -> None:
        """A forward with a plan: state that is in memory, new or loaded, goes to the tier first."""
        if inside_ddp():
            raise BadUse(
                "DistributedDataParallel is around a module that was fitted with optimizer=: it would average"
                " gradients after the plan has consumed them. Leave DistributedDataParallel out and give fit"
                ' mesh="data=N", where accumulate= of Iteration sends gradients once for each iteration; or'
                " leave out optimizer= and use reserve= for the optimizer's state"
            )
        self.refuse_between()
        if self._elsewhere:
            self._elsewhere.store(self._moved)

    def refuse_between(self) -> None:
        """Nothing may use the parameters between the updates and `optimizer.step()`."""
        self._between.close()  # guards compare the classes of parameters
        self._refuse_broken()
        progress = self._progress
        if progress.updated and progress.task != running_backward():
            raise BadUse(
                "the parameters were updated in backward, and optimizer.step() was not called since: call it"
                " after each backward, for it does the rest of the iteration. To add up the gradients of"
                " several, give fit optimizer=Iteration(optimizer, accumulate=...)"
            )

    def _refuse_broken(self) -> None:
        progress = self._progress
        if progress.is_open and progress.updated and progress.task != running_backward():
            self.fails(RuntimeError())
        if self._is_stepping and running_backward() < 0 and not self._broken:
            self._broken = f"optimizer.step() failed in between, and may have updated a part: {_RESUME}"
        if self._broken:
            raise BadUse(self._broken)
        if stale := sum(version_of(parameter) == version for parameter, version in self._to_load.items()):
            raise BadUse(
                f"the optimizer's state was loaded after an iteration that ended in between, and {stale}"
                f" parameters that it had updated were not: {_RESUME}"
            )
        self._to_load.clear()

    def step_begins(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """`optimizer.step()` was called: do what waits for it, and look that the rest was in time.

        A closure, which has the forward and backward in it, is run here; the step gets its result.
        """
        self._between.close()
        self._refuse_broken()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        replaced = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            replaced = args[:1], {"closure": _Once(result)}
        self._between.close()
        self._do_what_waits()
        for parameter in self._moved:
            if self._elsewhere and parameter.grad is not None:  # the step itself updates it
                self._elsewhere.load(parameter)
        return replaced

    def _do_what_waits(self) -> None:
        self._refuse_broken()
        progress = self._progress
        if not progress.backwards:
            return  # the gradients are of another model
        self._is_stepping = bool(progress.updated)
        self._refuse_changes()
        self._is_stepping = True
        if self.sum_over_workers is not None and not progress.is_last:
            self._sum_late(self.sum_over_workers)
        progress.gradients.clear()  # each ends with its update
        self._groups = groups_by_parameter(self.optimizer)
        model = self._model() if self._model else None
        assert model is not None, "its plans are gone with the module"
        if self._repeat is not None:
            self._update_in_second_backward(model)
        elif self._clip_norm is not None:
            self._clip(list(model.parameters()), self._clip_norm)
        elif self._clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), self._clip_value)
        if not self.planner.keeps_all:
            self._update_rest(model)

    def _sum_late(self, sum_gradients: Callable[[], None]) -> None:
        """The step came before the last backward: gradients are still those of this worker alone."""
        seen = self._progress.gradients
        if is_called_by_scaler() or not all(each.is_still(p.grad) for p, each in seen.items()):
            raise BadUse(
                f"gradients were changed (clipped, unscaled) after {self._progress.backwards} of"
                f" {self.accumulate} backwards, and workers add them up in the last of these or in"
                " optimizer.step(): use clip_norm= or clip_value= of Iteration, or call backward as often as"
                " its accumulate= says. Nothing has been updated yet"
            )
        sum_gradients()

    def _clip(self, parameters: list[nn.Parameter], most: float) -> None:
        if self.norm_over_workers is None:
            nn.utils.clip_grad_norm_(parameters, most)
            return
        norms = [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]
        total = self.norm_over_workers(torch.linalg.vector_norm(torch.stack(norms)))
        nn.utils.clip_grads_with_norm_(parameters, most, total)

    def _update_in_second_backward(self, model: nn.Module) -> None:
        """The norm is known: run forward and backward a second time, clip and update."""
        repeat, self._repeat = self._repeat, None
        parameters = list(model.parameters())
        for parameter in parameters:
            if parameter.grad is not None:
                self._norms[parameter] = torch.linalg.vector_norm(parameter.grad)
                parameter.grad = None
        norms = [self._norms[parameter] for parameter in parameters if parameter in self._norms]
        self._norms.clear()
        self._total_norm = torch.linalg.vector_norm(torch.stack(norms))
        assert repeat is not None
        assert self._clip_norm is not None
        try:
            repeat()
            nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, self._total_norm)  # what stayed
        finally:
            self._total_norm = None

    def _update_rest(self, model: nn.Module) -> None:
        """What was not done in backward. What shall stay is left to the step itself."""
        kept, own = self._kept(model), set(model.parameters())
        for parameter in sorted(self._groups, key=lambda p: p.nbytes):  # in the order of the plan
            if parameter in own and parameter not in kept and parameter.grad is not None:
                self._update(parameter)

    def _kept(self, model: nn.Module) -> set[Tensor | None]:
        """The parameters whose gradients stay."""
        named = model.named_parameters(remove_duplicate=False)
        return {parameter for name, parameter in named if name in self.planner.kept_names} | {self._watched}

    def _refuse_changes(self) -> None:
        """Raise BadUse for what came too late, or would have if updates did not wait this time."""
        progress, scaled = self._progress, getattr(self.optimizer, "grad_scale", None) is not None
        if scaled and not self.planner.keeps_all:
            raise self._too_late("a GradScaler scales gradients that the optimizer unscales")
        if self._updates_late and self._repeat is None:
            return
        if is_called_by_scaler():
            raise self._too_late("a GradScaler unscaled gradients")
        for parameter, seen in progress.gradients.items():
            if not seen.is_still(parameter.grad):
                raise self._too_late("gradients were changed (clipped, unscaled, added to, cleared)")
        if self._asked:
            raise self._too_late(f"the gradient of {self._name_of(self._asked[0])} was read or set")
        if any(parameter.grad is not None for parameter in progress.updated):
            raise self._too_late("a second gradient came for a parameter")
        if self._between.is_changed():
            raise self._too_late("a parameter was changed")
        now = [options_of(group) for group in self.optimizer.param_groups]
        if progress.options and progress.options != now and not self._updates_late:
            raise self._too_late("an option of a parameter group, such as lr, was changed")

    def _too_late(self, what: str, *, spoils: bool = True) -> BadUse:
        """Why, and what to do instead."""
        begun = bool(self._progress.updated)
        if begun and spoils:
            self._broken = f"{what} after parameters had been updated in backward: {_RESUME}"
        return BadUse(
            f"{what} between backward and optimizer.step(), where fit(..., optimizer=) has consumed gradients"
            " already: use fit(..., optimizer=Iteration(optimizer, clip_norm=1.0)) in place of"
            " clip_grad_norm_, its clip_value= in place of clip_grad_value_, its keep_gradients=True with a"
            " GradScaler or for changes of your own (or names of parameters, whose gradients then stay), and"
            " set options before backward. "
            + (f"This iteration is spoilt: {_RESUME}" if self._broken else "")
            + ("" if begun else "Nothing has been updated yet")
        )

    def _refuse_updated_by_others(self, parameters: Sequence[Tensor]) -> None:
        """Two modules fitted with one optimizer may have parameters in common."""
        hooks = (hook for hook in hooks_before_steps(self.optimizer) if isinstance(hook, _StepHook))
        others = (other for hook in hooks if (other := hook.iteration()) not in (None, self))
        if any(not other._progress.updated.keys().isdisjoint(parameters) for other in others if other):
            raise BadUse(
                "another module that was fitted with this optimizer has updated the same parameters in its"
                " backward: call optimizer.step() after each of the two, or put both into one module"
            )

    def _refuse_old(self, parameter: Tensor) -> None:
        if parameter.grad is not None and bool(parameter.grad.any()):
            raise BadUse(
                "gradients of an earlier iteration are there when backward begins: call optimizer.zero_grad()"
                " after each optimizer.step(), or give fit optimizer=Iteration(optimizer,"
                " accumulate=...) for several backwards"
            )

    def loaded(self) -> None:
        """The optimizer's state was loaded: whatever was left in between is over."""
        if self._elsewhere:
            self._elsewhere.forget()
        self._to_load |= {p: version for p, version in self._progress.updated.items() if version is not None}
        self._states_in_order = len(self.optimizer.state)
        self._broken, self._progress, self._seen_a_step = "", _Progress(), True
        self._is_stepping, self._total_norm = False, None
        self._between.forget()

    def stepped(self) -> None:
        """`optimizer.step()` is done."""
        if self._is_stepping:
            self._progress, self._seen_a_step = _Progress(), True
        self._is_stepping = False
        self._bring_new_states_in_order()

    def _bring_new_states_in_order(self) -> None:
        """Let entries that this step has added to the state follow each other as in eager: parameter by
        parameter of the groups, and not as gradients were final."""
        state = self.optimizer.state
        new = set(list(state)[self._states_in_order :])
        for parameter in groups_by_parameter(self.optimizer) if new else ():
            if parameter in new:
                state[parameter] = state.pop(parameter)
        self._states_in_order = len(state)


class _StepHook(OwnHook):
    """Tells an iteration of the optimizer's step, as long as there is one."""

    def __init__(self, iteration: weakref.ref[RunningIteration]) -> None:
        self.iteration = iteration

    def __call__(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """As `register_step_pre_hook` wants it."""
        iteration = self.iteration()
        return iteration.step_begins(args, kwargs) if iteration is not None else None


class _Once:
    """Stands for a closure that has run."""

    def __init__(self, result: object) -> None:
        self._result, self._is_used = result, False

    def __call__(self) -> object:
        if self._is_used:
            raise BadUse("the optimizer evaluates its closure more than once in a step: leave out optimizer=")
        self._is_used = True
        return self._result


def _stepped(iteration: weakref.ref[RunningIteration]) -> None:
    found = iteration()
    if found is not None:
        found.stepped()


def _saves(iteration: weakref.ref[RunningIteration]) -> None:
    found = iteration()
    if found is not None:
        found.refuse_between()


def _loaded(iteration: weakref.ref[RunningIteration]) -> None:
    found = iteration()
    if found is not None:
        found.loaded()
