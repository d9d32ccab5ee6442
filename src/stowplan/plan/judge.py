"""The judges of plans: the memory and seconds of any list of steps, and whether it computes its graph.

They share no code with the search, so that each can show the other wrong.

`simulate` is the only judge of peaks: the exact memory curve and seconds. It works on tensors and storages as
PyTorch does: a storage exists while any tensor in it is bound. With transfers there is a clock. Ops run one
after the other. Each copy engine takes its transfers in the order they were begun; a load also waits for the
store of the same bytes. What frees a tensor on its way out, or uses one on its way in, waits.

`verify` asks whether a plan is legal, and runs before every execution. A plan computes its graph if every op
runs once, with every value it reads being the value the graph means: in memory, not overwritten since, made
from inputs of which the same holds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stowplan.analyse.facts import is_resident
from stowplan.errors import IllegalPlan
from stowplan.ir import Graph, Kind, Op, Phase, Role
from stowplan.ops.effects import UNDER_WAY, UPDATE, aliasing_of
from stowplan.ops.table import site_of
from stowplan.plan.plan import Compute, Free, Load, Plan, Pricing, RecomputeOp, Step, Store, Tier
from stowplan.plan.problem import can_recompute, outdated_tensors, overwritable, updated_buffers
from stowplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """One way of one storage, in seconds from the beginning of the step; `step` is its place in the plan."""

    step: int
    tensors: tuple[str, ...]
    nbytes: int
    is_store: bool
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A step that waits before it begins."""

    step: int
    tensor: str
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


class Engines:
    """Mutable on purpose: it receives one step after the other."""

    def __init__(self, tier: Tier | None) -> None:
        self._given = tier
        self.now_seconds = 0.0
        self.transfers: list[Transfer] = []
        self.stalls: list[Stall] = []
        self._busy_until = {True: 0.0, False: 0.0}  # by direction: True writes
        self._under_way: dict[str, float] = {}  # tensor -> when its transfer ends
        self._written: dict[tuple[str, ...], float] = {}  # when the tier has a storage, by all its names

    @property
    def stall_seconds(self) -> float:
        """The seconds that steps have waited so far."""
        return sum((stall.seconds for stall in self.stalls), 0.0)

    def run(self, step: int, seconds: float, uses: Iterable[str]) -> None:
        """An op: waits for what it uses and is still on the way."""
        self.wait(step, uses)
        self.now_seconds += seconds

    def wait(self, step: int, tensors: Iterable[str]) -> None:
        """Let time pass until none of the tensors is on the way."""
        for name in tensors:
            end = self._under_way.pop(name, 0.0)
            if end > self.now_seconds:
                self.stalls.append(Stall(step, name, self.now_seconds, end))
                self.now_seconds = end

    def store(self, step: int, tensors: tuple[str, ...], nbytes: int) -> None:
        """Begin to write."""
        end = self._begin(step, tensors, nbytes, self._tier(step).store_seconds(nbytes), is_store=True)
        self._written[tensors] = end

    def load(self, step: int, tensors: tuple[str, ...], nbytes: int) -> None:
        """Begin to read, as soon as it is written."""
        if tensors not in self._written:
            raise IllegalPlan(f"step {step} loads {', '.join(tensors)}, which was not stored by these names")
        self._begin(step, tensors, nbytes, self._tier(step).load_seconds(nbytes), is_store=False)

    def finish(self, step: int) -> None:
        """The end of the plan: whatever is on the way arrives first."""
        self.wait(step, list(self._under_way))

    def _tier(self, step: int) -> Tier:
        if self._given is None:
            raise IllegalPlan(f"step {step} offloads a tensor, but the plan names no tier")
        return self._given

    def _begin(
        self, step: int, names: tuple[str, ...], nbytes: int, seconds: float, *, is_store: bool
    ) -> float:
        ready = self.now_seconds if is_store else max(self.now_seconds, self._written[names])
        start = max(ready, self._busy_until[is_store])
        self._busy_until[is_store] = start + seconds
        self._under_way.update(dict.fromkeys(names, start + seconds))
        self.transfers.append(Transfer(step, names, nbytes, is_store, start, start + seconds))
        return start + seconds


