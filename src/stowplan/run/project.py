"""A step on a card that is not here: captured with the card's kernels, priced by its figures, planned for it.

Nothing of it is measured. The peak without a plan is compared with that of the step as captured for this CPU,
and the difference is split by cause: the causes are added one after the other, with a capture for each.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from stowplan.analyse.facts import estimated_workspaces
from stowplan.capture import Captured, capture
from stowplan.capture.cuda_calls import Chosen, CudaCalls
from stowplan.capture.recording import Loss
from stowplan.errors import CaptureError
from stowplan.ir import DType, Graph, Op, Tensor
from stowplan.plan.allocator.projection import HeapProjection, plan_for_device
from stowplan.plan.allocator.projection import project as through_allocator
from stowplan.plan.allocator.settings import AllocatorSettings
from stowplan.plan.cards import Card, card_named, price_on_card, workspace_on
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import DEFAULT_OPTIONS, TECHNIQUES, PlanOptions, Prefer
from stowplan.plan.plan import AgainstEager, Plan, Verdict
from stowplan.plan.planner import refuse_hopeless
from stowplan.plan.select import Selector, planner_of
from stowplan.plan.watch import limited_to, tell_phase
from stowplan.run.measure.inspect_step import StepInspection, inspection_of_step
from stowplan.run.optimizers import optimizer_share
from stowplan.run.target import Target
from stowplan.units import parse_bytes

_WHY = {
    Chosen.ATTENTION: "attention in other kernels, which keep a log-sum-exp and the generator's state",
    Chosen.BATCH_NORM: "batch norm runs in cuDNN and keeps its own statistics",
    Chosen.DROPOUT: "dropout keeps a mask of truth values, not of numbers",
    Chosen.RMS_NORM: "RMS norm is one kernel and keeps a factor for each row",
}
_STATISTICS = ("native_layer_norm", "native_batch_norm", "_native_batch_norm_legit_functional")
_NARROW = (DType.FLOAT16, DType.BFLOAT16)
_NOT_RUN = "it was projected for another device, where nothing has run"


@dataclass(frozen=True, slots=True)
class Difference:
    """A reason why the peak without a plan differs from that of the CPU's capture, and by how many bytes.

    `calls` is how many calls of forward it concerns; 0 where it is not about calls.
    """

    cause: str
    calls: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ProjectedStep:
    """A step as it would run on a card. Peaks are of requested bytes, without a plan.

    `lasting_bytes` are workspaces that libraries keep beside the step's tensors; `peak_bytes` includes them.
    """

    card: Card
    captured: Captured
    parameters: tuple[torch.Tensor, ...]  # without data, for the optimizer's share
    here_peak_bytes: int
    peak_bytes: int
    differences: tuple[Difference, ...]
    lasting_bytes: tuple[int, ...]

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    def inspected(self, optimizer: str | None = None) -> StepInspection:
        """What `inspect` shows of a step; with an optimizer of `torch.optim`, including its memory."""
        share = None
        if optimizer:
            share = optimizer_share(optimizer, self.parameters, device=self.card.kind)
        return inspection_of_step(self.captured, workspace_on(self.graph, self.card), share)

    def notes(self) -> Iterator[str]:
        """What the figures leave out."""
        if self.card.is_cuda and any("convolution" in op.type for op in self.graph.ops):
            yield (
                "convolutions: cuDNN's workspace depends on the algorithm it chooses, and is not counted;"
                " torch.backends.cudnn.deterministic = True takes little"
            )
        yield "tiles are not planned for another device: `fit` on the card tries them where nothing else fits"
        yield f"seconds are the roofline of {self.card.name} at its published rates: real ones are larger"

    def planner(self, options: PlanOptions = DEFAULT_OPTIONS) -> "Selector[Any]":
        """Plans of requested bytes, without tiles: their kernels are chosen where they run."""
        options = replace(options, allow=set(options.allow) - {"tile"})
        pricing = price_on_card(self.graph, self.card, options)
        peak = self.captured.eager.peak_bytes(pricing.workspace_bytes)
        planner = planner_of(self.graph, pricing, options, plain_peak_bytes=peak)
        return replace(planner, compare=self._marked)

    def plan(
        self,
        allowed_bytes: int | None = None,
        options: PlanOptions = DEFAULT_OPTIONS,
        settings: AllocatorSettings | None = None,
    ) -> tuple[Plan, HeapProjection | None]:
        """A plan within the budget, which limits reserved bytes on a CUDA device, and what it reserves."""
        allowed = self.card.usable_bytes if allowed_bytes is None else allowed_bytes
        planner = self.planner(options)
        refuse_hopeless(self.graph, allowed, options, lambda: planner.minimum_bytes)
        with limited_to(options.seconds):
            if not self.card.is_cuda:
                return planner.plan(allowed), None
            plan, heap = plan_for_device(
                lambda budget: verify(planner.answer(budget)[0]),
                allowed,
                settings or AllocatorSettings(),
                lasting=self.lasting_bytes,
            )
            return self._marked(plan), heap

    def without_a_plan(self, settings: AllocatorSettings | None = None) -> HeapProjection | None:
        """What the step takes from a CUDA device if every value is kept."""
        if not self.card.is_cuda:
            return None
        keeps_all = self.planner(PlanOptions(())).plan(2**62)
        return through_allocator(keeps_all, settings or AllocatorSettings(), lasting=self.lasting_bytes)

    def _marked(self, plan: Plan) -> Plan:
        against = AgainstEager(Verdict.UNCHECKED, _NOT_RUN)
        return replace(plan, projected_for=self.card.id, against_eager=against)


@dataclass(frozen=True, slots=True)
class Projection:
    """A plan for a card that is not here. `heap` is None for devices without PyTorch's caching allocator."""

    step: ProjectedStep
    plan: Plan
    heap: HeapProjection | None

    def __repr__(self) -> str:
        """The card and the plan's figures."""
        return f"<projected for {self.step.card.name}: {self.plan!r}>"


