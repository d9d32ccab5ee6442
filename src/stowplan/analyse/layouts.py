"""Changes of layout: the step without them, and the step with as few as its ops need.

Images are stored in one of two layouts, such as NHWC and NCHW. An op reads and writes its images in one
layout; where a reader's layout is not the writer's, a LAYOUT op makes a copy in the other one, which costs
memory and time. Most ops have a kernel for either layout, so their layouts are a choice. Let x(op) be 0 or 1
for the layout of an op, u(v) the largest and w(v) the least x among the writer and the readers of an image v.
The copies take the sum of bytes(v) * (u(v) - w(v)), one copy for all readers. That is a minimum cut, and its
linear programme has whole solutions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from stowplan.ir.graph import Graph, Kind, Op, Phase, Role, Tensor, Use
from stowplan.units import format_bytes


class Layouts(StrEnum):
    """In which layouts the ops of a file work."""

    RECORDED = "recorded"  # in those of the file
    CHOSEN = "chosen"  # in those between which the fewest bytes are copied


_ELEMENTWISE = frozenset(
    (
        "Add",
        "AddN",
        "AddV2",
        "Elu",
        "EluGrad",
        "Identity",
        "Maximum",
        "Minimum",
        "Mul",
        "Neg",
        "Relu",
        "Relu6",
        "Relu6Grad",
        "ReluGrad",
        "Rsqrt",
        "Selu",
        "SeluGrad",
        "Sigmoid",
        "SigmoidGrad",
        "Softplus",
        "Sqrt",
        "Square",
        "Sub",
        "Tanh",
        "TanhGrad",
    )
)
_WITH_DATA_FORMAT = frozenset(
    (
        "AvgPool",
        "AvgPoolGrad",
        "BiasAdd",
        "BiasAddGrad",
        "Conv2D",
        "Conv2DBackpropFilter",
        "Conv2DBackpropInput",
        "FusedBatchNorm",
        "FusedBatchNormGrad",
        "FusedBatchNormGradV2",
        "FusedBatchNormGradV3",
        "FusedBatchNormV2",
        "FusedBatchNormV3",
        "MaxPool",
        "MaxPoolGrad",
    )
)
_EITHER = _ELEMENTWISE | _WITH_DATA_FORMAT  # types of ops that have a kernel for both layouts


def without_layout(graph: Graph) -> Graph:
    """`graph` without its LAYOUT ops: readers of such an op's output read the op's input.

    A LAYOUT op stays if another op adds into its output.
    """
    bypassed = _changes(graph)
    source = _sources(bypassed)
    gone = {op.id for op in bypassed}
    ops = tuple(_rerouted(op, source) for op in graph.ops if op.id not in gone)
    held = frozenset(source.get(name, name) for name in graph.held)
    tensors = {
        name: _relinked(tensor, source) for name, tensor in graph.tensors.items() if name not in source
    }
    return _without_idle(replace(graph, tensors=tensors, ops=ops, held=held), bypassed)


def _changes(graph: Graph) -> list[Op]:
    """The ops that only transpose their first input; further inputs give the permutation."""
    added_into = {use.tensor for op in graph.ops for use in op.outputs if use.role is Role.ACCUMULATE}
    turns = (op for op in graph.ops if op.phase is Phase.LAYOUT and op.inputs and len(op.outputs) == 1)
    return [op for op in turns if op.outputs[0].tensor not in added_into]


def _sources(changes: Sequence[Op]) -> dict[str, str]:
    """By tensor that a change of layout makes, the tensor it is a copy of."""
    source: dict[str, str] = {}
    for op in changes:
        turned = op.inputs[0].tensor
        source[op.outputs[0].tensor] = source.get(turned, turned)
    return source


def _relinked(tensor: Tensor, source: Mapping[str, str]) -> Tensor:
    alias_of, gradient_of = (source.get(link or "", link) for link in (tensor.alias_of, tensor.gradient_of))
    return replace(tensor, alias_of=alias_of, gradient_of=gradient_of)


def _rerouted(op: Op, source: Mapping[str, str]) -> Op:
    return replace(op, inputs=tuple(Use(source.get(use.tensor, use.tensor), use.role) for use in op.inputs))


def _without_idle(graph: Graph, gone: Sequence[Op]) -> Graph:
    """`graph` without the permutations that only ops which are gone read."""
    used = {use.tensor for op in graph.ops for use in (*op.inputs, *op.outputs)} | graph.held
    linked = {link for tensor in graph.tensors.values() for link in (tensor.alias_of, tensor.gradient_of)}
    idle = {use.tensor for op in gone for use in op.inputs[1:]} - used - linked
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name not in idle}
    return replace(graph, tensors=tensors)


@dataclass(frozen=True, slots=True)
class Relaid:
    """A step in chosen layouts: its changes of layout and the bytes they copy, before and after."""

    graph: Graph
    changes_before: int
    changes: int
    copied_bytes_before: int
    copied_bytes: int

    def __str__(self) -> str:
        saved = format_bytes(self.copied_bytes_before - self.copied_bytes)
        return (
            f"{self.changes} changes of layout where the file has {self.changes_before}, which saves copies"
            f" of {saved}; kernels for the other layout may round differently"
        )


def with_fewest_changes(graph: Graph) -> Relaid:
    """The step in the layouts between which the fewest bytes are copied.

    Inputs, results, views and the ops that are not known to take either layout stay in theirs.
    """
    changes = _changes(graph)
    chosen = _Choice(graph, changes)
    relaid = _rebuilt(graph, chosen) if len(chosen.layouts) == 2 else graph
    after = _changes(relaid)
    return Relaid(
        relaid, len(changes), len(after), _copied_bytes(graph, changes), _copied_bytes(relaid, after)
    )


def _copied_bytes(graph: Graph, changes: Sequence[Op]) -> int:
    return sum(graph.tensors[op.outputs[0].tensor].nbytes or 0 for op in changes)


class _Choice:
    """The layout of each op that may take either, so that the fewest bytes are copied."""

    def __init__(self, graph: Graph, changes: Sequence[Op]) -> None:
        self.graph, self.changes = graph, changes
        self.source = _sources(changes)
        ends = (use.tensor for op in changes for use in (op.inputs[0], op.outputs[0]))
        self.layouts = sorted({graph.tensors[name].layout for name in ends})
        gone = {op.id for op in changes}
        self.ops = [op for op in graph.ops if op.id not in gone]
        self._fixed = self._fixed_tensors()
        self._recorded = {op.id: layout for op in self.ops if (layout := self._free_layout(op)) is not None}
        self._chosen = self._solved() if self._recorded and len(self.layouts) == 2 else {}

    def layout_in(self, op: Op, name: str) -> str:
        """The layout in which an op reads or writes a tensor."""
        recorded = self.graph.tensors[name].layout
        return self._chosen.get(op.id, recorded) if recorded in self.layouts else recorded

    def is_image(self, name: str) -> bool:
        """Whether a tensor is in one of the two layouts."""
        return self.graph.tensors[name].layout in self.layouts

    def _fixed_tensors(self) -> frozenset[str]:
        """Tensors that keep their layout: results, views and what they are views of, sums of several ops."""
        views = {name for name, tensor in self.graph.tensors.items() if tensor.alias_of is not None}
        viewed = {self.graph.storage_of(name) for name in views}
        added = {use.tensor for op in self.ops for use in op.outputs if use.role is Role.ACCUMULATE}
        fixed = self.graph.held | views | viewed | added
        return fixed | {self.source[name] for name in fixed if name in self.source}

    def _free_layout(self, op: Op) -> str | None:
        """The layout of an op that may take either; None if it may not."""
        images = [use.tensor for use in (*op.inputs, *op.outputs) if self.is_image(use.tensor)]
        found = {self.graph.tensors[name].layout for name in images}
        is_fixed = not self._fixed.isdisjoint(op.writes())
        return found.pop() if op.type in _EITHER and len(found) == 1 and not is_fixed else None

    def _uses(self) -> Iterator[tuple[str, str, Op | None]]:
        """Each image, a name it is used by, and the op that makes or reads it; None stands for the caller."""
        for op in self.ops:
            for use in (*op.inputs, *op.outputs):
                if self.is_image(use.tensor) and use.role in (Role.DATA, Role.SAVED, Role.ACCUMULATE):
                    yield self.source.get(use.tensor, use.tensor), use.tensor, op
        made = {name for op in self.ops for name in op.writes()}
        given = (name for name in self.graph.tensors if name not in made and name not in self.source)
        kept = (name for name in (*given, *self._fixed) if self.is_image(name))
        yield from ((self.source.get(name, name), name, None) for name in kept)

    def _solved(self) -> dict[str, str]:
        """The layout of each free op, by its id. An op that changes weighs as much as one byte copied."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # here: half a second that few files need
        from scipy.sparse import csr_array

        uses = list(self._uses())
        images = dict.fromkeys(image for image, _, _ in uses)
        x = {op: column for column, op in enumerate(self._recorded)}
        u = {image: len(x) + column for column, image in enumerate(images)}
        w = {image: len(x) + len(u) + column for column, image in enumerate(images)}
        copied = [float(self.graph.tensors[image].nbytes or 0) for image in images]
        changed = [-1.0 if layout == self.layouts[1] else 1.0 for layout in self._recorded.values()]
        price = np.array([*changed, *copied, *(-nbytes for nbytes in copied)])
        low, high = np.zeros(len(price)), np.ones(len(price))
        rows: list[tuple[int, int]] = []  # in each, the first is at least the second
        for image, name, op in uses:
            if op is not None and op.id in x:
                rows += [(u[image], x[op.id]), (x[op.id], w[image])]
            elif self.graph.tensors[name].layout == self.layouts[1]:
                low[u[image]] = 1.0
            else:
                high[w[image]] = 0.0
        at = np.repeat(np.arange(len(rows)), 2)
        matrix = csr_array((np.tile([1.0, -1.0], len(rows)), (at, np.ravel(rows))), (len(rows), len(price)))
        found = milp(price, constraints=LinearConstraint(matrix, lb=0), bounds=Bounds(low, high))
        if found.x is None:
            raise AssertionError(f"the recorded layouts are a solution, but none was found: {found.message}")
        return {op: self.layouts[round(found.x[column])] for op, column in x.items()}


