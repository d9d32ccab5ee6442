"""Names that lead back to the user's code: of modules, parameters, buffers and arguments."""

import inspect
from typing import Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stowplan.capture.recording import Step


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
    """A name per leaf of the arguments: the parameter of `forward` it is passed as, and the way inside it."""
    positional = _positional_names(step.model, len(step.args))
    leaves, _ = pytree.tree_flatten_with_path((step.args, dict(step.kwargs)))
    names = []
    for path, _ in leaves:
        side, key, *inner = (str(key).strip("[].'") for key in path)
        names.append(".".join([positional[int(key)] if side == "0" else key, *inner]))
    return names


def _positional_names(model: nn.Module, count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += (f"{parameter.name}.{index}" for index in range(count - len(names)))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]
