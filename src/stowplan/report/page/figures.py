"""The figures at the head of a report."""

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stowplan.analyse.facts import costs_of, liveness_of, untiled_bound
from stowplan.analyse.inspection import times_of
from stowplan.ir import Document, Graph, Kind
from stowplan.plan.explain.updates import updates_of
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Basis
from stowplan.plan.record import Record
from stowplan.plan.steps import Decision, Keep, Offload, Recompute, Tile
from stowplan.report.page.subject import PageSubject
from stowplan.units import format_bytes, format_count, format_seconds

_FATES: dict[type[Decision], str] = {
    Keep: "kept",
    Recompute: "recomputed",
    Offload: "offloaded",
    Tile: "in tiles",
}

Figure: TypeAlias = tuple[str, str, str]  # what, how much, and what that means


def figures_of(subject: PageSubject) -> list[Figure]:
    """The figures that a subject has, the most important first."""
    found: list[Figure] = []
    if subject.record:
        found += _of_record(subject.record)
    if subject.plan:
        found += _of_plan(subject.plan)
    elif subject.document:
        found += _of_document(subject, subject.document)
    return [*found, _size(subject.graph)]


def _of_record(record: Record) -> Iterator[Figure]:
    plain = record.plain_measured_peak_bytes
    against = f"eager {format_bytes(plain)}" if plain is not None else f"on {record.device}"
    yield "measured peak", format_bytes(record.measured_peak_bytes), against
    ratio = record.measured_time_ratio
    times = f"{ratio:.2f} x eager" if ratio is not None else f"on {record.device}"
    yield "measured time", format_seconds(record.measured_seconds), times
    if worst := record.worst:
        same = worst.largest == 0
        figure = "the same" if same else f"{worst.relative:.1e}"
        meaning = f"{len(record.differences):,} compared, bit for bit" if same else f"at {worst.tensor}"
        yield "gradients", figure, meaning


def _of_plan(plan: Plan) -> Iterator[Figure]:
    if plan.projected_for:
        yield "device", plan.projected_for, "projected: nothing ran on it"
    yield "projected peak", format_bytes(plan.projected_peak_bytes), _of_allowed(plan)
    saved = 1 - plan.projected_peak_bytes / plan.plain_peak_bytes if plan.plain_peak_bytes else 0.0
    yield "baseline peak", format_bytes(plan.plain_peak_bytes), f"the plan needs {saved:.0%} less"
    yield "time", f"{plan.time_ratio:.3f} x", f"of the baseline; at least {plan.bound:.3f}"
    if updates := updates_of(plan.graph):
        times = ", ".join(f"{count} {when}" for when, count in updates.parameters_by_time.items())
        yield "parameters updated", f"{sum(updates.parameters_by_time.values()):,}", times
    yield _not_kept(plan)
    if plan.minimum_bytes is None:
        yield "smallest budget", "not searched", _basis(plan)
    else:
        tiles = "with these tiles" if plan.is_tiled else "without tiles"
        yield "smallest budget", format_bytes(plan.minimum_bytes), f"{tiles}; {_basis(plan)}"


def _not_kept(plan: Plan) -> Figure:
    """The number of tensors that are not kept, their decisions, and the extra work."""
    others = [decision for decision in plan.decisions.values() if not isinstance(decision, Keep)]
    fates = Counter(_FATES[type(decision)] for decision in others)
    told = ", ".join(f"{count:,} {fate}" for fate, count in fates.items()) or "all kept"
    meaning = f"of {len(plan.decisions):,}: {told}; +{format_count(plan.extra_macs)} MACs"
    return "not kept", f"{len(others):,}", meaning


def _of_allowed(plan: Plan) -> str:
    return f"of {format_bytes(plan.allowed_bytes)} allowed"


def _basis(plan: Plan) -> str:
    match plan.pricing.basis:
        case Basis.MACS:
            return "priced by MACs"
        case Basis.ROOFLINE:
            return "priced by roofline"
        case Basis.MEASURED:
            return "priced by timing"


def _of_document(subject: PageSubject, document: Document) -> Iterator[Figure]:
    graph, curve = document.graph, subject.timeline.curve_bytes()
    yield "peak", format_bytes(int(curve.max(initial=0))), _running(subject, curve)
    yield "lower bound", format_bytes(untiled_bound(graph, liveness_of(graph))), "without tiles"
    constants = sum(tensor.nbytes or 0 for tensor in graph.tensors.values() if tensor.kind is Kind.CONSTANT)
    if 100 * constants > curve.max(initial=0):
        yield "constants", format_bytes(constants), "counted apart from the peak"
    costs = costs_of(graph)
    if costs.step_macs:
        yield "work", format_count(costs.step_macs), f"MACs, {format_count(costs.forward_macs)} forward"
    if document.profile:
        for clock, times in times_of(graph, document.profile).items():
            yield f"{clock} time", format_seconds(times.span_seconds), "from first start to last end"


def _running(subject: PageSubject, curve: NDArray[np.int64]) -> str:
    """The op at the peak, with its type where its name is only a number."""
    if not len(curve):
        return "nothing runs"
    name = subject.timeline.runs[int(curve.argmax())].op
    op = next(op for op in subject.graph.ops if op.id == name)
    return f"while {op.type} {name} runs" if name.isdecimal() else f"while {name} runs"


def _size(graph: Graph) -> Figure:
    return "graph", f"{len(graph.ops):,} ops", f"{len(graph.tensors):,} tensors"
