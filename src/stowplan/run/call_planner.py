"""CallPlanner: from a call of a model to a planned step.

The step is captured, with what it depends on, priced and planned, and compared with one eager forward.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from stowplan.capture import Captured, Ref, capture, is_same_step
from stowplan.capture.layouts import has_learned
from stowplan.capture.recording import Loss, output_keys
from stowplan.capture.stand_ins import Spec, flatten, look_of, unlike_plain
from stowplan.errors import BadUse, BudgetTooSmall, CaptureError
from stowplan.ir import Kind
from stowplan.ir.graph import collector_paused
from stowplan.ops.table import shape_of
from stowplan.plan.draft import AgainstEager, Draft, Verdict
from stowplan.plan.options import USUAL_EXECUTION, PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.progress import showing_progress
from stowplan.run.beside import constants_by_device
from stowplan.run.border.draws import Draws, SomebodyDrew
from stowplan.run.border.guard import (
    Dependencies,
    Observation,
    Place,
    collecting_hooks_removed,
    sharing_of,
)
from stowplan.run.measure.agreement import RelaidResult, compared
from stowplan.run.planning.plan_cache import USER_PLANS, PlanCache
from stowplan.run.planning.planner import DraftedStep, PlannedStep, Subject, replayed_bytes
from stowplan.run.planning.road import draft_for
from stowplan.run.wrappers import refuse_shards, with_forward
from stowplan.torch_private import neighbours_set_aside, said_to_infer
from stowplan.watch import limited_to, tell_phase

if TYPE_CHECKING:
    from stowplan.run.planning.constraint import Constraint
    from stowplan.run.planning.improver import Improver
    from stowplan.run.planning.sizes import PlannedSizes
    from stowplan.techniques.iteration.run.iteration import RunningIteration
    from stowplan.techniques.iteration.run.planner import Variant

_LOGGER = logging.getLogger("stowplan")

_WAITED = (
    "wait=False is for plans that recompute, in one process that may have children; with an optimizer, a"
    ' budget for each device, offload, compiled kernels, an arena, held blocks or prefer="time" fit waits for'
    " the plan"
)
_SLOW = 3.0  # times of eager from which on a plan is a warning
_COMPARED_SIZES = 3  # carried plans of one module that are compared with eager
_MOST_LAYOUTS = 64  # that one step has wrong at first


class KindOfCall(NamedTuple):
    """The looks and structure of the leaves of a call, which of them share memory, and what autocast does.

    Unless it `records`, it is under torch.no_grad(), or it `infers`, under torch.inference_mode().
    """

    looks: tuple[object, ...]
    spec: str
    shared: tuple[Place, ...]
    casts: tuple[tuple[str, torch.dtype], ...]
    records: bool = True
    infers: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned step, the kind of call it is for, and everything else that it depends on."""

    kind: KindOfCall
    step: PlannedStep
    dependencies: Dependencies
    taken_bytes: int  # by the step, beside other things that are alive
    improver: "Improver | None" = None  # which looks for a better plan meanwhile

    def improved(self) -> "Planned":
        """The same step by the better plan, if one was found."""
        better, plan = self.improver.better() if self.improver else None, self.step.plan
        if better is None:
            return replace(self, improver=None)
        taken = self.taken_bytes - plan.projected_peak_bytes - replayed_bytes(plan)
        taken += better.projected_peak_bytes + replayed_bytes(better)
        return replace(self, step=replace(self.step, plan=better), taken_bytes=taken, improver=None)

    @property
    def is_trained(self) -> bool:
        """Whether it is differentiated; otherwise it is forward alone."""
        return self.step.captured.program.is_differentiated

    @property
    def fits_in_eager(self) -> bool:
        """Whether the model may run as it is.

        That is known if eager was seen to run the captured ops, and if these do not depend on values.
        """
        plan = self.step.plan
        known = plan.against_eager is not None and plan.against_eager.verdict is Verdict.SAME
        return known and self.can_be_followed and plan.plain_peak_bytes <= plan.allowed_bytes

    @property
    def fits_while_it_counts(self) -> bool:
        """Whether the model may run as it is where nothing is otherwise but the numbers of counters."""
        plan = self.step.plan
        known = plan.against_eager is not None and plan.against_eager.verdict is Verdict.SAME
        counts = bool(self.dependencies.answers.counters)
        return counts and known and plan.plain_peak_bytes <= plan.allowed_bytes

    @property
    def can_be_followed(self) -> bool:
        """Whether an eager run can be compared with the captured ops, at this size or a smaller one."""
        compared = self.step.plan.against_eager
        is_other = compared is not None and compared.verdict is Verdict.DIFFERS
        return not self.dependencies.answers.steps and not self.step.plan.is_tiled and not is_other


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call `forward(model, *args, **kwargs)` to be planned."""

    kind: KindOfCall
    model: nn.Module
    forward: Callable[..., Any]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]


@dataclass(slots=True)
class CallPlanner:
    """Plans the calls of one fitted module."""

    allowed_bytes: int
    options: PlanOptions
    loss: Loss | None = None
    all_outputs: bool = False  # gradients may come in for all, not for the loss alone
    iteration: "RunningIteration | None" = None  # the optimizer that the plans update with
    devices: "Constraint | None" = None  # a budget for each device; `allowed_bytes` is their sum
    cache: PlanCache = USER_PLANS
    priced: list[DraftedStep] = field(default_factory=list)  # steps that further sizes can take over from
    sizes: "PlannedSizes | None" = None  # the same, once there are further sizes
    compared_sizes: int = 0  # carried plans that were compared with eager
    latest: Dependencies | None = None  # of the last capture
    said: set[str] = field(default_factory=set)

    def for_a_copy(self) -> "CallPlanner":
        """For a copy of the model, whose optimizer is another one and whose steps are priced anew."""
        return replace(self, priced=[], sizes=None, iteration=None, latest=None, said=set())

    def for_evaluation(self, allowed_bytes: int) -> "CallPlanner":
        """For calls of the same model without gradients, within these bytes and however slow."""
        options = replace(self.options, execution=USUAL_EXECUTION, slowest=inf)
        return replace(
            self,
            allowed_bytes=allowed_bytes,
            options=options,
            iteration=None,
            priced=[],
            sizes=None,
            latest=None,
        )

    def plan(self, call: ModelCall, given: Plan | None = None) -> Planned:
        """Capture a call and plan it, again for each kernel that lays out its result otherwise.

        A plan that is `given` is used if it is one of this step.
        """
        refuse_shards(call.model)
        plain = with_forward(call.model, call.forward)
        with (
            showing_progress(f"planning {type(call.model).__name__}", allowed_bytes=self.allowed_bytes),
            collecting_hooks_removed(plain),
            neighbours_set_aside(),
            said_to_infer(call.kind.infers),
        ):
            for _ in range(_MOST_LAYOUTS):
                try:
                    return self._capture_and_plan(call, plain, given)
                except RelaidResult as found:
                    reason = found
        raise CaptureError(f"{reason}, and so do many others", advice="call contiguous() on its operands")

    def _capture_and_plan(self, call: ModelCall, plain: nn.Module, given: Plan | None) -> Planned:
        model, args, kwargs = call.model, call.args, call.kwargs
        begun = time.perf_counter()
        tell_phase("capturing ops")
        observation, captured = self._observed(model, plain, args, kwargs, call.kind.records)
        if self.loss is None and captured.program.is_differentiated:
            _refuse_given_back(captured)
            if not self.all_outputs and not _has_a_loss(captured):
                self.say_once(
                    f"{type(model).__name__} returns no loss, one number alone or beside other tensors: the"
                    " plan takes a gradient for each output, and what the loss takes comes on top of the"
                    " budget. Give fit loss=, a function of the output or the name of one, or"
                    ' outputs="all" if this is meant'
                )
        leaves = flatten(args, kwargs)[0]
        dependencies = self.latest = observation.dependencies(captured.program, leaves, captured.answers)
        subject = Subject(captured, plain, args, kwargs, loss=self.loss)
        constants = sum(constants_by_device(captured).values())
        beside = 0 if self.devices else constants  # devices count them each
        with (
            limited_to(self.options.search.time_limit),
            refused_beside(beside, "tensors that are attributes, globals or written out, and workspaces"),
        ):
            plans = partial(
                draft_for,
                allowed_bytes=self.allowed_bytes - beside,
                options=self.options,
                given=given,
                unsearched=self._unsearched_step,
                cache=self.cache,
                constraint=self.devices,
            )
            if self.iteration is None:
                variant, found = None, plans(subject)
            else:
                planner = self.iteration.planner
                variant, subject, found = planner.first_that_fits(subject, model, plans)
        step = replace(found, draft=self._compared(found, subject)).verified()
        plan = step.plan
        if self.iteration is not None and variant is not None:
            self._take(self.iteration, variant, step, model)
        if observation.writes:  # an eager forward that was stopped may have left others, or more in a table
            observation.writes.repeat({id(vars(plain)): vars(model)})
            dependencies = observation.dependencies(captured.program, leaves, captured.answers)
        if not found.is_carried:
            self.priced.append(found)
        name, seconds = type(model).__name__, time.perf_counter() - begun
        slow = "; a larger budget costs less time: `stowplan plan TARGET --frontier` shows all"
        is_slow = plan.time_ratio > _SLOW
        level = logging.WARNING if is_slow else logging.INFO
        how = "carried a plan over for" if found.is_carried else "planned"
        _LOGGER.log(level, "%s %s: %r, in %.1f s%s", how, name, plan, seconds, slow if is_slow else "")
        taken = plan.projected_peak_bytes + replayed_bytes(plan) + constants
        return Planned(call.kind, step, dependencies, taken, self._improver(found, step))

    def _improver(self, found: DraftedStep, step: PlannedStep) -> "Improver | None":
        """Who looks for a better plan than a first one."""
        if found.keep is None:
            return None
        from stowplan.run.planning.improver import Improver  # most steps wait for their plan

        return Improver.of(step.plan, step.captured, self.options, found.keep)

    def _observed(
        self,
        model: nn.Module,
        plain: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        records: bool,
    ) -> tuple[Observation, Captured]:
        """The captured step, and what it depends on. If other threads draw, it is captured twice."""
        observed = partial(self._observed_once, model, plain, args, kwargs, records)
        try:
            return observed()
        except SomebodyDrew as found:
            return observed(found.unclear)

    def _observed_once(
        self,
        model: nn.Module,
        plain: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        records: bool,
        unclear: Draws | None = None,
    ) -> tuple[Observation, Captured]:
        """The captured step, and what it depends on.

        Forward may write plain values if it finds them at the next call, leaves them so, and does the same.
        They are then written now, as its first call would.
        """
        how = partial(
            capture, plain, args, kwargs, loss=self.loss, all_outputs=self.all_outputs, records=records
        )
        first: Captured | None = None
        observed = partial(Observation, plain, self.loss, flatten(args, kwargs)[0])
        observation = observed()
        try:
            with observation.watching(unclear):
                first = how(know_values=True, containers=observation.containers)
            return observation, first
        except CaptureError as refusal:
            writes = observation.writes
            if first is None or writes is None:
                raise
            observation = observed()
            with writes.kept():
                with observation.watching(unclear):
                    second = how(know_values=True, containers=observation.containers)
                if not is_same_step(first, second):
                    raise refusal from None
        writes.repeat({id(vars(plain)): vars(model)})
        observation.note_writes(writes)
        return observation, second

    def _unsearched_step(self, subject: Subject, allowed_bytes: int) -> DraftedStep | None:
        """The step with carried decisions, or with a first plan that is improved later."""
        carried = self._carried_step(subject, allowed_bytes)
        if carried is None and not self.options.search.wait and self._may_improve(subject):
            return self.cache.first_step_for(subject, allowed_bytes, self.options)
        return carried

    def _may_improve(self, subject: Subject) -> bool:
        """Whether the plan can be exchanged while training runs; one that cannot is waited for."""
        from stowplan.run.planning.improver import may_have_children  # most steps wait for their plan

        options, execution = self.options, self.options.execution
        is_other = execution.is_compiled or execution.constraints or options.offloads
        beside = self.iteration is not None or self.devices is not None
        is_plain = "recompute" in options.allow and options.prefer == "exactness"
        is_trained = subject.captured.program.is_differentiated
        may_improve = is_plain and is_trained and not is_other and not beside and may_have_children()
        if not may_improve:
            self.say_once(_WAITED)
        return may_improve

    def _carried_step(self, subject: Subject, allowed_bytes: int) -> DraftedStep | None:
        """The step with decisions of another size of the same program, if they are good enough."""
        if (not self.priced and self.sizes is None) or self.options.execution.is_compiled:
            return None
        from stowplan.run.planning.sizes import PlannedSizes  # most modules are called with one shape

        self.sizes = self.sizes or PlannedSizes()
        while self.priced:
            self.sizes.add(self.priced.pop(0))
        with collector_paused():
            return self.sizes.step_for(subject, allowed_bytes, self.options)

    def _compared(self, found: DraftedStep, subject: Subject) -> Draft:
        """The draft and what is known of eager. Of carried plans that recompute, the first few are compared.

        Ops that were seen to lay out their results otherwise than captured may do so at each size anew.
        """
        # smaller calls may run as they are if this one fits without its plan
        fits = found.draft.plain_peak_bytes <= found.draft.allowed_bytes
        is_known = found.is_carried and not fits and self.compared_sizes >= _COMPARED_SIZES
        if is_known and not any(has_learned(event.target) for event in subject.captured.forward):
            note = (
                f"the decisions are carried over from another size of the same program; {self.compared_sizes}"
                " other sizes were compared with eager, and this one was not"
            )
            return replace(found.draft, against_eager=AgainstEager(Verdict.UNCHECKED, note))
        with collector_paused():
            draft = compared(found.draft, subject)
        self.compared_sizes += found.is_carried
        return draft

    def _take(
        self, iteration: "RunningIteration", variant: "Variant", step: PlannedStep, model: nn.Module
    ) -> None:
        """Let the iteration run by this step."""
        room_bytes = step.plan.allowed_bytes - step.plan.projected_peak_bytes
        iteration.takes(variant, step.captured, model, room_bytes)
        if variant.two_backwards:
            self.say_once(
                "gradients do not fit the budget until their norm is known: forward and backward are run"
                " twice in each iteration, for the norm and for the updates"
            )

    def say_once(self, sentence: str, topic: str = "") -> None:
        """Warn, if it was not said before, or nothing of the same topic."""
        if (topic or sentence) not in self.said:
            self.said.add(topic or sentence)
            _LOGGER.warning(sentence)


def _has_a_loss(captured: Captured) -> bool:
    """Whether one output is differentiated, and it is one number."""
    tangents = [captured.graph.tensors[name] for name in captured.program.tangents if name is not None]
    return len(tangents) == 1 and prod(shape_of(tangents[0])) == 1


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
def refused_beside(nbytes: int, what: str) -> Iterator[None]:
    """A refusal tells of the whole budget."""
    try:
        yield
    except BudgetTooSmall as refusal:
        raise refusal.beside(nbytes, what) from None


def kind_of_call(leaves: list[object], spec: Spec) -> KindOfCall:
    """Equal for calls that one captured step can serve, as far as the call itself tells."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    devices = {leaf.device.type for leaf in tensors} | {"cpu"}
    casts = tuple((d, torch.get_autocast_dtype(d)) for d in sorted(devices) if torch.is_autocast_enabled(d))
    try:
        looks = tuple(map(look_of, leaves))
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return KindOfCall(looks, str(spec), sharing_of(tensors), casts, *modes)
    except RuntimeError as fault:  # there are tensors without strides or storages
        unlike = next(filter(None, map(unlike_plain, tensors)), None)
        if unlike is None:
            raise
        raise BadUse(f"an argument {unlike}") from fault
