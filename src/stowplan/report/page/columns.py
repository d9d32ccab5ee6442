"""The data of a subject as columns: JSON that a browser reads fast, with numbers in place of names.

Each run is drawn in a lane, so that a branch or a skip connection gets its own line. A run holds its lane
until the last run of its half that uses its result. A run that ends several lanes takes the lowest: chains
stay level, and a U-Net is drawn as a U. A recomputed op is drawn in its first lane.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from stowplan.analyse.facts import costs_of, is_resident
from stowplan.analyse.timeline import Doing, Offsets, Timeline
from stowplan.ir import Graph, Kind, Op, Phase, Role, Tensor
from stowplan.ir.text import Labels
from stowplan.plan.explain.reasons import decisions_of, reasons_of
from stowplan.plan.plan import Plan
from stowplan.plan.steps import Decision
from stowplan.report.page.subject import PageSubject


@dataclass(frozen=True, slots=True)
class Lanes:
    """By run: whether it is drawn in the backward half, and its lane there, 0 next to the border."""

    backward: tuple[bool, ...]
    lanes: tuple[int, ...]


def lanes_of(timeline: Timeline) -> Lanes:
    """Lanes for every run of a timeline."""
    backward = _backward_runs(timeline)
    ending = _ending_at(timeline, backward)
    lanes: list[int] = []
    free: dict[bool, list[int]] = {False: [], True: []}
    used = {False: 0, True: 0}
    first: dict[str, int] = {}
    for run, half in enumerate(backward):
        if timeline.runs[run].op in first:
            lanes.append(first[timeline.runs[run].op])
            continue
        freed = sorted({lanes[maker] for maker in ending[run] if maker != run})
        if freed:
            lanes.append(freed.pop(0))
        elif free[half]:
            lanes.append(heappop(free[half]))
        else:
            lanes.append(used[half])
            used[half] += 1
        first[timeline.runs[run].op] = lanes[run]
        for lane in [*freed, *([lanes[run]] if run in ending[run] else [])]:
            heappush(free[half], lane)
    return Lanes(tuple(backward), tuple(lanes))


def _backward_runs(timeline: Timeline) -> list[bool]:
    """Ops of neither half belong to the half that is running."""
    phases = {op.id: op.phase for op in timeline.graph.ops}
    found, turned = [], False
    for run in timeline.runs:
        phase = phases[run.op]
        turned = turned or phase is Phase.BACKWARD
        found.append(turned and phase is not Phase.FORWARD)
    return found


def _ending_at(timeline: Timeline, backward: list[bool]) -> list[list[int]]:
    """By run: the makers whose results nothing in their half uses later."""
    once = [run.doing is Doing.COMPUTE for run in timeline.runs]
    last = list(range(len(backward)))
    for stay in timeline.stays:
        if stay.made and once[stay.first]:
            uses = (use for use in stay.uses if backward[use] == backward[stay.first] and once[use])
            last[stay.first] = max(last[stay.first], *uses, stay.first)
    ending: list[list[int]] = [[] for _ in backward]
    for maker, run in enumerate(last):
        ending[run].append(maker)
    return ending


Columns: TypeAlias = dict[str, object]

WORDS = {
    "kinds": [str(kind) for kind in Kind],
    "phases": [str(phase) for phase in Phase],
    "roles": [str(role) for role in Role],
    "doings": [str(doing) for doing in Doing],
}
_NUMBER = {word: number for words in WORDS.values() for number, word in enumerate(words)}


def ops_columns(subject: PageSubject) -> Columns:
    """Every op of the graph once."""
    graph, ops = subject.graph, subject.graph.ops
    number_of = {name: number for number, name in enumerate(graph.tensors)}
    return {
        "id": [op.id for op in ops],
        "type": _shared(op.type for op in ops),
        "phase": [_NUMBER[op.phase] for op in ops],
        "scope": _shared(op.scope for op in ops),
        "source": _shared(op.source for op in ops),
        "macs": costs_of(graph).macs.tolist(),
        "seconds": [subject.seconds.get(op.id) for op in ops] if subject.seconds else None,
        "inputs": [[number_of[use.tensor] for use in op.inputs] for op in ops],
        "outputs": [[number_of[use.tensor] for use in op.outputs] for op in ops],
        "input_roles": [_roles(op) for op in ops],
    }


def _roles(op: Op) -> str:
    """One digit per input."""
    return "".join(str(_NUMBER[use.role]) for use in op.inputs)


def tensors_columns(subject: PageSubject) -> Columns:
    """Every tensor of the graph once, and what was decided about it."""
    tensors = subject.graph.tensors
    number_of = {name: number for number, name in enumerate(tensors)}
    plan, timeline = subject.plan, subject.timeline
    decisions = _words(decisions_of(plan, timeline)) if plan else {}
    reasons = reasons_of(plan, timeline) if plan else {}
    gradients, labels = _gradients(subject.graph), Labels(subject.graph)
    return {
        "id": list(tensors),
        "name": _shared(tensor.name if tensor.name != tensor.id else "" for tensor in tensors.values()),
        "module": _shared(_module(tensor, labels) for tensor in tensors.values()),
        "kind": [_NUMBER[tensor.kind] for tensor in tensors.values()],
        "shape": _shared(shape_text(tensor) for tensor in tensors.values()),
        "bytes": [tensor.nbytes for tensor in tensors.values()],
        "gradient_of": [number_of.get(gradients.get(name, ""), -1) for name in tensors],
        "alias_of": [number_of.get(tensor.alias_of or "", -1) for tensor in tensors.values()],
        "decision": _shared(decisions.get(name, "") for name in tensors),
        "reason": _shared(reasons.get(name, "") for name in tensors),
    }


def _module(tensor: Tensor, labels: Labels) -> str:
    """The module that makes it, in a captured step; a gradient is named after its tensor instead."""
    return labels.module_of(tensor.id) if not tensor.name and tensor.gradient_of is None else ""


def _gradients(graph: Graph) -> dict[str, str]:
    """By tensor the tensor it is the gradient of; for a view of a parameter, the parameter.

    A tensor with a view that is a gradient counts as a gradient.
    """
    found: dict[str, str] = {}
    for name, tensor in graph.tensors.items():
        if (of := tensor.gradient_of) is not None:
            source = graph.storage_of(of)
            found[name] = source if is_resident(graph.tensors[source]) else of
            found.setdefault(graph.storage_of(name), found[name])
    return found


def _shared(texts: Iterable[str]) -> Columns:
    """A column in which many texts are alike: each once, and by row the number of its text."""
    numbers: dict[str, int] = {}
    rows = [numbers.setdefault(text, len(numbers)) for text in texts]
    return {"texts": list(numbers), "rows": rows}


def _words(decisions: Mapping[str, Decision]) -> dict[str, str]:
    """By tensor the name of its decision's type, in small letters."""
    return {name: type(decision).__name__.lower() for name, decision in decisions.items()}


