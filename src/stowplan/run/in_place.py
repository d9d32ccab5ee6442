"""A plan in place: the model itself runs what `fit` planned, as the same object.

Who holds the model (optimizers, wrappers, trainers) need not learn of it. The object changes its class, for a
subclass of the same name, and back when the handle's `remove` is called. Copies and files are of the model as
it was: `torch.save`, `pickle` and `copy.deepcopy` give an object of the model's own class, without a plan.
"""

import copyreg
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import ref

from torch import nn

from stowplan.errors import BadUse
from stowplan.run.fitting import FittedModule, Fitting, Otherwise, model_class
from stowplan.run.wrappers import fitted_class, leave_checkpointing_off, seen_as

_CLASSES: dict[type, type] = {}
_FITTING, _INSTALLED = "_fitting", "_installed"


class _InPlace(FittedModule):
    """What a model with a plan in place adds to its class: how it runs, and how it is copied."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _FITTING not in vars(self):  # a copy that the model's own code has made
            return model_class(self).forward(self, *args, **kwargs)
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """That of the model's own class. `pickle` takes `__newobj__` only for an object's present class."""
        how: Any = _as_before(self).__reduce_ex__(protocol)
        if how[0] is not getattr(copyreg, "__newobj__"):  # noqa: B009 -- the stubs do not have it
            return how
        return getattr(copyreg, "_reconstructor"), (*how[1], object, None), *how[2:]  # noqa: B009


@dataclass(slots=True, weakref_slot=True)
class Installed:
    """A plan that runs in a model, until `remove`; also a context manager, which removes it at its end."""

    _model: "ref[nn.Module]"
    _class: type[nn.Module]
    _own: dict[str, object]  # attributes of the model that gave way
    _added: tuple[str, ...]  # and those that came

    def remove(self) -> None:
        """Let the model be what it was. A second call does nothing."""
        model = self._model()
        if model is None or vars(model).get(_INSTALLED) is not self:
            return
        if type(model) is not _class_in_place(self._class):
            raise BadUse(
                f"{self._class.__name__} was given another class, {type(model).__qualname__}, since its plan"
                " was installed; undo that first"
            )
        model.__class__ = self._class
        self.put_back(model)

    def put_back(self, model: nn.Module) -> None:
        """Give the model, or a copy of it, the attributes that it had."""
        for name in self._added:
            vars(model).pop(name, None)
        vars(model).update(self._own)

    def __enter__(self) -> "Installed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def install(fitted: nn.Module, model: nn.Module, *, otherwise: Otherwise | None = None) -> Installed:
    """Let `model` itself run the plans of `fitted = stowplan.fit(model, ...)`, until the result's `remove()`.

    The model stays the same object, with the same parameters, hooks and `state_dict`. `isinstance` holds as
    before; `type(model)` is a subclass of the same name. A plan that was installed before gives way.

    Args:
        fitted: what `fit` returned for this model. It can still be called.
        model: the module that was given to `fit`.
        otherwise: called with the error if a later call cannot be planned. If it returns, that call runs
            without a plan. By default the error is raised, as by `fitted`.
    """
    fitting = vars(fitted).get(_FITTING)
    if not isinstance(fitting, Fitting):
        raise BadUse(
            f"install takes what fit returned for one process, and then the model, not {_name(fitted)}"
        )
    if vars(fitted)["_parameters"] is not vars(model)["_parameters"]:
        raise BadUse(
            f"{_name(fitted)} was not fitted from this {_name(model)}: write install(fit(model, ...), model)"
        )
    if fitted is model:
        raise BadUse("install takes what fit returned, and then the model that was given to fit")
    known: Installed | None = vars(model).get(_INSTALLED)
    if known is not None:
        known.remove()
    vars(fitted)[_FITTING] = deepcopy(fitting)
    fitting.bound.clear()
    fitting.otherwise = otherwise
    if fitting.planner.iteration is not None:
        fitting.planner.iteration.belongs_to(model)
    own = {name: vars(model)[name] for name in ("forward",) if name in vars(model)}
    before, kind = {**vars(model)}, type(model)
    model.__class__ = _class_in_place(kind)
    vars(model).pop("forward", None)
    vars(model)[_FITTING] = fitting
    leave_checkpointing_off(model)
    added = tuple(name for name in vars(model) if name not in before)
    found = Installed(ref(model), kind, own, (*added, _INSTALLED))
    vars(model)[_INSTALLED] = found
    return found


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _class_in_place(kind: type[nn.Module]) -> type:
    """One class for each class of model."""
    found = _CLASSES.get(kind)
    return found or _CLASSES.setdefault(kind, fitted_class(kind, _InPlace))


def _as_before(model: nn.Module) -> nn.Module:
    """The model's parts under its own class, without a plan: what is copied and written."""
    found: nn.Module = seen_as(model_class(model), model)
    installed = vars(model).get(_INSTALLED)
    if installed is not None:
        installed.put_back(found)
    return found
