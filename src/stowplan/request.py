"""Request: all that is asked of a plan, made once at the door and checked once.

The door is `fit`, the command line, or the backend of `torch.compile`. Options that belong together are small
frozen dataclasses. Their fields are the only place where an option has its name, its default and what the
command line says of it. What cannot be combined is in one table, `NOT_TOGETHER`: facts of a request, and the
sentence that refuses all of them at once.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, cast, get_args

from stowplan.errors import BadUse
from stowplan.plan.options import (
    DEFAULT_OPTIONS,
    Execution,
    PlanOptions,
    Search,
    told,
)
from stowplan.plan.plan import Plan
from stowplan.units import bytes_left, is_automatic, parse_bytes

Outputs: TypeAlias = Literal["loss", "all"]
Layouts: TypeAlias = Literal["follow", "choose"]
Parameters: TypeAlias = Literal["replicate", "shard", "choose"]
Amount: TypeAlias = float | str
Budget: TypeAlias = Amount | Mapping[Any, Amount]


@dataclass(frozen=True, slots=True)
class Iteration:
    """A whole iteration: the step and the update of its parameters, under one budget.

    Args:
        optimizer: the optimizer of the model's parameters; on the command line, and for its verbs, a name of
            `torch.optim` or MODULE:FUNCTION.
        clip_norm: clip as `clip_grad_norm_` before the step. All gradients stay until then or, if they do not
            fit, forward and backward are run twice.
        clip_value: clip as `clip_grad_value_`, each gradient when it is consumed.
        accumulate: the number of backwards before each step.
        keep_gradients: names of parameters whose gradients stay, or True for all; other gradients are None
            after backward.
    """

    optimizer: object
    clip_norm: float | None = field(
        default=None, metadata=told("with --optimizer: clip gradients to this norm", "NORM")
    )
    clip_value: float | None = None
    accumulate: int = field(
        default=1, metadata=told("with --optimizer: backwards before each update (default 1)", "N")
    )
    keep_gradients: bool | Iterable[str] = False

    @staticmethod
    def of(optimizer: object) -> "Iteration | None":
        """What a caller wrote: the optimizer alone, or with more of the loop."""
        return optimizer if optimizer is None or isinstance(optimizer, Iteration) else Iteration(optimizer)

    def __post_init__(self) -> None:
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise BadUse(f"accumulate is {self.accumulate!r}; it is a number of backwards, at least 1")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadUse(
                f"clip_norm is {self.clip_norm!r}; it is the largest norm that gradients may have, above 0"
            )
        if self.clip_value is not None and not self.clip_value > 0:
            raise BadUse(
                f"clip_value is {self.clip_value!r}; it is the largest size of a gradient's element, above 0"
            )
        if self.clip_norm is not None and self.clip_value is not None:
            raise BadUse("clip_norm and clip_value are both given; give one")
        if isinstance(self.keep_gradients, str):
            raise BadUse(
                f"keep_gradients is {self.keep_gradients!r}; it is True, or a list of names of parameters"
            )


@dataclass(frozen=True, slots=True)
class Mesh:
    """Workers that share a step.

    Args:
        axes: axes and sizes such as "data=2,space=2x2", a DeviceMesh with named dims, or a number of workers:
            then the fastest division that fits the budget on each is chosen. The names of the axes say which
            dims they cut; an axis `model` divides heads and hidden width.
        dims: for each input, the dim that each axis cuts, where the names do not say it.
        layouts: "choose" may cut stages of a convolutional net in another way than its inputs.
        parameters: "shard" leaves each worker its rows of every parameter, gradient and optimizer state. The
            parameters of the model stay the same objects and hold these rows, so an optimizer may be made
            before or after `fit`. The plan gathers whole parameters where they are read, and decides under
            the budget which to keep for backward and which to gather again; gradients are summed and divided
            as soon as they are final. "choose" does so only if the budget is too small for whole parameters.
    """

    axes: object
    dims: Mapping[str, Sequence[int | None]] | None = None
    layouts: Layouts = "follow"
    parameters: Parameters = "replicate"

    def __post_init__(self) -> None:
        if self.layouts not in get_args(Layouts):
            raise BadUse(f"no layouts {self.layouts!r}; there is {', '.join(get_args(Layouts))}")
        if self.parameters not in get_args(Parameters):
            raise BadUse(f"no parameters {self.parameters!r}; there is {', '.join(get_args(Parameters))}")
        is_number = isinstance(self.axes, int)
        if self.parameters != "replicate" and (is_number or self.layouts != "follow"):
            raise BadUse('parameters="shard" is for a mesh such as data=4, and not for a chosen division')
        if is_number and self.dims is not None:
            raise BadUse("dims says what the axes of a mesh cut; of a number of workers, that is chosen")


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes that are declared before training, and how many plans are kept.

    Args:
        ranges: by name of an argument and dim the smallest and the largest size, as in
            `{"input_ids": {1: (16, 2048)}}`. Dims with the same range are one size; a `torch.export.Dim` may
            stand for a range. The largest shapes are planned first, and refused if they do not fit.
        keep_plans: the plan that was unused for longest makes room for another.
    """

    ranges: Mapping[str, Mapping[int, Any]] | None = None
    keep_plans: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.keep_plans, int) or self.keep_plans < 1:
            raise BadUse(f"keep_plans is {self.keep_plans!r}; it is a number of plans, at least 1")


