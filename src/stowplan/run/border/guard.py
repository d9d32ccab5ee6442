"""Guard: whether a model is still the program that was captured, asked before every step.

The facts of `Dependencies` are compared in two ways. `is_untouched` looks whether the same objects stand in
the same places, which takes about a microsecond a module. If something is another object, `change` pictures
the model anew and compares what it means: an equal value in a new object is no change.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import contains, getitem, is_

from torch import Tensor, nn

from stowplan.run.border.dependencies import (
    HELD_ARGUMENTS,
    SWITCHES,
    Dependencies,
    held_among,
    storages_of,
)
from stowplan.run.border.frozen import Owner, Picture, first_change, state_of
from stowplan.torch_private import GLOBAL_HOOKS, HOOKS, tensor_guards

_TABLES = ("_modules", "_parameters", "_buffers")


class TensorLooks:
    """The types, shapes, strides, dtypes, devices and `requires_grad` of tensors, compared in C++.

    This is the check that Dynamo's guards make of tensors; in Python it would take five times as long.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._guards = tensor_guards(tensors)

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether these, in the same order, look as the tensors did."""
        return bool(self._guards.check(*tensors))


class Guard:
    """The dependencies of a captured step, held against one living model."""

    def __init__(self, dependencies: Dependencies, model: nn.Module) -> None:
        self._dependencies, self._model = dependencies, model
        self.is_set = False
        self.other_answer: str | None = None  # what forward would read otherwise, if that is the change

    def change(self, leaves: Sequence[object]) -> str | None:
        """What is not as it was when the step was captured; None if all is. `leaves` are of the arguments."""
        picture = self._dependencies.picture(self._model, leaves)
        change = first_change(self._dependencies.facts, picture.facts)
        self.other_answer = None if change else self._dependencies.answers.other_answer(leaves)
        change = change or self.other_answer
        self.is_set = change is None
        if change is None:
            self._set(picture)
        return change

    def tensors(self) -> Mapping[int, tuple[Owner, object]]:
        """Where plain attributes and globals that the program reads stand now, by identity at capture."""
        return {number: self._places[label] for number, label in self._dependencies.places.items()}

    def _set(self, picture: Picture) -> None:
        self._owners, self._keys, self._values = picture.owners, picture.keys, picture.values
        self._sized, self._sizes = picture.sized, list(map(len, picture.sized))
        self._absent = [owner for owner, _ in picture.absent], [name for _, name in picture.absent]
        self._states, self._places = picture.states, picture.tensors
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
        hooks = [*GLOBAL_HOOKS, *(getattr(module, kind) for module in modules[1:] for kind in HOOKS)]
        self._no_hooks = [table for table in hooks if not table]
        self._hooks = [table for table in hooks if table]
        self._hook_numbers = list(map(list, self._hooks))
        tables = [(vars(m), name, vars(m)[name]) for m in modules for name in _TABLES if vars(m)[name]]
        self._own, self._table_names = [own for own, _, _ in tables], [name for _, name, _ in tables]
        self._tables = [table for _, _, table in tables]
        self._kinds, self._modules = list(map(type, modules[1:])), modules[1:]

    def _set_tensors(self, picture: Picture) -> None:
        tables = (t for m in self._model.modules() for t in (m._parameters, m._buffers))
        places = [(table, name) for table in tables for name in table]
        self._held_in = [table for table, _ in places], [name for _, name in places]
        self._held = list(map(getitem, *self._held_in))
        self._attributes = list(picture.tensors.values())
        self._unique = self._tensors()
        self._look = TensorLooks(self._unique)
        self._storages = storages_of(self._model)

    def _tensors(self) -> list[Tensor]:
        """Parameters, buffers and tensors that are plain attributes, each once."""
        others = (owner[key] for owner, key in self._attributes)
        return list(
            {id(tensor): tensor for tensor in chain(self._held, others) if tensor is not None}.values()
        )

    def is_untouched(self, leaves: Sequence[object]) -> bool:
        """Whether all that the step depends on is in its place, the same objects as at the last full look."""
        if not self.is_set:
            return False
        try:
            return (
                self._children == self._child_copies
                and not any(self._no_hooks)
                and list(map(list, self._hooks)) == self._hook_numbers
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
                and self._dependencies.answers.other_answer(leaves) is None
            )
        except (KeyError, IndexError):  # something that was there is gone
            return False

    def _are_tensors_alike(self) -> bool:
        same = all(map(is_, map(getitem, *self._held_in), self._held))
        return same and self._look.holds(self._tensors() if self._attributes else self._unique)
