"""`fit`: a module that trains like the one it was made of, within a budget in bytes.

The returned object is a shallow copy of the model under a subclass of its class: it has the same parameters,
buffers, submodules and state_dict, and differs in `forward` alone. For every new kind of call (shapes,
dtypes, modes) the step is captured, priced and planned once; after that the plan's own code runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stowplan.capture import capture
from stowplan.errors import BadUse, BudgetTooSmall, StowplanError
from stowplan.plan.make import ON_REQUEST, TECHNIQUES, known_techniques
from stowplan.plan.plan import Plan
from stowplan.plan.tiles.master import Prefer, preference
from stowplan.run.agreement import compared
from stowplan.run.auto_budget import automatic_budget
from stowplan.run.plan_cache import USER_PLANS, PlanCache, saved_step
from stowplan.run.probe import Progress
from stowplan.run.sharing import sharing_of
from stowplan.run.stand_in import seen_as, with_forward
from stowplan.run.straight import StraightStep
from stowplan.run.tiles.plan import PlannedStep, plan_step
from stowplan.run.tiles.ways import Search, Subject
from stowplan.run.wrappers import refuse_shards, refuse_wrapped
from stowplan.units import parse_bytes

if TYPE_CHECKING:
    from stowplan.run.shards.processes import MeshLike

Model = TypeVar("Model", bound=nn.Module)


def fit(
    model: Model,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    budget: int | str,
    mesh: "MeshLike | int | None" = None,
    dims: Mapping[str, Sequence[int | None]] | None = None,
    layouts: str = "follow",
    reserve: int | str = 0,
    allow: Iterable[str] = TECHNIQUES,
    prefer: str = Prefer.EXACTNESS,
    plan: Plan | None = None,
    progress: Progress | None = None,
    moves: int | None = None,
) -> Model:
    """`model`, planned for calls like `model(*args, **kwargs)`: its training step stays under `budget`.

    The budget counts all that is alive on the device during forward and backward: parameters, buffers,
    inputs, gradients, activations, temporaries. "auto" is what the device has free, less a tenth, and what of
    the step is there already. `reserve` is what it must leave free for what stowplan does
    not see: optimizer state, gradients that were there before, the buckets and shards of wrappers, which go
    around what is returned: `DistributedDataParallel(fit(...))`, `fully_shard(fit(...))`.

    `allow` names the techniques that may cost time. What is recomputed leaves every gradient the same to the
    bit. Tiles add up in another order, so gradients are then the same within rounding: by default they are
    used where nothing else is within the budget, and with `prefer="time"` wherever they are faster;
    `plans_of(fitted)[0].exactness` tells. `moves` bounds the search for a plan. Raises BudgetTooSmall, with
    the smallest budget, before anything runs.

    A plan that moves nothing away is kept in the user's cache folder, and found there by the same step,
    budget and machine. A `plan` that was saved is used instead of making one; it is refused if it is for
    another step.

    With a `mesh` of workers ("data=2,space=2x2", or a DeviceMesh with named dims), all its processes call
    this alike, with whole arguments, which may be on the meta device; the budget is that of each. What is
    returned is called with a worker's part of the arguments, `shards_of(fitted).share(*args)`. Which dims of
    them the axes cut follows from the axes' names, or is given by `dims`, by input. With `layouts="choose"`
    stages of a convolutional net are cut otherwise than its inputs where that pays. For a number of workers,
    `mesh=4`, both are chosen: the fastest way that is within the budget on every worker; `choices_of(fitted)`
    tells what became of the others.
    """
    _refuse_misuse(model, args)
    refuse_wrapped(model)
    if mesh is not None:
        from stowplan.run.shards.fit import fit_on_mesh
        from stowplan.run.shards.hand_out import Wish

        _refuse_on_mesh(budget, plan, allow)
        search = Search(known_techniques(allow), moves, progress)
        bytes_ = parse_bytes(budget), parse_bytes(reserve)
        wish = Wish(*bytes_, search, preference(prefer), dims, layouts)
        return fit_on_mesh(model, tuple(args), dict(kwargs or {}), mesh=mesh, wish=wish)
    if dims is not None or layouts != "follow":
        raise BadUse("dims and layouts are of a step on a mesh, and there is no mesh; give mesh= as well")
    whole = automatic_budget(model, (args, dict(kwargs or {}))) if budget == "auto" else parse_bytes(budget)
    beside = parse_bytes(reserve)
    fitting = Fitting(type(model).forward, whole - beside, tuple(allow), preference(prefer), progress, moves)
    fitting.given, fitting.reserve_bytes = plan, beside
    fitted: Model = seen_as(type(f"Fitted{type(model).__name__}", (_Fitted, type(model)), {}), model)
    fitted.__dict__["_fitting"] = fitting
    with torch.enable_grad():
        fitting.step_for(fitted, args, dict(kwargs or {}))
    return fitted


def plans_of(fitted: nn.Module) -> tuple[Plan, ...]:
    """The plans that a fitted module has made so far, the first call's first."""
    fitting: Fitting | None = fitted.__dict__.get("_fitting")
    if fitting is None:
        raise BadUse(
            f"{type(fitted).__name__} has no plans: they are of what fit returns, not of what it takes"
        )
    return tuple(planned.plan for planned in fitting.planned.values())