def _rebuilt(graph: Graph, chosen: _Choice) -> Graph:
    """The step in the chosen layouts, each change of layout just before its first reader."""
    source = chosen.source
    made = {name: chosen.layout_in(op, name) for op in chosen.ops for name in op.writes()}
    tensors = {
        name: _in_layout(_relinked(tensor, source), made.get(name, tensor.layout))
        for name, tensor in graph.tensors.items()
        if name not in source
    }
    known = {(source[name], graph.tensors[name].layout): op for op in chosen.changes for name in op.writes()}
    ops: list[Op] = []

    def name_in(layout: str, name: str) -> str:
        image = source.get(name, name)
        if tensors[image].layout == layout:
            return image
        change = _change(known.get((image, layout)), image, layout)
        copy = change.outputs[0].tensor
        if copy not in tensors:
            tensors[copy] = _copy(tensors[image], copy, layout)
            ops.append(change)
        return copy

    for op in chosen.ops:
        inputs = (
            replace(use, tensor=name_in(chosen.layout_in(op, use.tensor), use.tensor)) for use in op.inputs
        )
        rerouted = replace(op, inputs=tuple(inputs))  # first, for the changes of layout it needs
        ops.append(rerouted)
    held = frozenset(name_in(graph.tensors[name].layout, name) for name in graph.held)
    return _without_idle(replace(graph, tensors=tensors, ops=tuple(ops), held=held), chosen.changes)


def _change(known: Op | None, image: str, layout: str) -> Op:
    if known is not None:
        return replace(known, inputs=(Use(image), *known.inputs[1:]))
    name = f"{image} as {layout}"
    return Op(name, "Transpose", Phase.LAYOUT, (Use(image),), (Use(name),))


def _copy(tensor: Tensor, name: str, layout: str) -> Tensor:
    kind = tensor.kind if tensor.kind is Kind.GRADIENT else Kind.ACTIVATION
    return _in_layout(replace(tensor, id=name, name="", kind=kind, alias_of=None, gradient_of=None), layout)


def _in_layout(tensor: Tensor, layout: str) -> Tensor:
    if not layout or layout == tensor.layout or tensor.shape is None:
        return tensor
    size = dict(zip(tensor.layout, tensor.shape, strict=True))
    return replace(tensor, layout=layout, shape=tuple(size[axis] for axis in layout))
