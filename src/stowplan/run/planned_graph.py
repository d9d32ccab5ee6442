"""A graph of Dynamo's, run by plans: captured and planned once for each kind of call.

Which of its results the loss depends on is not known before a backward. At first all that can be are taken to
be differentiated, and those that no gradient comes for count as zero. If the one scalar among them turns out
to be the loss, and the others not to be differentiated, they are left out from then on.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.fx import GraphModule

from stowplan.capture import Captured, Ref, capture
from stowplan.errors import BadUse, CaptureError
from stowplan.plan.plan import Plan
from stowplan.run.fit import kind_of_call
from stowplan.run.member import Member
from stowplan.run.shared_budget import SharedBudget
from stowplan.run.straight import StraightStep


@dataclass(slots=True, weakref_slot=True, eq=False)
class Settings:
    """What the graphs of one compilation have in common."""

    options: Mapping[str, object]
    budget: SharedBudget
    allow: tuple[str, ...]
    moves: int | None


@dataclass(frozen=True, slots=True)
class Result:
    """What Dynamo says of something that a graph returns."""

    is_attached: bool  # part of autograd's graph
    is_scalar: bool


def results_of(graph: GraphModule) -> list[Result]:
    """What the graph returns, by the stand-ins that Dynamo has traced it with."""
    (returned,) = graph.graph.output_node().args
    assert isinstance(returned, (tuple, list))
    values = [
        node.meta.get("example_value") if isinstance(node, torch.fx.Node) else node for node in returned
    ]
    return [
        Result(value.requires_grad, value.dim() == 0) if isinstance(value, Tensor) else Result(False, False)
        for value in values
    ]


class PlannedGraph:
    """Called by Dynamo's code in place of the graph."""

    def __init__(self, graph: GraphModule, results: Sequence[Result], settings: Settings) -> None:
        self._graph, self._settings = graph, settings
        self._loss = _lone_scalar(results)
        self._steps: dict[object, _CapturedStep] = {}
        self._kinds_of_loss: set[object] = (
            set()
        )  # kinds of call in which nothing but the loss is differentiated

    def __call__(self, *inputs: object) -> Sequence[object]:
        kind = kind_of_call(self._graph, inputs, {})
        step = self._step_for(kind, inputs)
        there = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        plan = self._settings.budget.plan_for(step.member, there, step.wanted(inputs))
        outputs = step.run(plan, inputs)
        self._follow(kind, step, plan, outputs)
        return outputs

    def _step_for(self, kind: object, inputs: tuple[object, ...]) -> "_CapturedStep":
        key = kind, kind in self._kinds_of_loss
        if key not in self._steps:
            everything = self._loss is not None and kind not in self._kinds_of_loss
            self._steps[key] = _captured(
                self._graph, inputs, self._settings, self._loss if everything else None
            )
        return self._steps[key]

    def _follow(self, kind: object, step: "_CapturedStep", plan: Plan, outputs: Sequence[object]) -> None:
        """Tell the budget when the backward of this run is done, and learn from it what is differentiated."""
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        budget, node = self._settings.budget, _node_below(tensors)
        run = budget.opened(plan, tensors)
        node.register_prehook(partial(self._learn, kind, step))
        node.register_hook(lambda *_: budget.closed(run))
        weakref.finalize(node, budget.closed, run).atexit = False

    def _learn(self, kind: object, step: "_CapturedStep", gradients: Sequence[Tensor | None]) -> None:
        """Called with the gradients that come in for the step's outputs."""
        if self._loss is None:
            return
        arrived = {
            name for name, gradient in zip(step.outputs, gradients, strict=True) if gradient is not None
        }
        only_loss = arrived == {step.name_of(self._loss)}
        if only_loss:
            self._kinds_of_loss.add(kind)
        elif kind in self._kinds_of_loss:
            self._kinds_of_loss.discard(kind)
            if step.as_vector is None:
                raise BadUse(
                    "a gradient came in for an output besides the loss, which it did not in earlier steps;"
                    " the plan has no part for it, but will have from the next step on"
                )


def _lone_scalar(results: Sequence[Result]) -> int | None:
    """The position of the one scalar among several results that can be differentiated."""
    attached = {position: result for position, result in enumerate(results) if result.is_attached}
    scalars = [position for position, result in attached.items() if result.is_scalar]
    return scalars[0] if len(attached) > 1 and len(scalars) == 1 else None


@dataclass(slots=True)
class _CapturedStep:
    """A graph captured for one kind of call. `as_vector` is the scalar that it returns as a vector of one."""

    graph: GraphModule
    captured: Captured
    member: Member
    as_vector: int | None
    _latest: tuple[Plan, StraightStep] | None = None

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
        """What the graph returns, computed by the plan."""
        if self._latest is None or self._latest[0] is not plan:
            self._latest = plan, StraightStep(self.captured, self.graph, steps=plan.steps)
        outputs = self._latest[1](*inputs)
        assert isinstance(outputs, (tuple, list))
        if self.as_vector is None:
            return outputs
        return [o.reshape(()) if n == self.as_vector else o for n, o in enumerate(outputs)]


def _captured(
    graph: GraphModule, inputs: tuple[object, ...], settings: Settings, as_vector: int | None
) -> _CapturedStep:
    """Capture takes a lone scalar for the loss and differentiates nothing else, unless it is a vector."""

    def shaped(outputs: Sequence[Tensor]) -> list[Tensor]:
        return [o.reshape(1) if n == as_vector else o for n, o in enumerate(outputs)]

    captured = capture(graph, inputs, loss=None if as_vector is None else shaped)
    _refuse_writing_unseen(captured, inputs)
    member = Member(captured, settings.allow, settings.moves, is_followed=_is_followed(captured))
    return _CapturedStep(graph, captured, member, as_vector)


def _is_followed(captured: Captured) -> bool:
    """Whether something follows before its backward. A loss is differentiated at once."""
    tangents = (captured.graph.tensors[name] for name in captured.program.tangents if name is not None)
    return any(tangent.shape for tangent in tangents)


def _refuse_writing_unseen(captured: Captured, inputs: Sequence[object]) -> None:
    """Writing into an input must be seen by autograd and by every other input in the same memory."""
    named = list(zip(captured.program.inputs, inputs, strict=True))
    tensors = {name: leaf for name, leaf in named if name is not None and isinstance(leaf, Tensor)}
    places = [tensor.untyped_storage()._cdata for tensor in tensors.values()]
    for name in captured.program.updates.keys() & tensors.keys():
        if tensors[name].requires_grad:
            raise CaptureError(
                f"the graph writes into {name}, which wants a gradient", advice="copy it first"
            )
        if places.count(tensors[name].untyped_storage()._cdata) > 1:
            raise CaptureError(f"the graph writes into {name}, which another input shares memory with")


def _node_below(outputs: Sequence[Tensor]) -> Node:
    """The autograd node of the step itself, below those that follow it."""
    node = next(output.grad_fn for output in outputs if output.grad_fn is not None)
    while node.name() != "StepFunctionBackward":
        node = next(below for below, _ in node.next_functions if below is not None)
    return node
