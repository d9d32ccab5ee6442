"""Fitting: what a fitted module knows, and how a call finds its plan.

For every new kind of call (shapes, dtypes) and for every change of the program (an attribute, a module, a
mode) the step is captured, priced and planned once; after that the plan's own code runs, as long as its guard
holds.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from stowplan.capture import Captured, Program, Ref, capture, is_same_step
from stowplan.capture.arguments import Spec, flatten, look_of
from stowplan.capture.layouts import has_learned
from stowplan.capture.recording import Loss, after_loss, output_keys
from stowplan.errors import BadUse, BudgetTooSmall, CaptureError, StowplanError
from stowplan.ir import Kind
from stowplan.plan.options import Kernels, PlanOptions
from stowplan.plan.plan import AgainstEager, Plan, Verdict
from stowplan.plan.watch import showing_progress, tell_phase
from stowplan.run.border.dependencies import (
    Dependencies,
    Observation,
    Place,
    collecting_hooks_removed,
    sharing_of,
)
from stowplan.run.border.guard import Guard
from stowplan.run.measure.agreement import Relaid, compared, written_tensors
from stowplan.run.planning.plan_cache import USER_PLANS, PlanCache, saved_step
from stowplan.run.planning.subject import PlannedStep, Subject
from stowplan.run.step.straight import StraightStep
from stowplan.run.wrappers import (
    fitted_class,
    refuse_shards,
    with_forward,
)
from stowplan.torch_private import checkpoints_as_calls, storage_id

if TYPE_CHECKING:
    from stowplan.run.iteration.iteration import Iteration
    from stowplan.run.planning.sizes import PlannedSizes
    from stowplan.run.shapes import DeclaredShapes, Shapes

_LOGGER = logging.getLogger("stowplan")

_FITTED_CLASSES: dict[type, type] = {}
_SLOW = 3.0  # times of eager from which on a plan is a warning
_MOST_ANSWERS = 16  # different values that forward may read off arguments of one kind
_ROOM = 0.97  # of the elements that seem to fit without a plan, so that they do
_MOST_SMALLER = 512  # kinds of calls that run as they are
_MOST_REFUSED = 64  # kinds of calls of one module; the oldest makes room
_COMPARED_SIZES = 3  # carried plans of one module that are compared with eager
_MOST_LAYOUTS = 64  # that one step has wrong at first


class _Fitted(nn.Module):
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
    if kind not in _FITTED_CLASSES:
        _FITTED_CLASSES[kind] = fitted_class(kind, _Fitted)
    return _FITTED_CLASSES[kind]


def _blank(kind: type[nn.Module]) -> object:
    """A fitted module of this class, to be filled with what a copy or a file holds."""
    made: object = object.__new__(fitted_class_of(kind))
    return made


def model_class(model: nn.Module) -> type[nn.Module]:
    """The class of the model itself, fitted or not, also under a wrapper's class such as FSDP's."""
    fitted = (kind.__bases__[1] for kind in type(model).__mro__ if _Fitted in kind.__bases__)
    return next(fitted, type(model))


class KindOfCall(NamedTuple):
    """The looks and structure of the leaves of a call, which of them share memory, and what autocast does."""

    looks: tuple[object, ...]
    spec: str
    shared: tuple[Place, ...]
    casts: tuple[tuple[str, torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned step, the kind of call it is for, and everything else that it depends on."""

    kind: KindOfCall
    step: PlannedStep
    dependencies: Dependencies

    @property
    def fits_in_eager(self) -> bool:
        """Whether the model may run as it is.

        That is known if eager was seen to run the captured ops, and if these do not depend on values.
        """
        plan = self.step.plan
        if self.dependencies.answers.steps:
            return False
        known = plan.against_eager is not None and plan.against_eager.verdict is Verdict.SAME
        return known and not plan.is_tiled and plan.plain_peak_bytes <= plan.allowed_bytes


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
    allowed_bytes: int
    options: PlanOptions
    planned: list[Planned] = field(default_factory=list)
    bound: list[_Bound] = field(default_factory=list)  # the latest last
    given: Plan | None = None  # a saved plan, for the first kind of call
    reserve_bytes: int = 0  # of the budget, beside what is allowed
    loss: Loss | None = None
    all_outputs: bool = False  # gradients may come in for all, not for the loss alone
    iteration: "Iteration | None" = None  # the optimizer that the plans update with
    cache: PlanCache = USER_PLANS
    keep_plans: int = 128
    priced: list[PlannedStep] = field(default_factory=list)  # steps that further sizes can take over from
    sizes: "PlannedSizes | None" = None  # the same, once there are further sizes
    shapes: "DeclaredShapes | None" = None
    largest: Planned | None = None  # of the declared shapes
    enlarged: set[tuple[int, ...]] = field(default_factory=set)  # sizes that were planned for smaller calls
    compared_sizes: int = 0  # carried plans that were compared with eager
    smaller: list[tuple[KindOfCall, Planned]] = field(default_factory=list)  # than a step that fits in eager
    refused: list[_Refused] = field(default_factory=list)
    latest: Dependencies | None = None  # of the last capture
    said: set[str] = field(default_factory=set)
    lock: AbstractContextManager[object] = field(default_factory=RLock)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans made so far."""
        return tuple(planned.step.plan for planned in self.planned)

    def __deepcopy__(self, _: dict[int, Any]) -> "Fitting":
        """For a copy of the model: the same plans, bound to it when it is called.

        An optimizer is not that of the copy, so plans that update with it are not either.
        """
        planned = [] if self.iteration else list(self.planned)
        lists: dict[str, Any] = {
            "bound": [],
            "refused": [],
            "priced": [],
            "smaller": [],
            "said": set(),
            "enlarged": set(),
        }
        none: dict[str, Any] = {"iteration": None, "sizes": None, "latest": None, "largest": None}
        return replace(self, planned=planned, lock=RLock(), **lists, **none)

    def __reduce__(self) -> Any:
        """For a file or another process: how to plan. What was planned is planned there when it is called."""
        how = (self.own_forward, self.allowed_bytes, replace(self.options, progress=None))
        more = {name: getattr(self, name) for name in ("reserve_bytes", "loss", "all_outputs", "keep_plans")}
        return Fitting, how, (None, more)

    def run(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Call the model: by a plan if a gradient is wanted, and as it is if not."""
        if self.iteration:
            self.iteration.refuse_between()
        if not torch.is_grad_enabled():
            return self._eager(model, args, kwargs)
        step = self.step_for(model, args, kwargs)
        if self.iteration:
            self.iteration.forward_begins()
        if step is None:
            self._say_once("nothing wants a gradient: the model is run as it is, without a plan")
            return self._eager(model, args, kwargs)
        return step(*args, **kwargs)

    def _eager(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        return after_loss(self.eager_forward(model)(*args, **kwargs), self.loss)

    def eager_forward(self, model: nn.Module) -> Callable[..., Any]:
        """The model's own forward, bound to it."""
        return partial(self.own_forward or model_class(model).forward, model)

    def step_for(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        may_run_as_it_is: bool = True,
    ) -> "StraightStep | _AsItIs | None":
        """The step for this call, planned if none applies to it; None if nothing wants a gradient."""
        with self.lock:
            leaves, spec = flatten(args, kwargs)
            kind = kind_of_call(leaves, spec)
            for place in range(len(self.bound) - 1, -1, -1):
                bound = self.bound[place]
                if bound.planned.kind == kind and bound.guard.is_untouched(leaves):
                    self.bound.append(self.bound.pop(place))  # the one unused for longest comes first
                    return bound.step
            if not _wants_gradient(model, leaves):
                return None
            larger = self._smaller_than(kind, model, leaves)
            if larger is not None:
                return _AsItIs(self, model, larger)
            change, answers = None, 0
            for planned in reversed(self.planned):
                if planned.kind == kind:
                    guard = Guard(planned.dependencies, model)
                    found = guard.change(leaves)
                    if found is None:
                        return self._bind(planned, guard, model)
                    change = change or found
                    answers += guard.other_answer is not None and not planned.dependencies.answers.draws
            if answers >= _MOST_ANSWERS:
                raise CaptureError(
                    f"{change}, and it has read {answers} other values there: each needs a plan of its own",
                    advice="pad or bucket the argument that it reads from, compute the value outside forward"
                    ' and pass it as a number, or use torch.compile(model, backend="stowplan")',
                )
            self._refuse_again(kind, model, leaves)
            if may_run_as_it_is:
                larger = self._larger_in_eager(kind, model, leaves) or self._enlarged(kind, model, leaves)
            if larger is not None:
                return _AsItIs(self, model, larger, watched_as=kind)
            if change is not None:
                _LOGGER.warning("planning %s again: %s", model_class(model).__name__, change)
            planned = self._planned_or_refused(kind, model, args, kwargs, change)
            self._make_room()
            self.planned.append(planned)
            guard = Guard(planned.dependencies, model)
            change = guard.change(leaves)
            assert change is None, change
            return self._bind(planned, guard, model)

    def _planned_or_refused(
        self,
        kind: KindOfCall,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        change: str | None,
    ) -> Planned:
        """Plan; a budget that is too small is remembered."""
        self.latest = None
        leaves = flatten(args, kwargs)[0]
        try:
            with (
                _told_as_new(leaves, change, is_new=bool(self.planned)),
                _beside(self.reserve_bytes, "the reserve"),
            ):
                return self._plan(kind, model, args, kwargs)
        except BudgetTooSmall as refusal:
            if self.latest is not None:
                known = _Refused(kind, self.latest, refusal.again())
                self.refused = [*self.refused, known][-_MOST_REFUSED:]
            raise

    def _refuse_again(self, kind: KindOfCall, model: nn.Module, leaves: list[object]) -> None:
        for known in self.refused:
            if known.kind == kind and Guard(known.dependencies, model).change(leaves) is None:
                raise known.refusal.again()

    def _make_room(self) -> None:
        """Of the plans, the one unused for longest makes room for another."""
        while len(self.planned) >= self.keep_plans:
            used = [bound.planned for bound in self.bound]
            unused = [planned for planned in self.planned if not any(planned is p for p in used)]
            gone = (unused or used)[0]
            self.planned = [planned for planned in self.planned if planned is not gone]
            self.bound = [bound for bound in self.bound if bound.planned is not gone]
            self.smaller = [(kind, larger) for kind, larger in self.smaller if larger is not gone]

    @property
    def _must_plan(self) -> bool:
        """Whether no call may run as it is: the plan updates parameters, or has kernels that are faster."""
        return self.iteration is not None or self.options.kernels == Kernels.COMPILED

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

    def _larger_in_eager(self, kind: KindOfCall, model: nn.Module, leaves: list[object]) -> Planned | None:
        """A planned step that is no smaller and fits without its plan."""
        if self._must_plan or not any(planned.fits_in_eager for planned in self.planned):
            return None
        from stowplan.run.smaller import CallSizes  # most modules are called with one shape

        sizes = CallSizes.of(kind)
        for planned in reversed(self.planned):
            larger = CallSizes.of(planned.kind) if planned.fits_in_eager else None
            if sizes and larger and sizes.is_within(larger) and self._is_program_of(planned, model, leaves):
                return planned
        return None

    def _enlarged(self, kind: KindOfCall, model: nn.Module, leaves: list[object]) -> Planned | None:
        """The largest of the declared calls like this one that seems to fit without a plan, if it does.

        Activations are taken to grow at least in proportion to the elements of a call. What is found is
        planned like any call; the guess decides only which call that is.
        """
        if self.shapes is None or self.largest is None or self._must_plan:
            return None
        plan, sizes = self.largest.step.plan, self.shapes.sizes_of(leaves)
        held = (t.nbytes for t in model.parameters() if t.requires_grad)
        fixed = sum(t.nbytes for t in chain(model.parameters(), model.buffers())) + sum(held)
        share = (self.allowed_bytes - fixed) / max(1, plan.plain_peak_bytes - fixed)
        longer = self.shapes.enlarged(sizes, _ROOM * share) if sizes else None
        if longer is None or longer == sizes or longer in self.enlarged:
            return None
        self.enlarged.add(longer)
        try:
            self.step_for(model, *self.shapes.call(longer), may_run_as_it_is=False)
        except StowplanError:  # then the call itself is planned, or refused
            return None
        return self._larger_in_eager(kind, model, leaves)

    def as_it_is(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Call the model in eager, with gradients."""
        with checkpoints_as_calls():
            return self._eager(model, args, kwargs)

    def watched_as_it_is(
        self,
        kind: KindOfCall,
        larger: Planned,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """The same, watched; by a plan after all if it turns out to be another program."""
        from stowplan.run.smaller import Unlike, watched

        captured, given = larger.step.captured, flatten(args, kwargs)[0]
        written = written_tensors(captured.program, [model], given)
        devices = {tensor.device.type for tensor in model.parameters()}
        try:
            result = watched(lambda: self.as_it_is(model, args, kwargs), captured.forward, written, devices)
        except Unlike:
            step = self.step_for(model, args, kwargs, may_run_as_it_is=False)
            assert step is not None, "a gradient was wanted when the step was looked for"
            return step(*args, **kwargs)
        self.smaller = [(kind, larger), *self.smaller][:_MOST_SMALLER]
        return result

    def declare(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], shapes: "Shapes"
    ) -> None:
        """Plan the largest of the declared shapes; raises BudgetTooSmall if they do not fit."""
        from stowplan.run.shapes import DeclaredShapes

        plain = with_forward(model, self.own_forward or model_class(model).forward)
        self.shapes = DeclaredShapes.of(plain, args, kwargs, shapes)
        try:
            self.step_for(model, *self.shapes.call(self.shapes.largest))
            self.largest = self.planned[-1] if self.planned else None
        except BudgetTooSmall as refusal:
            refusal.add_note(
                "These are the largest of the declared shapes; declare smaller ones, or a larger budget."
            )
            raise

    def foreseen(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Plan, bool] | None:
        """The plan for a call, or that of a larger one if the call runs as it is, and which of the two.

        None if nothing wants a gradient; raises BudgetTooSmall if the call does not fit.
        """
        step = self.step_for(model, args, kwargs)
        if isinstance(step, _AsItIs):
            return step.larger.step.plan, True
        return next(((b.planned.step.plan, False) for b in self.bound if b.step is step), None)

    def _bind(self, planned: Planned, guard: Guard, model: nn.Module) -> StraightStep:
        known = next((bound for bound in self.bound if bound.planned is planned), None)
        if known is not None:  # equal in all that the plan depends on, and perhaps made of other objects
            step = known.step
            step.bind(model, guard.tensors())
        else:
            step = planned.step.bound_to(model, places=guard.tensors(), consumer=self.iteration)
        others = [b for b in self.bound if b is not known and any(b.planned is p for p in self.planned)]
        self.bound = [*others, _Bound(planned, guard, step)]
        return step

    def _plan(
        self, kind: KindOfCall, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Planned:
        """Capture and plan, again for each kernel that turns out to lay out its result otherwise."""
        for _ in range(_MOST_LAYOUTS):
            try:
                return self._plan_once(kind, model, args, kwargs)
            except Relaid as found:
                reason = found
        raise CaptureError(f"{reason}, and so do many others", advice="call contiguous() on its operands")

    def _plan_once(
        self, kind: KindOfCall, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Planned:
        refuse_shards(model)
        with showing_progress(f"planning {model_class(model).__name__}", allowed_bytes=self.allowed_bytes):
            return self._capture_and_plan(kind, model, args, kwargs)

    def _capture_and_plan(
        self, kind: KindOfCall, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Planned:
        plain = with_forward(model, self.own_forward or model_class(model).forward)
        with collecting_hooks_removed(plain):
            return self._plan_as_captured(kind, model, plain, args, kwargs)

    def _plan_as_captured(
        self,
        kind: KindOfCall,
        model: nn.Module,
        plain: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Planned:
        begun = time.perf_counter()
        tell_phase("capturing")
        observation, captured = self._observed(model, plain, args, kwargs)
        if self.loss is None:
            _refuse_given_back(captured)
        leaves = flatten(args, kwargs)[0]
        dependencies = self.latest = observation.dependencies(captured.program, leaves, captured.answers)
        subject = Subject(captured, plain, args, kwargs, loss=self.loss)
        beside = _constant_bytes(captured.program)
        with _beside(beside, "tensors that are attributes, globals or written out"):
            if self.iteration is None:
                found = self._planned_step(subject, self.allowed_bytes - beside)
            else:
                subject, found = self._planned_iteration(self.iteration, subject, model, beside)
        plan = self._compared(found, subject)
        if observation.writes:  # an eager forward that was stopped may have left others
            observation.writes.repeat({id(vars(plain)): vars(model)})
        if not found.is_carried:
            self.priced.append(found)
        name, seconds = model_class(model).__name__, time.perf_counter() - begun
        slow = "; a larger budget costs less time: `stowplan plan TARGET --frontier` shows all"
        is_slow = plan.time_ratio > _SLOW
        level = logging.WARNING if is_slow else logging.INFO
        how = "carried a plan over for" if found.is_carried else "planned"
        _LOGGER.log(level, "%s %s: %r, in %.1f s%s", how, name, plan, seconds, slow if is_slow else "")
        return Planned(kind, replace(found, plan=plan), dependencies)

    def _observed(
        self, model: nn.Module, plain: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Observation, Captured]:
        """The captured step, and what it depends on.

        Forward may write plain values if it finds them at the next call, leaves them so, and does the same.
        They are then written now, as its first call would.
        """
        how = partial(capture, plain, args, kwargs, loss=self.loss, all_outputs=self.all_outputs)
        first: Captured | None = None
        observation = Observation(plain, self.loss)
        try:
            with observation.watching():
                first = how(know_values=True)
            return observation, first
        except CaptureError as refusal:
            writes = observation.writes
            if first is None or writes is None:
                raise
            observation = Observation(plain, self.loss)
            with writes.kept():
                with observation.watching():
                    second = how(know_values=True)
                if not is_same_step(first, second):
                    raise refusal from None
        writes.repeat({id(vars(plain)): vars(model)})
        observation.note_writes(writes)
        return observation, second

    def _planned_step(self, subject: Subject, allowed_bytes: int) -> PlannedStep:
        if self.given is not None and not self.planned:
            return saved_step(self.given, subject, allowed_bytes)
        carried = self._carried_step(subject, allowed_bytes)
        return carried or self.cache.step_for(subject, allowed_bytes, self.options)

    def _carried_step(self, subject: Subject, allowed_bytes: int) -> PlannedStep | None:
        """The step with a plan of another size of the same program, if there is one that is good enough."""
        if (not self.priced and self.sizes is None) or self.options.kernels == Kernels.COMPILED:
            return None
        from stowplan.run.planning.sizes import PlannedSizes  # most modules are called with one shape

        self.sizes = self.sizes or PlannedSizes()
        while self.priced:
            self.sizes.add(self.priced.pop(0))
        return self.sizes.step_for(subject, allowed_bytes, self.options)

    def _compared(self, found: PlannedStep, subject: Subject) -> Plan:
        """The plan and what is known of eager. Of carried plans that recompute, the first few are compared.

        Ops that were seen to lay out their results otherwise than captured may do so at each size anew.
        """
        fits = (
            found.plan.plain_peak_bytes <= found.plan.allowed_bytes
        )  # then smaller calls may run as they are
        is_known = found.is_carried and not fits and self.compared_sizes >= _COMPARED_SIZES
        if is_known and not any(has_learned(event.target) for event in subject.captured.forward):
            note = (
                f"the decisions are carried over from another size of the same program; {self.compared_sizes}"
                " other sizes were compared with eager, and this one was not"
            )
            return replace(found.plan, against_eager=AgainstEager(Verdict.UNCHECKED, note))
        plan = compared(found.plan, subject)
        self.compared_sizes += found.is_carried
        return plan

    def _planned_iteration(
        self, iteration: "Iteration", subject: Subject, model: nn.Module, beside: int
    ) -> tuple[Subject, PlannedStep]:
        """The first variant that fits the budget. If none does, the smallest refusal is raised."""
        refusals = list[BudgetTooSmall]()
        for variant in iteration.variants(subject.captured, model):
            step = replace(subject, captured=iteration.planned(subject.captured, model, variant))
            try:
                found = self._planned_step(step, self.allowed_bytes - beside)
            except BudgetTooSmall as refusal:
                refusals.append(refusal)
                continue
            iteration.takes(variant, step.captured, model)
            if variant.two_backwards:
                self._say_once(
                    "gradients do not fit the budget until their norm is known: forward and backward are run"
                    " twice in each iteration, for the norm and for the updates"
                )
            return step, found
        raise min(refusals, key=lambda each: each.minimum_bytes) from None

    def _say_once(self, sentence: str) -> None:
        if sentence not in self.said:
            self.said.add(sentence)
            _LOGGER.warning(sentence)


@dataclass(frozen=True, slots=True)
class _AsItIs:
    """A call that runs as it is, for a larger one fits without its plan. The first of a kind is watched."""

    fitting: Fitting
    model: nn.Module
    larger: Planned
    watched_as: KindOfCall | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.watched_as is None:
            return self.fitting.as_it_is(self.model, args, kwargs)
        return self.fitting.watched_as_it_is(self.watched_as, self.larger, self.model, args, kwargs)


def _refuse_given_back(captured: Captured) -> None:
    """A parameter or input that is returned beside the loss: the caller may well want its gradient too."""
    program, graph, keys = captured.program, captured.graph, output_keys(captured.program.output_spec)
    loss = next(key for key, tangent in zip(keys, program.tangents, strict=True) if tangent is not None)
    for key, leaf, attached, tangent in zip(
        keys, program.outputs, program.attached, program.tangents, strict=True
    ):
        if isinstance(leaf, Ref) and attached and tangent is None:
            given = graph.tensors[graph.storage_of(leaf.tensor)]
            if given.kind in (Kind.PARAMETER, Kind.INPUT):
                raise BadUse(
                    f"output {key!r} is the {given.kind} {given.id!r} or a view of it, and requires a"
                    f' gradient like the loss, output {loss!r}; use fit(..., outputs="all") if you'
                    f" differentiate both, and fit(..., loss={loss!r}) if not"
                )


@contextmanager
def _beside(nbytes: int, what: str) -> Iterator[None]:
    """A refusal tells of the whole budget."""
    try:
        yield
    except BudgetTooSmall as refusal:
        raise refusal.beside(nbytes, what) from None


def _constant_bytes(program: Program) -> int:
    """What tensors take that a plan does not count: plain attributes, globals, numbers in the code."""
    storages = {storage_id(t.untyped_storage()): t.untyped_storage() for t in program.constants.values()}
    return sum(storage.nbytes() for storage in storages.values())


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


def kind_of_call(leaves: list[object], spec: Spec) -> KindOfCall:
    """Equal for calls that one captured step can serve, as far as the call itself tells."""
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)} | {"cpu"}
    casts = tuple((d, torch.get_autocast_dtype(d)) for d in sorted(devices) if torch.is_autocast_enabled(d))
    shared = sharing_of(leaf for leaf in leaves if isinstance(leaf, Tensor))
    return KindOfCall(tuple(map(look_of, leaves)), str(spec), shared, casts)


def _wants_gradient(model: nn.Module, leaves: Sequence[object]) -> bool:
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return any(tensor.requires_grad for tensor in chain(model.parameters(), tensors))
