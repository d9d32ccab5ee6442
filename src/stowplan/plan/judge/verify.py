"""Verification: whether the steps of a plan compute its graph, and stay within its budget.

The steps are walked with the contents of each block of memory. An op may run where each operand lies in a
block with the version that the graph means, and changes contents where the graph says so, or where a result
is written over an operand. Nothing is asked about what is needed later: a value that was freed or written
over too early is missed by the op that reads it.
"""

from collections import Counter
from dataclasses import fields

from stowplan.errors import IllegalPlan
from stowplan.ir import Graph, Kind, Op, Phase
from stowplan.ir.graph import collector_paused
from stowplan.ops.effects import ONCE, UNDER_WAY, aliasing_of, effect_of, only_updates_statistics
from stowplan.ops.table import site_of
from stowplan.plan.draft import Draft
from stowplan.plan.judge.meaning import Content, Meaning, meaning_of
from stowplan.plan.judge.memory import Memory
from stowplan.plan.judge.simulate import Simulation, Tally
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Pricing
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Step, Store
from stowplan.units import format_bytes

Overwrites = tuple[tuple[str, str], ...]
_BUFFERS = (Kind.BUFFER, Kind.INPUT)  # in the graphs of torch.compile, a buffer is an input


def verify(draft: Draft) -> Plan:
    """The plan of a draft that is legal and stays within its budget; otherwise IllegalPlan names the step."""
    simulation = check_steps(draft.graph, draft.steps, draft.pricing)
    if simulation.curve_bytes != draft.projected_curve_bytes:
        raise IllegalPlan("the projected curve is not the one its steps have")
    if simulation.peak_bytes > draft.allowed_bytes:
        peak, allowed = format_bytes(simulation.peak_bytes), format_bytes(draft.allowed_bytes)
        raise IllegalPlan(f"its steps need {peak}, {allowed} are allowed")
    stored_bytes = sum(transfer.nbytes for transfer in simulation.transfers if transfer.is_store)
    tier = draft.pricing.tier
    if tier and stored_bytes > tier.capacity_bytes:
        stored, capacity = format_bytes(stored_bytes), format_bytes(tier.capacity_bytes)
        raise IllegalPlan(f"its steps store {stored}, {tier.name} has room for {capacity}")
    return _plan_of(draft)


def _plan_of(draft: Draft) -> Plan:
    """A plan's own constructor refuses, so that this is the only one."""
    plan = object.__new__(Plan)
    for each in fields(draft):
        object.__setattr__(plan, each.name, getattr(draft, each.name))
    return plan


def check_steps(graph: Graph, steps: tuple[Step, ...], pricing: Pricing) -> Simulation:
    """The simulation of steps that compute the graph; IllegalPlan names the first step that cannot."""
    with collector_paused():
        walk, tally = _Walk(graph), Tally(graph, steps, pricing)
        for number, step in enumerate(steps):
            tally.add(number, step, walk.take(number, step), walk.memory)
        walk.end()
        return tally.simulation()


