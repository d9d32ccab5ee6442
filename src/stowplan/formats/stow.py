"""stowplan's own file format, `.stow.json`: a whole document with a version and a digest.

    {"format": "stow", "version": 1, "digest": "sha256:...",
     "document": {"tensors": [...], "ops": [...], ...}}

The digest covers the document in one canonical form (no blanks, fields in order). Another tool may reformat a
file; a file with other content has another digest.

Tensors and ops are the bulk of a file: defaults are omitted, and a use with role DATA is a bare id. The
smaller facets are written as their types are. Strict JSON has no infinities: attributes write them as
`{"$float": "inf"}`, and a mapping's own keys that begin with $ get a second $.
"""

import json
import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, TypeAlias, TypeVar

import msgspec

from stowplan.errors import BadInput, BadUse
from stowplan.formats.checked import bad_input_of, checked, digest_of
from stowplan.geometry import Point
from stowplan.ir import (
    Allocation,
    Attribute,
    Document,
    DType,
    Graph,
    Kind,
    Note,
    Op,
    Phase,
    Profile,
    RegionLists,
    Reserved,
    Role,
    Shape,
    Tensor,
    TileSchedule,
    TileStep,
    Use,
)
from stowplan.ir.graph import collector_paused, object_without_repeats
from stowplan.ir.heap import HeapTrace, fault_in

_FLOAT = "$float"
_NON_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def to_json(attribute: Attribute) -> object:
    """The JSON value of an attribute."""
    if isinstance(attribute, tuple):
        return [to_json(item) for item in attribute]
    if isinstance(attribute, Mapping):
        return {f"${key}" if key[:1] == "$" else key: to_json(item) for key, item in attribute.items()}
    if isinstance(attribute, float) and not isfinite(attribute):
        return {_FLOAT: str(attribute)}
    return attribute


def from_json(value: object) -> Attribute:
    """The attribute of a JSON value."""
    if isinstance(value, list):
        return tuple(map(from_json, value))
    if isinstance(value, dict):
        return _non_finite(value[_FLOAT]) if value.keys() == {_FLOAT} else _mapping(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} does not come out of a JSON file")


def _mapping(value: dict[str, object]) -> dict[str, Attribute]:
    return {_own_key(key): from_json(item) for key, item in value.items()}


def _own_key(key: str) -> str:
    if key[:1] == "$" and key[:2] != "$$":
        raise BadInput(f"an attribute's key {key!r} begins with one $", where="$.ops")
    return key[1:] if key[:1] == "$" else key


def _non_finite(name: object) -> float:
    if not isinstance(name, str) or name not in _NON_FINITE:
        raise BadInput(f"an attribute's {_FLOAT} is one of {', '.join(_NON_FINITE)}", where="$.ops")
    return _NON_FINITE[name]


UseRecord: TypeAlias = str | tuple[str, Role]
TileRecord: TypeAlias = tuple[Point, tuple[TileStep, ...]]

