"""`torch.compile(model, backend="stowplan", options={"budget": "6GiB"})`: plans for the graphs Dynamo finds.

Dynamo hands over the parts of a model between two graph breaks, each with its parameters as inputs. A part is
captured when it is first called with real tensors, then planned like a model of its own, under the budget
that all parts compiled with the same options share (see `shared_budget`).

A graph of Dynamo's, run by plans: captured and planned once for each kind of call.

Which of its results the loss depends on is not known before a backward. At first all that can be are taken to
be differentiated, and those that no gradient comes for count as zero. If the one scalar among them turns out
to be the loss, and the others not to be differentiated, they are left out from then on.
"""

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as GraphNode

from stowplan.capture.stand_ins import flatten
from stowplan.errors import BadUse, nearest
from stowplan.plan.options import Execution, PlanOptions, Search, known_techniques
from stowplan.plan.plan import Plan
from stowplan.request import facts_of, refuse_together
from stowplan.run.backend.captured_graph import CapturedGraph
from stowplan.run.backend.graph_run import PlannedRun
from stowplan.run.backend.shared_budget import SharedBudget
from stowplan.run.call_planner import kind_of_call
from stowplan.run.step.function import Run, ends_of_chain
from stowplan.units import bytes_left, parse_bytes


@dataclass(slots=True, weakref_slot=True, eq=False)
class BackendSettings:
    """The settings that all graphs of one compilation share, and the options that they come from."""

    options: Mapping[str, object]
    budget: SharedBudget
    planning: PlanOptions


@dataclass(frozen=True, slots=True)
class GraphResult:
    """Dynamo's description of one result of a graph."""

    is_attached: bool  # part of autograd's graph
    is_scalar: bool


def results_of(graph: GraphModule) -> list[GraphResult]:
    """The results of the graph, as described by the tensors that Dynamo traced it with."""
    (returned,) = graph.graph.output_node().args
    assert isinstance(returned, (tuple, list))
    values = (node.meta.get("example_value") if isinstance(node, GraphNode) else node for node in returned)
    return [
        GraphResult(value.requires_grad, value.dim() == 0)
        if isinstance(value, Tensor)
        else GraphResult(False, False)
        for value in values
    ]


class PlannedGraph:
    """Called by Dynamo's code in place of the graph."""

    def __init__(self, graph: GraphModule, results: Sequence[GraphResult], settings: BackendSettings) -> None:
        self._graph, self._settings = graph, settings
        self._loss = _lone_scalar(results)
        self._captured: dict[object, CapturedGraph] = {}
        self._only_loss: set[object] = set()  # kinds of call in which nothing else is differentiated

    def __call__(self, *inputs: object) -> Sequence[object]:
        kind = kind_of_call(*flatten(inputs, {}))
        captured = self._captured_for(kind, inputs)
        if not captured.captured.graph.ops:  # it returns what it was given
            given_back: Sequence[object] = self._graph(*inputs)
            return given_back
        there = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        run = self._settings.budget.begin(captured.budgeted, there, captured.wanted(inputs))
        outputs = captured.run(run.point.plan, inputs)
        self._follow(kind, captured, run, outputs)
        return outputs

    def _captured_for(self, kind: object, inputs: tuple[object, ...]) -> CapturedGraph:
        as_vector = None if kind in self._only_loss else self._loss
        key = kind, as_vector
        if key not in self._captured:
            self._captured[key] = CapturedGraph.of(
                self._graph, inputs, options=self._settings.planning, as_vector=as_vector
            )
        return self._captured[key]

    def _follow(
        self, kind: object, captured: CapturedGraph, run: PlannedRun, outputs: Sequence[object]
    ) -> None:
        """Tell the budget when the backward of this run is done, and learn from it what is differentiated."""
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        (first, last, step), memory = ends_of_chain(tensors), self._settings.budget.opened(run, tensors)
        if self._loss is not None:
            learn = partial(self._learn, kind, captured, self._loss, weakref.ref(step))
            first.register_prehook(learn)
        first.register_prehook(lambda _: memory.turned())
        last.register_hook(lambda *_: memory.closed(run))
        weakref.finalize(last, memory.dropped, run).atexit = False

    def _learn(
        self, kind: object, captured: CapturedGraph, loss: int, step: "weakref.ref[Run]", _: object
    ) -> None:
        """Called when gradients have come in for the captured outputs."""
        run = step()
        assert run is not None, "the node that calls this holds it"
        if {name for name, came in zip(captured.outputs, run.came, strict=True) if came} == {
            captured.name_of(loss)
        }:
            self._only_loss.add(kind)
            return
        self._only_loss.discard(kind)
        if captured.as_vector is None:
            raise BadUse(
                "a gradient came in for an output other than the loss, which it did not in earlier steps;"
                " the plan has no part for it, but will have from the next step on"
            )