class _Fitted(nn.Module):
    """What a fitted module adds to its class: another way to run `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fitting: Fitting = self.__dict__["_fitting"]
        if not torch.is_grad_enabled():
            return fitting.plain_forward(self, *args, **kwargs)
        return fitting.step_for(self, args, kwargs)(*args, **kwargs)


@dataclass(slots=True)
class Fitting:
    """The plans of one fitted module, by kind of call."""

    plain_forward: Callable[..., Any]
    allowed_bytes: int
    allow: tuple[str, ...]
    prefer: Prefer
    progress: Progress | None = None
    moves: int | None = None
    planned: dict[object, PlannedStep] = field(default_factory=dict)
    steps: dict[object, StraightStep] = field(default_factory=dict)  # bound to the model
    given: Plan | None = None  # a saved plan, for the first kind of call
    reserve_bytes: int = 0  # of the budget, beside what is allowed
    cache: PlanCache = USER_PLANS

    def __deepcopy__(self, _: dict[int, Any]) -> "Fitting":
        """For a copy of the model: the same plans, bound to it when it is called."""
        return replace(self, steps={})

    def step_for(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> StraightStep:
        """The step for calls like this one, planned if there was none like it before."""
        key = kind_of_call(model, args, kwargs)
        if key not in self.planned:
            with _told_as_new(args, kwargs, is_new=bool(self.planned)), _beside(self.reserve_bytes):
                self.planned[key] = self._plan(model, args, kwargs)
        if key not in self.steps:
            self.steps[key] = self.planned[key].bound_to(model)
        return self.steps[key]

    def _plan(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> PlannedStep:
        refuse_shards(model)
        plain = with_forward(model, self.plain_forward)
        subject = Subject(capture(plain, args, kwargs), plain, args, kwargs)
        planned = self._planned(subject)
        return replace(planned, plan=compared(planned.plan, subject))

    def _planned(self, subject: Subject) -> PlannedStep:
        if self.given is not None and not self.planned:
            return saved_step(self.given, subject, self.allowed_bytes)
        settings = (sorted(self.allow), self.prefer, self.moves)
        return self.cache.step_for(subject, self.allowed_bytes, settings, partial(self._search, subject))

    def _search(self, subject: Subject) -> PlannedStep:
        return plan_step(
            subject,
            self.allowed_bytes,
            allow=self.allow,
            prefer=self.prefer,
            progress=self.progress,
            moves=self.moves,
        )


def _refuse_misuse(model: object, args: object) -> None:
    if not isinstance(model, nn.Module):
        raise BadUse(
            f"fit takes a torch.nn.Module, not a {type(model).__name__}: put the step into its forward"
        )
    if not isinstance(args, tuple | list):
        raise BadUse(f"args is a {type(args).__name__}; write fit(model, (x, y), budget=...) for model(x, y)")


def _refuse_on_mesh(budget: int | str, plan: Plan | None, allow: Iterable[str]) -> None:
    if budget == "auto":
        raise BadUse('budget="auto" is what is free here, and workers may share that: give each its bytes')
    if plan is not None:
        raise BadUse("a saved plan is of a step in one process; with a mesh, each worker makes its own")
    if moved := sorted(set(allow).intersection(ON_REQUEST)):
        raise BadUse(
            f"{moved[0]} is not offered with a mesh: gradients that are being summed cannot be moved"
        )


@contextmanager
def _beside(reserve_bytes: int) -> Iterator[None]:
    """A refusal tells of the whole budget."""
    try:
        yield
    except BudgetTooSmall as refusal:
        raise refusal.beside(reserve_bytes, "the reserve") from None


@contextmanager
def _told_as_new(args: object, kwargs: object, *, is_new: bool) -> Iterator[None]:
    """A refusal in the middle of training says which call was unlike those before."""
    try:
        yield
    except StowplanError as refusal:
        if is_new:
            leaves = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            shapes = ", ".join("x".join(map(str, leaf.shape)) or "scalar" for leaf in leaves)
            refusal.add_note(
                f"No call like this was planned before: tensors of {shapes}. A new shape, dtype or mode is"
                " planned when it comes; pad to shapes that fit, or call fit with the largest first."
            )
        raise


def kind_of_call(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Equal for calls that one captured step serves."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    casts = tuple((d, torch.get_autocast_dtype(d)) for d in sorted(devices) if torch.is_autocast_enabled(d))
    modes = tuple(module.training for module in model.modules())
    held = (*model.parameters(), *model.buffers())
    shared = sharing_of((*held, *(leaf for leaf in leaves if isinstance(leaf, Tensor))))
    looks = tuple(map(_look_of, leaves)), tuple(map(_look_of, held))
    return *looks, str(spec), casts, modes, shared


def _look_of(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return type(leaf), tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return leaf
