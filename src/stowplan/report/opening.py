"""Open what a report is asked for: a plan, a record, or a document in any of the formats that can be read."""

from collections.abc import Callable
from pathlib import Path

from stowplan.errors import BadInput
from stowplan.formats.door import read_document
from stowplan.plan.files import plan_file, record_file
from stowplan.report.page.subject import Thing

_HEAD = 256  # bytes by which plans and records are recognised


def opened(path: str | Path, *, saved: str | None = None) -> Thing:
    """What is in a file. `saved` chooses between the two views of a Chainer file."""
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
