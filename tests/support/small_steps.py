"""Small training steps drawn at random, with everything that makes a plan hard to get right.

Views and views of views, results that may be written over operands, several outputs, random draws, buffers
that are read and updated, running statistics, ops with an effect that happens once, sums in both halves,
updates by an optimizer, parameters, inputs that the caller keeps or not, and sometimes a second device.
"""

from collections.abc import Sequence
from random import Random

from stowplan.ir import Attributes, DType, Graph, Kind, Op, Phase, Role, Shape, Tensor, Use, validate
from stowplan.ops.effects import UPDATE
from stowplan.plan.pricing import Basis, Pricing

NORM = "aten._native_batch_norm_legit_functional.default"


def small_step(seed: int) -> tuple[Graph, Pricing]:
    """A step of about five to thirty ops, with prices and some workspace."""
    random = Random(seed)
    graph = _Drawing(random).step()
    seconds = {op.id: float(random.choice((0, 1, 5, 20))) for op in graph.ops}
    workspace = {op.id: random.choice((8, 24)) for op in graph.ops if random.random() < 0.2}
    for op in graph.ops:  # a view is no kernel: the search folds it into its operand
        if op.outputs and all(graph.tensors[name].alias_of for name in op.writes()):
            workspace.pop(op.id, None)
    return graph, Pricing(seconds, Basis.MEASURED, workspace)