class _Walk:
    """Mutable on purpose: the contents of all blocks, step by step."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self.memory, meaning = graph, Memory(graph), meaning_of(graph)
        self._meaning, self._last = meaning.ops, meaning.last
        self._content: dict[int, Content] = {}
        for name in graph.tensors:
            if (block := self.memory.block_of(name)) is not None:
                self._content[block] = (graph.storage_of(name), 0)
        self._from_outside = frozenset(self._content)
        updates = (op for op in graph.ops if op.phase is Phase.UPDATE)
        self._booked = frozenset(name for op in updates for name in op.reads())
        results = (name for name in graph.held if graph.tensors[name].kind is not Kind.GRADIENT)
        self._results = frozenset(map(graph.storage_of, results))  # the caller has them as forward ends
        self._done: set[str] = set()
        self._draws = Counter[str]()  # of each device
        self._newest = Counter[str]()  # the version of each storage that the steps have come to
        self._tier: dict[tuple[str, ...], Content] = {}
        self._arriving: set[int] = set()  # blocks that messages arrive in
        self._lost: list[str] = []  # said last: mostly an op that waits for them misses the block first

    def take(self, number: int, step: Step) -> int:
        """Look whether the step may be taken, and take it; returns the bytes alive meanwhile."""
        match step:
            case Compute(name, overwrites):
                return self._first_run(number, self._meaning_of(number, name), overwrites)
            case RecomputeOp(name, outputs, overwrites):
                return self._again(number, self._meaning_of(number, name), outputs, overwrites)
            case Free(tensors):
                self._free(number, tensors)
            case Store(tensors):
                self._store(number, tensors)
            case Load(tensors):
                self._load(number, tensors)
        return self.memory.level

    def end(self) -> None:
        """Look whether all was done, and whether what the graph holds is there."""
        for name in self._meaning:
            if name not in self._done:
                raise IllegalPlan(f"op {name!r} never runs")
        if self._lost:
            raise IllegalPlan(self._lost[0])
        for name in sorted(self._graph.held):
            root = self._graph.storage_of(name)
            if self._content_of(name) != (root, self._last[root]):
                raise IllegalPlan(f"{name!r} is gone at the end, though the graph holds it")

    def _meaning_of(self, number: int, name: str) -> Meaning:
        if name not in self._meaning:
            raise IllegalPlan(f"step {number} runs {name!r}, which is not an op of the graph")
        return self._meaning[name]

    def _content_of(self, name: str) -> Content | None:
        block = self.memory.block_of(name)
        return None if block is None else self._content[block]

    def _first_run(self, number: int, meaning: Meaning, overwrites: Overwrites) -> int:
        op = meaning.op
        if op.id in self._done:
            raise IllegalPlan(f"step {number} runs {op.id!r} a second time as if it were the first")
        if meaning.draw is not None:
            if meaning.draw != self._draws[op.device]:
                raise IllegalPlan(f"step {number} draws the random numbers of {op.id!r} out of turn")
            self._draws[op.device] += 1
        for name, content in meaning.operands:
            if self._content_of(name) != content:
                raise IllegalPlan(_missing(number, op, name))
        level = self._run(number, meaning, tuple(op.writes()), overwrites)
        self._done.add(op.id)
        for storage, version in (*meaning.makes.values(), *meaning.changes.values()):
            self._newest[storage] = version
        return level

    def _again(self, number: int, meaning: Meaning, outputs: tuple[str, ...], overwrites: Overwrites) -> int:
        op = meaning.op
        if op.id not in self._done:
            raise IllegalPlan(f"step {number} repeats {op.id!r}, which has not run yet")
        once = f"step {number} repeats {op.id!r}, which must run once or would not make the same"
        if meaning.changes or not self._may_repeat(op):
            raise IllegalPlan(once)
        for name, content in meaning.operands:
            if self._content_of(name) != content:
                if self._graph.tensors[content[0]].kind not in _BUFFERS:
                    raise IllegalPlan(_missing(number, op, name))
                if not only_updates_statistics(site_of(self._graph, op)):
                    raise IllegalPlan(once)
        if not self._booked.isdisjoint(outputs):
            raise IllegalPlan(f"step {number} makes the new contents of a buffer a second time ({op.id!r})")
        if not set(outputs) <= set(op.writes()):
            raise IllegalPlan(f"step {number} wants outputs of {op.id!r} that it does not have")
        return self._run(number, meaning, outputs, overwrites)

    def _may_repeat(self, op: Op) -> bool:
        """A forward op, or one that only makes views, without an effect that happens once."""
        only_looks = all(self._graph.tensors[name].alias_of is not None for name in op.writes())
        in_time = op.phase is Phase.FORWARD or (only_looks and op.phase is Phase.BACKWARD)
        return in_time and not effect_of(site_of(self._graph, op)) & ONCE

    def _run(self, number: int, meaning: Meaning, outputs: tuple[str, ...], overwrites: Overwrites) -> int:
        """Run an op whose operands are there; returns the bytes alive meanwhile."""
        op, memory = meaning.op, self.memory
        if overwrites:
            self._check_overwrites(number, meaning, outputs, overwrites)
        if self._arriving:  # who reads it waits for the messages
            self._arriving.difference_update(map(memory.block_of, op.reads()))
        level = memory.run(number, op, outputs, dict(overwrites))
        for name, content in (*meaning.makes.items(), *meaning.changes.items()):
            block = memory.block_of(name)
            if block is not None and (name in outputs or name in meaning.changes):
                self._content[block] = content
        if op.type in UNDER_WAY and (block := memory.block_of(op.outputs[0].tensor)) is not None:
            self._arriving.add(block)
        return level

    def _check_overwrites(
        self, number: int, meaning: Meaning, outputs: tuple[str, ...], overwrites: Overwrites
    ) -> None:
        """Each pair is of one output and one block; what is needed later is seen when it is missed."""
        op = meaning.op
        site = site_of(self._graph, op)
        in_place_of = aliasing_of(site).in_place_of
        victims_of = {
            tensor.id: {site.inputs[place].id for place in in_place_of.get(position, ())}
            for position, tensor in enumerate(site.outputs)
        }
        taken: set[str | int | None] = set()
        for output, victim in overwrites:
            block = self.memory.block_of(victim)
            may = output in outputs and output in meaning.makes and victim in victims_of[output]
            if not may or {output, block} & taken or not self._may_be_replaced(op, victim, output):
                raise IllegalPlan(f"step {number}: {op.id!r} may not write {output!r} over {victim!r}")
            taken |= {output, block}

    def _may_be_replaced(self, op: Op, victim: str, output: str) -> bool:
        """Whether the victim fills a block of the step's own, is like the output, and no operand beside it
        is in there."""
        block, reads = self.memory.block_of(victim), set(op.reads())
        if victim not in reads or block is None or block in self._from_outside:
            return False
        old, new = self._graph.tensors[victim], self._graph.tensors[output]
        one, other = ((t.shape, t.dtype, t.layout, t.device) for t in (old, new))
        fills = self.memory.size_of(victim) == (old.nbytes or 0) == (new.nbytes or 0)
        return (
            one == other and fills and all(self.memory.block_of(name) != block for name in reads - {victim})
        )

    def _free(self, number: int, tensors: tuple[str, ...]) -> None:
        for name in tensors:
            block = self.memory.block_of(name)
            if name in self._graph.held and self._graph.storage_of(name) in self._results:
                raise IllegalPlan(f"step {number} frees {name!r}, which the caller has by then")
            if block in self._arriving and self.memory.names_in(block) == 1:
                self._lost.append(f"step {number} frees {name!r}, of which messages are still under way")
            self.memory.free(number, (name,))

    def _store(self, number: int, tensors: tuple[str, ...]) -> None:
        if not tensors:
            raise IllegalPlan(f"step {number} stores nothing")
        for name in tensors:
            root, block = self._graph.storage_of(name), self.memory.block_of(name)
            content = None if block is None else self._content[block]
            if content is None or content[0] != root or block in self._from_outside:
                raise IllegalPlan(f"step {number} stores {name!r}, which does not hold a value made before")
            if root in self._results:
                raise IllegalPlan(f"step {number} stores {name!r}, which the caller has by then")
            if block in self._arriving:
                raise IllegalPlan(f"step {number} stores {name!r}, of which messages are still under way")
            self._tier[tensors] = content
        self.memory.look_at_stored(number, tensors)

    def _load(self, number: int, tensors: tuple[str, ...]) -> None:
        content = self._tier.get(tensors)
        if content is None or content[1] != self._newest[content[0]]:
            names = ", ".join(tensors)
            raise IllegalPlan(f"step {number} loads {names}, of which the tier does not have the value")
        block = self.memory.load(number, tensors)
        self._content[block] = content


def _missing(number: int, op: Op, name: str) -> str:
    return f"step {number}: {op.id!r} reads {name!r}, which does not hold its value then"
