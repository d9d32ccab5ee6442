"""State elsewhere: optimizer state waits in a tier and is in memory only while its parameter is updated.

A tensor of the state that is away is replaced in the optimizer by one of the same shape on the meta device,
which raises if somebody reads its values. `state_dict()` brings all of it back first.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stowplan.run.optimizers import tensors_in
from stowplan.run.step.function import Away, LiveTier
from stowplan.torch_private import storage_id

WORTH_BYTES = 4096  # smaller tensors stay: a block of the disk is not smaller


def movable(state: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors of one parameter's state that may wait in a tier, each the only one in its storage."""
    found = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    storages = [storage_id(tensor.untyped_storage()) for tensor in tensors_in(state.values())]
    return {
        name: tensor
        for name, tensor in found.items()
        if WORTH_BYTES <= tensor.nbytes == tensor.untyped_storage().nbytes()
        if storages.count(storage_id(tensor.untyped_storage())) == 1
    }


class StateElsewhere:
    """The state of one optimizer, and the tensors of it that are in the tier, by parameter."""

    def __init__(self, optimizer: Optimizer, tier: LiveTier) -> None:
        self._optimizer, self._tier = weakref.ref(optimizer), tier
        self._away: dict[Tensor, dict[str, Away]] = {}
        own = weakref.ref(self)
        optimizer.register_state_dict_pre_hook(lambda _: _all_back(own))
        optimizer.register_state_dict_post_hook(_with_own_entries)

    def store(self, parameters: Iterable[Tensor]) -> None:
        """Write the state of `parameters` to the tier, and free its memory."""
        for parameter in parameters:
            state = self._state_of(parameter)
            away = self._away.setdefault(parameter, {})
            found = {name: t for name, t in movable(state).items() if not t.is_meta}
            for name in found:
                away.pop(name, None)  # so that the tier writes where it was
            begun = {name: self._tier.store(tensor) for name, tensor in found.items()}
            for name, stored in begun.items():
                stored.wait()
                away[name] = stored
                state[name] = torch.empty_like(found.pop(name), device="meta")

    def load(self, parameter: Tensor) -> None:
        """Read the state of a parameter into memory, where the next update changes it."""
        away, state = self._away.get(parameter, {}), self._state_of(parameter)
        begun = {name: stored.load()[0] for name, stored in away.items() if state[name].is_meta}
        for name, tensor in begun.items():
            away[name].wait()
            state[name] = tensor

    def load_all(self) -> None:
        """Read everything into memory that is not there."""
        for parameter in self._away:
            self.load(parameter)

    def forget(self) -> None:
        """The optimizer has other state."""
        self._away.clear()

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        optimizer = self._optimizer()
        assert optimizer is not None, "an update without an optimizer"
        found: dict[str, Any] = optimizer.state.get(parameter, {})
        return found


_ELSEWHERE: weakref.WeakKeyDictionary[Optimizer, StateElsewhere] = weakref.WeakKeyDictionary()


def state_elsewhere(optimizer: Optimizer, tier: LiveTier) -> StateElsewhere:
    """That of an optimizer, one for all modules that are fitted with it."""
    if optimizer not in _ELSEWHERE:
        _ELSEWHERE[optimizer] = StateElsewhere(optimizer, tier)
    return _ELSEWHERE[optimizer]


def bring_back(optimizer: Optimizer) -> None:
    """Read all state of an optimizer into memory, if some of it is in a tier."""
    if optimizer in _ELSEWHERE:
        _ELSEWHERE[optimizer].load_all()


def _all_back(own: weakref.ref[StateElsewhere]) -> None:
    found = own()
    if found is not None:
        found.load_all()


def _with_own_entries(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Else what the caller holds would change when state goes back to the tier."""
    return {**state_dict, "state": {key: dict(state) for key, state in state_dict["state"].items()}}