USUAL_SHAPES = Shapes()


@dataclass(frozen=True, slots=True)
class NotOffered:
    """Facts of a request that are not offered together, and the sentence that says so."""

    facts: frozenset[str]
    sentence: str


def _rows(*rows: tuple[str, str]) -> tuple[NotOffered, ...]:
    return tuple(NotOffered(frozenset(facts.split(" + ")), sentence) for facts, sentence in rows)


_NOT_EACH = (
    'a budget for each device, which "auto" also is for a model on several, is not offered with an arena, a'
    " mesh, an optimizer or declared shapes: these count the bytes of all devices; give one number for their"
    " sum"
)
_WITHOUT_HELD_BLOCKS = (
    "held_blocks=True is for one process on one device, and for a step without an arena; leave out arena=,"
    " mesh= and budgets for each device"
)
_NO_OTHER_SHAPES = "shapes are for one process, and for plans that fit makes; leave out mesh= and plan="
_ARENA_HERE = "--arena is for --budget on this machine: drop --allocator, --frontier and --device"
_OF_A_FILE = "the target is a file, which {}: give MODULE:FUNCTION, or leave it out"
_NO_FILE = "{} is for files, and the target is a step of PyTorch, which {}: drop it"

NOT_TOGETHER = _rows(
    ("arena + mesh", "arena=True is for the step of one process; leave it out with mesh="),
    ("held blocks + arena", _WITHOUT_HELD_BLOCKS),
    ("held blocks + mesh", _WITHOUT_HELD_BLOCKS),
    ("held blocks + budget by device", _WITHOUT_HELD_BLOCKS),
    ("optimizer + offload-gradients", "offload-gradients is not offered together with optimizer="),
    ("budget by device + arena", _NOT_EACH),
    ("budget by device + mesh", _NOT_EACH),
    ("budget by device + optimizer", _NOT_EACH),
    ("budget by device + shapes", _NOT_EACH),
    (
        "budget by device + reserve",
        "reserve is of one budget; take it off the budget of each device instead",
    ),
    ("shapes + mesh", _NO_OTHER_SHAPES),
    ("shapes + plan", _NO_OTHER_SHAPES),
    (
        "mesh + automatic budget",
        'budget="auto" is what is free here, and workers may share that: give each its bytes',
    ),
    (
        "mesh + plan",
        "a saved plan is of a step in one process; with a mesh, each worker makes its own",
    ),
    (
        "mesh + time limit",
        "time_limit is for one process: workers must end at the same plan; limit moves= instead",
    ),
    ("mesh + compiled", 'kernels="compiled" is for one process; leave it out with a mesh'),
    (
        "mesh + offload-gradients",
        "offload-gradients is not available with a mesh: gradients that are being summed cannot be"
        ' offloaded; activations can be, with "offload"',
    ),
    ("mesh + loss", "loss and outputs are not offered with a mesh: there the model returns its loss"),
    ("mesh + all outputs", "loss and outputs are not offered with a mesh: there the model returns its loss"),
    (
        "one output + all outputs",
        "loss= plans for gradients of one output, and outputs='all' for all: give one",
    ),
    ("arena + allocator", _ARENA_HERE),
    ("arena + frontier", _ARENA_HERE),
    ("arena + card", _ARENA_HERE),
    (
        "compiled + card",
        "--kernels compiled is for this machine, where kernels are priced: drop it, or --device",
    ),
    ("arena + file", _OF_A_FILE.format("cannot run in an arena")),
    ("compiled + file", _OF_A_FILE.format("has no kernels to compile")),
    ("optimizer + file", _OF_A_FILE.format("has no optimizer")),
    ("saved + function", _NO_FILE.format("saved", "has its own backward")),
    ("training + function", _NO_FILE.format("training", "has its own backward")),
    ("layouts + function", _NO_FILE.format("layouts", "runs in the layouts of its tensors")),
    (
        "graph + tile",
        "graphs of torch.compile can only be planned with recompute; for tile use stowplan.fit",
    ),
    (
        "graph + offload",
        "graphs of torch.compile can only be planned with recompute; for offload use stowplan.fit",
    ),
    (
        "graph + offload-gradients",
        "graphs of torch.compile can only be planned with recompute; for offload-gradients use stowplan.fit",
    ),
)
"""What is not offered together. Each refusal of a combination is a row."""


def refuse_together(facts: Iterable[str]) -> None:
    """BadUse with the sentence of the first row whose facts are all among these."""
    asked = set(facts)
    for row in NOT_TOGETHER:
        if row.facts <= asked:
            raise BadUse(row.sentence)


