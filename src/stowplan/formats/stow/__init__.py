"""stowplan's own file format, `.stow.json`: a whole document with a version and a digest.

    {"format": "stow", "version": 1, "digest": "sha256:...",
     "document": {"tensors": [...], "ops": [...], ...}}

The digest covers the document in one canonical form (no blanks, fields in order). Another tool may reformat a
file; a file with other content has another digest.
"""

import json
import re
from collections.abc import Iterable
from hashlib import sha256

import msgspec

from stowplan.errors import BadInput, BadUse
from stowplan.formats.checked import bad_input_of, checked
from stowplan.formats.stow.records import DocumentRecord, OpRecord, TensorRecord, document_of, record_of
from stowplan.ir import Document
from stowplan.ir.graph import collector_paused, object_without_repeats

__all__ = ["FORMAT", "read", "recognise", "write"]


FORMAT = "stow"
VERSION = 1

_OPENING = re.compile(r'\s*\{\s*"format"\s*:\s*"stow"\s*[,}]')
_EMPTY = b'{"tensors":[],"ops":[]'
_ENCODER = msgspec.json.Encoder(enc_hook=dict)  # mappings of other types are written as objects


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file around the document."""

    format: str
    version: int
    digest: str
    document: msgspec.Raw


def recognise(text: str) -> bool:
    """A JSON object that opens by naming this format."""
    return _OPENING.match(text[:4096]) is not None


def write(document: Document) -> str:
    """The file of a document, with a line for each tensor and op."""
    try:
        record = record_of(document)
        frame = _Frame(FORMAT, VERSION, _digest(_ENCODER.encode(record)), msgspec.Raw(_laid_out(record)))
        return _ENCODER.encode(frame).decode() + "\n"
    except UnicodeEncodeError as fault:
        raise BadUse(f"the document holds text that is not Unicode: {fault.object[:40]!r}") from fault


def read(text: str) -> Document:
    """The document in a file; BadInput if it is not what was written."""
    try:
        with collector_paused():
            document = _document_in(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as fault:
        raise bad_input_of(fault) from fault
    checked(document.graph, {}, "$.ops")
    return document


def _document_in(data: bytes) -> Document:
    frame = msgspec.json.decode(data, type=_Frame)
    if (frame.format, frame.version) != (FORMAT, VERSION):
        raise BadInput(f"{frame.format!r} version {frame.version}; read here is version {VERSION}", where="$")
    record = msgspec.json.decode(frame.document, type=DocumentRecord)
    spelled = _ENCODER.encode(record)
    if _digest(spelled) != frame.digest:
        raise BadInput("the content has another digest: the file was changed or damaged", where="$.digest")
    canonical = _ENCODER.encode(msgspec.structs.replace(frame, document=msgspec.Raw(spelled)))
    if msgspec.json.format(data, indent=-1) != canonical:
        _check_other_spelling(data, spelled)
    return document_of(record, FORMAT)


def _check_other_spelling(data: bytes, spelled: bytes) -> None:
    """Accept fields in another order and the like, but no key that comes twice or is not known."""
    try:
        frame = json.loads(data, object_pairs_hook=object_without_repeats)
    except ValueError as fault:
        raise BadInput(str(fault), where="$") from fault
    if frame["document"] != json.loads(spelled):
        raise BadInput("holds a key that this version does not write", where="$.document")


def _digest(spelled: bytes) -> str:
    return f"sha256:{sha256(spelled).hexdigest()}"


def _laid_out(record: DocumentRecord) -> bytes:
    """The canonical spelling with line breaks around each tensor and op."""
    rest = _ENCODER.encode(msgspec.structs.replace(record, tensors=(), ops=()))
    tensors, ops = _lines(record.tensors), _lines(record.ops)
    return b'{"tensors":[' + tensors + b'],"ops":[' + ops + b"]" + rest.removeprefix(_EMPTY)


def _lines(records: Iterable[TensorRecord | OpRecord]) -> bytes:
    return b"\n" + _ENCODER.encode_lines(records).rstrip().replace(b"\n", b",\n") + b"\n"
