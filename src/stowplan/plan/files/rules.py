"""The checks of a plan from a file before anything computes with it: figures in range, legal steps.

Whoever explains, draws or runs a plan may then rely on it as on one that was just made.
"""

from collections.abc import Iterable

from stowplan.errors import BadInput, IllegalPlan
from stowplan.plan.decision import Load, Recompute, Store, Tile
from stowplan.plan.explain.transfers import transfer_id
from stowplan.plan.judge.verify import verify
from stowplan.plan.plan import Plan
from stowplan.plan.tile_map import TileMap

_MOST_BYTES = 2**62
_MOST_NUMBER = 1e40  # seconds, or the multiply-accumulates that stand for them
_MOST_DIMS = 64
_DEEPEST_TILES = 8


def checked_plan(plan: Plan) -> Plan:
    """`plan` itself if it keeps all rules; BadInput names the key of the first that it breaks."""
    if not plan.graph.ops or not plan.steps:
        raise BadInput("a plan without ops or steps", where="$.content.steps")
    _check_prices(plan)
    _check_figures(plan)
    _check_decisions(plan)
    for told in plan.tile_maps:
        _check_tile_map(told)
    _check_transfers(plan)
    try:
        return verify(plan)
    except IllegalPlan as fault:
        raise BadInput(f"is not a legal plan for its graph: {fault}", where="$.content.steps") from fault


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


def _check_prices(plan: Plan) -> None:
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


def _check_figures(plan: Plan) -> None:
    check_bytes("$.content.projected_curve_bytes", plan.projected_curve_bytes)
    check_bytes("$.content.plain_peak_bytes", [plan.plain_peak_bytes])
    check_bytes("$.content.minimum_bytes", [plan.minimum_bytes or 0])
    seconds = (plan.projected_seconds, plan.plain_seconds, plan.bound_seconds)
    check_numbers("$.content.projected_seconds", seconds)
    check_numbers("$.content.allowed_bytes", [plan.allowed_bytes])
    check_numbers("$.content.extra_macs", [abs(plan.extra_macs)])


def _check_decisions(plan: Plan) -> None:
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


def _check_transfers(plan: Plan) -> None:
    """Transfers are shown as ops of their own, whose names the graph must not have."""
    moves = {transfer_id(step) for step in plan.steps if isinstance(step, Store | Load) and step.tensors}
    if taken := sorted(moves.intersection(op.id for op in plan.graph.ops)):
        raise BadInput(f"op {taken[0]!r} has the name of a transfer", where="$.content.graph")
