"""Fitting: what a fitted module knows, and how a call finds its plan.

For every new kind of call (shapes, dtypes) and for every change of the program (an attribute, a module, a
mode) the step is captured, priced and planned once; after that the plan's own code runs, as long as its guard
holds.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from threading import local
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn

from stowplan.alone import Lock, alone
from stowplan.capture.composite import opened
from stowplan.capture.recording import Step, after_loss, argument_names
from stowplan.capture.stand_ins import TensorLook, flatten
from stowplan.errors import BadUse, BudgetTooSmall, CaptureError, StowplanError
from stowplan.plan.plan import Plan
from stowplan.run.beside import BesideWatch
from stowplan.run.border.frozen import restore
from stowplan.run.border.guard import (
    Dependencies,
    Guard,
)
from stowplan.run.call_planner import (
    CallPlanner,
    KindOfCall,
    ModelCall,
    Planned,
    kind_of_call,
    refused_beside,
)
from stowplan.run.evaluations import Evaluations
from stowplan.run.measure.agreement import written_tensors
from stowplan.run.shapes import DeclaredShapes, Shapes
from stowplan.run.step.function import waiting_of
from stowplan.run.step.straight import StraightStep
from stowplan.run.wrappers import (
    fitted_class,
    with_forward,
)
from stowplan.torch_private import (
    another_derivative,
    checkpoints_as_calls,
    is_exporting,
    is_tracing,
    mode_in_the_way,
    own_saved_tensors,
)
from stowplan.units import format_bytes

if TYPE_CHECKING:
    from stowplan.run.second_derivatives import Differentiable

_LOGGER = logging.getLogger("stowplan")

_FITTED_CLASSES: dict[type, type] = {}
_HERE = local()  # whether a fitted module is being planned
_MOST_ANSWERS = 16  # different values that forward may read off arguments of one kind
_MOST_SMALLER = 512  # kinds of calls that run as they are
_MOST_REFUSED = 64  # kinds of calls of one module; the oldest makes room
_OTHER_CASTS = (
    "planning %s again: this call is %s, and the plan was made %s, so its ops differ. To plan once, call fit"
    " in the same autocast as the model"
)


Otherwise: TypeAlias = Callable[[Exception], None]
"""Learns why a call is not planned, and returns if the call shall run as it is."""


class FittedModule(nn.Module):
    """What a fitted module adds to its class: another way to run `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fitting: Fitting = self.__dict__["_fitting"]
        return fitting.run(self, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class is made here, so it is found again by the class that it was made of."""
        if type(self) is not fitted_class_of(model_class(self)):
            return super().__reduce_ex__(protocol)
        return _blank, (model_class(self),), vars(self)


def fitted_class_of(kind: type[nn.Module]) -> type:
    """One class for each class of model."""
    found = _FITTED_CLASSES.get(kind)
    return found or _FITTED_CLASSES.setdefault(kind, fitted_class(kind, FittedModule))


def _blank(kind: type[nn.Module]) -> object:
    """A fitted module of this class, to be filled with what a copy or a file holds."""
    made: object = object.__new__(fitted_class_of(kind))
    return made


def model_class(model: nn.Module) -> type[nn.Module]:
    """The class of the model itself, fitted or not, also under a wrapper's class such as FSDP's."""
    found = (kind.__bases__ for kind in type(model).__mro__)
    fitted = (bases[1] for bases in found if len(bases) == 2 and issubclass(bases[0], FittedModule))
    return next(fitted, type(model))


@dataclass(frozen=True, slots=True)
class _Refused:
    """A kind of call that does not fit, for the program as it was."""

    kind: KindOfCall
    dependencies: Dependencies
    refusal: BudgetTooSmall


@dataclass(frozen=True, slots=True)
class _Bound:
    """A planned step on the parameters of one model, and the guard that says whether it applies."""

    planned: Planned
    guard: Guard
    step: StraightStep


@dataclass(slots=True)
class Fitting:
    """The plans of one fitted module: by kind of call, and for the program as it was when each was made."""

    own_forward: Callable[..., Any] | None  # what stands for the class's, if it was set on the model itself
    planner: CallPlanner
    beside: BesideWatch
    planned: list[Planned] = field(default_factory=list)
    bound: list[_Bound] = field(default_factory=list)  # the latest last
    given: Plan | None = None  # a saved plan, for the first kind of call
    reserve_bytes: int = 0  # of the budget, beside what is allowed
    reserved_for: str = "the reserve"
    keep_plans: int = 128
    trains: bool = True  # whether the call that was given to fit wanted gradients
    shapes: DeclaredShapes | None = None
    smaller: list[tuple[KindOfCall, Planned]] = field(default_factory=list)  # run as they are, and why
    refused: list[_Refused] = field(default_factory=list)
    twice: list[Planned] = field(default_factory=list)  # of which second derivatives were asked for
    evaluations: Evaluations = field(default_factory=Evaluations)
    evaluator: CallPlanner | None = None  # of calls without gradients, if others were asked for
    otherwise: Otherwise | None = None  # takes refusals in place of the caller, whose call then runs as it is
    lock: Lock = field(default_factory=Lock)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans made so far."""
        return tuple(planned.step.plan for planned in self.planned)

    def __deepcopy__(self, _: dict[int, Any]) -> "Fitting":
        """For a copy of the model: the same plans, bound to it when it is called.

        An optimizer is not that of the copy, so plans that update with it are not either.
        """
        planned = [] if self.planner.iteration else list(self.planned)
        lists: dict[str, Any] = {"bound": [], "refused": [], "smaller": [], "twice": []}
        planner, beside = self.planner.for_a_copy(), self.beside.for_a_copy()
        lists |= {"evaluations": Evaluations(), "evaluator": None}
        return replace(self, planner=planner, beside=beside, planned=planned, lock=Lock(), **lists)

    def __reduce__(self) -> Any:
        """For a file or another process: how to plan. What was planned is planned there when it is called."""
        own = self.planner
        options = replace(own.options, search=replace(own.options.search, progress=None))
        how = (own.allowed_bytes, options, own.loss, own.all_outputs, None, own.devices)
        beside = self.beside.name, self.beside.budget_bytes
        return _read_back, (self.own_forward, how, beside, self.reserve_bytes, self.keep_plans, self.trains)

    @property
    def allowed_bytes(self) -> int:
        """The budget without the reserve."""
        return self.planner.allowed_bytes

    def run(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Call the model: by a plan, or as it is if it is exported, or fits without gradients."""
        iteration = self.planner.iteration
        if iteration:
            iteration.refuse_between()
        if getattr(_HERE, "is_planning", False):
            return self.as_it_is(model, args, kwargs)  # as a part of the model that is planned
        if is_exporting() or is_tracing():
            return self._eager(model, args, kwargs)
        try:
            kind = another_derivative(_read_by(model, args, kwargs))
            if not torch.is_grad_enabled() and (kind or mode_in_the_way()):
                return self._eager(model, args, kwargs)
            if kind:
                raise BadUse(f"a plan has the ops of backward, and none for {kind}: call the model itself")
            step = self.step_for(model, args, kwargs)
        except Exception as fault:  # of capture too: the run as it is raises what is the model's own
            if self.otherwise is None:
                raise
            self.otherwise(fault)
            return self.as_it_is(model, args, kwargs)
        if iteration and torch.is_grad_enabled():
            iteration.forward_begins()
        if step is not None:
            return step(*args, **kwargs)
        if self.trains and torch.is_grad_enabled():
            self.planner.say_once("nothing wants a gradient: the model is run as it is, without a plan")
        return self._eager(model, args, kwargs)

    def _eager(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        return after_loss(self.eager_forward(model)(*args, **kwargs), self.planner.loss)

    def _forward_of(self, model: nn.Module) -> Callable[..., Any]:
        return self.own_forward or model_class(model).forward

    def eager_forward(self, model: nn.Module) -> Callable[..., Any]:
        """The model's own forward, bound to it."""
        return partial(self._forward_of(model), model)

    def step_for(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        may_run_as_it_is: bool = True,
        may_be_tried: bool = True,
    ) -> "StraightStep | _AsItIs | None":
        """The step for this call, planned if none applies to it; None for one without gradients that fits.

        A call that seems to fit as it is may be tried: it is planned after all if it turns out not to.
        """
        if mode := mode_in_the_way():
            raise BadUse(f"a mode is active, {mode}; leave it, or call the model that you gave to fit")
        look_up = partial(
            self._step_for,
            model,
            args,
            kwargs,
            may_run_as_it_is=may_run_as_it_is,
            may_be_tried=may_be_tried,
        )
        step = look_up(may_plan=False)
        if isinstance(step, _Unplanned):
            step = alone(partial(look_up, may_plan=True))  # unless another thread has planned it meanwhile
        assert not isinstance(step, _Unplanned)
        return step

    def _step_for(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        may_run_as_it_is: bool,
        may_be_tried: bool,
        may_plan: bool,
    ) -> "StraightStep | _AsItIs | _Unplanned | None":
        with self.lock.here():
            leaves, spec = flatten(args, kwargs)
            kind = kind_of_call(leaves, spec)
            for place in range(len(self.bound) - 1, -1, -1):
                bound = self.bound[place]
                if bound.planned.kind == kind and bound.guard.is_untouched(leaves):
                    if may_run_as_it_is and any(bound.planned is each for each in self.twice):
                        return _AsItIs(self, model, bound.planned)
                    self.bound.append(self.bound.pop(place))  # the one unused for longest comes first
                    return bound.step if bound.planned.improver is None else self._improved(bound, model)
            if not kind.records or not wants_gradient(model, leaves):
                call = ModelCall(kind, model, self._forward_of(model), args, kwargs)
                return self._step_without_gradients(call, leaves, may_plan=may_plan)
            larger = self._smaller_than(kind, model, leaves)
            if larger is not None:
                return _AsItIs(self, model, larger)
            change, answers, counted = None, 0, list[Planned]()
            for planned in reversed(self.planned):
                if planned.kind == kind:
                    guard = Guard(planned.dependencies, model)
                    found = guard.change(leaves)
                    if found is None:
                        return self._bind(planned, guard, model)
                    change = change or found
                    counted += [planned] if guard.counts else []
                    is_answer = guard.other_answer is not None and not guard.counts
                    answers += is_answer and not planned.dependencies.answers.draws
            if answers >= _MOST_ANSWERS:
                raise CaptureError(
                    f"{change}, and it has read {answers} other values there: each needs a plan of its own",
                    advice="pad or bucket the argument that it reads from, compute the value outside forward"
                    ' and pass it as a number, or use torch.compile(model, backend="stowplan")',
                )
            self._refuse_again(kind, model, leaves)
            alike = (
                [] if self._must_plan else [planned for planned in counted if planned.fits_while_it_counts]
            )
            if may_run_as_it_is and alike:
                return _AsItIs(self, model, alike[0], watched_as=kind, alike=tuple(alike[1:]))
            if may_run_as_it_is:
                larger = self._larger(kind, model, leaves, may_be_tried=may_be_tried)
            if larger is not None:
                return _AsItIs(self, model, larger, watched_as=kind)
            if not may_plan:
                return _Unplanned()
            if change is not None:
                _LOGGER.warning("planning %s again: %s", model_class(model).__name__, change)
            elif self.planned and all(kind.casts != planned.kind.casts for planned in self.planned):
                now, then = _autocast_of(kind), _autocast_of(self.planned[-1].kind)
                _LOGGER.warning(_OTHER_CASTS, model_class(model).__name__, now, then)
            self._tell_of_numbers(kind, model, args, kwargs)
            call = ModelCall(kind, model, self._forward_of(model), args, kwargs)
            planned = self._planned_by(self.planner, call, change)
            self._tell_of_counters(planned, model)
            self._make_room()
            self.planned.append(planned)
            guard = Guard(planned.dependencies, model)
            change = guard.change(leaves)
            assert change is None, change
            return self._bind(planned, guard, model)

    def _tell_of_numbers(
        self, kind: KindOfCall, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """Warn if this call is the second in a row that needs a plan only because of another number in it."""
        latest = [planned.kind for planned in self.planned[-2:]]
        changed = [_numbers_apart(kind, other) for other in latest]
        if len(latest) < 2 or not all(changed):
            return
        step = Step(with_forward(model, self._forward_of(model)), args, kwargs, None, torch.device("cpu"))
        names, values = argument_names(step), flatten(args, kwargs)[0]
        for place in sorted(frozenset[int]().union(*changed)):
            name, kind_of_number = names[place], type(values[place]).__name__
            self.planner.say_once(
                f"{name!r} is a Python {kind_of_number} that changes from call to call, and each value of it"
                f" is planned anew, which takes far longer than a step: pass torch.tensor({name}) to"
                f" {model_class(model).__name__}, which one plan reads at each call"
            )

    def _tell_of_counters(self, planned: Planned, model: nn.Module) -> None:
        """Say once what becomes of calls with another number in a buffer that the step itself changes."""
        plan, name = planned.step.plan, model_class(model).__name__
        taken, allowed = format_bytes(plan.plain_peak_bytes), format_bytes(plan.allowed_bytes)
        for answer in planned.dependencies.answers.counters:
            if planned.fits_while_it_counts and not self._must_plan:
                then = (
                    f"calls with other numbers there run {name} as it is, watched op by op: that takes"
                    f" {taken} of the {allowed} allowed"
                )
            else:
                then = (
                    "each number needs a plan of its own, which takes far longer than a step; keep it a"
                    " tensor, as in queue.index_copy_(0, (pointer + arange) % size, keys), or count in"
                    " Python outside forward and pass the number in as a tensor"
                )
            where = f", at {answer.where}" if answer.where else ""
            self.planner.say_once(
                f"forward reads a number of the buffer {answer.counts!r}, which it changes{where}: {then}"
            )

    def _planned_by(self, planner: CallPlanner, call: ModelCall, change: str | None) -> Planned:
        """Plan; a budget that is too small is remembered."""
        planner.latest = None
        leaves = flatten(call.args, call.kwargs)[0]
        try:
            with (
                own_saved_tensors(),
                _planning_here(),
                _told_as_new(leaves, change, is_new=bool(self.planned)),
                refused_beside(self.reserve_bytes, self.reserved_for),
            ):
                return planner.plan(call, None if self.planned else self.given)
        except BudgetTooSmall as refusal:
            if planner.latest is not None:
                known = _Refused(call.kind, planner.latest, refusal.again())
                self.refused = [*self.refused, known][-_MOST_REFUSED:]
            raise

    def _refuse_again(self, kind: KindOfCall, model: nn.Module, leaves: list[object]) -> None:
        for known in self.refused:
            if known.kind == kind and Guard(known.dependencies, model).change(leaves) is None:
                raise known.refusal.again()

    def _step_without_gradients(
        self, call: ModelCall, leaves: list[object], *, may_plan: bool
    ) -> "StraightStep | _Unplanned | None":
        """The step for a call without gradients that does not fit as it is; None for one that does.

        What `fit` planned for training serves evaluation as well as it can: where no plan can be made, such a
        call runs as it is, and that is said.
        """
        kind, model, change = call.kind, call.model, None
        for planned in reversed(self.planned):
            if planned.kind == kind:
                guard = Guard(planned.dependencies, model)
                change = guard.change(leaves)
                if change is None:
                    return self._bind(planned, guard, model)
        own = not self.trains
        planner = self.planner if own else self._evaluator(model)
        if planner is None or self.evaluations.refuse(kind):
            return None
        if self.evaluations.fit(kind, model, leaves, planner.allowed_bytes) and not (own and self._must_plan):
            return None
        if own:
            self._refuse_again(kind, model, leaves)
        if not may_plan:
            return _Unplanned()
        if change is not None and own:
            _LOGGER.warning("planning %s again: %s", model_class(model).__name__, change)
        try:
            planned = self._planned_by(planner, call, change)
        except Exception as refusal:  # of a call that fit was not asked about: eager raises it, or can do it
            is_too_large = isinstance(refusal, BudgetTooSmall)
            if own and (is_too_large or not self.planned):
                raise
            self.evaluations.add_refused(kind, at_any_size=not is_too_large)
            name, why = model_class(model).__name__, str(refusal).partition("\n")[0]
            self.planner.say_once(
                f"a call of {name} without gradients runs as it is, without a plan: {why}",
                topic="unplanned without gradients",
            )
            return None
        plan = planned.step.plan
        self.evaluations.add(kind, model, plan.plain_peak_bytes, planned.dependencies)
        if not own and plan.plain_peak_bytes <= planner.allowed_bytes:
            return None
        if not own:
            name, ratio = model_class(model).__name__, plan.time_ratio
            self.planner.say_once(
                f"calls of {name} without gradients run by a plan where they would not fit: one takes"
                f" {format_bytes(plan.plain_peak_bytes)}, or {format_bytes(plan.projected_peak_bytes)}"
                f" by its plan, {plan.exactness}, in {ratio:.2f} times the time",
                topic="planned without gradients",
            )
        self._make_room()
        self.planned.append(planned)
        guard = Guard(planned.dependencies, model)
        change = guard.change(leaves)
        assert change is None, change
        return self._bind(planned, guard, model)

    def _evaluator(self, model: nn.Module) -> CallPlanner | None:
        """Plans evaluation beside what training leaves in memory: gradients, or the state of `optimizer=`."""
        own = self.planner
        if self.evaluator is not None or own.devices is not None:  # what is free of each budget is not known
            return self.evaluator
        if own.iteration is not None:
            from stowplan.run.optimizers import optimizer_share  # most fits have none

            left = optimizer_share(own.iteration.optimizer).state_bytes
        else:
            left = sum(p.nbytes for p in opened(model.parameters()) if p.requires_grad)
        self.evaluator = own.for_evaluation(own.allowed_bytes - left)
        return self.evaluator

    def _make_room(self) -> None:
        """Of the plans, the one unused for longest makes room for another."""
        while len(self.planned) >= self.keep_plans:
            used = [bound.planned for bound in self.bound]
            unused = [planned for planned in self.planned if not any(planned is p for p in used)]
            gone = (unused or used)[0]
            self.planned = [planned for planned in self.planned if planned is not gone]
            self.bound = [bound for bound in self.bound if bound.planned is not gone]
            self.smaller = [(kind, larger) for kind, larger in self.smaller if larger is not gone]
            self.twice = [planned for planned in self.twice if planned is not gone]

    @property
    def _must_plan(self) -> bool:
        """Whether no call may run as it is: the plan updates parameters, is faster, or places tensors.

        Nor may one on devices with a budget each: what eager takes of each is not known.
        """
        own, execution = self.planner, self.planner.options.execution
        each = own.iteration is not None or own.devices is not None
        return each or execution.is_compiled or bool(execution.constraints)

    def _smaller_than(self, kind: KindOfCall, model: nn.Module, leaves: list[object]) -> Planned | None:
        """The step that fits without its plan and that calls of this kind were seen to be smaller than."""
        larger = next((planned for known, planned in self.smaller if known == kind), None)
        return larger if larger and self._is_program_of(larger, model, leaves) else None

    def _is_program_of(self, planned: Planned, model: nn.Module, leaves: list[object]) -> bool:
        """Whether the model is as it was when this step was planned, whatever the sizes of the call."""
        for bound in self.bound:
            if bound.planned is planned and bound.guard.is_untouched(leaves):
                return True
        return Guard(planned.dependencies, model).change(leaves) is None

    def _larger(
        self, kind: KindOfCall, model: nn.Module, leaves: list[object], *, may_be_tried: bool
    ) -> Planned | None:
        """A planned step that is no smaller and fits without its plan or, to be tried, shows if this does."""
        followed = [] if self._must_plan else [p for p in reversed(self.planned) if p.can_be_followed]
        if not followed:
            return None
        from stowplan.run.smaller import CallSizes  # most modules are called with one shape

        sizes, tried = CallSizes.of(kind), None
        for planned in followed:
            larger = CallSizes.of(planned.kind)
            if sizes is None or larger is None or not sizes.is_within(larger):
                continue
            seems_to_fit = may_be_tried and self._seems_to_fit(sizes.share_of(larger), planned, model)
            if (planned.fits_in_eager or seems_to_fit) and self._is_program_of(planned, model, leaves):
                if planned.fits_in_eager:
                    return planned
                tried = tried or planned
        return tried

    def _seems_to_fit(self, share: float, larger: Planned, model: nn.Module) -> bool:
        """Whether a call with this share of a larger one's elements should fit without a plan.

        Activations are taken to grow at least in proportion to the elements of a call. The run itself shows
        whether it fits; the guess decides only which calls are tried.
        """
        held = (t.nbytes for t in model.parameters() if t.requires_grad)
        fixed = sum(t.nbytes for t in opened(chain(model.parameters(), model.buffers()))) + sum(held)
        plan = larger.step.plan
        return share * (plan.plain_peak_bytes - fixed) <= plan.allowed_bytes - fixed

    def as_it_is(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Call the model in eager, with gradients."""
        with checkpoints_as_calls():
            return self._eager(model, args, kwargs)

    def watched_as_it_is(
        self,
        kind: KindOfCall,
        steps: Sequence[Planned],
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """The same, watched beside these steps; by a plan after all if it is the program of none."""
        from stowplan.run.smaller import Unlike, watched

        given, held = flatten(args, kwargs)[0], [*opened((*model.parameters(), *model.buffers()))]
        for larger in steps:
            written = written_tensors(larger.step.captured.program, [model], given)
            contents = larger.dependencies.contents(model, given)
            try:
                result = watched(lambda: self.as_it_is(model, args, kwargs), larger, held, given, written)
            except Unlike:
                restore(contents)  # what forward made ends here, with the exception's frames
                continue
            if larger.kind != kind:  # a step that counts is watched at each call
                self.smaller = [(kind, larger), *self.smaller][:_MOST_SMALLER]
            return result
        step = self.step_for(model, args, kwargs, may_run_as_it_is=False)
        assert step is not None, "a gradient was wanted when the step was looked for"
        return step(*args, **kwargs)

    def declare(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], shapes: Shapes
    ) -> None:
        """Plan the largest of the declared shapes; raises BudgetTooSmall if they do not fit."""
        plain = with_forward(model, self._forward_of(model))
        self.shapes = DeclaredShapes.of(plain, args, kwargs, shapes)
        try:
            self.step_for(model, *self.shapes.call(self.shapes.largest))
        except BudgetTooSmall as refusal:
            refusal.add_note(
                "These are the largest of the declared shapes; declare smaller ones, or a larger budget."
            )
            raise

    def foreseen(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Plan, bool] | None:
        """The plan for a call, or that of a larger one if the call runs as it is, and which of the two.

        None if no gradient is wanted and it runs as it is; raises BudgetTooSmall if the call does not fit.
        """
        step = self.step_for(model, args, kwargs, may_be_tried=False)
        if isinstance(step, _AsItIs):
            return step.larger.step.plan, True
        return next(((b.planned.step.plan, False) for b in self.bound if b.step is step), None)

    def _bind(self, planned: Planned, guard: Guard, model: nn.Module) -> StraightStep:
        known = next((bound for bound in self.bound if bound.planned is planned), None)
        if known is not None:  # equal in all that the plan depends on, and perhaps made of other objects
            step = known.step
            step.bind(model, guard.places())
        else:
            beside = partial(self.beside.forward_begins, planned.taken_bytes)
            is_twice = planned.is_trained and not self._must_plan
            step = planned.step.bound_to(
                model,
                places=guard.places(),
                consumer=self.planner.iteration if planned.is_trained else None,
                beside=beside,
                again=self._differentiable(planned, model) if is_twice else None,
            )
        others = [b for b in self.bound if b is not known and any(b.planned is p for p in self.planned)]
        self.bound = [*others, _Bound(planned, guard, step)]
        return step

    def _improved(self, bound: _Bound, model: nn.Module) -> StraightStep:
        """The step of this call: by a better plan from now on, if one was found since the last.

        It is taken over between two iterations alone: while a forward or backward of the model is under way,
        in any thread, or a backward can still come, the step stays as it is.
        """
        planned, improver = bound.planned, bound.planned.improver
        assert improver is not None, "somebody looks for a better plan"
        improver.calls += 1
        if not improver.is_done or not waiting_of(model).are_done:
            return bound.step
        better = planned.improved()
        step = bound.step
        if better.step is not planned.step:
            step = self._bind(better, bound.guard, model)
            _LOGGER.info(
                "iteration %d: a plan at %.2f in place of %.2f of eager's time",
                improver.calls,
                better.step.plan.time_ratio,
                planned.step.plan.time_ratio,
            )
        self.planned = [better if each is planned else each for each in self.planned]
        self.smaller = [(kind, better if each is planned else each) for kind, each in self.smaller]
        self.twice = [better if each is planned else each for each in self.twice]
        others = [each for each in self.bound if each.planned is not planned and each.planned is not better]
        self.bound = [*others, _Bound(better, bound.guard, step)]
        return step

    def _differentiable(self, planned: Planned, model: nn.Module) -> "Differentiable":
        """How this step is run if second derivatives are asked for."""
        from stowplan.run.second_derivatives import Differentiable, drawing_devices, second_bytes

        of, needed_bytes = ref(model), second_bytes(planned.step.captured)

        def living() -> nn.Module:
            found = of()
            assert found is not None, "its gradients are asked for"
            return found

        def seen() -> None:
            self.twice = [*(each for each in self.twice if each is not planned), planned]
            name = model_class(living()).__name__
            if self.otherwise is not None:
                self.otherwise(
                    BadUse(
                        "create_graph=True asks for second derivatives, and a plan has none; without a plan"
                        f" they take up to {format_bytes(needed_bytes)}. Where this first loss also uses the"
                        " results themselves, its gradients are eager's within rounding"
                    )
                )
                return
            self.planner.say_once(
                f"create_graph=True asks for second derivatives of {name}, and a plan has none: calls like"
                " this one run the model as it is from now on, which fits the budget. Where this first loss"
                " also uses the results themselves, its gradients are eager's within rounding"
            )

        return Differentiable(
            planned.step.captured,
            of,
            planned.kind.casts,
            self.allowed_bytes if self.otherwise is None else max(self.allowed_bytes, needed_bytes),
            needed_bytes,
            drawing_devices(planned.step.captured),
            lambda args, kwargs: self.as_it_is(living(), args, kwargs),
            lambda leaves: self._is_program_of(planned, living(), list(leaves)),
            seen,
        )


def _autocast_of(kind: KindOfCall) -> str:
    casts = " and ".join(f'torch.autocast("{device}", {dtype})' for device, dtype in kind.casts)
    return f"inside {casts}" if casts else "outside of autocast"


def _numbers_apart(one: KindOfCall, other: KindOfCall) -> frozenset[int]:
    """The places of the numbers that two kinds of call differ in; empty if they also differ elsewhere."""
    if one._replace(looks=()) != other._replace(looks=()) or len(one.looks) != len(other.looks):
        return frozenset()
    pairs = list(enumerate(zip(one.looks, other.looks, strict=True)))
    apart = [(place, looks) for place, looks in pairs if looks[0] != looks[1]]
    if not all(_is_number(look) for _, looks in apart for look in looks):
        return frozenset()
    return frozenset(place for place, _ in apart)


def _is_number(look: object) -> bool:
    """Whether this is how `look_of` describes a Python number; True and False are flags."""
    if not isinstance(look, tuple) or isinstance(look, TensorLook):
        return False
    kind = look[0]
    return isinstance(kind, type) and issubclass(kind, (int, float, complex)) and kind is not bool


def _read_by(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[object]:
    """What a call is given and the tensors of the model, looked up only if somebody asks."""
    yield from flatten(args, kwargs)[0]
    yield from chain(model.parameters(), model.buffers())


def _read_back(
    own_forward: Callable[..., Any] | None,
    how: tuple[Any, ...],
    beside: tuple[str, int],
    reserve_bytes: int,
    keep_plans: int,
    trains: bool,
) -> Fitting:
    planner, watch = CallPlanner(*how), BesideWatch(*beside)
    return Fitting(
        own_forward, planner, watch, reserve_bytes=reserve_bytes, keep_plans=keep_plans, trains=trains
    )


@dataclass(frozen=True, slots=True)
class _AsItIs:
    """A call that runs as it is, because of what a larger one has shown. The first of a kind is watched."""

    fitting: Fitting
    model: nn.Module
    larger: Planned
    watched_as: KindOfCall | None = None
    alike: tuple[Planned, ...] = ()  # of which one may have shown it, if the larger has not

    def __call__(self, *args: object, **kwargs: object) -> object:
        given = [leaf for leaf in flatten(args, kwargs)[0] if isinstance(leaf, Tensor)]
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        there = opened(chain(self.model.parameters(), self.model.buffers(), given))
        self.fitting.beside.forward_begins(self.larger.step.plan.plain_peak_bytes, trained, there)
        if self.watched_as is None:
            return self.fitting.as_it_is(self.model, args, kwargs)
        steps = self.larger, *self.alike
        return self.fitting.watched_as_it_is(self.watched_as, steps, self.model, args, kwargs)


class _Unplanned:
    """No plan applies to a call."""


@contextmanager
def _planning_here() -> Iterator[None]:
    """Within, and in this thread, fitted modules inside the model run as they are."""
    was, _HERE.is_planning = getattr(_HERE, "is_planning", False), True
    try:
        yield
    finally:
        _HERE.is_planning = was


@contextmanager
def _told_as_new(leaves: Sequence[object], change: str | None, *, is_new: bool) -> Iterator[None]:
    """A refusal in the middle of training says what was unlike before: the call, or the program."""
    try:
        yield
    except StowplanError as refusal:
        if change is not None:
            refusal.add_note(f"The step was planned again because {change}.")
        elif is_new:
            tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
            shapes = ", ".join("x".join(map(str, leaf.shape)) or "scalar" for leaf in tensors)
            refusal.add_note(
                f"No call like this was planned before: tensors of {shapes}. A new shape, dtype or mode is"
                " planned when it comes; pad to shapes that fit, or call fit with the largest first."
            )
        raise


def wants_gradient(model: nn.Module, leaves: Sequence[object]) -> bool:
    """Whether a parameter or an argument requires a gradient."""
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return any(tensor.requires_grad for tensor in chain(model.parameters(), tensors))
