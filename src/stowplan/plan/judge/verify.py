"""Is this plan legal for this graph? Knows nothing of how it was made; runs before every execution.

A plan computes its graph if every op runs once, with every value it reads being the value the graph means:
in memory, not overwritten since, made from inputs of which the same holds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from stowplan.errors import IllegalPlan
from stowplan.ir import Graph, Kind, Op, Phase, Role
from stowplan.ops.effects import UPDATE
from stowplan.ops.table import site_of
from stowplan.plan.judge.simulate import simulate
from stowplan.plan.plan import Compute, Free, Load, Plan, RecomputeOp, Step, Store
from stowplan.plan.problem import can_recompute, outdated_tensors, overwritable
from stowplan.units import format_bytes


def verify(plan: Plan) -> Plan:
    """`plan` itself if it is legal and stays within its budget; otherwise IllegalPlan names the step."""
    _Check(plan.graph).walk(plan.steps)
    pricing = plan.pricing
    simulation = simulate(plan.graph, plan.steps, pricing)
    if simulation.curve_bytes != plan.projected_curve_bytes:
        raise IllegalPlan("the projected curve is not the one its steps have")
    if simulation.peak_bytes > plan.allowed_bytes:
        peak, allowed = format_bytes(simulation.peak_bytes), format_bytes(plan.allowed_bytes)
        raise IllegalPlan(f"its steps need {peak}, {allowed} are allowed")
    stored_bytes = sum(transfer.nbytes for transfer in simulation.transfers if transfer.is_store)
    if pricing.tier and stored_bytes > pricing.tier.capacity_bytes:
        stored, capacity = format_bytes(stored_bytes), format_bytes(pricing.tier.capacity_bytes)
        raise IllegalPlan(f"its steps store {stored}, {pricing.tier.name} has room for {capacity}")
    return plan


@dataclass(slots=True)
class _Check:
    """Follows which tensors hold the value that the graph means."""

    graph: Graph
    _made: frozenset[str] = field(init=False)
    _ops: Mapping[str, Op] = field(init=False)
    _sound: set[str] = field(init=False)  # tensors that hold their value
    _done: set[str] = field(default_factory=set)
    _outdated: frozenset[str] = field(init=False)  # tensors that a second read finds changed
    _booked: frozenset[str] = field(init=False)  # tensors that are written into them
    _stored: set[tuple[str, ...]] = field(default_factory=set)  # storages that the tier has, by their names

    def __post_init__(self) -> None:
        self._made = frozenset(name for op in self.graph.ops for name in op.writes())
        self._ops = {op.id: op for op in self.graph.ops}
        self._sound = {name for name in self.graph.tensors if name not in self._made}
        self._outdated = outdated_tensors(self.graph)
        updates = (op for op in self.graph.ops if op.phase is Phase.UPDATE)
        self._booked = frozenset(name for op in updates for name in op.reads())

    def walk(self, steps: tuple[Step, ...]) -> None:
        """Take every step, then look whether all was done and is there."""
        for number, step in enumerate(steps):
            match step:
                case Compute(name, overwrites):
                    self._compute(number, self._op(number, name), overwrites)
                case RecomputeOp(name, outputs, overwrites):
                    self._again(number, self._op(number, name), outputs, overwrites)
                case Free(tensors):
                    self._sound.difference_update(tensors)
                case Store(tensors):
                    self._store(number, tensors)
                case Load(tensors):
                    self._load(number, tensors)
        for op in self.graph.ops:
            if op.id not in self._done:
                raise IllegalPlan(f"op {op.id!r} never runs")
        for name in sorted(self.graph.held - self._sound):
            raise IllegalPlan(f"{name!r} is gone at the end, though the graph holds it")

    def _op(self, number: int, name: str) -> Op:
        if name not in self._ops:
            raise IllegalPlan(f"step {number} runs {name!r}, which is not an op of the graph")
        return self._ops[name]

    def _compute(self, number: int, op: Op, overwrites: tuple[tuple[str, str], ...]) -> None:
        if op.id in self._done:
            raise IllegalPlan(f"step {number} runs {op.id!r} a second time as if it were the first")
        self._run(number, op, tuple(op.writes()), overwrites)
        self._done.add(op.id)

    def _again(
        self, number: int, op: Op, outputs: tuple[str, ...], overwrites: tuple[tuple[str, str], ...]
    ) -> None:
        if op.id not in self._done:
            raise IllegalPlan(f"step {number} repeats {op.id!r}, which has not run yet")
        if _accumulates(op) or not can_recompute(self.graph, op, self._outdated):
            raise IllegalPlan(
                f"step {number} repeats {op.id!r}, which must run once or would not make the same"
            )
        if not self._booked.isdisjoint(outputs):
            raise IllegalPlan(f"step {number} makes the new contents of a buffer a second time ({op.id!r})")
        if not set(outputs) <= set(op.writes()):
            raise IllegalPlan(f"step {number} wants outputs of {op.id!r} that it does not have")
        self._run(number, op, outputs, overwrites)

    def _store(self, number: int, tensors: tuple[str, ...]) -> None:
        if not tensors:
            raise IllegalPlan(f"step {number} stores nothing")
        for name in tensors:
            if name not in self._sound or name not in self._made:
                raise IllegalPlan(f"step {number} stores {name!r}, which does not hold a value made before")
            if self._leaves_the_step(name):
                raise IllegalPlan(f"step {number} stores {name!r}, which the caller has by then")
        self._stored.add(tensors)

    def _leaves_the_step(self, name: str) -> bool:
        """Whether something outside may hold the storage: results of the forward half do so from its end."""
        held = (
            other for other in self.graph.held if self.graph.storage_of(other) == self.graph.storage_of(name)
        )
        return any(self.graph.tensors[other].kind is not Kind.GRADIENT for other in held)

    def _load(self, number: int, tensors: tuple[str, ...]) -> None:
        if tensors not in self._stored:
            names = ", ".join(tensors)
            raise IllegalPlan(f"step {number} loads {names}, of which the tier does not have the value")
        self._sound.update(tensors)

    def _run(
        self, number: int, op: Op, outputs: tuple[str, ...], overwrites: tuple[tuple[str, str], ...]
    ) -> None:
        for name in (*op.reads(), *_accumulates(op)):
            if name not in self._sound:
                raise IllegalPlan(
                    f"step {number}: {op.id!r} reads {name!r}, which does not hold its value then"
                )
        allowed = dict(overwritable(self.graph, site_of(self.graph, op), self._made))
        for output, victim in overwrites:
            if output not in outputs or victim not in allowed.get(output, ()) or victim not in self._sound:
                raise IllegalPlan(f"step {number}: {op.id!r} may not write {output!r} over {victim!r}")
            self._spoil(victim)
        for name in _updated(self.graph, op):
            self._spoil(name)
        for name in _accumulates(op):  # what the tier has is only a part of the sum from now on
            self._forget(self.graph.storage_of(name))
        self._sound.update(outputs)

    def _forget(self, root: str) -> None:
        self._stored = {names for names in self._stored if self.graph.storage_of(names[0]) != root}

    def _spoil(self, victim: str) -> None:
        """Everything that shares the victim's storage loses its value."""
        root = self.graph.storage_of(victim)
        self._sound = {name for name in self._sound if self.graph.storage_of(name) != root}


def _accumulates(op: Op) -> tuple[str, ...]:
    return tuple(use.tensor for use in op.outputs if use.role is Role.ACCUMULATE)


def _updated(graph: Graph, op: Op) -> Iterator[str]:
    """The parameters that an update changes in place."""
    if op.type == UPDATE:
        yield from (name for name in op.reads() if graph.tensors[name].kind is Kind.PARAMETER)
