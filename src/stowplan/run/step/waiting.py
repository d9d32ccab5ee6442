"""Waiting: the forwards of a model that wait for their backward. A budget is for one of them at a time."""

import logging
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from stowplan.run.step.function import Run
from stowplan.units import format_bytes

_LOGGER = logging.getLogger("stowplan")


class Waiting:
    """Says once that a forward began while others of the model wait."""

    def __init__(self, name: str) -> None:
        self._name, self._runs, self._said = name, WeakSet[Run](), False

    def begins(self) -> None:
        """A forward is about to run."""
        held = sum(run.held_bytes for run in list(self._runs))
        if held and not self._said:
            self._said = True
            _LOGGER.warning(
                "a forward of %s began while an earlier one waits for its backward and holds %s: the budget"
                " is for one forward and its backward. Call backward after each forward, or put both into one"
                " module and fit that. This is said once.",
                self._name,
                format_bytes(held),
            )

    def add(self, run: Run) -> None:
        """The run waits from now on, until its backward is done or nobody can call it any more."""
        self._runs.add(run)


_OF_MODEL: WeakKeyDictionary[nn.Module, Waiting] = WeakKeyDictionary()


def waiting_of(model: nn.Module) -> Waiting:
    """The same for all steps that are bound to a model."""
    return _OF_MODEL.setdefault(model, Waiting(type(model).__name__))
