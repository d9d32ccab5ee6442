"""Memory: which blocks exist while the steps of a plan run, and which tensors are in them.

A tensor that no op makes has a block from the beginning. An op takes a block for each result that is not a
view and is not written over an operand, before it runs. A view is one more name of the block of an operand.
A block is given back when its last name goes: by a Free, or because its op makes the name again elsewhere.
While an op runs, what it makes and nobody asked for is there too, and so is a term that it adds to a tensor,
unless it adds in place. Constants count nothing.
"""

from collections.abc import Mapping, Sequence

from stowplan.errors import IllegalPlan
from stowplan.ir import Graph, Kind, Op, Role
from stowplan.ops.effects import aliasing_of
from stowplan.ops.table import site_of
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Step, Store

_ALWAYS_THERE = (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)


class Memory:
    """Mutable on purpose: it takes one step after the other."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._ops = graph, {op.id: op for op in graph.ops}
        self._reads = {op.id: tuple(op.reads()) for op in graph.ops}
        self._block_of: dict[str, int] = {}
        self._names: list[int] = []  # by block: how many tensors are in it
        self._nbytes: list[int] = []  # by block
        self.level = 0
        made = {name for op in graph.ops for name in op.writes()}
        for name in graph.tensors:
            if name not in made:
                self._enter(name)

    def block_of(self, name: str) -> int | None:
        """The block that a tensor is in; blocks are numbered in the order they are taken."""
        return self._block_of.get(name)

    def size_of(self, name: str) -> int:
        """Bytes of the block that a tensor is in."""
        return self._nbytes[self._block_of[name]]

    def names_in(self, block: int) -> int:
        """How many tensors are in a block."""
        return self._names[block]

    def largest_first(self) -> tuple[str, ...]:
        """One tensor for each block but those of constants, the largest block first."""
        by_block = {block: name for name, block in reversed(self._block_of.items())}
        names = (by_block[block] for block in sorted(by_block, key=lambda b: (-self._nbytes[b], b)))
        return tuple(name for name in names if self._graph.tensors[name].kind is not Kind.CONSTANT)

    def take(self, number: int, step: Step) -> int:
        """Carry out one step; returns the bytes alive meanwhile. IllegalPlan if it cannot be done."""
        match step:
            case Compute(op, overwrites):
                return self.run(number, self._ops[op], tuple(self._ops[op].writes()), dict(overwrites))
            case RecomputeOp(op, outputs, overwrites):
                return self.run(number, self._ops[op], outputs, dict(overwrites))
            case Free(tensors):
                self.free(number, tensors)
            case Store(tensors):
                self.look_at_stored(number, tensors)
            case Load(tensors):
                self.load(number, tensors)
        return self.level

    def run(self, number: int, op: Op, wanted: Sequence[str], overwrites: Mapping[str, str]) -> int:
        """Run `op` for the wanted outputs; returns the bytes alive meanwhile."""
        for name in self._reads[op.id]:
            if name not in self._block_of:
                raise IllegalPlan(f"step {number}: {op.id} reads {name!r}, which is not in memory then")
        aside = 0
        for use in op.outputs:
            name, tensor = use.tensor, self._graph.tensors[use.tensor]
            nbytes = tensor.nbytes or 0
            if use.role is Role.ACCUMULATE:
                aside += 0 if aliasing_of(site_of(self._graph, op)).adds_in_place else nbytes
            elif tensor.alias_of is not None:
                if name in wanted:
                    viewed = self._block_viewed(number, op, name)
                    aside += self._alone_in_block(name)
                    self._join(name, viewed)
            elif name in overwrites:
                aside += self._alone_in_block(name)
                self._join(name, self._block_of[overwrites[name]])
            elif name in wanted:
                aside += self._alone_in_block(name)
                self._allocate(name, nbytes)
            else:
                aside += nbytes
        return self.level + aside

    def free(self, number: int, tensors: Sequence[str]) -> None:
        """Take names from their blocks; a block goes with the last of them."""
        for name in tensors:
            if name not in self._block_of or self._is_always_there(name):
                raise IllegalPlan(f"step {number}: frees {name!r}, which is not there to be freed")
            self._leave(name)

    def load(self, number: int, tensors: Sequence[str]) -> int:
        """Take a new block for tensors that come back from the tier; returns the block."""
        if bound := [name for name in tensors if name in self._block_of]:
            raise IllegalPlan(f"step {number} loads {bound[0]!r}, which is in memory")
        if not tensors:
            raise IllegalPlan(f"step {number} loads nothing")
        self._allocate(tensors[0], self._graph.tensors[self._graph.storage_of(tensors[0])].nbytes or 0)
        block = self._block_of[tensors[0]]
        for name in tensors[1:]:
            self._join(name, block)
        return block

    def look_at_stored(self, number: int, tensors: Sequence[str]) -> None:
        """The names share one block that may leave; nothing is freed yet."""
        blocks = {self._block_of.get(name) for name in tensors}
        if len(blocks) != 1 or None in blocks or any(map(self._is_always_there, tensors)):
            raise IllegalPlan(f"step {number} stores {', '.join(tensors)}, not one storage that may leave")

    def _is_always_there(self, name: str) -> bool:
        return self._graph.tensors[name].kind in _ALWAYS_THERE

    def _enter(self, name: str) -> None:
        """A tensor that comes from outside: a name of its base's block, or of a block of its own."""
        tensor = self._graph.tensors[name]
        if tensor.alias_of is not None:
            if tensor.alias_of not in self._block_of:
                self._enter(tensor.alias_of)
            self._join(name, self._block_of[tensor.alias_of])
        elif name not in self._block_of:
            self._allocate(name, 0 if tensor.kind is Kind.CONSTANT else tensor.nbytes or 0)

    def _block_viewed(self, number: int, op: Op, view: str) -> int:
        """The block that `view` looks at: that of an operand in the same storage, or of its owner."""
        root = self._graph.storage_of(view)
        viewed = next((name for name in self._reads[op.id] if self._graph.storage_of(name) == root), root)
        if viewed not in self._block_of:
            what = f"makes {view!r}, a view of {viewed!r}, which is not in memory then"
            raise IllegalPlan(f"step {number}: {op.id} {what}")
        return self._block_of[viewed]

    def _alone_in_block(self, name: str) -> int:
        """The bytes that go with the older copy of a name: when the op is done, not before."""
        block = self._block_of.get(name)
        return self._nbytes[block] if block is not None and self._names[block] == 1 else 0

    def _allocate(self, name: str, nbytes: int) -> None:
        self._names.append(0)
        self._nbytes.append(nbytes)
        self.level += nbytes
        self._join(name, len(self._names) - 1)

    def _join(self, name: str, block: int) -> None:
        self._leave(name)
        self._block_of[name] = block
        self._names[block] += 1

    def _leave(self, name: str) -> None:
        block = self._block_of.pop(name, None)
        if block is not None:
            self._names[block] -= 1
            if self._names[block] == 0:
                self.level -= self._nbytes[block]
