"""The form of a plan's file: JSON with a version and a digest, the graph inside it in its own file form."""

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from stowplan.errors import BadInput
from stowplan.formats import stow
from stowplan.formats.checked import bad_input_of, digest_of
from stowplan.ir import Document
from stowplan.plan.draft import AgainstEager, ArenaUse, Draft, Schedule
from stowplan.plan.pricing import Pricing
from stowplan.plan.steps import (
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
    transfer_id,
)
from stowplan.plan.tile_map import TileMap

Content = TypeVar("Content")


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The digest is taken over the bytes of the content as they stand."""

    format: str
    version: int
    digest: str
    content: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Seal:
    """The first fields of all files of one kind."""

    format: str
    version: int

    def recognise(self, text: str) -> bool:
        """Whether a file opens as this kind does."""
        return text[:200].lstrip().startswith(f'{{"format":"{self.format}"')

    def close(self, content: object) -> str:
        """The file of a content."""
        body = msgspec.json.encode(content)
        frame = _Frame(self.format, self.version, digest_of(body), msgspec.Raw(body))
        return msgspec.json.encode(frame).decode()

    def open(self, text: str, kind: type[Content]) -> Content:
        """The content of a file; BadInput if it is damaged or of another kind or version."""
        try:
            frame = msgspec.json.decode(text, type=_Frame)
            self._check(frame)
            return msgspec.json.decode(frame.content, type=kind)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as fault:
            raise bad_input_of(fault) from fault

    def _check(self, frame: _Frame) -> None:
        if (frame.format, frame.version) != (self.format, self.version):
            found = f"{frame.format!r} version {frame.version}"
            raise BadInput(
                f"is {found}, and this stowplan reads {self.format!r} version {self.version}: write it anew",
                where="$",
            )
        if digest_of(bytes(frame.content)) != frame.digest:
            raise BadInput(
                "the content has another digest: the file was changed or damaged", where="$.digest"
            )


_MOST_BYTES = 2**62
_MOST_NUMBER = 1e40  # seconds, or the multiply-accumulates that stand for them
_MOST_DIMS = 64
_DEEPEST_TILES = 8


def _check(draft: Draft) -> None:
    """BadInput names the key of the first figure that is out of range."""
    if not draft.graph.ops or not draft.steps:
        raise BadInput("a plan without ops or steps", where="$.content.steps")
    _check_prices(draft)
    _check_figures(draft)
    _check_decisions(draft)
    for told in draft.tile_maps:
        _check_tile_map(told)
    _check_transfers(draft)


def check_bytes(where: str, counts: Iterable[int]) -> None:
    """Refuse counts of bytes that no machine has."""
    for count in counts:
        if not 0 <= count < _MOST_BYTES:
            raise BadInput(f"a number of bytes that no machine has: {_shown(count)}", where=where)


def check_numbers(where: str, numbers: Iterable[float]) -> None:
    """Refuse seconds and shares that are negative, infinite or absurd."""
    for number in numbers:
        if not 0 <= number <= _MOST_NUMBER:
            raise BadInput(f"a figure that nothing can have: {_shown(number)}", where=where)


def _shown(number: float) -> str:
    """A number of any length in few characters."""
    return f"{number:g}" if isinstance(number, float) or abs(number) < _MOST_BYTES**4 else "a huge one"


def _check_prices(plan: Schedule) -> None:
    pricing = plan.pricing
    if missing := [op.id for op in plan.graph.ops if op.id not in pricing.seconds]:
        raise BadInput(f"op {missing[0]!r} has no price", where="$.content.pricing.seconds")
    check_numbers("$.content.pricing.seconds", pricing.seconds.values())
    check_bytes("$.content.pricing.workspace_bytes", pricing.workspace_bytes.values())
    check_bytes("$.content.pricing.workspace_bytes", [sum(pricing.workspace_bytes.values())])
    if tier := pricing.tier:
        where = "$.content.pricing.tier"
        check_bytes(where, (tier.capacity_bytes, tier.staging_bytes))
        rates = (tier.store_bytes_per_second, tier.load_bytes_per_second)
        check_numbers(where, (*rates, tier.latency_seconds))
        if not all(rates):
            raise BadInput("a tier that moves nothing in any time", where=where)


def _check_figures(plan: Schedule) -> None:
    check_bytes("$.content.projected_curve_bytes", plan.projected_curve_bytes)
    check_bytes("$.content.plain_peak_bytes", [plan.plain_peak_bytes])
    check_bytes("$.content.minimum_bytes", [plan.minimum_bytes or 0])
    seconds = (plan.projected_seconds, plan.plain_seconds, plan.bound_seconds)
    check_numbers("$.content.projected_seconds", seconds)
    check_numbers("$.content.allowed_bytes", [plan.allowed_bytes])
    check_numbers("$.content.extra_macs", [abs(plan.extra_macs)])
    if use := plan.arena:
        check_bytes("$.content.arena", (use.nbytes, use.beside_bytes, use.copied_bytes))


def _check_decisions(plan: Schedule) -> None:
    made = {name for op in plan.graph.ops for name in op.writes()}
    for name, decision in plan.decisions.items():
        where = f"$.content.decisions[{name[:40]!r}]"
        if isinstance(decision, Tile):
            _check_shape(where, decision.parts)
        elif name not in plan.graph.tensors:
            raise BadInput("is decided about, but the graph has no such tensor", where=where)
        elif isinstance(decision, Recompute) and name not in made:
            raise BadInput("is recomputed, but no op makes it", where=where)


def _check_tile_map(told: TileMap) -> None:
    where, level, depth = "$.content.tile_maps", [told], 0
    while level:
        if depth > _DEEPEST_TILES:
            raise BadInput(f"segments inside of each other, more than {_DEEPEST_TILES} deep", where=where)
        for inner in level:
            _check_shape(where, inner.parts)
            check_numbers(where, (inner.tiles, inner.halo_share, abs(inner.extra_macs)))
            check_bytes(where, [inner.backward_peak_bytes])
            for op in inner.levels:
                _check_shape(where, op.whole)
                _check_shape(where, op.part)
                check_numbers(where, (op.work, op.macs))
        level, depth = [further for inner in level for further in inner.within], depth + 1


def _check_shape(where: str, shape: tuple[int, ...]) -> None:
    if len(shape) > _MOST_DIMS:
        raise BadInput(f"a shape of {len(shape)} dims, more than {_MOST_DIMS}", where=where)
    check_bytes(where, shape)


def _check_transfers(plan: Schedule) -> None:
    """Transfers are shown as ops of their own, whose names the graph must not have."""
    moves = {transfer_id(step) for step in plan.steps if isinstance(step, Store | Load) and step.tensors}
    if taken := sorted(moves.intersection(op.id for op in plan.graph.ops)):
        raise BadInput(f"op {taken[0]!r} has the name of a transfer", where="$.content.graph")


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
    arena: ArenaUse | None = None


def recognise(text: str) -> bool:
    """Whether a file opens as a plan does."""
    return _SEAL.recognise(text)


def write(plan: Schedule) -> str:
    """The file of a plan, or of a draft: whoever reads it gets a plan."""
    record = _Record(
        **{name: getattr(plan, name) for name in _Record.__struct_fields__ if name not in _SPELLED},
        decisions={owner: _spelled(choice, _DECISIONS) for owner, choice in plan.decisions.items()},
        steps=[_spelled(step, _STEPS) for step in plan.steps],
        graph=stow.write(Document("stow", plan.graph)),
    )
    return _SEAL.close(record)


_SPELLED = ("decisions", "steps", "graph")


def read_draft(text: str) -> Draft:
    """What a file says of a plan; BadInput if it is damaged, not one, or has figures out of range."""
    if not recognise(text):
        what = "this is not a plan; `stowplan plan TARGET --budget BYTES -o PLAN` writes one"
        raise BadInput(what, where="line 1")
    record = _SEAL.open(text, _Record)
    draft = Draft(
        **{name: getattr(record, name) for name in _Record.__struct_fields__ if name not in _SPELLED},
        decisions={owner: _read(words, _DECISIONS) for owner, words in record.decisions.items()},
        steps=tuple(_read(words, _STEPS) for words in record.steps),
        graph=stow.read(record.graph).graph,
    )
    _check(draft)
    return draft


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
