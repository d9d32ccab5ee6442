"""A graph of Dynamo's, captured for one kind of call, and run by one plan or another."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import wraps

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from stowplan.capture import Captured, Ref, capture
from stowplan.capture.origins import BY_PARTS, Origin, is_users, told
from stowplan.errors import CaptureError
from stowplan.ir import Op
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.problem import SETS_APART
from stowplan.run.backend.budgeted_graph import BudgetedGraph
from stowplan.run.planning.planner import Subject, with_kernels
from stowplan.run.step.straight import StraightStep
from stowplan.run.wrappers import with_forward
from stowplan.torch_private import FakeTensor, storage_id

aten = torch.ops.aten
_OUTSIDE = (
    "put it into a function under @torch.compiler.disable: Dynamo then leaves it to Python, and the graphs"
    " around it are planned"
)


@dataclass(slots=True)
class CapturedGraph:
    """`as_vector` is the position of a scalar that the step returns as a vector of one.

    Capture takes a scalar among several results for the loss, and differentiates nothing else.
    """

    graph: GraphModule
    captured: Captured
    budgeted: BudgetedGraph
    as_vector: int | None
    _latest: tuple[Plan, StraightStep] | None = None

    @staticmethod
    def of(
        graph: GraphModule,
        inputs: tuple[object, ...],
        *,
        options: PlanOptions,
        as_vector: int | None,
    ) -> "CapturedGraph":
        """Capture `graph(*inputs)`."""

        def shaped(outputs: Sequence[Tensor]) -> list[Tensor]:
            return [o.reshape(1) if n == as_vector else o for n, o in enumerate(outputs)]

        @wraps(type(graph).forward)
        def node_by_node(self: GraphModule, *given: object) -> object:
            return _Led(self).run(*given)

        led = with_forward(graph, node_by_node)
        try:
            captured = capture(led, inputs, loss=None if as_vector is None else shaped)
        except CaptureError as refusal:
            own = "" if BY_PARTS in refusal.advice else refusal.advice
            advice = f"{own}, or {_OUTSIDE}" if own else _OUTSIDE
            raise CaptureError(refusal.what, where=refusal.where, advice=advice) from refusal
        _refuse_hidden_writes(captured, inputs)
        _refuse_hidden_results(captured)
        captured = _with_copies_set_apart(captured)
        captured = with_kernels(Subject(captured, led, inputs, {}), options)
        budgeted = BudgetedGraph(captured, options, is_followed=_is_followed(captured))
        return CapturedGraph(graph, captured, budgeted, as_vector)

    @property
    def outputs(self) -> list[str]:
        """The tensors that the step returns, each once."""
        leaves = self.captured.program.outputs
        return list(dict.fromkeys(leaf.tensor for leaf in leaves if isinstance(leaf, Ref)))

    def name_of(self, position: int) -> str:
        """The tensor that is returned there."""
        leaf = self.captured.program.outputs[position]
        assert isinstance(leaf, Ref)
        return leaf.tensor

    def wanted(self, inputs: Sequence[object]) -> list[Tensor]:
        """Inputs whose gradients stay: leaves, such as parameters."""
        named = zip(self.captured.program.inputs, inputs, strict=True)
        leaves = (leaf for name, leaf in named if name in self.captured.program.gradients)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_leaf]

    def run(self, plan: Plan, inputs: Sequence[object]) -> Sequence[object]:
        """The results of the graph, computed by the plan."""
        if self._latest is None or self._latest[0] is not plan:
            self._latest = plan, StraightStep(self.captured, self.graph, steps=plan.steps)
        outputs = self._latest[1](*inputs)
        assert isinstance(outputs, (tuple, list))
        return [o.reshape(()) if n == self.as_vector else o for n, o in enumerate(outputs)]


class _Led(Interpreter):
    """Runs a graph node by node, and tells for each the module and the line that Dynamo took it from."""

    def run_node(self, n: Node) -> object:
        """As the base class does."""
        path = next((path for path, _ in reversed(n.meta.get("nn_module_stack", {}).values())), "")
        lines = re.findall(r'^ *File "(.+)", line (\d+)', n.stack_trace or "", re.MULTILINE)
        source = next((f"{file}:{line}" for file, line in reversed(lines) if is_users(file)), "")
        scope = re.sub(r"^L\['(\w+)'\]", r"\1", path).removeprefix("self").removeprefix(".")
        with told(Origin(scope, source)):
            try:
                return super().run_node(n)
            except Exception as error:
                if source:  # the frames between have no line of the user's code
                    error.add_note(f"{source} in {scope}" if scope else source)
                raise


def _is_followed(captured: Captured) -> bool:
    """Whether something is likely to follow before its backward. A loss is differentiated at once."""
    tangents = (captured.graph.tensors[name] for name in captured.program.tangents if name is not None)
    return any(tangent.shape for tangent in tangents)


_COPIES = frozenset(
    (
        *(aten.clone.default, aten._to_copy.default, aten.embedding.default, aten.gather.default),
        *(aten.index.Tensor, aten.index_select.default),
    )
)


def _refuse_hidden_results(captured: Captured) -> None:
    """Refuse a graph that reads what no op was seen to make, and what has no contents: `fit` guards it."""
    for tensor in captured.program.constants.values():
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"the graph reads a tensor of shape {tuple(tensor.shape)} that no op was seen to make",
                advice=_OUTSIDE,
            )


def _with_copies_set_apart(captured: Captured) -> Captured:
    """A later graph may write into a buffer that this one copies, as into a queue: the copy is made once."""
    graph, program = captured.graph, captured.program
    callers = {name for name in program.inputs if name is not None and name not in program.gradients}

    def sets_apart(op: Op) -> bool:
        is_copy = program.calls[op.id].target in _COPIES
        return is_copy and graph.storage_of(next(iter(op.reads()))) in callers

    ops = (
        replace(op, attributes={**op.attributes, SETS_APART: True}) if sets_apart(op) else op
        for op in graph.ops
    )
    return replace(captured, graph=replace(graph, ops=tuple(ops)))


def _refuse_hidden_writes(captured: Captured, inputs: Sequence[object]) -> None:
    """Writing into an input must be seen by autograd, and through every other input in the same memory."""
    named = zip(captured.program.inputs, inputs, strict=True)
    tensors = {name: leaf for name, leaf in named if name is not None and isinstance(leaf, Tensor)}
    places = [storage_id(tensor.untyped_storage()) for tensor in tensors.values()]
    for name in captured.program.updates.keys() & tensors.keys():
        if tensors[name].requires_grad:
            raise CaptureError(
                f"the graph writes into {name}, which wants a gradient", advice="copy it first"
            )
        if places.count(storage_id(tensors[name].untyped_storage())) > 1:
            raise CaptureError(f"the graph writes into {name}, which shares memory with another input")
