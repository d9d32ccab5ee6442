"""A step on a card that is not here: captured with the card's kernels, priced by its figures, planned for it.

Nothing of it is measured. The peak without a plan is compared with that of the step as captured for this CPU,
and the difference is split by cause: the causes are added one after the other, with a capture for each.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from stowplan.analyse.facts import estimated_workspaces
from stowplan.capture import Captured, capture
from stowplan.capture.cuda_calls import Chosen, CudaCalls
from stowplan.capture.recording import Loss
from stowplan.capture.stand_ins import with_tensors
from stowplan.capture.states_on_host import with_states_on_host
from stowplan.errors import BadUse, BudgetTooSmall, CaptureError
from stowplan.ir import DType, Graph, Op, Tensor
from stowplan.ops.effects import UPDATE
from stowplan.plan.allocator.projection import HeapProjection, plan_for_device, project_unplanned
from stowplan.plan.allocator.settings import AllocatorSettings
from stowplan.plan.cards import (
    Card,
    PeakDifference,
    PeakOnCard,
    card_named,
    price_on_card,
    workspace_on,
    workspace_requests_on,
)
from stowplan.plan.draft import AgainstEager, Draft, Verdict
from stowplan.plan.options import (
    DEFAULT_OPTIONS,
    TECHNIQUES,
    USUAL_EXECUTION,
    USUAL_SEARCH,
    Execution,
    PlanOptions,
    Search,
    Techniques,
    known_techniques,
)
from stowplan.plan.plan import Plan
from stowplan.plan.planner import refuse_hopeless
from stowplan.plan.select import Selector, planner_of
from stowplan.request import Iteration, facts_of, refuse_together, with_former_spellings
from stowplan.run.cost.machine import Cost
from stowplan.run.measure.eager_requests import requests_of_eager
from stowplan.run.measure.inspect_step import StepInspection, inspection_of_step
from stowplan.run.optimizers import optimizer_share, twin_of
from stowplan.run.planning.iterations import iterations
from stowplan.run.target import Target
from stowplan.units import parse_bytes
from stowplan.watch import limited_to, tell_phase

if TYPE_CHECKING:
    from stowplan.techniques.iteration.run.one_by_one import UpdateBytes

_WHY = {
    Chosen.ATTENTION: "attention in other kernels, which keep a log-sum-exp and the generator's state",
    Chosen.BATCH_NORM: "batch norm runs in cuDNN and keeps its own statistics",
    Chosen.DROPOUT: "dropout keeps a mask of truth values, not of numbers",
    Chosen.RMS_NORM: "RMS norm is one kernel and keeps a factor for each row",
}
_STATISTICS = ("native_layer_norm", "native_batch_norm", "_native_batch_norm_legit_functional")
_NARROW = (DType.FLOAT16, DType.BFLOAT16)
_NO_TILES = "tiles are not planned for another device"
_NOT_RUN = "it was projected for another device, where nothing has run"


@dataclass(frozen=True, slots=True)
class ProjectedStep:
    """A step as it would run on a card. Peaks are of requested bytes, without a plan.

    `lasting_bytes` are workspaces that libraries keep beside the step's tensors; `peak_bytes` includes them.
    """

    card: Card
    captured: Captured
    model: nn.Module
    here_peak_bytes: int
    peak_bytes: int
    differences: tuple[PeakDifference, ...]
    lasting_bytes: tuple[int, ...]
    eager_update_seconds: float = 0.0  # of the optimizer's step, where the step is an iteration's

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    @property
    def peak(self) -> PeakOnCard:
        """The peak without a plan, and why it is not the CPU's."""
        here, there, lasting = self.here_peak_bytes, self.peak_bytes, sum(self.lasting_bytes)
        return PeakOnCard(self.card, here, there, lasting, self.differences, tuple(self.notes()))

    def inspected(self, optimizer: Optimizer | None = None) -> StepInspection:
        """What `inspect` shows of a step; with an optimizer of the model, including its memory."""
        share = optimizer_share(twin_of(optimizer, OnMeta()), device=self.card.kind) if optimizer else None
        return inspection_of_step(self.captured, workspace_on(self.graph, self.card), share)

    def iterations(self, asked: Iteration, *, offloads: bool = False) -> "list[ProjectedStep]":
        """The step with the updates of an optimizer: each variant takes less memory than those before.

        With `offloads`, state may wait in the host's memory.
        """
        there, on_meta = torch.device(self.card.kind), OnMeta()
        optimizer = asked.optimizer
        assert isinstance(optimizer, Optimizer), "its name was looked up for the model"
        twin = twin_of(optimizer, on_meta)
        iteration = iterations().planner(
            replace(asked, optimizer=twin),
            offloads=offloads and self.card.kind != "cpu",
            device=there,
            tier=self.card.tier,
        )
        with with_tensors(self.model, on_meta):
            trained = [p for group in twin.param_groups for p in group["params"] if p.requires_grad]
            seconds = self._update_seconds(iterations().book(twin, there).together(trained))
            variants = iteration.variants(self.captured, self.model)
            steps = [iteration.planned(self.captured, self.model, variant) for variant in variants]
        return [self._with(step, type(optimizer).__name__, seconds) for step in steps]

    def _with(self, step: Captured, name: str, seconds: float) -> "ProjectedStep":
        """An iteration that was captured, and the seconds of the optimizer's step in eager."""
        peak = step.eager.peak_bytes(workspace_on(self.graph, self.card)) + sum(self.lasting_bytes)
        added = PeakDifference(f"state and step of {name}", 0, peak - self.peak_bytes)
        differences = (*self.differences, added)
        return replace(
            self, captured=step, peak_bytes=peak, differences=differences, eager_update_seconds=seconds
        )

    def _update_seconds(self, taken: "UpdateBytes") -> float:
        return taken.launches * self.card.launch_seconds + taken.traffic_bytes / self.card.bytes_per_second

    def _update_costs(self) -> dict[str, Cost]:
        """Of the updates in the graph, by op id."""
        calls: Any = self.captured.program.calls
        updates = {op.id: calls[op.id].args[2] for op in self.graph.ops if op.type == UPDATE}
        return {name: update.projected_cost(self._update_seconds) for name, update in updates.items()}

    def notes(self) -> Iterator[str]:
        """What the figures leave out."""
        if self.card.is_cuda and any("convolution" in op.type for op in self.graph.ops):
            yield (
                "convolutions: cuDNN's workspace depends on the algorithm it chooses, and is not counted;"
                " torch.backends.cudnn.deterministic = True takes little"
            )
        if self.eager_update_seconds:
            yield "updates are priced by the bytes that their kernels move, and one launch for each kernel"
        yield f"{_NO_TILES}: `fit` on the card tries them where nothing else fits"
        yield f"seconds are the roofline of {self.card.name} at its published rates: real ones are larger"

    def planner(self, options: PlanOptions = DEFAULT_OPTIONS) -> "Selector[Any]":
        """Plans of requested bytes, without tiles: their kernels are chosen where they run."""
        updates = self._update_costs()
        techniques = {"recompute"} if updates else set(options.allow) - {"tile"}
        options = replace(options, allow=techniques.intersection(options.allow))
        pricing = price_on_card(self.graph, self.card, options)
        peak = self.captured.eager.peak_bytes(pricing.workspace_bytes)
        pricing = replace(
            pricing,
            seconds={**pricing.seconds, **{op: cost.seconds for op, cost in updates.items()}},
            workspace_bytes={
                **pricing.workspace_bytes,
                **{op: cost.rise_bytes for op, cost in updates.items()},
            },
        )
        planner = planner_of(self.graph, pricing, options, plain_peak_bytes=peak)
        later = self.eager_update_seconds - sum(cost.seconds for cost in updates.values())
        baseline = replace(planner.baseline, seconds=planner.baseline.seconds + later)
        return replace(planner, baseline=baseline, compare=partial(self._marked, baseline.seconds))

    def plan(
        self,
        allowed_bytes: int | None = None,
        options: PlanOptions = DEFAULT_OPTIONS,
        settings: AllocatorSettings | None = None,
    ) -> tuple[Plan, HeapProjection | None]:
        """A plan within the budget, which limits reserved bytes on a CUDA device, and what it reserves."""
        if tuple(options.allow) == ("tile",):
            raise BadUse(f"{_NO_TILES}, and nothing else is allowed: add recompute")
        allowed = self.card.usable_bytes if allowed_bytes is None else allowed_bytes
        try:
            return self._planned(allowed, options, settings)
        except BudgetTooSmall as refusal:
            if "tile" not in options.allow:
                raise
            smallest, own = refusal.known_minimum_bytes, refusal
            raise BudgetTooSmall(
                f"{refusal.what}; {_NO_TILES}, so none were considered",
                allowed_bytes=refusal.allowed_bytes,
                minimum_bytes=(lambda: own) if smallest is None else smallest,
                binding=refusal.binding,
            ) from None

    def _planned(
        self, allowed: int, options: PlanOptions, settings: AllocatorSettings | None
    ) -> tuple[Plan, HeapProjection | None]:
        planner = self.planner(options)
        refuse_hopeless(self.graph, allowed, options, lambda: planner.smallest)
        with limited_to(options.search.time_limit):
            if not self.card.is_cuda:
                return planner.plan(allowed), None
            draft, heap = plan_for_device(
                lambda budget: planner.answer(budget)[0],
                allowed,
                settings or AllocatorSettings(),
                lasting=self.lasting_bytes,
                held_blocks=options.execution.held_blocks,
            )
            return planner.plan_of(draft), heap

    def without_a_plan(self, settings: AllocatorSettings | None = None) -> HeapProjection | None:
        """What eager takes from a CUDA device: its storages from op to op, through the allocator."""
        if not self.card.is_cuda:
            return None
        workspaces = workspace_requests_on(self.graph, self.card)
        requests = requests_of_eager(self.captured, workspaces, self.lasting_bytes)
        return project_unplanned(requests, settings or AllocatorSettings())

    def _marked(self, plain_seconds: float, draft: Draft) -> Draft:
        against = AgainstEager(Verdict.UNCHECKED, _NOT_RUN)
        marks: Any = {"projected_for": self.card.id, "plain_seconds": plain_seconds}
        return replace(draft, against_eager=against, **marks)