def shape_text(tensor: Tensor) -> str:
    """Element type and sizes, as in "float32 8x64x56x56"."""
    sizes = "?" if tensor.shape is None else "x".join(map(str, tensor.shape)) or "scalar"
    return f"{tensor.dtype or ''} {sizes}".strip()


def runs_columns(timeline: Timeline) -> Columns:
    """Every run in order, and where it is drawn."""
    position = {op.id: number for number, op in enumerate(timeline.graph.ops)}
    lanes = lanes_of(timeline)
    return {
        "op": [position[run.op] for run in timeline.runs],
        "doing": [_NUMBER[run.doing] for run in timeline.runs],
        "aside": [run.aside_bytes for run in timeline.runs],
        "backward": [int(half) for half in lanes.backward],
        "lane": lanes.lanes,
    }


def largest_first(timeline: Timeline) -> list[int]:
    """The stays in the order in which a page has them."""
    return sorted(range(len(timeline.stays)), key=lambda i: (-timeline.stays[i].nbytes, i))


def stays_columns(timeline: Timeline, order: Sequence[int]) -> Columns:
    """Every stay, in this order."""
    number_of = {name: number for number, name in enumerate(timeline.graph.tensors)}
    stays = [timeline.stays[i] for i in order]
    return {
        "tensor": [number_of[stay.tensor] for stay in stays],
        "bytes": [stay.nbytes for stay in stays],
        "first": [stay.first for stay in stays],
        "last": [stay.last for stay in stays],
        "made": [int(stay.made) for stay in stays],
        "copy": [stay.copy for stay in stays],
        "uses": [stay.uses for stay in stays],
    }


def arena_columns(arena: Offsets, order: Sequence[int]) -> Columns:
    """Where each stay lies, in this order, and the workspace of each run."""
    return {
        "bytes": arena.nbytes,
        "recorded": arena.recorded,
        "segments": arena.segments,
        "offset": [arena.offsets[i] if arena.offsets else None for i in order],
        "asides": [[run, offset] for run, offset in sorted(arena.aside_offsets.items())],
    }


def away_columns(timeline: Timeline) -> Columns:
    """The tensors that wait in a tier, outside the device's memory."""
    number_of = {name: number for number, name in enumerate(timeline.graph.tensors)}
    return {
        "tensor": [number_of[stay.tensor] for stay in timeline.away],
        "bytes": [stay.nbytes for stay in timeline.away],
        "first": [stay.first for stay in timeline.away],
        "last": [stay.last for stay in timeline.away],
        "loads": [stay.uses for stay in timeline.away],
    }


def rows_of(timeline: Timeline) -> list[int]:
    """The tensors with a row of their own: the largest at the peak first, then resident ones."""
    tensors = timeline.graph.tensors
    number_of = {name: number for number, name in enumerate(tensors)}
    peak = int(timeline.curve_bytes().argmax()) if timeline.runs else 0
    keys: dict[str, tuple[bool, bool, int, int]] = {}
    for stay in timeline.stays:
        elsewhere = not stay.first <= peak <= stay.last
        key = (elsewhere, is_resident(tensors[stay.tensor]), -stay.nbytes, number_of[stay.tensor])
        keys[stay.tensor] = min(key, keys.get(stay.tensor, key))
    return [number_of[name] for name in sorted(keys, key=keys.__getitem__)]


def held_of(graph: Graph) -> list[int]:
    """The tensors that are held outside when the step ends."""
    return [number for number, name in enumerate(graph.tensors) if name in graph.held]


def plan_words(plan: Plan) -> list[str]:
    """The decisions that a plan uses, for the legend."""
    return sorted(set(_words(plan.decisions).values()))
