"""Why a tensor is kept, recomputed or offloaded, at what price, and what another decision would change."""

from dataclasses import dataclass

from stowplan.errors import BadUse
from stowplan.ir import Op
from stowplan.plan.decision import Compute, Decision, Free, Keep, Load, RecomputeOp, Step, Store
from stowplan.plan.judge.engines import Transfer
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.plan import Plan
from stowplan.plan.tile_map import TileLevel, TileMap
from stowplan.units import format_bytes, format_share


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the plan does with one tensor. Steps are positions in the plan's list."""

    tensor: str
    nbytes: int
    decision: Decision | None
    maker: str
    readers: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]  # steps from which to which it is in memory
    alive_at_peak: bool
    again_runs: int  # of its maker
    again_seconds: float  # spent on them
    again_share: float  # of the baseline's seconds
    transfers: tuple[Transfer, ...]  # out and back
    stall_seconds: float  # waited for it
    otherwise: str  # a sentence


def explain(plan: Plan, tensor: str) -> Explanation:
    """Why the plan treats a tensor as it does, and what another decision would cost; by id or name."""
    name = _find(plan, tensor)
    maker = next((op for op in plan.graph.ops if name in op.writes()), None)
    spans = _spans(plan, name)
    peak = plan.projected_curve_bytes.index(plan.projected_peak_bytes)
    pricing = plan.pricing
    run = simulate(plan.graph, plan.steps, pricing.seconds, pricing.workspace_bytes, pricing.tier)
    runs = sum(isinstance(step, RecomputeOp) and name in step.outputs for step in plan.steps)
    again_seconds = runs * pricing.seconds[maker.id] if maker else 0.0
    return Explanation(
        tensor=name,
        nbytes=plan.graph.tensors[name].nbytes or 0,
        decision=plan.decisions.get(name),
        maker=maker.id if maker else "",
        readers=tuple(op.id for op in plan.graph.ops if name in op.reads()),
        spans=spans,
        alive_at_peak=any(start <= peak <= end for start, end in spans),
        again_runs=runs,
        again_seconds=again_seconds,
        again_share=again_seconds / (plan.plain_seconds or 1.0),
        transfers=tuple(transfer for transfer in run.transfers if name in transfer.tensors),
        stall_seconds=sum((stall.seconds for stall in run.stalls if stall.tensor == name), 0.0),
        otherwise=_otherwise(plan, name, maker, spans, peak),
    )


@dataclass(frozen=True, slots=True)
class TiledTensor:
    """A tensor that is never whole: the map of its segment and its level there."""

    tensor: str
    told: TileMap
    level: TileLevel
    recomputed: bool  # inside of each tile


def explain_tiled(plan: Plan, tensor: str) -> TiledTensor | None:
    """What tiles do with a tensor, named as in its segment or with the sweep before it; None if none do."""
    sweep, _, bare = tensor.rpartition("/")
    for told in plan.tile_maps:
        if (found := told.find(bare)) and sweep in ("", told.sweep, found[0].sweep):
            return TiledTensor(bare, *found, recomputed=bare in told.again)
    return None


def _find(plan: Plan, tensor: str) -> str:
    if tensor in plan.graph.tensors:
        return tensor
    named = [known.id for known in plan.graph.tensors.values() if known.name == tensor]
    if len(named) == 1:
        return named[0]
    close = [name for name in plan.graph.tensors if tensor in name] or list(plan.decisions)
    raise BadUse(f"the plan has no tensor {tensor!r}; it has {', '.join(close[:5])} and others")


def _spans(plan: Plan, name: str) -> tuple[tuple[int, int], ...]:
    makers = {op.id for op in plan.graph.ops if name in op.writes()}
    spans: list[tuple[int, int]] = []
    start: int | None = None if makers else 0
    for number, step in enumerate(plan.steps):
        if isinstance(step, Free) and name in step.tensors and start is not None:
            spans.append((start, number))
            start = None
        elif start is None and _makes(step, name, makers):
            start = number
    if start is not None:
        spans.append((start, len(plan.steps) - 1))
    return tuple(spans)


def _makes(step: Step, name: str, makers: set[str]) -> bool:
    """Whether the tensor is in memory from this step on."""
    match step:
        case Compute(op):
            return op in makers
        case RecomputeOp(outputs=made) | Load(made):
            return name in made
        case Free() | Store():
            return False


def _otherwise(plan: Plan, name: str, maker: Op | None, spans: tuple[tuple[int, int], ...], peak: int) -> str:
    nbytes = plan.graph.tensors[name].nbytes or 0
    if len(spans) > 1:
        between = plan.projected_curve_bytes[spans[0][1] : spans[-1][0] + 1]
        needed = max(between, default=0) + nbytes
        over = needed - plan.allowed_bytes
        if over <= 0:
            return f"kept, the step would still fit: it would reach {format_bytes(needed)} while it waits"
        return f"kept, the step would reach {format_bytes(needed)}, {format_bytes(over)} over the budget"
    if maker is None or name not in plan.decisions or not isinstance(plan.decisions[name], Keep):
        return "nothing else was open to decide"
    seconds = plan.pricing.seconds[maker.id] / plan.plain_seconds if plan.plain_seconds else 0.0
    price = f"recomputing it would cost at least {format_share(seconds)} of the baseline"
    if any(start <= peak <= end for start, end in spans):
        return f"{price} and lower the memory at the peak by {format_bytes(nbytes)}"
    return f"{price} and not lower the peak, at which it is not in memory"