class OnMeta:
    """The same tensor without data, one for each; numbers stay as they are."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the original: its id stays

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            made = tensor if tensor.ndim == 0 else torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
            self._made[id(tensor)] = tensor, made
        return self._made[id(tensor)][1]


def first_that_fits(
    steps: Iterable[ProjectedStep],
    allowed_bytes: int | None,
    options: PlanOptions,
    settings: AllocatorSettings | None = None,
) -> tuple[ProjectedStep, Plan, HeapProjection | None]:
    """The first of these with a plan within the budget; raises the smallest refusal if there is none."""
    refusals = list[BudgetTooSmall]()
    for step in steps:
        try:
            return step, *step.plan(allowed_bytes, options, settings)
        except BudgetTooSmall as refusal:
            refusals.append(refusal)
    raise min(refusals, key=lambda each: each.minimum_bytes) from None


@dataclass(frozen=True, slots=True)
class Projection:
    """A plan for a card that is not here. `heap` is None for devices without PyTorch's caching allocator."""

    step: ProjectedStep
    plan: Plan
    heap: HeapProjection | None

    def __repr__(self) -> str:
        """The card and the plan's figures."""
        return f"<projected for {self.step.card.name}: {self.plan!r}>"


@with_former_spellings
def project(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    device: str,
    loss: Loss | None = None,
    budget: int | str | None = None,
    allow: Techniques = TECHNIQUES,
    optimizer: "Optimizer | Iteration | None" = None,
    search: Search = USUAL_SEARCH,
    execution: Execution = USUAL_EXECUTION,
) -> Projection:
    """A plan for a step on a card that is not here: a name such as "a100-80gb", or FILE.toml.

    Nothing is allocated if the model is on the meta device. The budget is of reserved bytes and defaults to
    the card's memory less the CUDA context. `result.plan.save(path)` writes the plan; on the card,
    `fit(..., plan=stowplan.load_plan(path))` compares it with the step as captured there before it runs.

    With an `optimizer` of the model the plan is for the whole iteration, as with `fit`; with "offload" in
    `allow`, its state may wait in the host's memory. The `search` and `execution` are those of `fit`.
    """
    step = project_step(Target(model, tuple(args), dict(kwargs or {}), loss), card_named(device))
    options = PlanOptions(known_techniques(allow), search, execution)
    refuse_together({"card", *facts_of(options)})
    steps: Iterable[ProjectedStep] = (step,)
    asked = Iteration.of(optimizer)
    if asked is not None:
        steps = step.iterations(asked, offloads="offload" in options.allow)
    allowed = None if budget is None else parse_bytes(budget, "budget")
    return Projection(*first_that_fits(steps, allowed, options))


