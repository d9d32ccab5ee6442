"""Files of a report: open a plan, record or document; write a page, trace, picture or table by suffix."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stowplan.analyse.timeline import Stay
from stowplan.errors import BadInput, BadUse
from stowplan.formats.door import read_document
from stowplan.ir.text import Labels
from stowplan.plan.explain.reasons import decisions_of
from stowplan.plan.files import plan_file, record_file
from stowplan.report.page import page_of
from stowplan.report.page.subject import PageSubject, Thing
from stowplan.report.picture import png_of, svg_of
from stowplan.report.trace import trace_of

_HEAD = 256  # bytes by which plans and records are recognised


def opened(path: str | Path, *, saved: str | None = None) -> Thing:
    """The content of a file. `saved` chooses between the two views of a Chainer file."""
    head = _head(Path(path))
    if plan_file.recognise(head):
        return _read(Path(path), plan_file.read)
    if record_file.recognise(head):
        return _read(Path(path), record_file.read)
    return read_document(path, saved=saved)


def _read(path: Path, reader: Callable[[str], Thing]) -> Thing:
    try:
        return reader(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as fault:
        raise BadInput("is not UTF-8", file=str(path), where=f"byte {fault.start}") from None
    except BadInput as fault:
        raise fault.in_file(str(path)) from fault


def _head(path: Path) -> str:
    """How a file begins; nothing if it cannot be read, which its reader will say better."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD).decode("utf-8", errors="replace")
    except OSError:
        return ""


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
    "module",
    "line",
)


def tensors_csv(subject: PageSubject) -> str:
    """Every tensor in the graph's order. Steps count from 1; what owns no memory in the step has none."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")  # names may hold line ends
    writer.writerow(COLUMNS)
    writer.writerows(tuple(map(_cell, row)) for row in _rows(subject))
    return text.getvalue()


def _cell(value: object) -> object:
    """A name that a spreadsheet would compute, after the apostrophe that makes it take all as text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _rows(subject: PageSubject) -> Iterator[tuple[object, ...]]:
    timeline, graph, labels = subject.timeline, subject.graph, Labels(subject.graph)
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
        home = labels.module_of(tensor.id), labels.line_of(tensor.id)
        yield (*known, maker.get(tensor.id, ""), *_life(stays.get(tensor.id, []), peak), told, *home)


def _life(stays: list[Stay], peak: int) -> tuple[object, ...]:
    """First and last step, how often it is made and used, and whether it is there at the peak."""
    if not stays:
        return "", "", 0, 0, ""
    first, last = min(stay.first for stay in stays), max(stay.last for stay in stays)
    alive = any(stay.first <= peak <= stay.last for stay in stays)
    uses = sum(len(stay.uses) for stay in stays)
    return first + 1, last + 1, sum(stay.made for stay in stays), uses, "yes" if alive else "no"


def _only(subjects: Sequence[PageSubject], path: str) -> PageSubject:
    if len(subjects) != 1:
        raise BadUse(f"{path} shows one thing and {len(subjects)} are given; .html and .json.gz take several")
    return subjects[0]


_WRITERS: dict[str, Callable[[Sequence[PageSubject], str], bytes]] = {
    ".html": lambda subjects, _: page_of(subjects).encode(),
    ".json.gz": lambda subjects, _: trace_of(subjects),
    ".svg": lambda subjects, path: svg_of(_only(subjects, path)).encode(),
    ".png": lambda subjects, path: png_of(_only(subjects, path)),
    ".csv": lambda subjects, path: tensors_csv(_only(subjects, path)).encode("utf-8", errors="replace"),
}


def write_report(subjects: Sequence[PageSubject], path: str | Path) -> int:
    """Write what the suffix of `path` asks for; returns how many bytes it took."""
    name = str(path)
    writer = next((write for suffix, write in _WRITERS.items() if name.lower().endswith(suffix)), None)
    if writer is None:
        raise BadUse(f"{name}: the suffix says what to write, and is none of {', '.join(_WRITERS)}")
    content = writer(subjects, name)
    try:
        Path(path).write_bytes(content)
    except OSError as fault:
        raise BadUse(f"{path} cannot be written: {fault.strerror or fault}") from fault
    return len(content)
