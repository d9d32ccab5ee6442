"""Names that lead back to the user's code: of modules, parameters, buffers and arguments."""

import inspect
from typing import Literal

from torch import Tensor, nn

from stowplan.capture.arguments import leaf_names
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
    return leaf_names(step.args, step.kwargs, _positional_names(step.model, len(step.args)))


def _positional_names(model: nn.Module, count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += (f"{parameter.name}.{index}" for index in range(count - len(names)))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]
