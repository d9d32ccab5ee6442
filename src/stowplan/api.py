"""The few verbs a user calls."""

from dataclasses import replace
from pathlib import Path

from stowplan.analyse.inspection import Inspection, inspection_of
from stowplan.errors import BadUse
from stowplan.formats.door import read_document
from stowplan.formats.writers import format_for, text_of
from stowplan.ir import Document

__all__ = ["Inspection", "convert", "inspect", "read_document"]


def inspect(path: str | Path, *, saved: str | None = None, packed: bool | None = None) -> Inspection:
    """What is in a file, where its memory goes, and how small it could get; nothing is run.

    `saved` ("listed" or "retain") chooses between the two views that a Chainer file gives of its backward;
    `packed` asks for the tensors' places in one arena, which are found unasked unless there are very many.
    """
    return inspection_of(read_document(path, saved=saved), packed=packed)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str | None = None,
    graph_only: bool = False,
    saved: str | None = None,
) -> Document:
    """Write what `source` holds to `target`, in the format `to` or the one the target's suffix asks for.

    With `graph_only`, times, addresses, regions and tiles are left out. Returns the document written.
    """
    document = read_document(source, saved=saved)
    if graph_only:
        document = replace(document, profile=None, allocation=None, regions=None, tiles=None)
    text = text_of(document, to or format_for(Path(target)))
    try:
        Path(target).write_text(text, encoding="utf-8", newline="\n")
    except OSError as fault:
        raise BadUse(f"{target} cannot be written: {fault.strerror or fault}") from fault
    return document