class _Drawing:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._tensors: dict[str, Tensor] = {}
        self._ops: list[Op] = []
        self._values: list[str] = []  # of the forward half
        self._undone: list[Op] = []  # updates of buffers that come later
        self._has_two_devices = random.random() < 0.2

    def step(self) -> Graph:
        random = self._random
        for name in ("x", "y")[: random.randint(1, 2)]:
            self._values.append(self._tensor(name, Kind.INPUT, (random.choice((4, 8)),)))
        for name in ("w", "v"):
            self._tensor(name, Kind.PARAMETER, (random.choice((4, 8)),))
        if random.random() < 0.3:
            self._values.append(self._tensor("fixed", Kind.CONSTANT, (8,)))
        differentiable = [op for _ in range(random.randint(2, 8)) if (op := self._layer())]
        while self._undone:
            self._ops.append(self._undone.pop(0))
        held: set[str] = {name for name in ("x", "y") if name in self._tensors and random.random() < 0.6}
        made = [name for name in self._values if name not in ("x", "y", "fixed")]
        if made:
            held |= {made[-1], random.choice(made)} if random.random() < 0.3 else {made[-1]}
        if made and random.random() < 0.9:
            held |= self._backward(differentiable, made[-1])
        changed = {name for name in self._tensors if name.endswith(".updated")}
        held |= {name for name in changed if self._tensors[name].kind is Kind.INPUT}  # the caller has them
        held |= {self._root(name) for name in held & changed}
        used = {use.tensor for op in self._ops for use in (*op.inputs, *op.outputs)} | held
        used |= {self._root(name) for name in used}
        tensors = {name: tensor for name, tensor in self._tensors.items() if name in used}
        return validate(Graph(tensors, tuple(self._ops), frozenset(held)))

    def _tensor(self, name: str, kind: Kind, shape: Shape, base: str | None = None, layout: str = "") -> str:
        nbytes = 4 * shape[0] if len(shape) == 1 else 4 * shape[0] * shape[1]
        device = self._random.choice(("here", "there")) if self._has_two_devices and base is None else "here"
        device = self._tensors[base].device if base else device
        self._tensors[name] = Tensor(
            name, kind, shape, DType.FLOAT32, nbytes, layout=layout, device=device, alias_of=base
        )
        return name

    def _op(
        self,
        kind: str,
        reads: Sequence[str],
        outputs: Sequence[Use],
        phase: Phase = Phase.FORWARD,
        attributes: Attributes | None = None,
    ) -> Op:
        made = [use.tensor for use in outputs]
        device = self._tensors[(*made, *reversed(reads))[0]].device  # an update is where its parameter is
        role = Role.SAVED if phase is Phase.BACKWARD and self._random.random() < 0.5 else Role.DATA
        uses = tuple(Use(name, role) for name in reads)
        op = Op(f"{kind} {len(self._ops)}", kind, phase, uses, tuple(outputs), attributes or {}, device)
        self._ops.append(op)
        return op

    def _new(self, shape: Shape, kind: Kind = Kind.ACTIVATION, base: str | None = None) -> str:
        return self._tensor(f"t{len(self._tensors)}", kind, shape, base)

    def _shape(self, name: str) -> Shape:
        shape = self._tensors[name].shape
        assert shape is not None
        return shape

    def _root(self, name: str) -> str:
        base = self._tensors[name].alias_of
        return name if base is None else self._root(base)

    def _layer(self) -> Op | None:
        """One more op, or a few; returns the one that backward differentiates, if any."""
        random = self._random
        value = self._values[-1] if random.random() < 0.7 else random.choice(self._values)
        other = random.choice(self._values)
        if self._undone and random.random() < 0.4:
            self._ops.append(self._undone.pop(0))
        kinds = (
            *(self._pointwise, self._pointwise, self._product, self._view, self._view, self._dropout),
            *(self._norm, self._count, self._outside, self._split, self._sum, self._sweep, self._old_relu),
        )
        op = random.choice(kinds)(value, other)
        if op is not None:
            self._values.append(op.outputs[0].tensor)
        return op

    def _pointwise(self, value: str, other: str) -> Op:
        kind = self._random.choice(
            ("aten.relu.default", "aten.add.Tensor", "aten.mul.Scalar", "aten.bernoulli.p")
        )
        reads = [value, other] if kind == "aten.add.Tensor" else [value]
        return self._op(kind, reads, [Use(self._new(self._shape(value)))])

    def _product(self, value: str, other: str) -> Op:
        weight = self._random.choice(("w", "v", "w", other))
        return self._op("aten.mm.default", [value, weight], [Use(self._new((self._random.choice((4, 8)),)))])

    def _view(self, value: str, _other: str) -> Op:
        kind, shape = self._random.choice(
            (
                ("aten.alias.default", self._shape(value)),
                ("aten.alias.default", self._shape(value)),
                ("aten.view.default", (2, 2)),
                ("aten.slice.Tensor", (2,)),
            )
        )
        base = value if self._random.random() < 0.3 else self._root(value)
        return self._op(kind, [value], [Use(self._new(shape, base=base))])

    def _dropout(self, value: str, _other: str) -> Op:
        mask = self._new(self._shape(value), Kind.MASK)
        return self._op(
            "aten.native_dropout.default", [value], [Use(self._new(self._shape(value))), Use(mask)]
        )

    def _norm(self, value: str, _other: str) -> Op:
        buffers = [self._buffer() for _ in range(2)]
        made = [self._new(self._shape(value)), self._new((4,)), self._new((4,))]
        changed = [self._new(self._shape(name)) for name in buffers]
        training = {"training": self._random.random() < 0.8}
        op = self._op(NORM, [value, "w", *buffers], list(map(Use, (*made, *changed))), attributes=training)
        for name, new in zip(buffers, changed, strict=True):
            self._update(name, new)
        return op

    def _count(self, value: str, _other: str) -> Op:
        """An op that reads a buffer which the step changes, perhaps through views."""
        buffer = seen = self._buffer()
        for _ in range(self._random.choice((0, 0, 1, 2))):
            seen = (
                self._op("aten.alias.default", [seen], [Use(self._new((4,), base=buffer))]).outputs[0].tensor
            )
        made = self._op("aten.add.Tensor", [value, seen], [Use(self._new(self._shape(value)))])
        changed = self._op("aten.add.Scalar", [buffer], [Use(self._new((4,)))])
        self._update(buffer, changed.outputs[0].tensor)
        if self._random.random() < 0.3 and self._tensors[f"{buffer}.updated"]:
            while self._undone:
                self._ops.append(self._undone.pop(0))
            reads = [made.outputs[0].tensor, f"{buffer}.updated"]
            return self._op("aten.add.Tensor", reads, [Use(self._new(self._shape(value)))])
        return made

    def _buffer(self) -> str:
        return self._tensor(f"b{len(self._tensors)}", self._random.choice((Kind.BUFFER, Kind.INPUT)), (4,))

    def _update(self, buffer: str, new: str) -> None:
        updated = self._tensor(f"{buffer}.updated", self._tensors[buffer].kind, (4,), buffer)
        name = f"update {updated}"
        device = self._tensors[buffer].device
        kind = "stowplan.update_buffer"
        self._undone.append(Op(name, kind, Phase.UPDATE, (Use(new),), (Use(updated),), device=device))

    def _outside(self, value: str, _other: str) -> Op:
        return self._op("stowplan.first_token.default", [value], [Use(self._new((4,)))])

    def _split(self, value: str, other: str) -> Op:
        outputs = [Use(self._new((self._random.choice((4, 8)),))) for _ in range(self._random.randint(2, 3))]
        return self._op("Split", [value, other], outputs)

    def _sum(self, value: str, _other: str) -> Op | None:
        """A term that is added to what an op made before."""
        made = {use.tensor for op in self._ops for use in op.outputs if use.role is Role.DATA}
        sums = [name for name in self._values if name in made and name == self._root(name) and name != value]
        if not sums:
            return None
        kind = self._random.choice(("Wide", "GetItem.backward"))
        self._op(kind, [value], [Use(self._random.choice(sums), Role.ACCUMULATE)])
        return None

    def _sweep(self, value: str, other: str) -> Op:
        over = self._random.choice(((0, 1), (0, 0), (1, 0), (-1, 0)))
        outputs = [Use(self._new(self._shape(value))), Use(self._new(self._shape(other)))]
        return self._op("stowplan.sweep.default", [value, other], outputs, attributes={"over": over})

    def _old_relu(self, value: str, _other: str) -> Op:
        """Of a format whose table does not compare layouts."""
        layout = self._random.choice(("", "strided"))
        name = self._tensor(f"t{len(self._tensors)}", Kind.ACTIVATION, self._shape(value), layout=layout)
        return self._op("Relu", [value], [Use(name)])

    def _backward(self, differentiable: Sequence[Op], last: str) -> set[str]:
        """The adjoints in reverse; returns the gradients that the caller gets."""
        random = self._random
        gradients = {last: self._tensor("given", Kind.GRADIENT, self._shape(last))}
        for op in reversed(differentiable):
            output = op.outputs[0].tensor
            if output not in gradients:
                continue
            if random.random() < 0.2:  # a look at the gradient under another name
                base = self._root(gradients[output])
                seen = self._new(self._shape(output), Kind.GRADIENT, base)
                self._op("aten.alias.default", [gradients[output]], [Use(seen)], Phase.BACKWARD)
                gradients[output] = seen
            self._adjoint(op, gradients[output], gradients)
        own = {name: gradients[name] for name in ("w", "v") if name in gradients}
        held = set(own.values()) | {
            gradients[name] for name in ("x", "y") if name in gradients and random.random() < 0.5
        }
        if own and random.random() < 0.3:
            for name, gradient in own.items():
                op = Op(
                    f"update {name}",
                    UPDATE,
                    Phase.UPDATE,
                    (Use(gradient), Use(name)),
                    (),
                    {"when": "later"},
                    self._tensors[name].device,
                )
                self._ops.append(op)
                held -= {gradient} if random.random() < 0.7 else set()
        made = {use.tensor for op in self._ops for use in op.outputs}
        return held & made

    def _adjoint(self, op: Op, gradient: str, gradients: dict[str, str]) -> None:
        random = self._random
        saved = [name for name in (*op.reads(), *op.writes()) if random.random() < 0.5]
        wanted = [name for name in dict.fromkeys(op.reads()) if self._tensors[name].kind is not Kind.BUFFER]
        for name in wanted:
            if random.random() < 0.15:
                continue
            is_first = name not in gradients
            if is_first:
                gradients[name] = self._new(self._shape(name), Kind.GRADIENT)
            target = gradients[name]
            if not is_first and target != self._root(target):
                continue
            if not is_first and target == "given":
                continue
            kind = random.choice(("Back", "aten.threshold_backward.default", "GetItem.backward"))
            reads = [gradient, *saved[: 1 if "aten" in kind else None]] if saved else [gradient]
            if target in reads:
                continue
            use = Use(target, Role.DATA if is_first else Role.ACCUMULATE)
            self._op(kind, reads, [use], Phase.BACKWARD)