def project_step(target: Target, card: Card) -> ProjectedStep:
    """Capture a step as if on a card, and compare its peak with that of the step as it is."""
    tell_phase("capturing ops")
    here = _captured(target, None)
    lasting = card.lasting_bytes(here.graph)
    here_peak = here.eager.peak_bytes(estimated_workspaces(here.graph))
    steps = [PeakDifference("workspace of CPU kernels, estimated", 0, here.eager.peak_bytes())]
    there, chosen = here, list[Chosen]()
    if card.is_cuda:
        used = CudaCalls(card.attentions, has_tensor_cores=card.has_tensor_cores)
        there = _captured(target, used)
        for cause in used.counts:
            chosen.append(cause)
            last = len(chosen) == len(used.counts)
            partly = there if last else _captured(target, _some(card, chosen))
            steps.append(PeakDifference(_WHY[cause], used.counts[cause], partly.eager.peak_bytes()))
        there = _with_wide_statistics(there)
        steps.append(PeakDifference("statistics of norms in float32", 0, there.eager.peak_bytes()))
    there = with_states_on_host(replace(there, graph=_moved(there.graph, card.device)))
    within = there.eager.peak_bytes(workspace_on(there.graph, card))
    steps.append(PeakDifference("workspace of the card's kernels, estimated", 0, within))
    peak = within + sum(lasting)
    steps.append(PeakDifference(f"{len(lasting)} workspaces that cuBLAS keeps", 0, peak))
    changes = tuple(_changes(here_peak, steps))
    return ProjectedStep(card, there, target.model, here_peak, peak, changes, lasting)