MOST_SECONDS = 1e12

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _Record(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A JSON object whose keys are known and whose default values go without saying."""


class TensorRecord(_Record):
    """One tensor."""

    id: str
    kind: Kind
    shape: Shape | None = None
    dtype: DType | None = None
    nbytes: int | None = None
    name: str = ""
    layout: str = ""
    device: str = ""
    gradient_of: str | None = None
    alias_of: str | None = None


class OpRecord(_Record):
    """One op, at its place in the order."""

    id: str
    type: str
    phase: Phase
    inputs: tuple[UseRecord, ...] = ()
    outputs: tuple[UseRecord, ...] = ()
    attributes: dict[str, Any] = {}
    device: str = ""
    adjoint_of: str | None = None
    scope: str = ""
    source: str = ""


class TilesRecord(_Record):
    """A tile schedule; JSON objects have no tuples for keys, so tiles are pairs of coordinate and steps."""

    grid: Point
    forward: tuple[TileRecord, ...]
    backward: tuple[TileRecord, ...]


class AllocationRecord(_Record):
    """The places of tensors, and the segments of an allocator."""

    places: dict[str, tuple[int, int]]
    segments: tuple[Reserved, ...] = ()


class DocumentRecord(_Record):
    """All a file says. Tensors and ops come first: the writer gives each of them a line."""

    tensors: tuple[TensorRecord, ...]
    ops: tuple[OpRecord, ...]
    held: tuple[str, ...] = ()
    name: str = ""
    profile: Profile | None = None
    allocation: AllocationRecord | None = None
    regions: RegionLists | None = None
    tiles: TilesRecord | None = None
    notes: tuple[Note, ...] = ()
    counts: dict[str, int] = {}
    heap: HeapTrace | None = None


def record_of(document: Document) -> DocumentRecord:
    """The record of a document, as its file holds it."""
    graph = document.graph
    if document.profile and (fault := _impossible_time(document.profile)):
        raise BadUse(fault)
    return DocumentRecord(
        tensors=tuple(map(_tensor_record, graph.tensors.values())),
        ops=tuple(map(_op_record, graph.ops)),
        held=tuple(sorted(graph.held)),
        name=graph.name,
        profile=document.profile,
        allocation=_allocation_record(document.allocation) if document.allocation else None,
        regions=document.regions,
        tiles=_tiles_record(document.tiles) if document.tiles else None,
        notes=document.notes,
        counts=dict(document.counts),
        heap=document.heap,
    )


def _tensor_record(tensor: Tensor) -> TensorRecord:
    return TensorRecord(
        tensor.id,
        tensor.kind,
        tensor.shape,
        tensor.dtype,
        tensor.nbytes,
        tensor.name,
        tensor.layout,
        tensor.device,
        tensor.gradient_of,
        tensor.alias_of,
    )


def _op_record(op: Op) -> OpRecord:
    return OpRecord(
        op.id,
        op.type,
        op.phase,
        tuple(map(_use_record, op.inputs)),
        tuple(map(_use_record, op.outputs)),
        {key: to_json(value) for key, value in op.attributes.items()},
        op.device,
        op.adjoint_of,
        op.scope,
        op.source,
    )


def _use_record(use: Use) -> UseRecord:
    return use.tensor if use.role is Role.DATA else (use.tensor, use.role)


def _allocation_record(allocation: Allocation) -> AllocationRecord:
    return AllocationRecord(dict(allocation.places), allocation.segments)


def _tiles_record(tiles: TileSchedule) -> TilesRecord:
    return TilesRecord(tiles.grid, tuple(tiles.forward.items()), tuple(tiles.backward.items()))


def _impossible_time(profile: Profile) -> str:
    """The fault in a profile's times, "" if there is none: sums and differences of them must stay numbers."""
    for clock, times in profile.clocks.items():
        for op, time in times.items():
            moments = (time.start_seconds, time.kernel_seconds, time.end_seconds)
            if not all(abs(moment) <= MOST_SECONDS for moment in moments):
                return f"op {op!r} has a time on clock {clock!r} not within {MOST_SECONDS:g} s: {moments}"
    return ""


def document_of(record: DocumentRecord, format_name: str) -> Document:
    """The document a file describes, its graph not yet validated."""
    if record.profile and (fault := _impossible_time(record.profile)):
        raise BadInput(fault, where="$.profile")
    if record.heap and (fault := fault_in(record.heap)):
        raise BadInput(fault, where="$.heap")
    graph = Graph(
        _unique(((tensor.id, _tensor(tensor)) for tensor in record.tensors), "$.tensors"),
        tuple(map(_op, record.ops)),
        frozenset(record.held),
        record.name,
    )
    return Document(
        format_name,
        graph,
        record.profile,
        Allocation(record.allocation.places, record.allocation.segments) if record.allocation else None,
        record.regions,
        _tiles(record.tiles) if record.tiles else None,
        record.notes,
        record.counts,
        record.heap,
    )


def _tensor(record: TensorRecord) -> Tensor:
    return Tensor(
        record.id,
        record.kind,
        record.shape,
        record.dtype,
        record.nbytes,
        record.name,
        record.layout,
        record.device,
        record.gradient_of,
        record.alias_of,
    )


def _op(record: OpRecord) -> Op:
    return Op(
        record.id,
        record.type,
        record.phase,
        tuple(map(_use, record.inputs)),
        tuple(map(_use, record.outputs)),
        {key: from_json(value) for key, value in record.attributes.items()},
        record.device,
        record.adjoint_of,
        record.scope,
        record.source,
    )


def _use(record: UseRecord) -> Use:
    return Use(record) if isinstance(record, str) else Use(*record)


def _tiles(record: TilesRecord) -> TileSchedule:
    return TileSchedule(
        record.grid, _unique(record.forward, "$.tiles.forward"), _unique(record.backward, "$.tiles.backward")
    )


def _unique(pairs: Iterable[tuple[_Key, _Value]], where: str) -> dict[_Key, _Value]:
    found: dict[_Key, _Value] = {}
    for key, value in pairs:
        if key in found:
            raise BadInput(f"{key!r} comes twice", where=where)
        found[key] = value
    return found


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
        frame = _Frame(FORMAT, VERSION, digest_of(_ENCODER.encode(record)), msgspec.Raw(_laid_out(record)))
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
        raise BadInput(
            f"is {frame.format!r} version {frame.version}, and this stowplan reads version {VERSION}",
            where="$",
        )
    record = msgspec.json.decode(frame.document, type=DocumentRecord)
    spelled = _ENCODER.encode(record)
    if digest_of(spelled) != frame.digest:
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


def _laid_out(record: DocumentRecord) -> bytes:
    """The canonical spelling with line breaks around each tensor and op."""
    rest = _ENCODER.encode(msgspec.structs.replace(record, tensors=(), ops=()))
    tensors, ops = _lines(record.tensors), _lines(record.ops)
    return b'{"tensors":[' + tensors + b'],"ops":[' + ops + b"]" + rest.removeprefix(_EMPTY)


def _lines(records: Iterable[TensorRecord | OpRecord]) -> bytes:
    return b"\n" + _ENCODER.encode_lines(records).rstrip().replace(b"\n", b",\n") + b"\n"