def project(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    device: str,
    loss: Loss | None = None,
    budget: int | str | None = None,
    allow: Iterable[str] = TECHNIQUES,
    prefer: Prefer | str = Prefer.EXACTNESS,
    time_limit: float | None = None,
) -> Projection:
    """A plan for a step on a card that is not here: a name such as "a100-80gb", or FILE.toml.

    Nothing is allocated if the model is on the meta device. The budget is of reserved bytes and defaults to
    the card's memory less the CUDA context. `result.plan.save(path)` writes the plan; on the card,
    `fit(..., plan=stowplan.load_plan(path))` compares it with the step as captured there before it runs.
    """
    step = project_step(Target(model, tuple(args), dict(kwargs or {}), loss), card_named(device))
    options = PlanOptions(tuple(allow), prefer, seconds=time_limit)
    plan, heap = step.plan(None if budget is None else parse_bytes(budget), options)
    return Projection(step, plan, heap)


def project_step(target: Target, card: Card) -> ProjectedStep:
    """Capture a step as if on a card, and compare its peak with that of the step as it is."""
    tell_phase("capturing")
    here = _captured(target, None)
    lasting = card.lasting_bytes(here.graph)
    here_peak = here.eager.peak_bytes(estimated_workspaces(here.graph))
    steps = [Difference("workspace of CPU kernels, estimated", 0, here.eager.peak_bytes())]
    there, chosen = here, list[Chosen]()
    if card.is_cuda:
        used = CudaCalls(card.attentions, has_tensor_cores=card.has_tensor_cores)
        there = _captured(target, used)
        for cause in used.counts:
            chosen.append(cause)
            last = len(chosen) == len(used.counts)
            partly = there if last else _captured(target, _some(card, chosen))
            steps.append(Difference(_WHY[cause], used.counts[cause], partly.eager.peak_bytes()))
        there = _with_wide_statistics(there)
        steps.append(Difference("statistics of norms in float32", 0, there.eager.peak_bytes()))
    there = replace(there, graph=_moved(there.graph, card.device))
    within = there.eager.peak_bytes(workspace_on(there.graph, card))
    steps.append(Difference("workspace of the card's kernels, estimated", 0, within))
    peak = within + sum(lasting)
    steps.append(Difference(f"{len(lasting)} workspaces that cuBLAS keeps", 0, peak))
    parameters = tuple(
        torch.empty_like(p, device="meta").requires_grad_(p.requires_grad) for p in target.model.parameters()
    )
    changes = tuple(_changes(here_peak, steps))
    return ProjectedStep(card, there, parameters, here_peak, peak, changes, lasting)


def _changes(before: int, steps: Iterable[Difference]) -> Iterator[Difference]:
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
