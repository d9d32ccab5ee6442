"""Wrappers: data parallelism and sharding go around a planned step, checkpointing gives way to it.

What they do happens in hooks: before and after the modules they wrap, and when a gradient arrives. A planned
step calls no inner module, so hooks there would not run, while those around it do.
"""

from typing import Any

from torch import Tensor, nn

from stowplan.errors import BadUse
from stowplan.torch_private import tell_of_checkpoints

_PLAIN = (Tensor, nn.Parameter)


def refuse_wrapped(model: nn.Module) -> None:
    """A model that is wrapped already is no step to plan: its wrapper belongs around the result."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            wrapper = type(module).__name__
            raise BadUse(
                f"{path or 'the model'} is wrapped in {wrapper}, whose work cannot be done inside a planned"
                f" step; fit the module within, then wrap what fit returns: {wrapper}(fit(...))"
            )


def switch_checkpointing_off(model: nn.Module) -> None:
    """Take back what `gradient_checkpointing_enable` of Hugging Face did: flags, and a hook on the inputs."""
    switched: Any = model
    if getattr(model, "is_gradient_checkpointing", False) is True:
        tell_of_checkpoints()
        switched.gradient_checkpointing_disable()
        if hasattr(model, "_require_grads_hook"):
            switched.disable_input_require_grads()


def leave_checkpointing_off(fitted: nn.Module) -> None:
    """Trainers switch checkpointing on in the model; in a fitted one that logs that the plan replaces it."""
    if hasattr(fitted, "gradient_checkpointing_enable"):
        vars(fitted)["gradient_checkpointing_enable"] = _enable_nothing


def _enable_nothing(*_: object, **__: object) -> None:
    tell_of_checkpoints()


def refuse_shards(model: nn.Module) -> None:
    """Parameters must be there as a whole while the step runs, which only a wrapper around it can see to."""
    named = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in named:
        if type(tensor) not in _PLAIN:
            raise BadUse(
                f"{name} is a {type(tensor).__name__} of shape {tuple(tensor.shape)} when the step runs: only"
                " a part of it is on this worker. Inner modules are not called in a planned step and do not"
                " gather their parameters; fit first, then shard as one unit: fully_shard(fit(...)), of the"
                " whole model or of each of its blocks"
            )
