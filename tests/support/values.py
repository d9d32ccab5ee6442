"""A machine that runs the steps of a plan on values without numbers, and so knows what a plan computes.

It shares nothing with the judges of plans. A block of memory is an object with a value in it, a value says
by which op it was made and from which values, and a plan is right if each run of an op reads and makes the
values that it does when the graph's ops run in their order in memory without end. Bytes are counted by
adding up the blocks that names lead to, at each step anew.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stowplan.ir import Graph, Kind, Op, Phase, Role
from stowplan.ops.effects import UPDATE, Effect, aliasing_of, effect_of
from stowplan.ops.table import site_of
from stowplan.plan.pricing import Pricing
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Step, Store
from tests.support.small_steps import NORM

_ALWAYS = (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)


class Wrong(Exception):
    """The steps do not compute the graph, or do what a plan may not do."""


@dataclass(eq=False, slots=True)
class Block:
    """A piece of memory."""

    value: int
    nbytes: int
    device: str
    is_given: bool = False  # by the caller, before the step


@dataclass(slots=True)
class Reference:
    """What each op reads and makes when all of them run in order, and what there is at the end."""

    reads: dict[str, dict[str, int]] = field(default_factory=dict)
    makes: dict[str, dict[str, int]] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    known: dict[object, int] = field(default_factory=dict)  # the number of each value

    def number(self, value: object) -> int:
        return self.known.setdefault(value, len(self.known))


def reference_of(graph: Graph) -> Reference:
    """Run the graph itself."""
    reference = Reference()
    machine = Machine(graph, reference, is_reference=True)
    for op in graph.ops:
        machine.run(op, tuple(op.writes()), {}, is_first=True)
    reference.end = {name: block.value for name, block in machine.names.items()}
    return reference


def curve_of(
    graph: Graph, reference: Reference, steps: Sequence[Step], pricing: Pricing
) -> list[dict[str, int]]:
    """By step, the bytes on each device; raises Wrong if the steps do not compute the graph."""
    machine = Machine(graph, reference)
    ops = {op.id: op for op in graph.ops}
    done: list[str] = []
    curve: list[dict[str, int]] = []
    moves = any(isinstance(step, Store) for step in steps)
    for step in steps:
        match step:
            case Compute(name, overwrites):
                if name in done:
                    raise Wrong(f"{name} twice")
                done.append(name)
                op = ops[name]
                level = machine.run(op, tuple(op.writes()), dict(overwrites), is_first=True)
                _add_workspace(level, graph, op, pricing)
            case RecomputeOp(name, outputs, overwrites):
                if name not in done:
                    raise Wrong(f"{name} again, and not before")
                op = ops[name]
                level = machine.run(op, outputs, dict(overwrites), is_first=False)
                _add_workspace(level, graph, op, pricing)
            case Free(tensors):
                machine.free(tensors)
                level = machine.level()
            case Store(tensors):
                machine.store(tensors)
                level = machine.level()
            case Load(tensors):
                machine.load(tensors)
                level = machine.level()
        if moves and pricing.tier:
            _add_beside(level, graph, pricing.tier.staging_bytes)
        curve.append(level)
    if len(done) < len(ops):
        raise Wrong("not all ops ran")
    for name in (*graph.held, *(name for name, tensor in graph.tensors.items() if tensor.kind in _ALWAYS)):
        if name not in machine.names or machine.names[name].value != reference.end[name]:
            raise Wrong(f"{name} at the end")
    return curve


def _add_beside(level: dict[str, int], graph: Graph, staging_bytes: int) -> None:
    for device in level:
        level[device] += staging_bytes
    for name in {_root(graph, name) for op in graph.ops if op.phase is Phase.UPDATE for name in op.writes()}:
        for device in ("", graph.tensors[name].device):
            level[device] += graph.tensors[name].nbytes or 0


def _add_workspace(level: dict[str, int], graph: Graph, op: Op, pricing: Pricing) -> None:
    if nbytes := pricing.workspace_bytes.get(op.id, 0):
        for device in {"", op.device, *(graph.tensors[name].device for name in (*op.reads(), *op.writes()))}:
            level[device] += nbytes


def _root(graph: Graph, name: str) -> str:
    while (base := graph.tensors[name].alias_of) is not None:
        name = base
    return name


class Machine:
    """Memory as a dict from names to blocks."""

    def __init__(self, graph: Graph, reference: Reference, *, is_reference: bool = False) -> None:
        self._graph, self._reference, self._is_reference = graph, reference, is_reference
        self._devices = {"", *(tensor.device for tensor in graph.tensors.values())}
        self.names: dict[str, Block] = {}
        self._tier: dict[tuple[str, ...], int] = {}
        self._latest: dict[str, int] = {}  # by storage
        self._drawn = Counter[str]()
        self._draws: dict[str, int] = {}  # by op: what the generator was at its first run
        self._called = Counter[str]()
        made = {name for op in graph.ops for name in op.writes()}
        for name, tensor in graph.tensors.items():
            if name not in made and tensor.alias_of is None:
                nbytes = 0 if tensor.kind is Kind.CONSTANT else tensor.nbytes or 0
                value = reference.number(("given", name))
                self.names[name] = Block(value, nbytes, tensor.device, is_given=True)
        for name, tensor in graph.tensors.items():
            if name not in made and tensor.alias_of is not None:
                self.names[name] = self.names[_root(graph, name)]

    def level(self, also: Iterable[Block] = ()) -> dict[str, int]:
        """The bytes on each device, and under "" of all."""
        total = dict.fromkeys(self._devices, 0)
        for block in {*self.names.values(), *also}:
            total[""] += block.nbytes
            total[block.device] += block.nbytes
        return total

    def run(
        self, op: Op, wanted: Sequence[str], overwrites: Mapping[str, str], *, is_first: bool
    ) -> dict[str, int]:
        """Run an op; returns the bytes meanwhile."""
        graph, reference = self._graph, self._reference
        added = [use.tensor for use in op.outputs if use.role is Role.ACCUMULATE]
        if missing := [name for name in (*op.reads(), *added) if name not in self.names]:
            raise Wrong(f"{op.id} misses {missing}")
        if not is_first:
            self._may_run_again(op, wanted)
        read = {name: self.names[name].value for name in (*op.reads(), *added)}
        before = set(self.names.values())
        made = self._values(op, read, is_first=is_first)
        if self._is_reference:
            reference.reads[op.id], reference.makes[op.id] = read, made
        for name, value in read.items():
            is_statistic = not is_first and _only_statistics(op) and name in _buffers(graph, op)
            if value != reference.reads[op.id][name] and not is_statistic:
                raise Wrong(f"{op.id} reads another {name}")
        beyond, over = list[Block](), list[Block]()
        for output, victim in overwrites.items():
            over.append(self._victim(op, output, victim, wanted, over))
        for use in op.outputs:
            name, tensor = use.tensor, graph.tensors[use.tensor]
            nbytes, root = tensor.nbytes or 0, _root(graph, use.tensor)
            if use.role is Role.ACCUMULATE:
                self.names[name].value = made[name]
                if op.type != "GetItem.backward":
                    beyond.append(Block(0, nbytes, tensor.device))
            elif root != name:
                if name in wanted:
                    seen = [self.names[each] for each in op.reads() if _root(graph, each) == root]
                    block = seen[0] if seen else self.names[root]
                    self.names[name] = block
                    if op.phase is Phase.UPDATE:
                        block.value = made[name]
            elif name in overwrites:
                self.names[name] = self.names[overwrites[name]]
                self.names[name].value = made[name]
            elif name in wanted:
                self.names[name] = Block(made[name], nbytes, tensor.device)
            else:
                beyond.append(Block(0, nbytes, tensor.device))
            if name in wanted and made[name] != reference.makes[op.id][name]:
                raise Wrong(f"{op.id} makes another {name}")
            if is_first:
                self._latest[root] = made[name]
        if op.type == UPDATE:
            for name in op.reads():
                if graph.tensors[name].kind is Kind.PARAMETER:
                    self.names[name].value = reference.number(("update", op.id, self.names[name].value))
        return self.level((*before, *beyond))

    def _values(self, op: Op, read: Mapping[str, int], *, is_first: bool) -> dict[str, int]:
        """What each output gets: a view shows what it looks at, all others depend on everything read."""
        graph, number = self._graph, self._reference.number
        effect = effect_of(site_of(graph, op))
        draw = 0
        if effect & Effect.RANDOM:
            if is_first:
                self._drawn[op.device] += 1
                self._draws[op.id] = self._drawn[op.device]
            draw = self._draws[op.id]
        if effect & Effect.OUTSIDE:
            self._called[op.id] += 1
        from_all = tuple(sorted(read.items()))
        buffers = _buffers(graph, op)
        values: dict[str, int] = {}
        for place, use in enumerate(op.outputs):
            name = use.tensor
            if use.role is Role.DATA and _root(graph, name) != name and op.phase is not Phase.UPDATE:
                seen = [read[each] for each in op.reads() if _root(graph, each) == _root(graph, name)]
                values[name] = seen[0] if seen else self.names[_root(graph, name)].value
                continue
            used = from_all
            if _only_statistics(op) and place < 3:
                used = tuple((each, value) for each, value in from_all if each not in buffers)
            values[name] = number((op.id, place, used, draw, self._called[op.id]))
        return values

    def _may_run_again(self, op: Op, wanted: Sequence[str]) -> None:
        views = all(_root(self._graph, name) != name for name in op.writes())
        if op.phase is not Phase.FORWARD and not (op.phase is Phase.BACKWARD and views):
            raise Wrong(f"{op.id} may not run a second time")
        if effect_of(site_of(self._graph, op)) & (Effect.OUTSIDE | Effect.BUFFER_UPDATE):
            raise Wrong(f"{op.id} happens once")
        if any(use.role is Role.ACCUMULATE for use in op.outputs):
            raise Wrong(f"{op.id} would add twice")
        if not set(wanted) <= set(op.writes()):
            raise Wrong(f"{op.id} makes no {wanted}")
        booked = {n for other in self._graph.ops if other.phase is Phase.UPDATE for n in other.reads()}
        if booked & set(wanted):
            raise Wrong(f"{op.id} makes new contents of a buffer twice")

    def _victim(
        self, op: Op, output: str, victim: str, wanted: Sequence[str], over: Sequence[Block]
    ) -> Block:
        """The block that an output is written into."""
        site, tensors = site_of(self._graph, op), self._graph.tensors
        places = aliasing_of(site).in_place_of
        writes = list(op.writes())
        made = {use.tensor for use in op.outputs if use.role is Role.DATA}
        allowed = output in made and victim in [
            site.inputs[place].id for place in places.get(writes.index(output), ())
        ]
        one, other = tensors[output], tensors.get(victim, tensors[output])
        alike = (one.shape, one.dtype, one.layout, one.device) == (
            other.shape,
            other.dtype,
            other.layout,
            other.device,
        )
        if not allowed or output not in wanted or not alike or one.alias_of is not None:
            raise Wrong(f"{op.id} cannot write {output} over {victim}")
        block = self.names[victim]
        beside = [name for name in op.reads() if name != victim and self.names[name] is block]
        if block.is_given or block.nbytes != one.nbytes or block in over or beside:
            raise Wrong(f"{op.id} may not write {output} over {victim}")
        return block

    def free(self, tensors: Iterable[str]) -> None:
        """Names end; a block without names is no more."""
        for name in tensors:
            if name not in self.names or self._graph.tensors[name].kind in _ALWAYS:
                raise Wrong(f"{name} cannot be freed")
            if name in self._graph.held and _root(self._graph, name) in self._results():
                raise Wrong(f"{name} is the caller's")
            del self.names[name]

    def _results(self) -> set[str]:
        held = self._graph.held
        return {_root(self._graph, n) for n in held if self._graph.tensors[n].kind is not Kind.GRADIENT}

    def store(self, tensors: tuple[str, ...]) -> None:
        """Write a block to the tier."""
        blocks = {self.names.get(name) for name in tensors}
        (block,) = blocks if len(blocks) == 1 else (None,)
        roots = {_root(self._graph, name) for name in tensors}
        if block is None or block.is_given or len(roots) != 1 or roots & self._results():
            raise Wrong(f"{tensors} cannot leave")
        if any(self._latest.get(root) != block.value for root in roots):
            raise Wrong(f"{tensors} are not what they mean")
        self._tier[tensors] = block.value

    def load(self, tensors: tuple[str, ...]) -> None:
        """Read it into a new block."""
        if tensors not in self._tier or any(name in self.names for name in tensors):
            raise Wrong(f"{tensors} cannot come back")
        root = self._graph.tensors[_root(self._graph, tensors[0])]
        if self._latest[root.id] != self._tier[tensors]:
            raise Wrong(f"{tensors} have changed since")
        block = Block(self._tier[tensors], root.nbytes or 0, root.device)
        self.names.update(dict.fromkeys(tensors, block))


def _only_statistics(op: Op) -> bool:
    return op.type == NORM and op.attributes.get("training") is True


def _buffers(graph: Graph, op: Op) -> set[str]:
    kinds = (Kind.BUFFER, Kind.INPUT)
    return {name for name in op.reads() if graph.tensors[_root(graph, name)].kind in kinds}
