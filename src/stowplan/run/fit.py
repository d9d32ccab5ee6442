"""`fit`: a module that trains like the one it was made of, within a budget in bytes.

The returned object is a shallow copy of the model under a subclass of its class: it has the same parameters,
buffers, submodules and state_dict, and differs in `forward` alone. For every new kind of call (shapes,
dtypes) and for every change of the program (an attribute, a module, a mode) the step is captured, priced and
planned once; after that the plan's own code runs, as long as its guard holds.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from threading import RLock
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from stowplan.capture import Captured, Program, Ref, capture
from stowplan.capture.arguments import Spec, flatten, look_of
from stowplan.capture.layouts import has_learned
from stowplan.capture.recording import Loss, after_loss, output_keys
from stowplan.errors import BadUse, BudgetTooSmall, CaptureError, StowplanError
from stowplan.ir import Kind
from stowplan.plan.options import DEFAULT_OPTIONS, ON_REQUEST, TECHNIQUES, PlanOptions, Prefer, Progress
from stowplan.plan.plan import AgainstEager, Plan, Verdict
from stowplan.plan.progress import showing_progress
from stowplan.plan.technique import Socket
from stowplan.plan.watch import tell_phase
from stowplan.run.border.dependencies import Dependencies, Observation, Place, sharing_of
from stowplan.run.border.guard import Guard
from stowplan.run.measure.agreement import Relaid, compared, written_tensors
from stowplan.run.planning.plan_cache import USER_PLANS, PlanCache, saved_step
from stowplan.run.planning.subject import PlannedStep, Subject
from stowplan.run.stand_in import fitted_class, seen_as, with_forward
from stowplan.run.step.straight import StraightStep
from stowplan.run.wrappers import (
    leave_checkpointing_off,
    refuse_shards,
    refuse_wrapped,
    switch_checkpointing_off,
)
from stowplan.torch_private import checkpoints_as_calls, storage_id
from stowplan.units import parse_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stowplan.run.iteration.iteration import Iteration
    from stowplan.run.planning.sizes import PlannedSizes
    from stowplan.run.shapes import DeclaredShapes, Shapes

Model = TypeVar("Model", bound=nn.Module)

_LOGGER = logging.getLogger("stowplan")


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """What a step on a mesh is planned for: a budget for each worker, of which a reserve stays free.

    `layouts` says whether stages may be cut otherwise than the inputs.
    """

    mesh: object
    budget_bytes: int
    reserve_bytes: int
    options: PlanOptions
    dims: Mapping[str, Sequence[int | None]] | None = None
    layouts: str = "follow"


MESHES: Socket[Callable[[nn.Module, tuple[object, ...], dict[str, object], ShardRequest], nn.Module]] = (
    Socket("run", "mesh")
)
"""How `fit` runs on several workers."""

_FITTED_CLASSES: dict[type, type] = {}
_SLOW = 3.0  # times of eager from which on a plan is a warning
_MOST_ANSWERS = 16  # different values that forward may read off arguments of one kind
_MOST_SMALLER = 512  # kinds of calls that run as they are
_MOST_REFUSED = 64  # kinds of calls of one module; the oldest makes room
_COMPARED_SIZES = 3  # carried plans of one module that are compared with eager
_MOST_LAYOUTS = 64  # that one step has wrong at first


def fit(
    model: Model,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    budget: int | str,
    mesh: object = None,
    dims: Mapping[str, Sequence[int | None]] | None = None,
    layouts: str = "follow",
    reserve: int | str = 0,
    allow: Iterable[str] = TECHNIQUES,
    prefer: str = Prefer.EXACTNESS,
    plan: Plan | None = None,
    loss: Loss | None = None,
    outputs: str = "loss",
    progress: Progress | None = None,
    moves: int | None = None,
    gap: float = DEFAULT_OPTIONS.gap,
    time_limit: float | None = None,
    optimizer: "Optimizer | None" = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    keep_gradients: bool | Iterable[str] = False,
    shapes: "Shapes | None" = None,
    keep_plans: int = 128,
) -> Model:
    """Plan the training step of `model(*args, **kwargs)` so that it stays within `budget` bytes.

    Returns a module with the same parameters, buffers and `state_dict` that runs the plan. Raises
    `BudgetTooSmall`, with the smallest budget, before anything runs.

    `budget` counts everything alive on the device during forward and backward: parameters, buffers, inputs,
    gradients, activations and temporaries. "auto" is the memory that the device has free, minus a tenth, plus
    the bytes of the model and the arguments. `reserve` is the part of the budget to leave free for optimizer
    state, gradients of earlier steps, and the buckets and shards of wrappers. Wrap the result:
    `DistributedDataParallel(fit(...))`, `fully_shard(fit(...))`.

    `allow` names the techniques that the plan may use. Recomputation leaves every gradient bitwise equal.
    Tiles add in another order, so gradients are then equal within rounding. By default tiles are used only if
    nothing else fits, and with `prefer="time"` wherever they are faster; `plans_of(fitted)[0].exactness` says
    which. The search ends when the time of its plan is at most a share of `gap` above the lower bound. After
    `time_limit` seconds it ends with the best plan so far, which then says so; `moves` limits it in a way
    that does not depend on the machine. Planning that takes more than two seconds shows a progress bar on a
    terminal, and elsewhere logs lines under "stowplan" at level INFO. `progress` is called with the number of
    probed ops and their total.

    `loss` says what is differentiated. The name or index of an output means this output; the module still
    returns all of them. A function of the model's output becomes part of the plan, and the module returns
    the function's result. Without `loss`, a model that returns one scalar returns its loss in it. The plan
    computes gradients for the loss alone and refuses those for other outputs; `outputs="all"` plans for
    gradients of all outputs.

    With an `optimizer`, which has the parameters of the model, the budget is for the whole iteration: it also
    counts the optimizer's state and the temporaries of its step. Each parameter is updated in backward as
    soon as its gradient is final and nothing needs the parameter, and the gradient ends there; the parameters
    and the state are those of the usual loop to the bit. Keep that loop: `loss.backward()`,
    `optimizer.step()`, `optimizer.zero_grad()`. `clip_norm` clips as `clip_grad_norm_` before the step: all
    gradients stay until then or, if they do not fit, forward and backward are run twice. `clip_value` clips
    as `clip_grad_value_`, each gradient when it is consumed. `accumulate` is the number of backwards before
    each step. `keep_gradients` names parameters whose gradients stay, or is True for all; other gradients are
    None after backward. With "offload" in `allow`, state that does not fit the budget waits on disk, or in
    the host's memory for an accelerator, and is loaded for the update of its parameter.

    Calls of other shapes are planned when they come. A call that is no larger than one that fits without a
    plan runs as it is. Otherwise the decisions of the nearest planned shape are carried over if the result is
    within 3 % of the lower bound, beyond the gap of that plan; if not, the shape is searched. A carried plan
    is compared with eager at the first few shapes alone, and says so. `keep_plans` limits the number of plans
    that are kept; the one unused for longest makes room. A shape that was refused is refused again at once.

    `shapes={"input_ids": {1: (16, 2048)}}` declares which dims of which arguments vary, and how far. Dims
    with the same range are one size; a `torch.export.Dim` may stand for a range. The largest shapes are
    planned first, and refused here if they do not fit. `shape_costs(fitted)` shows what the shapes between
    cost, and `scan(loader, fitted)` finds the batches of a data loader that do not fit.

    Plans are cached in the user's cache folder for the same step, budget and machine, except plans that
    offload. A saved `plan` is used instead of a new one; it is refused if it is for another step.

    With a `mesh` of workers ("data=2,space=2x2", or a DeviceMesh with named dims) all its processes make the
    same call with whole arguments, which may be on the meta device. The budget is that of each worker. Call
    the result with a worker's part of the arguments, `shards_of(fitted).share(*args)`. The names of the axes
    say which dims they cut, or `dims` says it for each input. `layouts="choose"` may cut stages of a
    convolutional net in another way than its inputs. `mesh=4` chooses the fastest division over 4 workers
    that fits the budget on each; `choices_of(fitted)` lists the options.
    """
    _refuse_misuse(model, args)
    _refuse_loss(loss, outputs)
    refuse_wrapped(model)
    options = PlanOptions(tuple(allow), prefer, moves, progress, time_limit, gap)
    iteration = None
    if optimizer is not None:
        _refuse_iteration(options, clip_norm, clip_value, accumulate, keep_gradients)
        from stowplan.run.iteration.iteration import Iteration  # most fits have no optimizer

        iteration = Iteration(
            optimizer,
            clip_norm=clip_norm,
            clip_value=clip_value,
            accumulate=accumulate,
            keep_gradients=keep_gradients,
            offloads="offload" in options.allow,
        )
        options = replace(options, allow=("recompute",) if "recompute" in options.allow else ())
    elif (clip_norm, clip_value, accumulate, keep_gradients) != (None, None, 1, False):
        raise BadUse(
            "clip_norm, clip_value, accumulate and keep_gradients are of an iteration; give optimizer= too"
        )
    if shapes is not None and (mesh is not None or plan is not None):
        raise BadUse("shapes are for one process, and for plans that fit makes; leave out mesh= and plan=")
    if mesh is not None:
        _refuse_on_mesh(budget, plan, options, iteration)
        if loss is not None or outputs != "loss":
            raise BadUse("loss and outputs are not offered with a mesh: there the model returns its loss")
        request = ShardRequest(mesh, parse_bytes(budget), parse_bytes(reserve), options, dims, layouts)
        return cast(Model, MESHES.of("mesh")(model, tuple(args), dict(kwargs or {}), request))
    if dims is not None or layouts != "follow":
        raise BadUse("dims and layouts are of a step on a mesh, and there is no mesh; give mesh= as well")
    if budget == "auto":
        from stowplan.run.auto_budget import automatic_budget

        budget = automatic_budget(model, (args, dict(kwargs or {})))
    whole = parse_bytes(budget)
    beside = parse_bytes(reserve)
    fitting = Fitting(_own_forward(model), whole - beside, options)
    fitting.given, fitting.reserve_bytes = plan, beside
    fitting.keep_plans = _at_least_one(keep_plans)
    fitting.loss, fitting.all_outputs = loss, outputs == "all"
    fitted: Model = seen_as(_fitted_class(_model_class(model)), model)
    fitted.__dict__.pop("forward", None)
    fitted.__dict__["_fitting"] = fitting
    if iteration is not None:
        iteration.belongs_to(fitted)
        fitting.iteration = iteration
    switch_checkpointing_off(model)
    leave_checkpointing_off(fitted)
    with torch.enable_grad():
        if shapes is not None:
            fitting.declare(fitted, tuple(args), dict(kwargs or {}), shapes)
        if fitting.step_for(fitted, tuple(args), dict(kwargs or {})) is None:
            raise BadUse(
                "nothing wants a gradient: no parameter and no argument has requires_grad, so there is no"
                " training step to plan"
            )
    return fitted


def plans_of(fitted: nn.Module) -> tuple[Plan, ...]:
    """The plans that a fitted module has made so far, in the order of their first calls."""
    fitting = fitted.__dict__.get("_fitting")
    if fitting is None:
        raise BadUse(
            f"{type(fitted).__name__} has no plans: they are of what fit returns, not of what it takes"
        )
    plans: tuple[Plan, ...] = fitting.plans
    return plans


class _Fitted(nn.Module):
    """What a fitted module adds to its class: another way to run `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fitting: Fitting = self.__dict__["_fitting"]
        return fitting.run(self, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class is made here, so it is found again by the class that it was made of."""
        if type(self) is not _fitted_class(_model_class(self)):
            return super().__reduce_ex__(protocol)
        return _blank, (_model_class(self),), vars(self)


def _fitted_class(kind: type[nn.Module]) -> type:
    """One class for each class of model."""
    if kind not in _FITTED_CLASSES:
        _FITTED_CLASSES[kind] = fitted_class(kind, _Fitted)
    return _FITTED_CLASSES[kind]


def _blank(kind: type[nn.Module]) -> object:
    """A fitted module of this class, to be filled with what a copy or a file holds."""
    made: object = object.__new__(_fitted_class(kind))
    return made


def _model_class(model: nn.Module) -> type[nn.Module]:
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
        lists: dict[str, Any] = {"bound": [], "refused": [], "priced": [], "smaller": [], "said": set()}
        none: dict[str, Any] = {"iteration": None, "sizes": None, "latest": None}
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
        return partial(self.own_forward or _model_class(model).forward, model)

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
                    answers += guard.other_answer is not None
            if answers >= _MOST_ANSWERS:
                raise CaptureError(
                    f"{change}, and it has read {answers} other values there: each needs a plan of its own",
                    advice="pad or bucket the argument that it reads from, compute the value outside forward"
                    ' and pass it as a number, or use torch.compile(model, backend="stowplan")',
                )
            self._refuse_again(kind, model, leaves)
            larger = self._larger_in_eager(kind, model, leaves) if may_run_as_it_is else None
            if larger is not None:
                return _AsItIs(self, model, larger, watched_as=kind)
            if change is not None:
                _LOGGER.warning("planning %s again: %s", _model_class(model).__name__, change)
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
        if self.iteration is not None or not any(planned.fits_in_eager for planned in self.planned):
            return None
        from stowplan.run.smaller import CallSizes  # most modules are called with one shape

        sizes = CallSizes.of(kind)
        for planned in reversed(self.planned):
            larger = CallSizes.of(planned.kind) if planned.fits_in_eager else None
            if sizes and larger and sizes.is_within(larger) and self._is_program_of(planned, model, leaves):
                return planned
        return None

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

        plain = with_forward(model, self.own_forward or _model_class(model).forward)
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
        with showing_progress(f"planning {_model_class(model).__name__}", allowed_bytes=self.allowed_bytes):
            return self._capture_and_plan(kind, model, args, kwargs)

    def _capture_and_plan(
        self, kind: KindOfCall, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Planned:
        begun = time.perf_counter()
        plain = with_forward(model, self.own_forward or _model_class(model).forward)
        observation = Observation(plain, self.loss)
        tell_phase("capturing")
        with observation.watching():
            captured = capture(
                plain, args, kwargs, loss=self.loss, all_outputs=self.all_outputs, know_values=True
            )
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
        if not found.is_carried:
            self.priced.append(found)
        name, seconds = _model_class(model).__name__, time.perf_counter() - begun
        slow = "; a larger budget costs less time: `stowplan plan TARGET --frontier` shows all"
        is_slow = plan.time_ratio > _SLOW
        level = logging.WARNING if is_slow else logging.INFO
        how = "carried a plan over for" if found.is_carried else "planned"
        _LOGGER.log(level, "%s %s: %r, in %.1f s%s", how, name, plan, seconds, slow if is_slow else "")
        return Planned(kind, replace(found, plan=plan), dependencies)

    def _planned_step(self, subject: Subject, allowed_bytes: int) -> PlannedStep:
        if self.given is not None and not self.planned:
            return saved_step(self.given, subject, allowed_bytes)
        carried = self._carried_step(subject, allowed_bytes)
        return carried or self.cache.step_for(subject, allowed_bytes, self.options)

    def _carried_step(self, subject: Subject, allowed_bytes: int) -> PlannedStep | None:
        """The step with a plan of another size of the same program, if there is one that is good enough."""
        if not self.priced and self.sizes is None:
            return None
        from stowplan.run.planning.sizes import PlannedSizes  # most modules are called with one shape

        self.sizes = self.sizes or PlannedSizes()
        while self.priced:
            self.sizes.add(self.priced.pop(0))
        return self.sizes.step_for(subject, allowed_bytes, self.options)

    def _compared(self, found: PlannedStep, subject: Subject) -> Plan:
        """The plan and what is known of eager. Of carried plans, only the first few are compared.

        Ops that were seen to lay out their results otherwise than captured may do so at each size anew.
        """
        is_known = found.is_carried and self.compared_sizes >= _COMPARED_SIZES
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


def _at_least_one(keep_plans: object) -> int:
    if not isinstance(keep_plans, int) or keep_plans < 1:
        raise BadUse(f"keep_plans is {keep_plans!r}; it is a number of plans, at least 1")
    return keep_plans


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


def _own_forward(model: nn.Module) -> Callable[..., Any] | None:
    """The forward that was set on the model itself, as a function of the module."""
    own = vars(model).get("forward")
    if own is None:
        return None
    if isinstance(own, MethodType) and own.__self__ is model:
        return own.__func__
    raise BadUse(
        f"forward was set on the model itself, as a {type(own).__name__} that is not bound to it: a plan made"
        " of it would run another object's step. Fit the model before it is wrapped, or put the step into the"
        " class's forward"
    )


def _refuse_misuse(model: object, args: object) -> None:
    if not isinstance(model, nn.Module):
        raise BadUse(
            f"fit takes a torch.nn.Module, not a {type(model).__name__}: put the step into its forward"
        )
    if not isinstance(args, tuple | list):
        raise BadUse(f"args is a {type(args).__name__}; write fit(model, (x, y), budget=...) for model(x, y)")


def _refuse_loss(loss: object, outputs: str) -> None:
    if outputs not in ("loss", "all"):
        raise BadUse(f"outputs is {outputs!r}; it is 'loss' for the loss alone, or 'all'")
    if isinstance(loss, str | int) and outputs == "all":
        raise BadUse(f"loss={loss!r} plans for gradients of one output, and outputs='all' for all: give one")
    if not isinstance(loss, NoneType | str | int | FunctionType | BuiltinFunctionType | MethodDescriptorType):
        raise BadUse(
            f"loss is a {type(loss).__name__}; it is the name or index of an output, or a function of the"
            " model's output. Write a lambda around it, or put a loss with parameters into a module with the"
            " model"
        )


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


def _refuse_iteration(
    options: PlanOptions,
    clip_norm: float | None,
    clip_value: float | None,
    accumulate: int,
    keep_gradients: bool | Iterable[str],
) -> None:
    if "offload-gradients" in options.allow:
        raise BadUse("offload-gradients is not offered together with optimizer=")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise BadUse(f"accumulate is {accumulate!r}; it is a number of backwards, at least 1")
    if clip_norm is not None and not clip_norm > 0:
        raise BadUse(f"clip_norm is {clip_norm!r}; it is the largest norm that gradients may have, above 0")
    if clip_value is not None and not clip_value > 0:
        raise BadUse(f"clip_value is {clip_value!r}; it is the largest size of a gradient's element, above 0")
    if clip_norm is not None and clip_value is not None:
        raise BadUse("clip_norm and clip_value are both given; give one")
    if isinstance(keep_gradients, str):
        raise BadUse(f"keep_gradients is {keep_gradients!r}; it is True, or a list of names of parameters")


def _refuse_on_mesh(budget: int | str, plan: Plan | None, options: PlanOptions, iteration: object) -> None:
    if iteration is not None:
        raise BadUse("optimizer= is for one process; with a mesh, use reserve= for the optimizer's state")
    if budget == "auto":
        raise BadUse('budget="auto" is what is free here, and workers may share that: give each its bytes')
    if plan is not None:
        raise BadUse("a saved plan is of a step in one process; with a mesh, each worker makes its own")
    if options.seconds is not None:
        raise BadUse("time_limit is for one process: workers must end at the same plan; limit moves= instead")
    if moved := sorted(set(options.allow).intersection(ON_REQUEST)):
        raise BadUse(
            f"{moved[0]} is not available with a mesh: gradients that are being summed cannot be offloaded"
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
