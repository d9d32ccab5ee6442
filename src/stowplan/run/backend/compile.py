"""`torch.compile(model, backend="stowplan", options={"budget": "6GiB"})`: plans for the graphs Dynamo finds.

Dynamo hands over the parts of a model between two graph breaks, each with its parameters as inputs. A part is
captured when it is first called with real tensors, then planned like a model of its own, under the budget
that all parts compiled with the same options share (see `shared_budget`).
"""

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import TypeAlias

import msgspec
from torch.fx import GraphModule

from stowplan.errors import BadUse
from stowplan.plan.options import Kernels, PlanOptions, known_techniques
from stowplan.plan.plan import Plan
from stowplan.run.backend.planned_graph import PlannedGraph, Settings, results_of
from stowplan.run.backend.shared_budget import SharedBudget
from stowplan.units import parse_bytes

Options: TypeAlias = Mapping[str, object]

_ALLOWED = ("recompute",)  # other techniques need the whole step, which Dynamo does not hand over

# Dynamo hands over the same options object with every graph of one call of torch.compile. The graphs keep
# their settings alive, and those the options, so that nobody else can have their place in memory.
_SETTINGS: "weakref.WeakValueDictionary[int, Settings]" = weakref.WeakValueDictionary()

_DYNAMOS_WORDS = re.compile(r"^L_(self_)?|(?<![^_])(modules|parameters|buffers)_(?!$)")


class _Choices(msgspec.Struct, forbid_unknown_fields=True):
    """The keys that `options` may have."""

    budget: int | str
    reserve: int | str = 0
    allow: str | tuple[str, ...] = _ALLOWED
    moves: int | None = None
    kernels: str = Kernels.EAGER


def backend(
    graph: GraphModule, _example_inputs: Sequence[object], *, options: Options | None = None
) -> Callable[..., object]:
    """What Dynamo calls for each graph.

    Options are `budget` and, as in `fit`, `reserve`, `allow`, `moves` and `kernels`. Times of plans with
    compiled kernels are compared with the same kernels without a budget. The example inputs may be without
    data, and are not looked at. A graph in which nothing is differentiated runs as it is, and so does what
    Dynamo leaves to Python: `reserve` for what that makes.
    """
    settings, results = _settings_for(options or {}), results_of(graph)
    if not any(result.is_attached for result in results):
        return graph.forward
    return PlannedGraph(_with_named_inputs(graph), results, settings)


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


def _settings_for(options: Options) -> Settings:
    if known := _SETTINGS.get(id(options)):
        return known
    chosen = _checked(options)
    allowed = parse_bytes(chosen.budget) - parse_bytes(chosen.reserve)
    allow = tuple(chosen.allow.split(",")) if isinstance(chosen.allow, str) else chosen.allow
    if others := sorted(known_techniques(allow).difference(_ALLOWED)):
        raise BadUse(
            f"graphs of torch.compile can only be planned with recompute; for {others[0]} use stowplan.fit"
        )
    planning = PlanOptions(allow, moves=chosen.moves, kernels=chosen.kernels)
    made = _SETTINGS[id(options)] = Settings(options, SharedBudget(allowed), planning)
    return made


def _checked(options: Options) -> _Choices:
    try:
        return msgspec.convert(dict(options), _Choices)
    except msgspec.ValidationError as fault:
        raise BadUse(
            f'{fault}; write torch.compile(model, backend="stowplan", options={{"budget": "6GiB"}}),'
            " and perhaps reserve, allow, moves, kernels"
        ) from fault
