"""A graph with a segment collapsed into sweeps: what is inside no longer exists, so any planner can go on.

Forward, one op makes the segment's outputs. Backward, one op makes the gradients of what the segment reads,
from those of its outputs and its inputs. A segment that ends in the loss makes the gradients with the loss;
backward only scales them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stowplan.errors import NotTileable
from stowplan.ir import Graph, Kind, Op, Phase, Role, Tensor, Use, validate
from stowplan.ops.effects import macs_of
from stowplan.ops.table import site_of
from stowplan.plan.pricing import Pricing
from stowplan.techniques.tiles.plan.costs import SweepCosts
from stowplan.techniques.tiles.plan.segment import Segment

SWEEP = "stowplan.sweep"
SWEEP_BACKWARD = "stowplan.sweep_backward"
SWEEP_LOSS = "stowplan.sweep_loss"
RESCALE = "aten.mul.Tensor"


@dataclass(frozen=True, slots=True)
class Collapsed:
    """The graph with sweeps, its prices, and the multiply-accumulates that they add to the step."""

    graph: Graph
    pricing: Pricing
    extra_macs: int


def collapse(segment: Segment, costs: SweepCosts, pricing: Pricing) -> Collapsed:
    """Collapse one segment of its graph, which must tell what each gradient is of."""
    graph = segment.graph
    inside = {op.id for op in segment.ops}
    adjoints = [op for op in graph.ops if op.adjoint_of in inside]
    gradients = _gradients_made(segment, adjoints)
    name = name_of_sweep(segment)
    forward, backward, scratch = (_fused if segment.loss else _apart)(segment, name, gradients)
    last: dict[str, tuple[Op, ...]] = {segment.ops[-1].id: forward, adjoints[-1].id: backward}
    gone = inside | {op.id for op in adjoints}
    updates = [op for op in graph.ops if not set(segment.updates).isdisjoint(op.reads())]
    last[segment.ops[-1].id] = (*forward, *updates)  # which stood inside the segment
    gone |= {op.id for op in updates}
    ops: list[Op] = []
    for op in graph.ops:
        ops += last.get(op.id, ()) if op.id in gone else (op,)
    _refuse_readers_of_what_is_gone(graph, ops)
    tensors = {**graph.tensors, **{tensor.id: tensor for tensor in scratch}}
    collapsed = _tidied(replace(graph, tensors=tensors, ops=_first_makes(ops)))
    return Collapsed(
        collapsed,
        _priced(segment, costs, pricing, adjoints, forward, backward),
        extra_macs_of(segment, costs),
    )


def _refuse_readers_of_what_is_gone(graph: Graph, ops: list[Op]) -> None:
    """Ops such as sums of gradients, which a captured step has explicitly and which have no forward op."""
    before, after = ({name for op in side for name in op.writes()} for side in (graph.ops, ops))
    for op in ops:
        if missing := sorted((before - after).intersection(op.reads())):
            raise NotTileable(f"{op.id} reads {missing[0]}, which would be inside")


def name_of_sweep(segment: Segment) -> str:
    """The op that takes the place of a segment."""
    return f"sweep.{segment.ops[0].id}"


def _gradients_made(segment: Segment, adjoints: list[Op]) -> list[Tensor]:
    tensors = segment.graph.tensors
    if not adjoints:
        raise NotTileable("nothing differentiates the segment")
    made = dict.fromkeys(name for op in adjoints for name in op.writes())
    return [tensors[name] for name in made if tensors[name].gradient_of in segment.inputs]


def _apart(
    segment: Segment, name: str, gradients: list[Tensor]
) -> tuple[tuple[Op, ...], tuple[Op, ...], tuple[Tensor, ...]]:
    """One op forward, one backward."""
    tensors = segment.graph.tensors
    inputs, outputs = map(Use, segment.inputs), tuple(map(Use, (*segment.outputs, *segment.updates)))
    forward = Op(name, SWEEP, Phase.FORWARD, tuple(inputs), outputs)
    incoming = tuple(Use(t.id) for t in tensors.values() if t.gradient_of in segment.outputs)
    saved = tuple(Use(tensor, Role.SAVED) for tensor in segment.inputs)
    made = tuple(Use(tensor.id) for tensor in gradients)
    backward = Op(
        f"{name}.backward", SWEEP_BACKWARD, Phase.BACKWARD, (*incoming, *saved), made, adjoint_of=name
    )
    return (forward,), (backward,), ()


def _fused(
    segment: Segment, name: str, gradients: list[Tensor]
) -> tuple[tuple[Op, ...], tuple[Op, ...], tuple[Tensor, ...]]:
    """Gradients of the loss come with it, not yet scaled by what comes in for it."""
    tensors = segment.graph.tensors
    scratch = tuple(
        replace(t, id=f"{t.id}.unscaled", gradient_of=None, name="", kind=Kind.GRADIENT) for t in gradients
    )
    made = (*segment.outputs, *segment.updates, *(tensor.id for tensor in scratch))
    outputs = tuple(map(Use, made))
    forward = Op(name, SWEEP_LOSS, Phase.FORWARD, tuple(map(Use, segment.inputs)), outputs)
    incoming = tuple(Use(t.id) for t in tensors.values() if t.gradient_of in segment.outputs)
    backward = tuple(
        Op(
            f"{name}.{t.id}",
            RESCALE,
            Phase.BACKWARD,
            (Use(s.id, Role.SAVED), *incoming),
            (Use(t.id),),
            adjoint_of=name,
        )
        for t, s in zip(gradients, scratch, strict=True)
    )
    return (forward,), backward, scratch


def _first_makes(ops: list[Op]) -> tuple[Op, ...]:
    """Whoever comes first makes a gradient, others add to it."""
    made: set[str] = set()
    settled = []
    for op in ops:
        roles = {use.tensor: Role.ACCUMULATE if use.tensor in made else Role.DATA for use in op.outputs}
        made.update(roles)
        settled.append(replace(op, outputs=tuple(Use(tensor, role) for tensor, role in roles.items())))
    return tuple(settled)


def _tidied(graph: Graph) -> Graph:
    """Without the tensors that no op mentions any more; a view of one of them is a tensor of its own."""
    used = {use.tensor for op in graph.ops for use in (*op.inputs, *op.outputs)} | graph.held
    resident = (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT, Kind.INPUT)
    kept = {n: t for n, t in graph.tensors.items() if n in used or t.kind in resident}
    apart = {n: replace(t, alias_of=None) for n, t in kept.items() if t.alias_of and t.alias_of not in kept}
    return validate(replace(graph, tensors={**kept, **apart}, held=graph.held & kept.keys()))


def _priced(
    segment: Segment,
    costs: SweepCosts,
    pricing: Pricing,
    adjoints: list[Op],
    forward: tuple[Op, ...],
    backward: tuple[Op, ...],
) -> Pricing:
    """Each op of the segment by the work of its tiles; backward recomputes them, unless it is fused."""
    ahead = sum(pricing.seconds[op.id] * costs.work[op.id] for op in segment.ops)
    back = sum(pricing.seconds[op.id] * costs.work[op.adjoint_of or ""] for op in adjoints)
    again = ahead - sum(pricing.seconds[op] * share for op, share in costs.idle.items())
    covariances = sum(pricing.seconds[op] * share for op, share in costs.gathered.items())
    ahead, back = ahead + covariances, back + covariances
    seconds, workspace = dict(pricing.seconds), dict(pricing.workspace_bytes)
    fused = segment.loss is not None
    seconds |= {op.id: ahead + back if fused else ahead for op in forward}
    seconds |= {op.id: 0.0 if fused else again + back for op in backward}
    forward_peak = max(costs.gathering_peak_bytes, costs.forward_peak_bytes)
    peak = costs.backward_peak_bytes if fused else forward_peak
    workspace |= {op.id: peak for op in forward}
    workspace |= {op.id: 0 if fused else costs.backward_peak_bytes for op in backward}
    return Pricing(seconds, pricing.basis, workspace, pricing.tier)


def extra_macs_of(segment: Segment, costs: SweepCosts) -> int:
    """The multiply-accumulates that a sweep adds to computing and differentiating its segment once."""
    graph = segment.graph
    adjoints = [op for op in graph.ops if op.phase is Phase.BACKWARD and op.adjoint_of in costs.work]
    macs: Mapping[str, int] = {op.id: macs_of(site_of(graph, op)) for op in (*segment.ops, *adjoints)}
    ahead = sum(macs[op.id] * costs.work[op.id] for op in segment.ops)
    back = sum(macs[op.id] * costs.work[op.adjoint_of or ""] for op in adjoints)
    idle = sum(macs[op] * share for op, share in costs.idle.items())
    again = 0.0 if segment.loss is not None or not graph.has_backward else ahead - idle
    covariances = 2 * sum(macs[op] * share for op, share in costs.gathered.items())
    return round(ahead + again + back + covariances - sum(macs.values()))
