"""Guard: whether a model is still the program that was captured, asked before every step.

The facts of `Dependencies` are compared in two ways. `is_untouched` looks whether the same objects stand in
the same places, which takes about a microsecond a module. If something is another object, `change` pictures
the model anew and compares what it means: an equal value in a new object is no change.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, contains, getitem, is_

from torch import Tensor, nn

from stowplan.run.border.dependencies import (
    HELD_ARGUMENTS,
    HOOKS,
    SWITCHES,
    Dependencies,
    held_among,
    storages_of,
)
from stowplan.run.border.frozen import Owner, Picture, first_change, state_of

_LOOKS = (
    attrgetter("requires_grad"),
    attrgetter("dtype"),
    attrgetter("shape"),
    Tensor.stride,
    attrgetter("device"),
    type,
)


class Guard:
    """The dependencies of a captured step, held against one living model."""

    def __init__(self, dependencies: Dependencies, model: nn.Module) -> None:
        self._dependencies, self._model = dependencies, model
        self._is_set = False

    def change(self, leaves: Sequence[object]) -> str | None:
        """What is not as it was when the step was captured; None if all is. `leaves` are of the arguments."""
        picture = self._dependencies.picture(self._model, leaves)
        change = first_change(self._dependencies.facts, picture.facts)
        self._is_set = change is None
        if change is None:
            self._set(picture)
        return change

    def tensors(self) -> Mapping[int, tuple[Owner, object]]:
        """Where plain attributes and globals that the program reads stand now, by identity at capture."""
        picture = self._dependencies.picture(self._model, ())
        return {number: picture.tensors[label] for number, label in self._dependencies.places.items()}

    def _set(self, picture: Picture) -> None:
        self._owners, self._keys, self._values = picture.owners, picture.keys, picture.values
        self._sized, self._sizes = picture.sized, list(map(len, picture.sized))
        self._absent = [owner for owner, _ in picture.absent], [name for _, name in picture.absent]
        self._states = picture.states
        self._looked_at = [
            (picture.tensors[label], picture.facts[f"values of {label}"])
            for label in self._dependencies.looked_at
        ]
        self._switches = [switch() for switch in SWITCHES.values()]
        self._set_modules()
        self._set_tensors(picture)

    def _set_modules(self) -> None:
        modules = list(self._model.modules())
        self._children = [module._modules for module in modules if module._modules]
        self._child_copies = [dict(table) for table in self._children]
        self._hooks = [getattr(module, kind) for module in modules[1:] for kind in HOOKS]
        self._own = [vars(module) for module in modules for _ in _TABLES]
        self._table_names = [name for _ in modules for name in _TABLES]
        self._tables = list(map(getitem, self._own, self._table_names))
        self._kinds, self._modules = list(map(type, modules[1:])), modules[1:]

    def _set_tensors(self, picture: Picture) -> None:
        tables = (t for m in self._model.modules() for t in (m._parameters, m._buffers))
        places = [(table, name) for table in tables for name in table]
        self._held_in = [table for table, _ in places], [name for _, name in places]
        self._held = list(map(getitem, *self._held_in))
        self._tensors = [tensor for tensor in self._held if tensor is not None]
        self._attributes = list(picture.tensors.values())
        self._looks = self._looks_now()
        self._storages = storages_of(self._model)

    def _looks_now(self) -> list[list[object]]:
        others: list[Tensor] = [owner[key] for owner, key in self._attributes]
        return [list(map(look, chain(self._tensors, others))) for look in _LOOKS]

    def is_untouched(self, leaves: Sequence[object]) -> bool:
        """Whether all that the step depends on is in its place, the same objects as at the last full look."""
        if not self._is_set:
            return False
        try:
            return (
                self._children == self._child_copies
                and not any(self._hooks)
                and all(map(is_, map(type, self._modules), self._kinds))
                and all(map(is_, map(getitem, self._own, self._table_names), self._tables))
                and all(map(is_, map(getitem, self._owners, self._keys), self._values))
                and list(map(len, self._sized)) == self._sizes
                and not any(map(contains, *self._absent))
                and [switch() for switch in SWITCHES.values()] == self._switches
                and all(state_of(value) == state for value, state in self._states)
                and all(state_of(owner[key]) == state for (owner, key), state in self._looked_at)
                and self._are_tensors_alike()
                and held_among(leaves, self._storages) == self._dependencies.facts[HELD_ARGUMENTS]
            )
        except (KeyError, IndexError):  # something that was there is gone
            return False

    def _are_tensors_alike(self) -> bool:
        return all(map(is_, map(getitem, *self._held_in), self._held)) and self._looks_now() == self._looks


_TABLES = ("_modules", "_parameters", "_buffers")