def _changes(before: int, steps: Iterable[PeakDifference]) -> Iterator[PeakDifference]:
    """From peaks with more and more causes to what each cause changes, where it changes anything."""
    for step in steps:
        if change := step.peak_bytes - before:
            yield replace(step, peak_bytes=change)
        before = step.peak_bytes


def _some(card: Card, chosen: Iterable[Chosen]) -> CudaCalls:
    return CudaCalls(card.attentions, has_tensor_cores=card.has_tensor_cores, chosen=tuple(chosen))


def _captured(target: Target, cuda: CudaCalls | None) -> Captured:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*device_type of 'cuda'.*")
        try:
            return capture(
                target.model, target.args, target.kwargs, loss=target.loss, know_values=True, cuda=cuda
            )
        except UserWarning as warning:
            raise CaptureError(
                "forward enters autocast of a CUDA device, whose choice of dtypes is not projected",
                advice="cast the model and its inputs, as in model.to(torch.bfloat16)",
            ) from warning


def _with_wide_statistics(captured: Captured) -> Captured:
    """Norms of narrow numbers keep their statistics in float32 on a CUDA device, and as narrow on a CPU."""
    graph, wide = captured.graph, dict[str, Tensor]()
    for op in graph.ops:
        if op.type.removeprefix("aten.").partition(".")[0] in _STATISTICS:
            for name in op.writes():
                tensor = graph.tensors[name]
                if name.endswith((".1", ".2")) and tensor.dtype in _NARROW and tensor.nbytes is not None:
                    wide[name] = replace(tensor, dtype=DType.FLOAT32, nbytes=2 * tensor.nbytes)
    spans = (
        replace(span, nbytes=2 * span.nbytes) if span.tensor in wide else span
        for span in captured.eager.spans
    )
    eager = replace(captured.eager, spans=tuple(spans))
    return replace(captured, graph=replace(graph, tensors={**graph.tensors, **wide}), eager=eager)


def _moved(graph: Graph, device: str) -> Graph:
    """The same graph on another device."""
    tensors = {name: replace(tensor, device=device) for name, tensor in graph.tensors.items()}
    return replace(graph, tensors=tensors, ops=tuple(_moved_op(op, device) for op in graph.ops))


def _moved_op(op: Op, device: str) -> Op:
    attributes = dict(op.attributes)
    if attributes.get("device") == "cpu":
        attributes["device"] = device
    return replace(op, device=device, attributes=attributes)
