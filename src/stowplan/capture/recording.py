"""Recording: the events of one training step, from its first op to its gradients, and the names in it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn

from stowplan.capture.arguments import Spec, leaf_names
from stowplan.capture.checks import unchecked
from stowplan.capture.storage_views import Lifetime, StorageView
from stowplan.capture.watching import AnswerHere, Event, Incoming
from stowplan.errors import CaptureError
from stowplan.ir import Kind
from stowplan.torch_private import pytree

if TYPE_CHECKING:
    from stowplan.capture.cuda_calls import CudaCalls

Loss: TypeAlias = Callable[..., object] | str | int
"""A function of the model's output, or the name or index of the output that is the loss."""


@dataclass(frozen=True, slots=True)
class Step:
    """A training step as the user gives it: `model(*args, **kwargs)`, then a loss function of the result.

    Gradients come in for the outputs at the positions `differentiated`, as the leaves of the result are
    counted. Without them, they come in for the output that `loss` names, with `all_outputs` for every output
    that can have one, or else for the only scalar. With `know_values`, small integer arguments are captured
    with their values. With `cuda`, forward calls the kernels of a CUDA device.
    """

    model: nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    loss: Loss | None
    device: torch.device
    all_outputs: bool = False
    differentiated: tuple[int, ...] | None = None
    know_values: bool = False
    cuda: "CudaCalls | None" = None

    def modules(self) -> dict[str, nn.Module]:
        """The modules that hold parameters, by the prefix of their names."""
        return {"": self.model, **({"loss.": self.loss} if isinstance(self.loss, nn.Module) else {})}


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """A tensor that no op of the step makes: its kind and all its names."""

    kind: Kind
    names: tuple[str, ...]
    view: StorageView


@dataclass(frozen=True, slots=True)
class Recording:
    """One step: its events in order (backward from `turn` on), the lifetimes of storages, inputs and outputs.

    `incoming` are the gradients that autograd's nodes received. `inputs` and `outputs` are the leaves of the
    arguments and of the result, tensors as storage views. `attached` outputs are part of autograd's graph;
    `tangents` are the gradients of the differentiated ones. `constants` are other tensors of the user's code.
    `replaced` are buffers that the model bound to a new tensor. `literals` are constants written in code, as
    in `torch.tensor([1, 2])`. A step that `looks_at_values` of known integers has branched on them; `answers`
    are what it read.
    """

    events: tuple[Event, ...]
    turn: int
    incoming: tuple[Incoming, ...]
    lifetimes: tuple[Lifetime, ...]
    externals: tuple[ExternalTensor, ...]
    constants: Mapping[StorageView, Tensor]
    inputs: tuple[StorageView | None, ...]
    input_spec: Spec
    outputs: tuple[object, ...]
    attached: tuple[bool, ...]
    output_spec: pytree.TreeSpec
    tangents: tuple[StorageView | None, ...]
    gradients: Mapping[StorageView, StorageView]
    replaced: Mapping[StorageView, StorageView]
    literals: frozenset[StorageView]
    looks_at_values: bool
    answers: tuple[AnswerHere, ...] = ()


def after_loss(output: object, loss: Loss | None) -> object:
    """What a step returns: the model's output, or the result of the loss function for it."""
    return loss(output) if callable(loss) else output


def output_named(output: object, name: str | int) -> Tensor:
    """The output of a model that `loss` names by key, attribute or index."""
    found = _entries(output).get(name)
    if isinstance(found, Tensor):
        return found
    entries = [entry for entry, value in _entries(output).items() if isinstance(value, Tensor)]
    raise CaptureError(
        f"loss is {name!r}, and the model returns no tensor of that name or index",
        advice=f"loss names one of {', '.join(map(repr, entries))}, or is a function of the model's output"
        if entries
        else "leave loss out, or give a function of the model's output",
    )


def output_keys(spec: pytree.TreeSpec) -> list[str | int | None]:
    """The name or index under which each leaf of a model's result is returned; None for the only one."""
    returned = unchecked(pytree.tree_unflatten(range(spec.num_leaves), spec))
    keys: list[str | int | None] = [None] * spec.num_leaves
    for key, value in _entries(returned).items():
        for leaf in pytree.tree_leaves(value):
            keys[leaf] = key
    return keys


def _entries(output: object) -> dict[str | int, object]:
    """The values that a model returns together, by name and by index."""
    if isinstance(output, Mapping):
        return dict(enumerate(output.values())) | dict(output)
    if isinstance(output, tuple | list):
        fields: tuple[str, ...] = getattr(output, "_fields", ())
        return dict(enumerate(output)) | dict(zip(fields, output, strict=False))
    return {}


def module_paths(step: Step) -> dict[nn.Module, str]:
    """The path of every module; the first one where it has several."""
    paths: dict[nn.Module, str] = {}
    for prefix, root in step.modules().items():
        for path, module in root.named_modules():
            paths.setdefault(module, f"{prefix}{path}".rstrip("."))
    return paths


def named_tensors(step: Step, what: Literal["parameters", "buffers"]) -> dict[str, Tensor]:
    """Parameters or buffers under every name they have."""
    return {
        f"{prefix}{name}": tensor
        for prefix, root in step.modules().items()
        for name, tensor in getattr(root, f"named_{what}")(remove_duplicate=False)
    }


def argument_names(step: Step) -> list[str]:
    """A name per leaf of the arguments: the parameter of `forward` it belongs to, and the path inside it."""
    return leaf_names(step.args, step.kwargs, _positional_names(step.model, len(step.args)))


def _positional_names(model: nn.Module, count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += (f"{parameter.name}.{index}" for index in range(count - len(names)))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]
