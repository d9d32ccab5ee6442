"""Wrappers: data parallelism and sharding go around a planned step, checkpointing gives way to it.

What they do happens in hooks: before and after the modules they wrap, and when a gradient arrives. A planned
step calls no inner module, so hooks there would not run, while those around it do.

`with_forward` and `seen_as` give a model's own parts, parameters and all, as an instance of another class.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any

from torch import Tensor, nn

from stowplan.capture.composite import has_attachments, is_divided, is_wrapper
from stowplan.errors import BadUse
from stowplan.torch_private import tell_of_checkpoints


def with_forward(model: nn.Module, forward: Callable[..., object]) -> nn.Module:
    """The model with another forward, to be captured.

    Its hooks run around a step, not in it: it has none. A `__call__` of its class does so too.
    """
    own = {"forward": forward, "__call__": nn.Module.__call__, "__module__": type(model).__module__}
    kind = type(type(model).__name__, (type(model),), own)
    found: nn.Module = seen_as(kind, model)
    vars(found).pop("forward", None)  # one that wraps the planned step, and would be called in its place
    for name, value in vars(found).items():
        if name.endswith("_hooks") and "forward" in name:
            vars(found)[name] = type(value)()
    return found


class _Called(BaseException):
    """Forward is called. No Exception, which the user's code might take for its own."""

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        super().__init__()
        self.args_of_forward, self.kwargs_of_forward = args, kwargs


def overrides_call(kind: type) -> bool:
    """Whether the user's own code runs around forward in a call, as in `def __call__(self, ...)`."""
    return not kind.__call__.__module__.startswith("torch.")


def arguments_of_forward(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """What forward is given if the model is called with these arguments: `__call__` may change them."""
    if not overrides_call(type(model)):
        return args, dict(kwargs)

    def forward(_: nn.Module, *given: object, **named: object) -> object:
        raise _Called(given, named)

    calling = with_forward(model, forward)
    try:
        type(model).__call__(calling, *args, **kwargs)
    except _Called as called:
        return called.args_of_forward, called.kwargs_of_forward
    raise BadUse(
        f"{type(model).__name__}.__call__ does not call forward, which is what fit plans; put what it does"
        " into forward"
    )


def fitted_class(kind: type[nn.Module], fitted: type[nn.Module]) -> type[nn.Module]:
    """`kind` with the methods of `fitted` before its own, under the same name, with forward's signature.

    Trainers choose the columns of a batch by the signature; `save_pretrained` writes the name of the class.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fitted.forward(self, *args, **kwargs)

    update_wrapper(forward, kind.forward)
    del vars(forward)["__wrapped__"]  # what it stands for is not to be called in its place
    if callable(kind.forward):  # for TorchScript it is a property
        vars(forward)["__signature__"] = inspect.signature(kind.forward)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (fitted, kind), {**own, "forward": forward})


def seen_as(kind: type, model: nn.Module) -> Any:
    """The model's own parts as an instance of `kind`. Nothing of the class is run, as a copy would."""
    seen: object = object.__new__(kind)
    vars(seen).update(vars(model))
    return seen


_PLAIN = (Tensor, nn.Parameter)


# What Hugging Face calls checkpointing: since transformers 5.23, and before. The older name then warns.
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def switch_checkpointing_off(model: nn.Module) -> Callable[[], None]:
    """Take back what `..._checkpointing_enable` of Hugging Face did: flags, and a hook on the inputs.

    Returns how to undo that.
    """
    switched: Any = model
    name = next((name for name in _CHECKPOINTING if hasattr(model, f"is_{name}")), None)
    if name is None or getattr(model, f"is_{name}") is not True:
        return lambda: None
    has_hook = hasattr(model, "_require_grads_hook")
    flags = [
        (
            module,
            {key: vars(module)[key] for key in vars(module) if any(each in key for each in _CHECKPOINTING)},
        )
        for module in model.modules()
    ]
    tell_of_checkpoints()
    getattr(model, f"{name}_disable")()
    if has_hook:
        switched.disable_input_require_grads()

    def undo() -> None:
        for module, own in flags:
            vars(module).update(own)
        if has_hook:
            switched.enable_input_require_grads()

    return undo


def leave_checkpointing_off(fitted: nn.Module) -> None:
    """Trainers switch checkpointing on in the model; in a fitted one that logs that the plan replaces it."""
    for name in _CHECKPOINTING:
        if hasattr(fitted, f"{name}_enable"):
            vars(fitted)[f"{name}_enable"] = _enable_nothing


def _enable_nothing(*_: object, **__: object) -> None:
    tell_of_checkpoints()


def refuse_shards(model: nn.Module) -> None:
    """Parameters must be there as a whole while the step runs, which only a wrapper around it can see to."""
    named = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in named:
        kind = type(tensor)
        if kind not in _PLAIN and (is_divided(kind) or not (is_wrapper(kind) or has_attachments(kind))):
            raise BadUse(
                f"{name} is a {type(tensor).__name__} of shape {tuple(tensor.shape)} when the step runs: only"
                " a part of it is on this worker. Inner modules are not called in a planned step and do not"
                " gather their parameters; fit first, then shard as one unit: fully_shard(fit(...)), of the"
                " whole model or of each of its blocks"
            )
