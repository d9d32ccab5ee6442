"""The tensors of a subject as a table for other programs: a line each, under the names of the columns."""

import csv
import io
from collections.abc import Iterator

from stowplan.analyse.timeline import Stay
from stowplan.plan.explain.reasons import decisions_of
from stowplan.report.page.subject import Subject

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how cells begin that spreadsheets compute
COLUMNS = (
    "id",
    "name",
    "kind",
    "dtype",
    "shape",
    "bytes",
    "made_by",
    "first_step",
    "last_step",
    "times_made",
    "uses",
    "alive_at_peak",
    "decision",
)


def tensors_csv(subject: Subject) -> str:
    """Every tensor in the graph's order. Steps count from 1; what owns no memory in the step has none."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")  # names may hold line ends
    writer.writerow(COLUMNS)
    writer.writerows(tuple(map(_cell, row)) for row in _rows(subject))
    return text.getvalue()


def _cell(value: object) -> object:
    """A name that a spreadsheet would compute, after the apostrophe that makes it take all as text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _rows(subject: Subject) -> Iterator[tuple[object, ...]]:
    timeline, graph = subject.timeline, subject.graph
    stays: dict[str, list[Stay]] = {}
    for stay in timeline.stays:
        stays.setdefault(stay.tensor, []).append(stay)
    decisions = decisions_of(subject.plan, timeline) if subject.plan else {}
    maker = {name: op.id for op in reversed(graph.ops) for name in op.writes()}
    peak = int(timeline.curve_bytes().argmax()) if timeline.runs else 0
    for tensor in graph.tensors.values():
        shape = "" if tensor.shape is None else "x".join(map(str, tensor.shape))
        told = type(decisions[tensor.id]).__name__.lower() if tensor.id in decisions else ""
        known = (tensor.id, tensor.name, tensor.kind, tensor.dtype or "", shape, tensor.nbytes)
        yield (*known, maker.get(tensor.id, ""), *_life(stays.get(tensor.id, []), peak), told)


def _life(stays: list[Stay], peak: int) -> tuple[object, ...]:
    """First and last step, how often it is made and used, and whether it is there at the peak."""
    if not stays:
        return "", "", 0, 0, ""
    first, last = min(stay.first for stay in stays), max(stay.last for stay in stays)
    alive = any(stay.first <= peak <= stay.last for stay in stays)
    uses = sum(len(stay.uses) for stay in stays)
    return first + 1, last + 1, sum(stay.made for stay in stays), uses, "yes" if alive else "no"