@dataclass(frozen=True, slots=True)
class Simulation:
    """Bytes alive while each step runs (a Free shows what is left after it), and the seconds of all.

    `extra_seconds` are spent on runs that are not an op's first; what is waited for is in `stalls`.
    """

    curve_bytes: tuple[int, ...]
    seconds: float
    extra_seconds: float
    transfers: tuple[Transfer, ...] = ()
    stalls: tuple[Stall, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max(self.curve_bytes, default=0)

    @property
    def stall_seconds(self) -> float:
        """The seconds that ops and frees wait for transfers in all."""
        return sum((stall.seconds for stall in self.stalls), 0.0)


def simulate(graph: Graph, steps: Sequence[Step], pricing: Pricing) -> Simulation:
    """Walk the steps, binding and freeing; raises IllegalPlan at a step that cannot run."""
    seconds, workspace, tier = pricing.seconds, pricing.workspace_bytes, pricing.tier
    memory, engines = _Memory(graph), Engines(tier)
    beside = transfer_bytes(graph, steps, tier)
    ops = {op.id: op for op in graph.ops}
    curve: list[int] = []
    first, again = list[float](), list[float]()
    for number, step in enumerate(steps):
        level = memory.take(number, step, ops) + beside
        match step:
            case Compute(op) | RecomputeOp(op):
                engines.run(number, seconds[op], _touched(ops[op]))
                if isinstance(step, RecomputeOp):
                    again.append(seconds[op])
                else:
                    first.append(seconds[op])
                level += workspace.get(op, 0)
            case Free(tensors):
                engines.wait(number, tensors)
            case Store(tensors):
                engines.store(number, tensors, memory.size_of(tensors[0]))
            case Load(tensors):
                engines.load(number, tensors, memory.size_of(tensors[0]))
        curve.append(level)
    engines.finish(len(steps))
    # by `sum`, as the planner adds the baseline's: since Python 3.12 its bits are not those of a loop
    extra_seconds = sum(again, 0.0)
    total = sum(first, 0.0) + extra_seconds + engines.stall_seconds
    return Simulation(tuple(curve), total, extra_seconds, tuple(engines.transfers), tuple(engines.stalls))


def peaks_by_device(graph: Graph, steps: Sequence[Step], pricing: Pricing) -> dict[str, int]:
    """The most bytes alive at once on each device that the graph has tensors on.

    A device's curve is that of the same steps in a graph whose tensors elsewhere take nothing. The workspace
    of an op counts on each device that it touches, and what a tier takes beside tensors on every device.
    """
    devices = sorted({tensor.device for tensor in graph.tensors.values() if tensor.device})
    return {device: _simulated_on(device, graph, steps, pricing).peak_bytes for device in devices}


def _simulated_on(device: str, graph: Graph, steps: Sequence[Step], pricing: Pricing) -> Simulation:
    def is_there(name: str) -> bool:
        return graph.tensors[name].device in (device, "")

    tensors = {
        name: tensor if is_there(name) else replace(tensor, nbytes=0)
        for name, tensor in graph.tensors.items()
    }
    workspace = {
        op.id: pricing.workspace_bytes.get(op.id, 0)
        for op in graph.ops
        if op.device in (device, "") or any(map(is_there, (*op.reads(), *op.writes())))
    }
    return simulate(replace(graph, tensors=tensors), steps, replace(pricing, workspace_bytes=workspace))


def transfer_bytes(graph: Graph, steps: Sequence[Step], tier: Tier | None) -> int:
    """The bytes that offloading takes throughout the steps, in addition to tensors; 0 without Store steps."""
    moves = any(isinstance(step, Store) for step in steps)
    return bytes_beside(graph, tier) if tier and moves else 0


def bytes_beside(graph: Graph, tier: Tier) -> int:
    """The memory that offloading needs: the engines' staging, and copies of the buffers that the step
    changes, which are restored if a transfer fails."""
    return tier.staging_bytes + sum(graph.tensors[name].nbytes or 0 for name in updated_buffers(graph))


def _touched(op: Op) -> tuple[str, ...]:
    """Whatever must be there when the op runs."""
    return (*op.reads(), *(use.tensor for use in op.outputs if use.role is Role.ACCUMULATE))


def alive_at(graph: Graph, steps: Sequence[Step], number: int) -> tuple[str, ...]:
    """The tensors that own a storage while step `number` runs, largest first; without constants."""
    memory = _Memory(graph)
    ops = {op.id: op for op in graph.ops}
    for position, step in enumerate(steps[: number + 1]):
        memory.take(position, step, ops)
    return memory.owners()


class _Memory:
    """Which tensors are bound to which storages, and how many bytes that makes."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._storage_of: dict[str, int] = {}
        self._bound: dict[int, int] = {}  # storage -> how many tensors are in it
        self._size: dict[int, int] = {}
        self.level = 0
        made = {name for op in graph.ops for name in op.writes()}
        for name in graph.tensors:
            if name not in made:
                self._bind_root(name)

    def _bind_root(self, name: str) -> None:
        base = self._graph.tensors[name].alias_of
        if base is not None:
            if base not in self._storage_of:
                self._bind_root(base)
            self._join(name, self._storage_of[base])
        elif name not in self._storage_of:
            tensor = self._graph.tensors[name]
            self._allocate(name, 0 if tensor.kind is Kind.CONSTANT else tensor.nbytes or 0)

    def _allocate(self, name: str, nbytes: int) -> None:
        storage = len(self._size)
        self._size[storage] = nbytes
        self._bound[storage] = 0
        self.level += self._size[storage]
        self._join(name, storage)

    def _join(self, name: str, storage: int) -> None:
        self._unbind(name)
        self._storage_of[name] = storage
        self._bound[storage] += 1

    def _unbind(self, name: str) -> None:
        storage = self._storage_of.pop(name, None)
        if storage is not None:
            self._bound[storage] -= 1
            if self._bound[storage] == 0:
                self.level -= self._size[storage]

    def take(self, number: int, step: Step, ops: Mapping[str, Op]) -> int:
        """Carry out one step; returns the bytes alive meanwhile."""
        match step:
            case Compute(op, overwrites):
                wanted = tuple(use.tensor for use in ops[op].outputs)
                return self.run(number, ops[op], wanted, dict(overwrites))
            case RecomputeOp(op, outputs, overwrites):
                return self.run(number, ops[op], outputs, dict(overwrites))
            case Free(tensors):
                self.free(number, tensors)
                return self.level
            case Store(tensors):
                self.store(number, tensors)
                return self.level
            case Load(tensors):
                self.load(number, tensors)
                return self.level

    def owners(self) -> tuple[str, ...]:
        """One tensor for each storage, the largest storage first."""
        by_storage = {storage: name for name, storage in reversed(self._storage_of.items())}
        names = (by_storage[storage] for storage in sorted(by_storage, key=lambda s: (-self._size[s], s)))
        return tuple(name for name in names if self._graph.tensors[name].kind is not Kind.CONSTANT)

    def run(self, number: int, op: Op, wanted: Sequence[str], overwrites: Mapping[str, str]) -> int:
        """Run `op`: bind the wanted outputs; returns the bytes alive meanwhile."""
        for name in op.reads():
            if name not in self._storage_of:
                raise IllegalPlan(f"step {number}: {op.id} reads {name!r}, which is not in memory then")
        aside = 0
        for use in op.outputs:
            size = self._graph.tensors[use.tensor].nbytes or 0
            if use.role is Role.ACCUMULATE:
                aside += 0 if aliasing_of(site_of(self._graph, op)).adds_in_place else size
            elif self._graph.tensors[use.tensor].alias_of is not None:
                if use.tensor in wanted:
                    self._join(use.tensor, self._storage_viewed(number, op, use.tensor))
            elif use.tensor in overwrites:
                self._join(use.tensor, self._storage_of[overwrites[use.tensor]])
            elif use.tensor in wanted:
                aside += self._alone_in_storage(use.tensor)  # goes when the op is done, not before
                self._allocate(use.tensor, size)
            else:
                aside += size
        return self.level + aside

    def _alone_in_storage(self, name: str) -> int:
        """The bytes that letting go of a name would free."""
        storage = self._storage_of.get(name)
        return self._size[storage] if storage is not None and self._bound[storage] == 1 else 0

    def _storage_viewed(self, number: int, op: Op, view: str) -> int:
        """The storage that `view` looks at: that of an operand in it, or of its owner."""
        root = self._graph.storage_of(view)
        viewed = next((name for name in op.reads() if self._graph.storage_of(name) == root), root)
        if viewed not in self._storage_of:
            what = f"makes {view!r}, a view of {viewed!r}, which is not in memory then"
            raise IllegalPlan(f"step {number}: {op.id} {what}")
        return self._storage_of[viewed]

    def free(self, number: int, tensors: Sequence[str]) -> None:
        """Free `tensors`."""
        for name in tensors:
            if name not in self._storage_of or is_resident(self._graph.tensors[name]):
                raise IllegalPlan(f"step {number}: frees {name!r}, which is not there to be freed")
            self._unbind(name)

    def size_of(self, name: str) -> int:
        """Bytes of the storage that a bound tensor is in."""
        return self._size[self._storage_of[name]]

    def store(self, number: int, tensors: Sequence[str]) -> None:
        """Look that the names share one storage that may leave; nothing is freed yet."""
        storages = {self._storage_of.get(name) for name in tensors}
        if len(storages) != 1 or None in storages or any(map(self._stays, tensors)):
            raise IllegalPlan(f"step {number} stores {', '.join(tensors)}, not one storage that may leave")

    def _stays(self, name: str) -> bool:
        return is_resident(self._graph.tensors[name])

    def load(self, number: int, tensors: Sequence[str]) -> None:
        """Bind the names to a storage of their own, which is new."""
        if bound := [name for name in tensors if name in self._storage_of]:
            raise IllegalPlan(f"step {number} loads {bound[0]!r}, which is in memory")
        if not tensors:
            raise IllegalPlan(f"step {number} loads nothing")
        self._allocate(tensors[0], self._graph.tensors[self._graph.storage_of(tensors[0])].nbytes or 0)
        for name in tensors[1:]:
            self._join(name, self._storage_of[tensors[0]])


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
    _under_way: set[str] = field(default_factory=set)  # storages that messages arrive in

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
            if self.graph.storage_of(name) in self._under_way:
                raise IllegalPlan(f"step {number} stores {name!r}, of which messages are still under way")
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
        self._under_way.difference_update(map(self.graph.storage_of, op.reads()))
        if op.type in UNDER_WAY:
            self._under_way.add(self.graph.storage_of(op.outputs[0].tensor))
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
