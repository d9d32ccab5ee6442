"""Small training steps with what makes planning hard: branches, views, second outputs, uneven sizes."""

from random import Random

from stowplan.ir import Graph, Kind, Op, Phase, Role, Tensor, Use
from stowplan.plan.pricing import Basis, Pricing


def training_step(seed: int, *, layers: int, plain: bool = False) -> Graph:
    """A forward half of `layers` ops that branch and join, and its backward half in reverse.

    `plain`: every op has one output and shares no storage, as exact solvers want it.
    """
    return _Builder(Random(seed), plain).build(layers)


def uneven_prices(graph: Graph, seed: int) -> Pricing:
    """Seconds that differ by up to a hundred times, in whole numbers to be exact; views are free."""
    random = Random(seed)
    seconds = {op.id: float(random.choice((1, 5, 20, 100))) for op in graph.ops}
    return Pricing(seconds | {op.id: 0.0 for op in graph.ops if op.type == "View"}, Basis.MEASURED)


class _Builder:
    def __init__(self, random: Random, plain: bool) -> None:
        self._random, self._plain = random, plain
        self._tensors: dict[str, Tensor] = {}
        self._ops: list[Op] = []
        self._forward: list[tuple[str, tuple[str, ...], str]] = []  # op, what it reads, its main output

    def build(self, layers: int) -> Graph:
        self._add("x", Kind.INPUT, 16)
        self._add("w", Kind.PARAMETER, 8)
        values = ["x"]
        for layer in range(layers):
            values.append(self._layer(layer, values))
        self._backward(values[-1])
        held = {"x", "gw", values[-1]} & self._tensors.keys()
        return Graph(self._tensors, tuple(self._ops), frozenset(held))

    def _add(self, name: str, kind: Kind, nbytes: int, alias_of: str | None = None) -> str:
        self._tensors[name] = Tensor(name, kind, nbytes=nbytes, alias_of=alias_of)
        return name

    def _layer(self, layer: int, values: list[str]) -> str:
        reads = [values[-1]]
        kind = "Wide" if self._plain else self._random.choice(("Wide", "Wide", "Relu", "Split", "View"))
        if kind != "View" and len(values) > 2 and self._random.random() < 0.4:
            reads.append(self._random.choice(values[:-1]))
        size = self._random.randint(1, 9) * 16
        if kind in ("Relu", "View"):
            size = self._tensors[reads[0]].nbytes or 0
        base = reads[0] if kind == "View" else None
        outputs = [Use(self._add(f"v{layer}", Kind.ACTIVATION, size, base))]
        if kind == "Split":
            outputs.append(Use(self._add(f"m{layer}", Kind.MASK, size // 4)))
        inputs = (*(Use(name) for name in reads), Use("w"))
        self._ops.append(Op(f"f{layer}", kind, Phase.FORWARD, inputs, tuple(outputs)))
        self._forward.append((f"f{layer}", tuple(reads), f"v{layer}"))
        return f"v{layer}"

    def _backward(self, loss: str) -> None:
        gradients = {loss: self._add(f"g_{loss}", Kind.GRADIENT, 16)}
        for number, (op, reads, output) in enumerate(reversed(self._forward)):
            if output not in gradients:
                continue
            saved = [name for name in (*reads, output) if self._random.random() < 0.7]
            mask = f"m{op[1:]}"
            saved += [mask] if mask in self._tensors else []
            made = tuple(self._contribution(gradients, read) for read in reads if read != "x")
            role = Role.ACCUMULATE if "gw" in self._tensors else Role.DATA
            weight = Use("gw" if "gw" in self._tensors else self._add("gw", Kind.GRADIENT, 8), role)
            inputs = (Use(gradients[output]), *(Use(name, Role.SAVED) for name in saved))
            self._ops.append(Op(f"b{number}", "Back", Phase.BACKWARD, inputs, (*made, weight), adjoint_of=op))

    def _contribution(self, gradients: dict[str, str], name: str) -> Use:
        if name in gradients:
            return Use(gradients[name], Role.ACCUMULATE)
        gradients[name] = self._add(f"g_{name}", Kind.GRADIENT, self._tensors[name].nbytes or 0)
        return Use(gradients[name])
