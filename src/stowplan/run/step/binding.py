"""Binding: which living tensor each parameter, buffer, input and constant of a program is."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from stowplan.capture import Captured
from stowplan.capture.arguments import flatten
from stowplan.errors import BadUse


class Binding:
    """Looks tensors up in the tables of the modules they live in, at each call: there may be new ones."""

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        loss: object = None,
        places: Mapping[int, tuple[Any, Any]] = MappingProxyType({}),
    ) -> None:
        """`places` has where constants are found that are attributes or globals, by identity."""
        self._graph, self._program = captured.graph, captured.program
        constants = self._program.constants
        self._found = {name: places[id(held)] for name, held in constants.items() if id(held) in places}
        self._constants = {name: held for name, held in constants.items() if name not in self._found}
        self._homes: dict[str, tuple[Mapping[str, Any], str]] = {}
        for tensor, names in (*self._program.parameters.items(), *self._program.buffers.items()):
            self._homes[tensor] = _home(names[0], model, loss)

    def has(self, tensor: str) -> bool:
        """Whether the tensor comes from outside the step and not from its caller's backward."""
        known = (self._homes, self._program.constants, self._program.inputs)
        return any(tensor in place for place in known)

    def tensors(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Tensor]:
        """All of them by id, for a call with these arguments."""
        found = {name: table[attribute] for name, (table, attribute) in self._homes.items()}
        found.update((name, owner[key]) for name, (owner, key) in self._found.items())
        found |= {**self._constants, **self._inputs(args, kwargs)}
        self._refuse_unwritable(found)
        return found

    def _refuse_unwritable(self, found: Mapping[str, Tensor]) -> None:
        """The step writes updates in place; a forward in inference mode leaves tensors that forbid that."""
        for name in self._program.updates:
            if found[name].is_inference() and not torch.is_inference_mode_enabled():
                known = self._program.buffers.get(name, (name,))[0]
                raise BadUse(
                    f"{known!r} was made in inference mode, and the planned step writes into it: replace it"
                    " by its clone(), or call the model under torch.no_grad() instead"
                )

    def _inputs(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Tensor]:
        leaves, spec = flatten(args, kwargs)
        if spec != self._program.input_spec:
            raise BadUse(f"captured for arguments {self._program.input_spec}, called with {spec}")
        found: dict[str, Tensor] = {}
        for name, leaf in zip(self._program.inputs, leaves, strict=True):
            if name is not None:
                found[name] = self._checked(name, leaf)
        return found

    def _checked(self, name: str, leaf: object) -> Tensor:
        expected = self._graph.tensors[name]
        if not isinstance(leaf, Tensor):
            raise BadUse(f"argument {name!r} is no tensor, and was one when the step was captured")
        if tuple(leaf.shape) != expected.shape or str(leaf.dtype) != f"torch.{expected.dtype}":
            raise BadUse(
                f"argument {name!r} is {leaf.dtype} of shape {tuple(leaf.shape)}, but the step was captured"
                f" for {expected.dtype} of shape {expected.shape}"
            )
        return leaf


def _home(name: str, model: nn.Module, loss: object) -> tuple[Mapping[str, Any], str]:
    """The table of the module that holds the tensor of this name, and its name there."""
    root = model
    if isinstance(loss, nn.Module) and name.startswith("loss.") and not hasattr(model, "loss"):
        root, name = loss, name.removeprefix("loss.")
    path, _, attribute = name.rpartition(".")
    module = root.get_submodule(path)
    return module._parameters if attribute in module._parameters else module._buffers, attribute
