"""Plans with tiles for a captured step: ways to tile are tried in the order of their expected seconds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from stowplan.capture import Captured
from stowplan.errors import BadUse, BudgetTooSmall, CaptureError
from stowplan.ir import Phase
from stowplan.plan.frontier import floor_of
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Pricing
from stowplan.plan.problem import problem_of
from stowplan.plan.tiles.candidates import Tiled, Tiling, tilings_of
from stowplan.plan.tiles.crops import crops_early
from stowplan.run.fit import plan_within, planner_for_captured
from stowplan.run.straight import StraightStep
from stowplan.run.tiles.sweep import Sweep
from stowplan.run.tiles.swept import capture_swept, check_differentiable


@dataclass(frozen=True, slots=True)
class TiledStep:
    """A plan, the step it is for, and the sweeps in it, by name."""

    plan: Plan
    captured: Captured
    sweeps: tuple[str, ...] = ()

    def bound_to(self, model: nn.Module) -> StraightStep:
        """The step, ready to be called like the model."""
        return StraightStep(self.captured, model, steps=self.plan.steps)


def plan_in_tiles(
    captured: Captured,
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    allowed_bytes: int,
    moves: int | None = None,
) -> TiledStep:
    """The fastest plan found within `allowed_bytes`, with sweeps where they are worth it.

    Raises BudgetTooSmall with the smallest budget that any way to tile was planned for.
    """
    plain = planner_for_captured(captured, moves=moves)
    plain_seconds = sum(plain.problem.seconds)
    best, smallest = None, BudgetTooSmall("", allowed_bytes=0, minimum_bytes=2**62, binding=())
    try:
        best = TiledStep(plan_within(plain, allowed_bytes), captured)
    except BudgetTooSmall as fault:
        smallest = fault
    for seconds, tiling in _by_seconds(captured, model, args, kwargs, plain.pricing):
        if best is not None and seconds >= best.plan.projected_seconds:
            break
        try:
            found = _planned(captured, model, args, kwargs, tiling, allowed_bytes, moves)
        except BudgetTooSmall as fault:
            smallest = min(smallest, fault, key=lambda fault: fault.minimum_bytes)
            continue
        except (BadUse, CaptureError):  # a loss without a form on parts, a view that needs another layout
            continue
        told = replace(found.plan, plain_seconds=plain_seconds, plain_peak_bytes=plain.plain_peak_bytes)
        told = replace(told, bound_seconds=min(plain_seconds, told.bound_seconds))
        if best is None or told.projected_seconds < best.plan.projected_seconds:
            best = replace(found, plan=told)
    if best is None:
        raise smallest
    return best


def _by_seconds(
    captured: Captured,
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
    pricing: Pricing,
) -> Iterator[tuple[float, Tiling]]:
    """Ways to tile with what they should take, if nothing else is recomputed."""
    try:
        check_differentiable(captured, model, args, kwargs)
    except BadUse:
        return
    priced = ((_expected_seconds(captured, pricing, t), t) for t in tilings_of(crops_early(captured.graph)))
    yield from sorted(priced, key=lambda pair: pair[0])


def _expected_seconds(captured: Captured, pricing: Pricing, tiling: Tiling) -> float:
    return sum(pricing.seconds.values()) + sum(_extra(captured, pricing, tiled) for tiled in tiling)


def _extra(captured: Captured, pricing: Pricing, tiled: Tiled) -> float:
    """Work done twice for the halo and, unless the tiles end in the loss, once more to differentiate."""
    work = tiled.costs.work
    runs = 1 if tiled.segment.loss else 2
    ahead = sum(pricing.seconds[op.id] * (runs * work[op.id] - 1) for op in tiled.segment.ops)
    adjoints = (op for op in captured.graph.ops if op.phase is Phase.BACKWARD and op.adjoint_of in work)
    return ahead + sum(pricing.seconds[op.id] * (work[op.adjoint_of or ""] - 1) for op in adjoints)


def _planned(
    captured: Captured,
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
    tiling: Tiling,
    allowed_bytes: int,
    moves: int | None,
) -> TiledStep:
    early = replace(captured, graph=crops_early(captured.graph))
    calls = captured.program.calls
    sweeps = [Sweep(tiled.segment, calls, tiled.parts) for tiled in tiling]
    swept = capture_swept(early, model, args, kwargs, sweeps=sweeps)
    _refuse_hopeless(swept, tiling, sweeps, allowed_bytes)
    planner = planner_for_captured(swept, moves=moves)
    plan = plan_within(planner, allowed_bytes)
    return TiledStep(plan, swept, tuple(sweep.name for sweep in sweeps))


def _refuse_hopeless(swept: Captured, tiling: Tiling, sweeps: list[Sweep], allowed_bytes: int) -> None:
    """BudgetTooSmall, before anything is tried, if not even the tiles themselves fit."""
    peaks = {s.name: t.costs.forward_peak_bytes for s, t in zip(sweeps, tiling, strict=True)}
    workspace = {op.id: peaks.get(str(op.attributes.get("name")), 0) for op in swept.graph.ops}
    floor = floor_of(problem_of(swept.graph, [0.0] * len(swept.graph.ops), workspace))
    if floor > allowed_bytes:
        raise BudgetTooSmall(
            f"{allowed_bytes} bytes allowed, but no schedule with {sweeps[0].name} needs less than {floor}",
            allowed_bytes=allowed_bytes,
            minimum_bytes=floor,
            binding=(),
        )
