"""`fit`: a module that trains like the one it was made of, within a budget in bytes.

The returned object is a shallow copy of the model under a subclass of its class: it has the same parameters,
buffers, submodules and state_dict, and differs in `forward` alone. `run/fitting.py` has what a call does.

The budget "auto" is the device's free bytes less a margin, plus the bytes of the step that exist already.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from os import PathLike
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from stowplan.capture.recording import Loss
from stowplan.capture.stand_ins import bytes_read, flatten
from stowplan.errors import BadUse
from stowplan.plan.options import USUAL_EXECUTION, USUAL_SEARCH, Execution, PlanOptions, Search, Techniques
from stowplan.plan.plan import Plan
from stowplan.plan.sockets import Socket
from stowplan.request import Amount, Budget, Iteration, Mesh, Outputs, Request, Shapes, with_former_spellings
from stowplan.run.beside import BesideWatch, Share, described, found_in_fit
from stowplan.run.border.models import refuse_call, refuse_model
from stowplan.run.call_planner import CallPlanner
from stowplan.run.cost.machine import free_bytes
from stowplan.run.fitting import Fitting, fitted_class_of, model_class, wants_gradient
from stowplan.run.planning.constraint import BUDGETS_BY_DEVICE
from stowplan.run.planning.iterations import iterations
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

    from stowplan.run.shapes import Range
    from stowplan.techniques.iteration.run.iteration import RunningIteration

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


MESHES: Socket[Callable[[nn.Module, tuple[object, ...], dict[str, object], Request], nn.Module]] = Socket(
    "run", "mesh"
)
"""How `fit` runs on several workers."""


@with_former_spellings
def fit(
    model: Model,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    budget: Budget,
    reserve: Amount = 0,
    allow: Techniques | None = None,
    loss: Loss | None = None,
    outputs: Outputs = "loss",
    optimizer: "Optimizer | Iteration | None" = None,
    mesh: "Mesh | str | int | object | None" = None,
    shapes: "Shapes | Mapping[str, Mapping[int, Range]] | None" = None,
    plan: "Plan | str | PathLike[str] | None" = None,
    search: Search = USUAL_SEARCH,
    execution: Execution = USUAL_EXECUTION,
) -> Model:
    """Plan the training step of `model(*args, **kwargs)` so that it stays within `budget` bytes.

    Returns a module with the same parameters, buffers and `state_dict` that runs the plan. Raises
    `BudgetTooSmall`, with the smallest budget, before the step runs.

    Planning that takes more than two seconds shows on one line what runs and the best plan so far, on a
    terminal and in a notebook; elsewhere it logs lines under "stowplan" at level INFO. Plans are cached in
    the user's cache folder for the same step, budget and machine, except plans that offload.

    Calls of other shapes are planned when they come. A call that is no larger than a planned one, and fits
    without a plan, runs as it is. Otherwise the decisions of the nearest planned shape are carried over if
    the result is within 3 % of the lower bound, beyond the gap of that plan; if not, the shape is searched. A
    carried plan is compared with eager at the first few shapes alone, and says so. A shape that was refused
    is refused again at once. `shape_costs(fitted)` shows what declared shapes cost, and `scan(loader,
    fitted)` finds the batches of a data loader that do not fit.

    Wrap the result: `DistributedDataParallel(fit(...))`, `fully_shard(fit(...))`. On a mesh all its processes
    make the same call with whole arguments, which may be on the meta device; call the result with a worker's
    part of them, `shards_of(fitted).share(*args)`. `choices_of(fitted)` lists the divisions of `mesh=4`.

    Args:
        model: the module whose step is planned. It stays as it is.
        args: what it is called with: `fit(model, (x, y), budget=...)` for `model(x, y)`.
        kwargs: the same by name.
        budget: the bytes of everything alive on the device during forward and backward: parameters, buffers,
            inputs, gradients, activations and temporaries. "auto" is the memory that the device has free,
            minus a tenth, plus the bytes of the model and the arguments. For a model on several devices it
            may name the bytes of each, as in `{"cuda:0": "8GiB", "cuda:1": "6GiB"}`: one number limits their
            sum, and "auto" limits each. On a mesh it is that of each worker.
        reserve: the part of the budget to leave free for optimizer state, gradients of earlier steps, and the
            buckets and shards of wrappers.
        allow: the techniques that the plan may use, by default recompute and tile. Recomputation leaves every
            gradient bitwise equal. Tiles add in another order, so gradients are then equal within rounding,
            and are used only if nothing else fits (see `Search.prefer`); `plans_of(fitted)[0].exactness` says
            which. A plan that takes more than twice eager's time, by the prices of its ops, is used only if
            `allow` or `prefer` is given: otherwise `PlanTooSlow`, a `BudgetTooSmall`, names its time and the
            smallest budget with a faster plan.
        loss: what is differentiated: the name or index of an output (the module still returns all of them),
            or a function of the model's output, which becomes part of the plan, and whose result the module
            returns. Without it, a model that returns one scalar returns its loss in it.
        outputs: "loss" computes gradients for the loss alone and refuses those for other outputs; "all" plans
            for gradients of all outputs.
        optimizer: the optimizer of the model's parameters, or an `Iteration` with more of the loop. The
            budget is then for the whole iteration: it also counts the optimizer's state and the temporaries
            of its step. Each parameter is updated in backward as soon as its gradient is final and nothing
            needs the parameter, and the gradient ends there; the parameters and the state are those of the
            usual loop to the bit. Keep that loop: `loss.backward()`, `optimizer.step()`,
            `optimizer.zero_grad()`. With "offload" in `allow`, state that does not fit the budget waits on
            disk, or in the host's memory for an accelerator, and is loaded for its update.
        mesh: workers that share the step: "data=2,space=2x2", a DeviceMesh, a number of workers, or a `Mesh`.
        shapes: which dims of which arguments vary, and how far: `{"input_ids": {1: (16, 2048)}}`, or
            `Shapes`.
        plan: a saved plan, or its path, instead of a new one. It is refused if it is for another step.
        search: how a plan is looked for, as in `Search(gap=0.05, time_limit=60)`.
        execution: how it runs, as in `Execution(kernels="compiled")`.
    """
    _refuse_misuse(model, args, kwargs)
    _refuse_loss(loss)
    saved = _loaded(plan)
    refuse_model(model)
    _refuse_loss_within_call(model, loss)
    refuse_call(model, args, kwargs or {})
    request = Request(
        budget=budget,
        reserve=reserve,
        options=PlanOptions.of_call(allow, search, execution),
        loss=loss,
        outputs=outputs,
        iteration=Iteration.of(optimizer),
        mesh=mesh if mesh is None or isinstance(mesh, Mesh) else Mesh(mesh),
        shapes=shapes if isinstance(shapes, Shapes) else Shapes(shapes),
        plan=saved,
    )
    return _fitted(model, tuple(args), dict(kwargs or {}), request)


def _fitted(model: Model, args: tuple[object, ...], kwargs: dict[str, object], request: Request) -> Model:
    """The module that runs the plan for a request."""
    if request.mesh is not None:
        options = replace(request.options, slowest=inf)  # workers take what they agree on, with a warning
        return cast(Model, MESHES.of("mesh")(model, args, kwargs, replace(request, options=options)))
    if is_automatic(request.budget):
        request = request.with_budget(automatic_budget(model, (args, kwargs)))
    budget, options = request.budget, request.options
    iteration = _running(request.iteration, options)
    if iteration is not None:
        options = iteration.planner.options(options)
    reserved, own = request.reserve_bytes, list[Share]()
    devices = None
    if isinstance(budget, Mapping):
        budget, devices = BUDGETS_BY_DEVICE.of("devices")(budget)
    whole = parse_bytes(budget, "budget")
    own_forward = _own_forward(model)
    if iteration is None and devices is None:
        own = found_in_fit(model)
    kept = sum(share.nbytes for share in own)
    allowed_bytes = bytes_left(whole, reserved) - max(0, kept - reserved)
    loss = cast("Loss | None", request.loss)
    planner = CallPlanner(allowed_bytes, options, loss, request.outputs == "all", iteration, devices)
    wanted = wants_gradient(model, flatten(args, kwargs)[0])
    fitting = Fitting(
        own_forward,
        planner,
        BesideWatch(type(model).__name__, whole, iteration.optimizer if iteration else None),
        given=request.plan,
        reserve_bytes=max(reserved, kept),
        reserved_for="the reserve" if reserved >= kept else described(own),
        keep_plans=request.shapes.keep_plans,
        trains=wanted,
    )
    fitted: Model = seen_as(fitted_class_of(model_class(model)), model)
    fitted.__dict__.pop("forward", None)
    fitted.__dict__["_fitting"] = fitting
    if iteration is not None:
        iteration.belongs_to(fitted)
    if iteration is not None and not wanted:
        raise BadUse(
            "nothing wants a gradient: no parameter and no argument has requires_grad, so optimizer= has"
            " nothing to update; leave it out to plan forward alone"
        )
    with ExitStack() as refused, torch.set_grad_enabled(wanted or torch.is_grad_enabled()):
        refused.callback(switch_checkpointing_off(model))
        leave_checkpointing_off(fitted)
        if request.shapes.ranges is not None:
            fitting.declare(fitted, args, kwargs, request.shapes.ranges)
        fitting.step_for(fitted, *arguments_of_forward(model, args, kwargs))
        refused.pop_all()
    if kept > reserved:
        costs = any(made.time_ratio > 1 for made in fitting.plans)
        _LOGGER.log(
            logging.WARNING if costs else logging.INFO,
            "of the budget of %s, %s are kept free for %s, and the plan has the rest",
            *(format_bytes(whole), format_bytes(kept), described(own)),
        )
    return fitted


def _running(iteration: Iteration | None, options: PlanOptions) -> "RunningIteration | None":
    if iteration is None:
        return None
    return iterations().running(iteration, offloads="offload" in options.allow)


def plans_of(fitted: nn.Module) -> tuple[Plan, ...]:
    """The plans that a fitted module has made so far, in the order of their first calls."""
    fitting = fitted.__dict__.get("_fitting")
    if fitting is None:
        raise BadUse(
            f"{type(fitted).__name__} has no plans: they are of what fit returns, not of what it takes"
        )
    plans: tuple[Plan, ...] = fitting.plans
    return plans


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


def _refuse_loss(loss: object) -> None:
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