def _lone_scalar(results: Sequence[GraphResult]) -> int | None:
    """The position of the one scalar among several results that can be differentiated."""
    attached = {position: result for position, result in enumerate(results) if result.is_attached}
    scalars = [position for position, result in attached.items() if result.is_scalar]
    return scalars[0] if len(attached) > 1 and len(scalars) == 1 else None


Options: TypeAlias = Mapping[str, object]

_EXAMPLE = '{"budget": "6GiB"}'
_ALLOWED = ("recompute",)  # other techniques need the whole step, which Dynamo does not hand over

# Dynamo hands over the same options object with every graph of one call of torch.compile. The graphs keep
# their settings alive, and those the options, so that nobody else can have their place in memory.
_SETTINGS: "weakref.WeakValueDictionary[int, BackendSettings]" = weakref.WeakValueDictionary()

_DYNAMOS_WORDS = re.compile(r"^L_(self_)?|(?<![^_])(modules|parameters|buffers)_(?!$)")


_OF_SEARCH, _OF_EXECUTION = ("moves", "time_limit"), ("kernels",)
_KEYS = ("budget", "reserve", "allow", *_OF_SEARCH, *_OF_EXECUTION)


def backend(
    graph: GraphModule, _example_inputs: Sequence[object], *, options: Options | None = None
) -> Callable[..., object]:
    """What Dynamo calls for each graph.

    Options are `budget` and, as in `fit`, `reserve`, `allow`, `moves` and `kernels`; `time_limit` is that of
    each graph. Times of plans with compiled kernels are compared with the same kernels without a budget. The
    example inputs may be without data, and are not looked at. A graph in which nothing is differentiated runs
    as it is, and so does what Dynamo leaves to Python: `reserve` for what that makes.
    """
    try:
        settings = _settings_for(options or {})
    except BadUse as fault:
        return partial(_refuse, str(fault))
    results = results_of(graph)
    if not any(result.is_attached for result in results):
        return graph.forward
    return PlannedGraph(_with_named_inputs(graph), results, settings)


def _refuse(why: str, *_: object) -> object:
    """In place of a graph: what is raised by Dynamo's code reaches the user, who would see any error of a
    backend inside BackendCompilerFailed."""
    raise BadUse(why)


def plans_for(options: Options) -> tuple[Plan, ...]:
    """The plans of the latest step of the graphs compiled with this very dictionary, in running order."""
    settings = _SETTINGS.get(id(options))
    return tuple(settings.budget.plans) if settings else ()


def _with_named_inputs(graph: GraphModule) -> GraphModule:
    """Dynamo's `L_self_modules_fc_parameters_weight_` becomes `fc_weight`, as plans and code are read."""
    taken: set[str] = set()
    for node in graph.graph.find_nodes(op="placeholder"):
        name = _DYNAMOS_WORDS.sub("", str(node.target)).strip("_")
        if not name.isidentifier() or iskeyword(name):
            name = f"input_{name}"
        while name in taken:
            name += "_"
        taken.add(name)
        node.target = name
    return GraphModule(graph, graph.graph)


def _settings_for(options: Options) -> BackendSettings:
    if known := _SETTINGS.get(id(options)):
        return known
    _refuse_unknown(options)
    reserve = parse_bytes(options.get("reserve", 0), "reserve")
    allowed = bytes_left(parse_bytes(options["budget"], "budget"), reserve)
    search: Any = {name: options[name] for name in _OF_SEARCH if name in options}
    execution: Any = {name: options[name] for name in _OF_EXECUTION if name in options}
    allow = known_techniques(options.get("allow", _ALLOWED))
    planning = PlanOptions(allow, Search(**search), Execution(**execution))
    refuse_together({"graph", *facts_of(planning)})
    made = _SETTINGS[id(options)] = BackendSettings(options, SharedBudget(allowed), planning)
    return made


def _refuse_unknown(options: Options) -> None:
    if unknown := [name for name in options if name not in _KEYS]:
        near = nearest(unknown[0], _KEYS)
        raise BadUse(f"no option {unknown[0]!r}{near} of the backend; there is {', '.join(_KEYS)}")
    if "budget" not in options:
        raise BadUse(f'no budget: write torch.compile(model, backend="stowplan", options={_EXAMPLE})')
