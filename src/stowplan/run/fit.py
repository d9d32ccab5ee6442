"""`fit`: a module that trains like the one it was made of, within a budget in bytes.

The returned object is a shallow copy of the model under a subclass of its class: it has the same parameters,
buffers, submodules and state_dict, and differs in `forward` alone. `run/fitting.py` has what a call does.

The budget "auto" is the device's free bytes less a margin, plus the bytes of the step that exist already.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from os import PathLike
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from stowplan.capture.recording import Loss
from stowplan.capture.stand_ins import bytes_read
from stowplan.errors import BadUse
from stowplan.plan.options import (
    DEFAULT_OPTIONS,
    Kernels,
    PlanOptions,
    Progress,
    Socket,
)
from stowplan.plan.plan import Plan
from stowplan.run.beside import BesideWatch, Share, described, found_in_fit
from stowplan.run.border.models import refuse_call, refuse_model
from stowplan.run.call_planner import CallPlanner
from stowplan.run.cost.machine import free_bytes
from stowplan.run.fitting import Fitting, fitted_class_of, model_class
from stowplan.run.wrappers import (
    arguments_of_forward,
    leave_checkpointing_off,
    overrides_call,
    seen_as,
    switch_checkpointing_off,
)
from stowplan.torch_private import pytree
from stowplan.units import bytes_left, format_bytes, is_automatic, parse_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stowplan.run.iteration.iteration import Iteration
    from stowplan.run.planning.on_devices import DeviceBudgets
    from stowplan.run.shapes import Shapes

_LOGGER = logging.getLogger("stowplan")

MARGIN = 0.1
"""The share of free memory that is left alone: for fragmentation, and for whoever else comes."""


def automatic_budget(model: nn.Module, args: object) -> int | dict[str, int]:
    """Bytes on the model's device. Parameters and inputs count towards a budget, and are there already.

    A model on several accelerators has a budget for each.
    """
    inputs = (leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))
    tensors = [*model.parameters(), *model.buffers(), *inputs]
    devices = list(dict.fromkeys(tensor.device for tensor in tensors)) or [torch.device("cpu")]
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    if len(accelerators) > 1:
        return {str(device): _automatic_on(device, tensors) for device in accelerators}
    return _automatic_on(devices[0], tensors)


def _automatic_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    there = bytes_read(tensor for tensor in tensors if tensor.device == device)
    return int(free_bytes(device) * (1 - MARGIN)) + sum(there.values())


Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """What a step on a mesh is planned for: a budget for each worker, of which a reserve stays free.

    `layouts` says whether stages may be cut otherwise than the inputs, and `parameters` whether each worker
    has them whole. `iteration` has the optimizer of sharded parameters.
    """

    mesh: object
    budget_bytes: int
    reserve_bytes: int
    options: PlanOptions
    dims: Mapping[str, Sequence[int | None]] | None = None
    layouts: str = "follow"
    parameters: str = "replicate"
    iteration: "Iteration | None" = None


MESHES: Socket[Callable[[nn.Module, tuple[object, ...], dict[str, object], ShardRequest], nn.Module]] = (
    Socket("run", "mesh")
)
"""How `fit` runs on several workers."""


_NOT_EACH = (
    'a budget for each device, which "auto" also is for a model on several, is not offered with arena=,'
    " mesh=, optimizer= or shapes=: these count the bytes of all devices; give one number for their sum"
)


def fit(
    model: Model,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    budget: "float | str | Mapping[Any, float | str]",
    mesh: object = None,
    dims: Mapping[str, Sequence[int | None]] | None = None,
    layouts: str = "follow",
    parameters: str = "replicate",
    reserve: float | str = 0,
    allow: Iterable[str] | None = None,
    prefer: str | None = None,
    kernels: str = Kernels.EAGER,
    arena: bool = False,
    held_blocks: bool = False,
    plan: "Plan | str | PathLike[str] | None" = None,
    loss: Loss | None = None,
    outputs: str = "loss",
    progress: Progress | None = None,
    moves: int | None = None,
    gap: float = DEFAULT_OPTIONS.gap,
    time_limit: float | None = None,
    optimizer: "Optimizer | None" = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    keep_gradients: bool | Iterable[str] = False,
    shapes: "Shapes | None" = None,
    keep_plans: int = 128,
) -> Model:
    """Plan the training step of `model(*args, **kwargs)` so that it stays within `budget` bytes.

    Returns a module with the same parameters, buffers and `state_dict` that runs the plan. Raises
    `BudgetTooSmall`, with the smallest budget, before anything runs.

    `budget` counts everything alive on the device during forward and backward: parameters, buffers, inputs,
    gradients, activations and temporaries. "auto" is the memory that the device has free, minus a tenth, plus
    the bytes of the model and the arguments. `reserve` is the part of the budget to leave free for optimizer
    state, gradients of earlier steps, and the buckets and shards of wrappers. Wrap the result:
    `DistributedDataParallel(fit(...))`, `fully_shard(fit(...))`.

    For a model on several devices, `budget` may name the bytes of each, as in
    `{"cuda:0": "8GiB", "cuda:1": "6GiB"}`. One number limits their sum, and "auto" limits each.
    `plans_of(fitted)[0].peaks_by_device` has the projected peak of each.

    `allow` names the techniques that the plan may use, by default recompute and tile. Recomputation leaves
    every gradient bitwise equal. Tiles add in another order, so gradients are then equal within rounding. By
    default (`prefer="exactness"`) tiles are used only if nothing else fits, and with `prefer="time"` wherever
    they are faster; `plans_of(fitted)[0].exactness` says which. A plan that takes more than twice eager's
    time, by the prices of its ops, is used only if `allow` or `prefer` is given: otherwise it counts as one
    that does not fit, and `PlanTooSlow`, a `BudgetTooSmall`, names its time and the smallest budget with a
    faster plan. The search ends when the time of its plan is at most a share of `gap` above the lower bound.
    After `time_limit` seconds it ends with the best plan so far, which then says so; `moves` limits it in a
    way that does not depend on the machine. Planning that takes more than two seconds shows on one line what
    runs and the best plan so far, on a terminal and in a notebook; elsewhere it logs lines under "stowplan"
    at level INFO. `progress` is called with the number of probed ops and their total.

    `kernels="compiled"` lets inductor compile groups of ops (chains of pointwise ops, norms, softmax, losses)
    where that is faster; products and convolutions stay eager. Each distinct group is compiled once on a
    machine, in child processes, which takes seconds for each and five minutes at most. The budget holds as
    for other plans, and gradients are equal within rounding unless every kernel gave the bits of its ops.

    `arena=True` runs the step in one storage: each tensor that the step computes lies at an offset that the
    plan gives it, so the step takes the same memory whatever the allocator does, and nothing fragments. The
    budget limits the arena and what lies beside it, and gradients are the same to the bit. Gradients lie in
    the arena too: it ends when they do, as with `zero_grad()`. With `optimizer` they lie beside it.

    `held_blocks=True` is for a device with PyTorch's caching allocator. The plan places what ops allocate:
    blocks are held for a moment where the allocator would else take another place. The step then reserves
    hardly more than it requests. Hold one segment before the model is loaded, as docs/allocator.md shows.

    `loss` says what is differentiated. The name or index of an output means this output; the module still
    returns all of them. A function of the model's output becomes part of the plan, and the module returns
    the function's result. Without `loss`, a model that returns one scalar returns its loss in it. The plan
    computes gradients for the loss alone and refuses those for other outputs; `outputs="all"` plans for
    gradients of all outputs.

    With an `optimizer`, which has the parameters of the model, the budget is for the whole iteration: it also
    counts the optimizer's state and the temporaries of its step. Each parameter is updated in backward as
    soon as its gradient is final and nothing needs the parameter, and the gradient ends there; the parameters
    and the state are those of the usual loop to the bit. Keep that loop: `loss.backward()`,
    `optimizer.step()`, `optimizer.zero_grad()`. `clip_norm` clips as `clip_grad_norm_` before the step: all
    gradients stay until then or, if they do not fit, forward and backward are run twice. `clip_value` clips
    as `clip_grad_value_`, each gradient when it is consumed. `accumulate` is the number of backwards before
    each step. `keep_gradients` names parameters whose gradients stay, or is True for all; other gradients are
    None after backward. With "offload" in `allow`, state that does not fit the budget waits on disk, or in
    the host's memory for an accelerator, and is loaded for the update of its parameter.

    Calls of other shapes are planned when they come. A call that is no larger than a planned one, and fits
    without a plan, runs as it is. Otherwise the decisions of the nearest planned shape are carried over if
    the result is within 3 % of the lower bound, beyond the gap of that plan; if not, the shape is searched. A
    carried plan is compared with eager at the first few shapes alone, and says so. `keep_plans` limits the
    number of plans that are kept; the one unused for longest makes room. A shape that was refused is refused
    again at once.

    `shapes={"input_ids": {1: (16, 2048)}}` declares which dims of which arguments vary, and how far. Dims
    with the same range are one size; a `torch.export.Dim` may stand for a range. The largest shapes are
    planned first, and refused here if they do not fit. `shape_costs(fitted)` shows what the shapes between
    cost, and `scan(loader, fitted)` finds the batches of a data loader that do not fit.

    Plans are cached in the user's cache folder for the same step, budget and machine, except plans that
    offload. A saved `plan` is used instead of a new one; it is refused if it is for another step.

    With a `mesh` of workers ("data=2,space=2x2", or a DeviceMesh with named dims) all its processes make the
    same call with whole arguments, which may be on the meta device. The budget is that of each worker. Call
    the result with a worker's part of the arguments, `shards_of(fitted).share(*args)`. The names of the axes
    say which dims they cut, or `dims` says it for each input; an axis `model` divides heads and hidden width.
    `layouts="choose"` may cut stages of a convolutional net in another way than its inputs. `mesh=4` chooses
    the fastest division over 4 workers that fits the budget on each; `choices_of(fitted)` lists the options.

    `parameters="shard"` on a mesh ("data=4") leaves each worker its rows of every parameter,
    gradient and optimizer state. The parameters of `model` stay the same objects and hold these rows, so an
    optimizer may be made before or after `fit`. The plan gathers whole parameters where they are read, and
    decides under the budget which to keep for backward and which to gather again; gradients are summed and
    divided as soon as they are final. `optimizer` and `clip_norm` then work as in one process.
    `parameters="choose"` does so only if the budget is too small for whole parameters.
    """
    _refuse_misuse(model, args, kwargs)
    plan = _loaded(plan)
    _refuse_loss(loss, outputs)
    refuse_model(model)
    _refuse_loss_within_call(model, loss)
    refuse_call(model, args, kwargs or {})
    how: Any = {"moves": moves, "progress": progress, "seconds": time_limit, "gap": gap, "kernels": kernels}
    options = PlanOptions.of_call(allow, prefer, **how, arena=bool(arena), held_blocks=bool(held_blocks))
    if options.arena and mesh is not None:
        raise BadUse("arena=True is for the step of one process; leave it out with mesh=")
    if options.held_blocks and (options.arena or mesh is not None or isinstance(budget, Mapping)):
        raise BadUse(
            "held_blocks=True is for one process on one device, and for a step without an arena; leave out"
            " arena=, mesh= and budgets for each device"
        )
    iteration = None
    if optimizer is not None:
        _refuse_iteration(options, clip_norm, clip_value, accumulate, keep_gradients)
        from stowplan.run.iteration.iteration import Iteration  # most fits have no optimizer

        iteration = Iteration(
            optimizer,
            clip_norm=clip_norm,
            clip_value=clip_value,
            accumulate=accumulate,
            keep_gradients=keep_gradients,
            offloads="offload" in options.allow,
            on_workers=mesh is not None,
        )
        options = iteration.planner.options(options)
    elif (clip_norm, clip_value, accumulate, keep_gradients) != (None, None, 1, False):
        raise BadUse(
            "clip_norm, clip_value, accumulate and keep_gradients are of an iteration; give optimizer= too"
        )
    whole_step = arena or mesh is not None or optimizer is not None or shapes is not None
    if whole_step and isinstance(budget, Mapping):
        raise BadUse(_NOT_EACH)
    if shapes is not None and (mesh is not None or plan is not None):
        raise BadUse("shapes are for one process, and for plans that fit makes; leave out mesh= and plan=")
    if mesh is not None:
        assert not isinstance(budget, Mapping)
        _refuse_on_mesh(budget, plan, options)
        if loss is not None or outputs != "loss":
            raise BadUse("loss and outputs are not offered with a mesh: there the model returns its loss")
        whole, beside = parse_bytes(budget, "budget"), parse_bytes(reserve, "reserve")
        bytes_left(whole, beside)
        options = replace(options, slowest=inf)  # workers take what they agree on, with a warning
        request = ShardRequest(mesh, whole, beside, options, dims, layouts, parameters, iteration)
        return cast(Model, MESHES.of("mesh")(model, tuple(args), dict(kwargs or {}), request))
    if dims is not None or layouts != "follow" or parameters != "replicate":
        raise BadUse(
            "dims, layouts and parameters are of a step on a mesh, and there is no mesh; give mesh= too"
        )
    if is_automatic(budget):
        budget = automatic_budget(model, (args, dict(kwargs or {})))
    reserved, own = parse_bytes(reserve, "reserve"), list[Share]()
    devices = None
    if isinstance(budget, Mapping):
        if whole_step:
            raise BadUse(_NOT_EACH)
        devices = _each_device(budget, reserved)
        budget = devices.sum_bytes
    whole = parse_bytes(budget, "budget")
    own_forward = _own_forward(model)
    if optimizer is None and devices is None:
        own = found_in_fit(model)
    kept = sum(share.nbytes for share in own)
    allowed_bytes = bytes_left(whole, reserved) - max(0, kept - reserved)
    planner = CallPlanner(allowed_bytes, options, loss, outputs == "all", iteration, devices)
    fitting = Fitting(
        own_forward,
        planner,
        BesideWatch(type(model).__name__, whole, optimizer),
        given=plan,
        reserve_bytes=max(reserved, kept),
        reserved_for="the reserve" if reserved >= kept else described(own),
        keep_plans=_at_least_one(keep_plans),
    )
    fitted: Model = seen_as(fitted_class_of(model_class(model)), model)
    fitted.__dict__.pop("forward", None)
    fitted.__dict__["_fitting"] = fitting
    if iteration is not None:
        iteration.belongs_to(fitted)
    switch_checkpointing_off(model)
    leave_checkpointing_off(fitted)
    with torch.enable_grad():
        if shapes is not None:
            fitting.declare(fitted, tuple(args), dict(kwargs or {}), shapes)
        if fitting.step_for(fitted, *arguments_of_forward(model, tuple(args), kwargs or {})) is None:
            raise BadUse(
                "nothing wants a gradient: no parameter and no argument has requires_grad, so there is no"
                " training step to plan"
            )
    if kept > reserved:
        costs = any(made.time_ratio > 1 for made in fitting.plans)
        _LOGGER.log(
            logging.WARNING if costs else logging.INFO,
            "of the budget of %s, %s are kept free for %s, and the plan has the rest",
            *(format_bytes(whole), format_bytes(kept), described(own)),
        )
    return fitted


def plans_of(fitted: nn.Module) -> tuple[Plan, ...]:
    """The plans that a fitted module has made so far, in the order of their first calls."""
    fitting = fitted.__dict__.get("_fitting")
    if fitting is None:
        raise BadUse(
            f"{type(fitted).__name__} has no plans: they are of what fit returns, not of what it takes"
        )
    plans: tuple[Plan, ...] = fitting.plans
    return plans


def _each_device(budget: Mapping[Any, float | str], reserve_bytes: int) -> "DeviceBudgets":
    from stowplan.run.planning.on_devices import DeviceBudgets  # most steps are on one device

    if reserve_bytes:
        raise BadUse("reserve is of one budget; take it off the budget of each device instead")
    return DeviceBudgets.of(budget)


def _loaded(plan: object) -> Plan | None:
    """The plan itself, or the one in a file."""
    if isinstance(plan, str | PathLike):
        from stowplan.plan.files import plan_file  # most plans are made here

        return plan_file.load(plan)
    if plan is not None and not isinstance(plan, Plan):
        raise BadUse(
            f"plan is of type {type(plan).__name__}; it is a stowplan.Plan, or the path of a saved one"
        )
    return plan


def _at_least_one(keep_plans: object) -> int:
    if not isinstance(keep_plans, int) or keep_plans < 1:
        raise BadUse(f"keep_plans is {keep_plans!r}; it is a number of plans, at least 1")
    return keep_plans


def _own_forward(model: nn.Module) -> Callable[..., Any] | None:
    """The forward that was set on the model itself, as a function of the module."""
    own = vars(model).get("forward")
    if own is None:
        return None
    if isinstance(own, MethodType) and own.__self__ is model:
        return own.__func__
    raise BadUse(
        f"forward was set on the model itself, as a {type(own).__name__} that is not bound to it: a plan made"
        " of it would run another object's step. Fit the model before it is wrapped, or put the step into the"
        " class's forward"
    )


def _refuse_misuse(model: object, args: object, kwargs: object) -> None:
    if isinstance(model, type):
        raise BadUse(f"fit takes an object, and {model.__name__} is a class: give fit {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise BadUse(
            f"fit takes a torch.nn.Module, not {type(model).__name__}: put the step into its forward"
        )
    if not isinstance(args, tuple | list):
        raise BadUse(
            f"args is of type {type(args).__name__}; write fit(model, (x, y), budget=...) for model(x, y)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise BadUse(
            f'kwargs is of type {type(kwargs).__name__}; write fit(model, (x,), {{"mask": m}}, budget=...)'
            " for model(x, mask=m)"
        )


def _refuse_loss(loss: object, outputs: str) -> None:
    if outputs not in ("loss", "all"):
        raise BadUse(f"outputs is {outputs!r}; it is 'loss' for the loss alone, or 'all'")
    if isinstance(loss, str | int) and outputs == "all":
        raise BadUse(f"loss={loss!r} plans for gradients of one output, and outputs='all' for all: give one")
    if not isinstance(loss, NoneType | str | int | FunctionType | BuiltinFunctionType | MethodDescriptorType):
        raise BadUse(
            f"loss is of type {type(loss).__name__}; it is the name or index of an output, or a function of"
            " the model's output. Write a lambda around it, or put a loss with parameters into a module with"
            " the model"
        )


def _refuse_loss_within_call(model: nn.Module, loss: object) -> None:
    if callable(loss) and overrides_call(model_class(model)):
        raise BadUse(
            f"{model_class(model).__name__} has a __call__ of its own, which would run after loss= and not"
            " before it; call the loss in forward, or put what __call__ does into forward"
        )


def _refuse_iteration(
    options: PlanOptions,
    clip_norm: float | None,
    clip_value: float | None,
    accumulate: int,
    keep_gradients: bool | Iterable[str],
) -> None:
    if "offload-gradients" in options.allow:
        raise BadUse("offload-gradients is not offered together with optimizer=")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise BadUse(f"accumulate is {accumulate!r}; it is a number of backwards, at least 1")
    if clip_norm is not None and not clip_norm > 0:
        raise BadUse(f"clip_norm is {clip_norm!r}; it is the largest norm that gradients may have, above 0")
    if clip_value is not None and not clip_value > 0:
        raise BadUse(f"clip_value is {clip_value!r}; it is the largest size of a gradient's element, above 0")
    if clip_norm is not None and clip_value is not None:
        raise BadUse("clip_norm and clip_value are both given; give one")
    if isinstance(keep_gradients, str):
        raise BadUse(f"keep_gradients is {keep_gradients!r}; it is True, or a list of names of parameters")


def _refuse_on_mesh(budget: object, plan: Plan | None, options: PlanOptions) -> None:
    if is_automatic(budget):
        raise BadUse('budget="auto" is what is free here, and workers may share that: give each its bytes')
    if plan is not None:
        raise BadUse("a saved plan is of a step in one process; with a mesh, each worker makes its own")
    if options.seconds is not None:
        raise BadUse("time_limit is for one process: workers must end at the same plan; limit moves= instead")
    if options.kernels != Kernels.EAGER:
        raise BadUse('kernels="compiled" is for one process; leave it out with a mesh')
    if "offload-gradients" in options.allow:
        raise BadUse(
            "offload-gradients is not available with a mesh: gradients that are being summed cannot be"
            ' offloaded; activations can be, with "offload"'
        )
