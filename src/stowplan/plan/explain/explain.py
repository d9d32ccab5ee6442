"""Why a tensor is kept, recomputed or offloaded, at what price, and what another decision would change."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate

from stowplan.errors import BadUse
from stowplan.ir import Graph, Op
from stowplan.ir.text import Labels
from stowplan.plan.judge.engines import Transfer
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.plan import Plan
from stowplan.plan.steps import Compute, Decision, Free, Keep, Load, RecomputeOp, Step, Store
from stowplan.plan.tile_map import TileLevel, TileMap
from stowplan.units import format_bytes, format_share

_LISTED = 5


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan's decision about one tensor and its effects. Steps are positions in the plan's list."""

    tensor: str
    nbytes: int
    decision: Decision | None
    maker: str
    readers: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]  # steps from which to which it is in memory
    run_spans: tuple[tuple[int, int], ...]  # the same, counting only what runs, from 1, as reports do
    runs: int  # of the whole plan, counted so
    alive_at_peak: bool
    again_runs: int  # of its maker
    again_seconds: float  # spent on them
    again_share: float  # of the baseline's seconds
    transfers: tuple[Transfer, ...]  # out and back
    transfer_runs: tuple[int, ...]  # their numbers, as in `run_spans`
    stall_seconds: float  # waited for it
    otherwise: str  # a sentence


def explain(plan: Plan, tensor: str) -> Explanation:
    """Why the plan treats a tensor as it does, and what another decision would cost; by id or name."""
    name = _find(plan, tensor)
    maker = next((op for op in plan.graph.ops if name in op.writes()), None)
    names = _storage(plan.graph, name)
    spans = _spans(plan, names)
    numbers = run_numbers(plan)
    peak = plan.projected_curve_bytes.index(plan.requested_peak_bytes)
    pricing = plan.pricing
    run = simulate(plan.graph, plan.steps, pricing)
    transfers = tuple(transfer for transfer in run.transfers if name in transfer.tensors)
    runs = sum(isinstance(step, RecomputeOp) and name in step.outputs for step in plan.steps)
    again_seconds = runs * pricing.seconds[maker.id] if maker else 0.0
    return Explanation(
        tensor=name,
        nbytes=plan.graph.tensors[name].nbytes or 0,
        decision=plan.decisions.get(name),
        maker=maker.id if maker else "",
        readers=tuple(_readers(plan.graph, names)),
        spans=spans,
        run_spans=tuple((numbers[start], numbers[end]) for start, end in spans),
        runs=numbers[-1],
        alive_at_peak=any(start <= peak <= end for start, end in spans),
        again_runs=runs,
        again_seconds=again_seconds,
        again_share=again_seconds / (plan.plain_seconds or 1.0),
        transfers=transfers,
        transfer_runs=tuple(numbers[transfer.step] for transfer in transfers),
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
    """The tiles of a tensor, named as in its segment or with the sweep before it; None if none do.

    The path of the module that makes it is also a name.
    """
    sweep, _, name = tensor.rpartition("/")
    for told in plan.tile_maps:
        made = [name] if told.find(name) else told.labels().made_in(name)
        found = told.find(made[0]) if len(made) == 1 else None
        if found and sweep in ("", told.sweep, found[0].sweep):
            return TiledTensor(made[0], *found, recomputed=made[0] in told.again)
    return None


def _find(plan: Plan, tensor: str) -> str:
    if tensor in plan.graph.tensors:
        return tensor
    named = [known.id for known in plan.graph.tensors.values() if known.name == tensor]
    graphs = (Labels(plan.graph), *(told.labels() for told in plan.tile_maps))
    made = {name: labels.tensor(name) for labels in graphs for name in labels.made_in(tensor)}
    if len(named or made) == 1:
        return next(iter(named or made))
    if made:
        raise BadUse(f"{tensor!r} is {len(made)} tensors: name one of {_listed(made.values())}")
    inside = (level.tensor for told in plan.tile_maps for level in told.levels)
    modules = (module for labels in graphs for module in labels.modules())
    known = dict.fromkeys((*plan.graph.tensors, *inside, *modules))
    close = [name for name in known if tensor in name] or get_close_matches(tensor, known, n=_LISTED)
    raise BadUse(f"the plan has no tensor {tensor!r}; it has {_listed(close or list(plan.decisions))}")


def _listed(names: Iterable[str]) -> str:
    all_of_them = list(names)
    return ", ".join(all_of_them[:_LISTED]) + (" and others" if len(all_of_them) > _LISTED else "")


def _storage(graph: Graph, name: str) -> set[str]:
    """The tensor and all views that share its storage."""
    owner = graph.storage_of(name)
    return {known for known in graph.tensors if graph.storage_of(known) == owner}


def _readers(graph: Graph, names: set[str]) -> Iterator[str]:
    """The ops that read the tensor or a view of it; ops that only make another view are left out."""
    for op in graph.ops:
        made = set(op.writes())
        if not names.isdisjoint(op.reads()) and not (made and names >= made):
            yield op.id


def run_numbers(plan: Plan) -> list[int]:
    """By step of the plan the number of its run, from 1; a step that frees belongs to the run before it."""
    return list(accumulate(0 if isinstance(step, Free) else 1 for step in plan.steps)) or [0]


def _spans(plan: Plan, names: set[str]) -> tuple[tuple[int, int], ...]:
    """The steps between which one of the names is in memory."""
    made_by = {op.id: names.intersection(op.writes()) for op in plan.graph.ops}
    alive = names.difference(*made_by.values())
    spans: list[tuple[int, int]] = []
    start: int | None = 0 if alive else None
    for number, step in enumerate(plan.steps):
        if isinstance(step, Free):
            alive = alive.difference(step.tensors)
            if start is not None and not alive:
                spans.append((start, number))
                start = None
        elif made := _made(step, names, made_by):
            alive |= made
            start = number if start is None else start
    if start is not None:
        spans.append((start, len(plan.steps) - 1))
    return tuple(spans)


def _made(step: Step, names: set[str], made_by: Mapping[str, set[str]]) -> set[str]:
    """Which of the names are in memory from this step on."""
    match step:
        case Compute(op):
            return made_by[op]
        case RecomputeOp(outputs=made) | Load(made):
            return names.intersection(made)
        case Free() | Store():
            return set()


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
