"""The file form of a plan: JSON with a version and a digest, the graph inside it in its own file form."""

from hashlib import sha256
from typing import Any

import msgspec

from stowplan.errors import BadInput
from stowplan.formats import stow
from stowplan.ir import Document
from stowplan.plan.decision import (
    Again,
    Compute,
    Decision,
    Free,
    Keep,
    Load,
    Offload,
    Recompute,
    Step,
    Store,
    Tile,
)
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Pricing
from stowplan.plan.tiles.maps import TileMap

FORMAT = "stowplan.plan"
VERSION = 1

_STEPS: dict[str, type[Step]] = {
    "compute": Compute,
    "again": Again,
    "free": Free,
    "store": Store,
    "load": Load,
}
_DECISIONS: dict[str, type[Decision]] = {
    "keep": Keep,
    "recompute": Recompute,
    "offload": Offload,
    "tile": Tile,
}


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plan's own fields; steps and decisions are a word and the fields of their type."""

    pricing: Pricing
    allowed_bytes: int
    decisions: dict[str, list[Any]]
    steps: list[list[Any]]
    projected_curve_bytes: tuple[int, ...]
    projected_seconds: float
    plain_peak_bytes: int
    plain_seconds: float
    minimum_bytes: int
    bound_seconds: float
    extra_macs: int
    graph: str
    tile_maps: tuple[TileMap, ...] = ()


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file around the plan; the digest is taken over the bytes of the plan as they stand."""

    format: str
    version: int
    digest: str
    plan: msgspec.Raw


def recognise(text: str) -> bool:
    """Whether a file opens as a plan does."""
    return text[:200].lstrip().startswith(f'{{"format":"{FORMAT}"')


def write(plan: Plan) -> str:
    """The file of a plan."""
    record = _Record(
        **{name: getattr(plan, name) for name in _Record.__struct_fields__ if name not in _SPELLED},
        decisions={owner: _spelled(choice, _DECISIONS) for owner, choice in plan.decisions.items()},
        steps=[_spelled(step, _STEPS) for step in plan.steps],
        graph=stow.write(Document("stow", plan.graph)),
    )
    body = msgspec.json.encode(record)
    return msgspec.json.encode(_Frame(FORMAT, VERSION, _digest(body), msgspec.Raw(body))).decode()


_SPELLED = ("decisions", "steps", "graph")


def read(text: str) -> Plan:
    """The plan in a file; BadInput if it is damaged or not one."""
    if not recognise(text):
        raise BadInput("this is not a plan; `stowplan plan TARGET --budget BYTES -o PLAN` writes one")
    try:
        frame = msgspec.json.decode(text, type=_Frame)
        if (frame.format, frame.version) != (FORMAT, VERSION):
            raise BadInput(
                f"{frame.format!r} version {frame.version}, not {FORMAT!r} version {VERSION}", where="$"
            )
        if _digest(bytes(frame.plan)) != frame.digest:
            raise BadInput(
                "the content has another digest: the file was changed or damaged", where="$.digest"
            )
        record = msgspec.json.decode(frame.plan, type=_Record)
        return Plan(
            **{name: getattr(record, name) for name in _Record.__struct_fields__ if name not in _SPELLED},
            decisions={owner: _read(words, _DECISIONS) for owner, words in record.decisions.items()},
            steps=tuple(_read(words, _STEPS) for words in record.steps),
            graph=stow.read(record.graph).graph,
        )
    except (msgspec.DecodeError, UnicodeEncodeError) as fault:
        what, _, where = str(fault).partition(" - at `")
        raise BadInput(what, where=where.rstrip("`") or "$") from fault


def _spelled(value: Any, words: dict[str, Any]) -> list[Any]:
    word = next(word for word, kind in words.items() if isinstance(value, kind))
    return [word, *(getattr(value, name) for name in value.__dataclass_fields__)]


def _read(words: list[Any], kinds: dict[str, Any]) -> Any:
    kind = kinds.get(str(words[0]) if words else "")
    if kind is None or len(words) != 1 + len(kind.__dataclass_fields__):
        raise BadInput(f"{words!r} is none of {', '.join(kinds)}", where="$.plan")
    fields = dict(zip(kind.__dataclass_fields__, words[1:], strict=True))
    return msgspec.convert(fields, kind)


def _digest(body: bytes) -> str:
    return f"sha256:{sha256(body).hexdigest()}"
