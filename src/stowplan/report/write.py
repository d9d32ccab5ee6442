"""Write a report to a file. The suffix decides what it is: a page, a trace, a picture or a table."""

from collections.abc import Callable, Sequence
from pathlib import Path

from stowplan.errors import BadUse
from stowplan.report.page import Subject, page_of
from stowplan.report.picture import png_of, svg_of
from stowplan.report.tensors_csv import tensors_csv
from stowplan.report.trace import trace_of


def _only(subjects: Sequence[Subject], path: str) -> Subject:
    if len(subjects) != 1:
        raise BadUse(f"{path} shows one thing and {len(subjects)} are given; .html and .json.gz take several")
    return subjects[0]


_WRITERS: dict[str, Callable[[Sequence[Subject], str], bytes]] = {
    ".html": lambda subjects, _: page_of(subjects).encode(),
    ".json.gz": lambda subjects, _: trace_of(subjects),
    ".svg": lambda subjects, path: svg_of(_only(subjects, path)).encode(),
    ".png": lambda subjects, path: png_of(_only(subjects, path)),
    ".csv": lambda subjects, path: tensors_csv(_only(subjects, path)).encode("utf-8", errors="replace"),
}


def write_report(subjects: Sequence[Subject], path: str | Path) -> int:
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
