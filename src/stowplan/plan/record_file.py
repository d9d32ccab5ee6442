"""The file form of a record: JSON with a version and a digest, the plan inside it in its own file form."""

from hashlib import sha256

import msgspec

from stowplan.errors import BadInput
from stowplan.plan import file as plan_file
from stowplan.plan.record import Difference, Record

FORMAT = "stowplan.record"
VERSION = 1


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record's own fields, and the file of its plan."""

    device: str
    measured_curve_bytes: tuple[int, ...]
    measured_curve_seconds: tuple[float, ...]
    measured_seconds: float
    plain_measured_peak_bytes: int | None
    plain_measured_seconds: float | None
    differences: tuple[Difference, ...]
    plan: str


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file around the record; the digest is taken over the bytes of the record as they stand."""

    format: str
    version: int
    digest: str
    record: msgspec.Raw


def recognise(text: str) -> bool:
    """Whether a file opens as a record does."""
    return text[:200].lstrip().startswith(f'{{"format":"{FORMAT}"')


def write(record: Record) -> str:
    """The file of a record."""
    fields = {name: getattr(record, name) for name in _Body.__struct_fields__ if name != "plan"}
    body = msgspec.json.encode(_Body(**fields, plan=plan_file.write(record.plan)))
    return msgspec.json.encode(_Frame(FORMAT, VERSION, _digest(body), msgspec.Raw(body))).decode()


def read(text: str) -> Record:
    """The record in a file; BadInput if it is damaged or not one."""
    try:
        frame = msgspec.json.decode(text, type=_Frame)
        if (frame.format, frame.version) != (FORMAT, VERSION):
            raise BadInput(f"{frame.format!r} version {frame.version}, not {FORMAT!r} version {VERSION}")
        if _digest(bytes(frame.record)) != frame.digest:
            raise BadInput(
                "the content has another digest: the file was changed or damaged", where="$.digest"
            )
        body = msgspec.json.decode(frame.record, type=_Body)
    except (msgspec.DecodeError, UnicodeEncodeError) as fault:
        what, _, where = str(fault).partition(" - at `")
        raise BadInput(what, where=where.rstrip("`") or "$") from fault
    if len(body.measured_curve_bytes) != len(body.measured_curve_seconds):
        raise BadInput("the measured curve has not one time for each value", where="$.record")
    fields = {name: getattr(body, name) for name in _Body.__struct_fields__ if name != "plan"}
    return Record(**fields, plan=plan_file.read(body.plan))


def _digest(body: bytes) -> str:
    return f"sha256:{sha256(body).hexdigest()}"
