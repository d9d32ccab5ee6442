"""The file form of a plan: JSON with a version and a digest, the graph inside it in its own file form."""

import reprlib
from typing import Any

import msgspec

from stowplan.errors import BadInput
from stowplan.formats import stow
from stowplan.formats.checked import bad_input_of
from stowplan.ir import Document
from stowplan.plan.decision import (
    Compute,
    Decision,
    Free,
    Keep,
    Load,
    Offload,
    Recompute,
    RecomputeOp,
    Step,
    Store,
    Tile,
)
from stowplan.plan.files.rules import checked_plan
from stowplan.plan.files.sealed import Seal
from stowplan.plan.plan import AgainstEager, Plan
from stowplan.plan.pricing import Pricing
from stowplan.plan.tile_map import TileMap

_SEAL = Seal("stowplan.plan", version=2)

_STEPS: dict[str, type[Step]] = {
    "compute": Compute,
    "again": RecomputeOp,
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
    minimum_bytes: int | None
    bound_seconds: float
    extra_macs: int
    graph: str
    tile_maps: tuple[TileMap, ...] = ()
    cut_short: str = ""
    against_eager: AgainstEager | None = None
    projected_for: str = ""


def recognise(text: str) -> bool:
    """Whether a file opens as a plan does."""
    return _SEAL.recognise(text)


def write(plan: Plan) -> str:
    """The file of a plan."""
    record = _Record(
        **{name: getattr(plan, name) for name in _Record.__struct_fields__ if name not in _SPELLED},
        decisions={owner: _spelled(choice, _DECISIONS) for owner, choice in plan.decisions.items()},
        steps=[_spelled(step, _STEPS) for step in plan.steps],
        graph=stow.write(Document("stow", plan.graph)),
    )
    return _SEAL.close(record)


_SPELLED = ("decisions", "steps", "graph")


def read(text: str) -> Plan:
    """The plan in a file; BadInput if it is damaged, not one, or one that is not legal for its own graph."""
    if not recognise(text):
        what = "this is not a plan; `stowplan plan TARGET --budget BYTES -o PLAN` writes one"
        raise BadInput(what, where="line 1")
    record = _SEAL.open(text, _Record)
    plan = Plan(
        **{name: getattr(record, name) for name in _Record.__struct_fields__ if name not in _SPELLED},
        decisions={owner: _read(words, _DECISIONS) for owner, words in record.decisions.items()},
        steps=tuple(_read(words, _STEPS) for words in record.steps),
        graph=stow.read(record.graph).graph,
    )
    return checked_plan(plan)


def _spelled(value: Any, words: dict[str, Any]) -> list[Any]:
    word = next(word for word, kind in words.items() if isinstance(value, kind))
    return [word, *(getattr(value, name) for name in value.__dataclass_fields__)]


def _read(words: list[Any], kinds: dict[str, Any]) -> Any:
    kind = kinds.get(words[0]) if words and isinstance(words[0], str) else None
    if kind is None or len(words) != 1 + len(kind.__dataclass_fields__):
        raise BadInput(f"{reprlib.repr(words)} is none of {', '.join(kinds)}", where="$.content")
    fields = dict(zip(kind.__dataclass_fields__, words[1:], strict=True))
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as fault:
        raise bad_input_of(fault) from fault