def facts_of(options: PlanOptions, iteration: Iteration | None = None) -> set[str]:
    """The facts of the options that all doors have."""
    execution = options.execution
    named = {
        "arena": execution.arena,
        "held blocks": execution.held_blocks,
        "compiled": execution.is_compiled,
        "time limit": options.search.time_limit is not None,
        "optimizer": iteration is not None,
    }
    return {*options.allow, *(name for name, asked in named.items() if asked)}


@dataclass(frozen=True, slots=True)
class Request:
    """What a step is planned for. Making one refuses every combination that is not offered."""

    budget: Budget
    reserve: Amount = 0
    options: PlanOptions = DEFAULT_OPTIONS
    loss: object = None
    outputs: Outputs = "loss"
    iteration: Iteration | None = None
    mesh: Mesh | None = None
    shapes: Shapes = USUAL_SHAPES
    plan: Plan | None = None

    def __post_init__(self) -> None:
        if self.outputs not in get_args(Outputs):
            raise BadUse(f"outputs is {self.outputs!r}; it is 'loss' for the loss alone, or 'all'")
        refuse_together(self.facts())
        if not isinstance(self.budget, Mapping) and not is_automatic(self.budget):
            bytes_left(parse_bytes(self.budget, "budget"), self.reserve_bytes)

    def facts(self) -> set[str]:
        """What was asked for, in the words of the table."""
        named = {
            "budget by device": isinstance(self.budget, Mapping),
            "automatic budget": is_automatic(self.budget),
            "reserve": self.reserve_bytes > 0,
            "loss": self.loss is not None,
            "one output": isinstance(self.loss, str | int),
            "all outputs": self.outputs == "all",
            "mesh": self.mesh is not None,
            "shapes": self.shapes.ranges is not None,
            "plan": self.plan is not None,
        }
        return facts_of(self.options, self.iteration) | {name for name, asked in named.items() if asked}

    @property
    def reserve_bytes(self) -> int:
        """The part of the budget that stays free."""
        return parse_bytes(self.reserve, "reserve")

    def with_budget(self, budget: int | Mapping[str, int]) -> "Request":
        """The same with the bytes that "auto" stands for."""
        return replace(self, budget=budget)


GROUPS: dict[str, type] = {
    "search": Search,
    "execution": Execution,
    "optimizer": Iteration,
    "mesh": Mesh,
    "shapes": Shapes,
}
"""By parameter of `fit`, the options that belong together."""

FORMER = {
    each.name: parameter
    for parameter, group in GROUPS.items()
    for number, each in enumerate(fields(group))
    if number or group in (Search, Execution)
}
"""Options that were parameters of their own until 0.2, and the parameter that has them now."""

_WHOSE = {
    "optimizer": "an iteration; give optimizer= too",
    "mesh": "a step on a mesh, and there is no mesh; give mesh= too",
}

P = ParamSpec("P")
R = TypeVar("R")


def with_former_spellings(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function with parameters of `GROUPS` be called with their options by themselves, as until 0.2."""
    usual = {name: each.default for name, each in signature(function).parameters.items()}
    former = {name for name, parameter in FORMER.items() if parameter in usual and name not in usual}

    @wraps(function)
    def spelled(*args: Any, **kwargs: Any) -> R:
        by_themselves = {name: kwargs.pop(name) for name in [*kwargs] if name in former}
        if not by_themselves:
            return function(*args, **kwargs)
        for parameter, names in _by_group(by_themselves).items():
            written = ", ".join(f"{name}=..." for name in names)
            group = GROUPS[parameter].__name__
            first = "" if parameter in ("search", "execution") else f"{parameter}, "
            warnings.warn(
                f"{_listed(names)} of {function.__name__} {_is(names)} now in"
                f" {parameter}=stowplan.{group}({first}{written})",
                DeprecationWarning,
                stacklevel=2,
            )
        there = {name: kwargs.pop(name) for name in GROUPS if name in kwargs}
        return function(*args, **kwargs, **grouped(there | by_themselves, usual))

    return cast("Callable[P, R]", spelled)


def grouped(given: Mapping[str, Any], usual: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options by themselves in the groups that they belong to. `usual` has the groups that are not given."""
    found = {name: value for name, value in given.items() if name not in FORMER}
    for parameter, names in _by_group(given).items():
        group, own = GROUPS[parameter], {name: given[name] for name in names}
        there = found.get(parameter, (usual or {}).get(parameter))
        if there is None and parameter in _WHOSE:
            raise BadUse(f"{_listed(names)} {_is(names)} of {_WHOSE[parameter]}")
        if isinstance(there, group):
            found[parameter] = replace(cast(Any, there), **own)
        else:
            found[parameter] = group(**own) if there is None else group(there, **own)
    return found


def _by_group(given: Mapping[str, Any]) -> dict[str, list[str]]:
    """The options that stand by themselves, by the parameter that has them now."""
    named = {parameter: [name for name in given if FORMER.get(name) == parameter] for parameter in GROUPS}
    return {parameter: names for parameter, names in named.items() if names}


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f"{name}=" for name in names)


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
