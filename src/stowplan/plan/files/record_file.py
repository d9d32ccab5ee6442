"""The file form of a record: JSON with a version and a digest, the plan inside it in its own file form."""

import msgspec

from stowplan.errors import BadInput
from stowplan.plan.files import plan_file
from stowplan.plan.files.plan_form import Seal, check_bytes, check_numbers
from stowplan.plan.record import Difference, Record

_SEAL = Seal("stowplan.record", version=2)


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


def recognise(text: str) -> bool:
    """Whether a file opens as a record does."""
    return _SEAL.recognise(text)


def write(record: Record) -> str:
    """The file of a record."""
    fields = {name: getattr(record, name) for name in _Body.__struct_fields__ if name != "plan"}
    return _SEAL.close(_Body(**fields, plan=plan_file.write(record.plan)))


def read(text: str) -> Record:
    """The record in a file; BadInput if it is damaged or not one."""
    body = _SEAL.open(text, _Body)
    if len(body.measured_curve_bytes) != len(body.measured_curve_seconds):
        raise BadInput("the measured curve has not one time for each value", where="$.content")
    check_bytes("$.content.measured_curve_bytes", body.measured_curve_bytes)
    check_bytes("$.content.plain_measured_peak_bytes", [body.plain_measured_peak_bytes or 0])
    seconds = (body.measured_seconds, body.plain_measured_seconds or 0.0, *body.measured_curve_seconds)
    check_numbers("$.content.measured_seconds", seconds)
    for difference in body.differences:
        check_numbers("$.content.differences", (difference.largest, difference.scale, difference.allowed))
    fields = {name: getattr(body, name) for name in _Body.__struct_fields__ if name != "plan"}
    return Record(**fields, plan=plan_file.read(body.plan))
