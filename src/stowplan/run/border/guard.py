"""What a captured step depends on, how each dependency is dealt with, and the check before every step.

| what the step depends on | class |
|---|---|
| arguments, parameters, buffers; tensors that are plain attributes or globals | re-read at each call |
| modules, their classes and order; attributes that forward read | guarded |
| globals, closures, defaults and class data that the code of forward comes to | guarded |
| shapes, dtypes, strides, devices, `requires_grad`, tied tensors; switches of torch | guarded |
| answers that forward reads off small integer arguments, as in `if mask.all()` | guarded |
| forward hooks on inner modules, which are a part of forward | guarded |
| other hooks on inner modules | refused |
| attributes, lists and globals that forward writes | refused |
| random numbers of Python and NumPy | refused |
| a tensor that is found nowhere it could be read anew | refused |
| calls that want no gradient, and fit as they are | run eagerly |

A guard that fails means another plan. `Dependencies` are facts by label, so that a copy of the model can be
held to them too. A Guard compares a living model with them in two ways. `is_untouched` looks whether the same
objects stand in the same places, which takes about a microsecond a module. If something is another object,
`change` pictures the model anew and compares what it means: an equal value in a new object is no change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, filterfalse
from operator import contains, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stowplan.alone import undone
from stowplan.capture import Program
from stowplan.capture.answers import NO_ANSWERS, Answers
from stowplan.capture.changes import changes_of
from stowplan.capture.composite import SameWrapper, has_attachments, is_composite, is_wrapper, opened
from stowplan.capture.origins import BY_PARTS
from stowplan.capture.program import inputs_of
from stowplan.capture.stand_ins import look_of
from stowplan.errors import CaptureError
from stowplan.run.border.draws import Draws
from stowplan.run.border.frozen import (
    Attributes,
    Frozen,
    OutsidePlaces,
    Picture,
    Same,
    first_change,
    held_by,
    identity_of,
    is_library,
    is_plain,
    module_of,
    restore,
    state_of,
)
from stowplan.run.border.reach import MODULE_STATE, Reach, Reads, own_state
from stowplan.torch_private import (
    FORWARD_HOOKS,
    GLOBAL_HOOKS,
    HOOKS,
    default_device,
    storage_id,
    tensor_guards,
)

HELD_ARGUMENTS = "arguments that lie in the memory of parameters or buffers"

_TENSOR_HOOKS = (Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook)

# Hooks of transformers hand what a module returns to the forward that runs, and do nothing else. The first
# forward that asks for hidden states, attentions or router logits installs them and notes that it did.
_COLLECTING_HOOKS, _COLLECTING_NOTED = (
    "transformers.utils.output_capturing",
    "_output_capturing_hooks_installed",
)

_OBSERVING_HOOKS = "torch.ao.quantization.quantize"  # they call a module with what another one returns
_WEIGHT_HOOKS = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm", "torch.nn.utils.prune")

_FLAT_WEIGHTS = (
    "_flat_weights",
    "_flat_weight_refs",
)  # an RNN's list of its parameters, made anew for others
# What changes kernels or the types of what is made, and no argument tells.
SWITCHES: Mapping[str, Callable[[], object]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": default_device,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.backends.mkldnn.enabled": partial(getattr, torch.backends.mkldnn, "enabled"),
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
}


Place = tuple[int, int, int]  # the first tensor in the same storage, bytes of it, bytes from that tensor on


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What a captured step took for granted, and how to look at it again.

    `reads` are the attributes that were read, by module path; `others` the same of modules that are not part
    of the model; `variables` the globals and closures that its code names. `places` has the label of every
    tensor of the program that is a plain attribute or a global, by the tensor's identity; `looked_at` are
    labels of those whose values decided what the step does. `answers` are what it read off arguments.
    `containers` are those that it leaves tensors in: the label at capture, and in later pictures.
    """

    facts: Mapping[str, Frozen]
    reads: Mapping[str, tuple[str, ...]]
    others: Mapping[nn.Module, tuple[str, ...]]
    variables: Mapping[str, tuple[Mapping[str, Any], str]]
    places: Mapping[int, str] = field(default_factory=dict)
    looked_at: tuple[str, ...] = ()
    answers: Answers = NO_ANSWERS
    containers: Mapping[str, str] = field(default_factory=dict)

    def picture(self, model: nn.Module, leaves: Sequence[object]) -> Picture:
        """The same facts as they are now, of this model and of arguments with these leaves."""
        found = _picture(model, self.reads, self.others, self.variables)
        found.facts[HELD_ARGUMENTS] = held_among(leaves, storages_of(model))
        _add_values(found, self.looked_at)
        return found

    def contents(self, model: nn.Module, leaves: Sequence[object]) -> list[tuple[Any, Any]]:
        """The containers that forward may change, with what they hold now, for `restore`."""
        own = [(vars(module), dict(vars(module))) for module in model.modules()]
        return [*own, *self.picture(model, leaves).contents]


@dataclass(frozen=True, slots=True)
class Writes:
    """Numbers, strings and the like, and new objects of these, that forward wrote: places and values."""

    places: tuple[tuple[dict[Any, Any], Any, Any], ...]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The program as forward left it; as it was before if anything fails within."""
        before = [(owner, dict(owner)) for owner, _, _ in self.places]
        self.repeat()
        try:
            yield
        except BaseException:
            restore(before)
            raise

    def repeat(self, instead: Mapping[int, dict[str, Any]] | None = None) -> None:
        """Write again, for owners whose identity is given to others `instead`."""
        for owner, key, value in self.places:
            (instead or {}).get(id(owner), owner)[key] = value


class Observation:
    """What a step was seen to depend on while it was captured.

    `writes` are what forward wrote, if these are plain values, which it may find and leave at each call.
    """

    def __init__(self, model: nn.Module, loss: object = None, leaves: Sequence[object] = ()) -> None:
        """`leaves` are of the arguments."""
        self._model, self._reads = model, Reads()
        self._roots = model, loss, leaves, _wrappers_among(model, leaves)
        self._reach = Reach.of(*self._roots)  # of all that forward may come to
        self.writes: Writes | None = None
        self.containers: Mapping[str, Any] = {}  # in which forward may leave tensors, by label

    @contextmanager
    def watching(self, unclear: Draws | None = None) -> Iterator[None]:
        """Within, the step is captured. Leaves everything as it was; refuses what cannot be replayed.

        Raises SomebodyDrew if another thread may have drawn random numbers; then watch a second time.
        """
        refuse_hooks(self._model)
        everything = {
            path: tuple(name for name in vars(module) if _is_own_state(name))
            for path, module in self._model.named_modules()
        }
        before = _picture(self._model, everything, {}, {})
        self._reach.follow(dict.fromkeys(type(module) for module in self._model.modules()))
        self._reach.picture(before)
        self.containers = before.containers
        draws = Draws(unclear)
        own = {id(module): dict(vars(module)) for module in self._model.modules()}
        shallow = [(vars(module), own[id(module)]) for module in self._model.modules()]
        held = [*shallow, *before.contents]
        with undone(partial(restore, held)):
            try:
                with self._reads.recording(own), _RefusingTensorHooks(), draws.watched():
                    yield
                change = first_change(before.facts, self._now(everything))
            finally:
                writes = _plain_writes(held)
                draws.put_back()
        if change is not None and not first_change(before.facts, self._now(everything)):
            self.writes = writes
        _refuse_writes(change)
        _refuse_draws(draws.used())

    def note_writes(self, writes: Writes) -> None:
        """What forward writes is what it finds, so the step depends on it."""
        self.writes = writes
        modules = {id(vars(module)): module for module in self._model.modules()}
        for owner, key, _ in writes.places:
            if id(owner) in modules:
                self._reads.add(modules[id(owner)], key)

    def _now(self, names: Mapping[str, tuple[str, ...]]) -> dict[str, Frozen]:
        """The same facts after the step; an attribute that is new counts too."""
        new = {
            path: tuple(dict.fromkeys((*names.get(path, ()), *filter(_is_own_state, vars(m)))))
            for path, m in self._model.named_modules()
        }
        return _picture(self._model, new, {}, self._reach.variables).facts

    def dependencies(
        self, program: Program, leaves: Sequence[object], answers: Answers = NO_ANSWERS
    ) -> Dependencies:
        """What the captured program depends on; `leaves` are of the arguments it was captured with."""
        reads, others = self._reads.by_path(self._model), self._reads.outside(self._model)
        reach = Reach.of(*self._roots)
        picture = _picture(self._model, reads, others, {})
        reach.picture(picture)
        labels = {id(owner[key]): label for label, (owner, key) in picture.tensors.items()}
        calls = program.calls.values()
        read = (
            program.constants.keys() if program.looks_at_values else {n for c in calls for n in inputs_of(c)}
        )
        for name, tensor in program.constants.items():
            if id(tensor) not in labels and name in read and name not in program.literals:
                raise CaptureError(
                    f"forward reads a tensor of shape {tuple(tensor.shape)} that is no argument, parameter,"
                    " buffer, attribute of a module or global: it could be replaced without being seen",
                    advice="register it with register_buffer, set it as an attribute, or pass it in",
                )
        constants = {id(tensor): labels.get(id(tensor), "") for tensor in program.constants.values()}
        places = {number: label for number, label in constants.items() if label}
        whole = (
            id(t) for t in program.constants.values() if not t.is_floating_point() and not t.is_complex()
        )
        looked_at = tuple(places[number] for number in whole if number in places and program.looks_at_values)
        _add_values(picture, looked_at)
        picture.facts[HELD_ARGUMENTS] = held_among(leaves, storages_of(self._model))
        containers = self._containers_of(program, picture)
        return Dependencies(
            picture.facts, reads, others, reach.variables, places, looked_at, answers, containers
        )

    def _containers_of(self, program: Program, picture: Picture) -> dict[str, str]:
        """The label in a picture of each container that the program leaves tensors in."""
        changes = changes_of(program.output_spec)
        now = {identity_of(held): label for label, held in picture.containers.items()}
        found = dict[str, str]()
        for stored in (each for each in (changes.stored if changes else ()) if not each.in_module):
            identity = identity_of(self.containers[stored.label])
            if identity not in now:
                raise CaptureError(
                    f"forward stores tensors in {stored.name!r}, which is found nowhere it could be looked up"
                    " at the next call",
                    advice="store them in an attribute of a module, or return them",
                )
            found[stored.label] = now[identity]
        return found


def _wrappers_among(model: nn.Module, leaves: Iterable[object]) -> list[type]:
    """The classes of parameters, buffers and arguments that are made of other tensors."""
    held = (type(tensor) for tensor in chain(model.parameters(), model.buffers()))
    given = (leaf for leaf in leaves if isinstance(leaf, type))
    return list(
        dict.fromkeys(kind for kind in chain(held, given) if is_wrapper(kind) or has_attachments(kind))
    )


def _plain_writes(contents: Iterable[tuple[Any, Any]]) -> Writes | None:
    """What these containers hold that they did not hold before; None if it is more than plain values.

    A new item may also be an object of plain values, as in a library's table of what it has looked up.
    """
    places: dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]] = {}
    for container, held in contents:
        if isinstance(container, set) and container == held:
            continue  # a copy may list it in another order
        were, now = held_by(held), held_by(container)
        changed = [(key, value) for key, value in now.items() if key not in were or were[key] is not value]
        if len(container) < len(held) + sum(key not in were for key, _ in changed):
            return None  # something is gone
        for key, value in changed:
            if not isinstance(container, dict) or not is_plain(value, opened=key not in were):
                return None
            places[id(container), key] = container, key, value
    return Writes(tuple(places.values()))


class _RefusingTensorHooks(TorchFunctionMode):
    """Refuses hooks that forward registers on tensors: capture would call them, and nothing afterwards."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _TENSOR_HOOKS:
            raise CaptureError(
                f"forward calls {func.__name__} of a tensor",
                advice="a planned step makes tensors of its own; register the hook on what the model returns,"
                " or on a parameter",
            )
        return func(*args, **(kwargs or {}))


def _is_own_state(name: str) -> bool:
    return name not in MODULE_STATE and name != _COLLECTING_NOTED


@contextmanager
def collecting_hooks_removed(model: nn.Module) -> Iterator[None]:
    """Removes the hooks that forward installs within: the planned step needs none, and eager adds its own."""
    before = [
        (module, set(module._forward_hooks), _COLLECTING_NOTED in vars(module)) for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, hooks, was_noted in before:
            for number in [number for number in module._forward_hooks if number not in hooks]:
                if getattr(module._forward_hooks[number], "__module__", None) == _COLLECTING_HOOKS:
                    del module._forward_hooks[number]
            if not was_noted:
                vars(module).pop(_COLLECTING_NOTED, None)


def _unseen(kind: str, hooks: Mapping[int, Any]) -> list[Any]:
    """The hooks whose work capture does not see whole: those of backward, and those of libraries."""
    if kind not in FORWARD_HOOKS:
        return list(hooks.values())
    return [
        hook
        for hook in hooks.values()
        if is_library(module_of(hook))
        and not (_collects(hook) or _computes_a_weight(hook) or module_of(hook) == _OBSERVING_HOOKS)
    ]


def _collects(hook: object) -> bool:
    return getattr(hook, "__module__", None) == _COLLECTING_HOOKS


def _computes_a_weight(hook: object) -> bool:
    """Whether it is one of PyTorch's own that make a weight before forward, by ops and nothing else."""
    return any(kind.__module__ in _WEIGHT_HOOKS for kind in type(hook).__mro__)


def refuse_hooks(model: nn.Module) -> None:
    """A planned step calls no inner module, so hooks there would not run."""
    for registered in GLOBAL_HOOKS:
        if registered:
            raise CaptureError(
                f"a hook for all modules is registered ({_hook_name(list(registered.values()))})",
                advice="a planned step calls no inner module, so it would not run there: remove it",
            )
    for path, module in model.named_modules():
        for kind in HOOKS:
            if path and (hooks := _unseen(kind, getattr(module, kind, {}))):
                what = kind.strip("_").removesuffix("s").replace("_", " ")
                raise CaptureError(
                    f"{path} has a {what} ({_hook_name(hooks)})",
                    advice=(
                        "a planned step calls no inner module, so the hook would not run: remove it, put what"
                        " it does into forward, or register it on the whole model or on a parameter"
                    ),
                )


def _hook_name(hooks: Sequence[Any]) -> str:
    hook = hooks[0]
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def _picture(
    model: nn.Module,
    reads: Mapping[str, tuple[str, ...]],
    others: Mapping[nn.Module, tuple[str, ...]],
    variables: Mapping[str, tuple[Mapping[str, Any], str]],
) -> Picture:
    found = Picture()
    paths = {module: path for path, module in model.named_modules()}
    known: dict[int, str] = {}
    for module, path in paths.items():
        _add_module(found, module, path, paths, known)
        for name in reads.get(path, ()):
            _add_attribute(found, f"{path}.{name}" if path else name, module, name)
    for number, (module, names) in enumerate(others.items()):
        label = f"{type(module).__qualname__} #{number} outside the model"
        for name in names:
            _add_attribute(found, f"{label}.{name}", module, name)
        for table in (module._parameters, module._buffers, module._modules):
            for name in table:
                found.add(f"{label}.{name}", table, name)
    found.add_variables(variables)
    found.facts["hooks for all modules"] = tuple(
        Same(hook) for hooks in GLOBAL_HOOKS for hook in hooks.values()
    )
    found.facts["memory that parameters and buffers share"] = sharing_of(
        chain(model.parameters(), model.buffers())
    )
    found.facts.update((label, (type(v := switch()), v)) for label, switch in SWITCHES.items())
    return found


def sharing_of(tensors: Iterable[Tensor]) -> tuple[Place, ...]:
    """The place of each tensor. Equal for calls whose tensors lie in storages in the same way.

    A step captured for `model(x, x)` is not that of `model(x, y)`, and a slice holds its whole storage.
    """
    first: dict[int, tuple[int, int]] = {}
    places = []
    for number, tensor in enumerate(opened(tensors)):
        storage, begin = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.element_size()
        owner, owner_begin = first.setdefault(storage_id(storage), (number, begin))
        places.append((owner, storage.nbytes(), begin - owner_begin))
    return tuple(places)


def storages_of(model: nn.Module) -> dict[int, int]:
    """The storages of parameters and buffers, numbered in their order."""
    numbers: dict[int, int] = {}
    for tensor in opened(chain(model.parameters(), model.buffers())):
        numbers.setdefault(storage_id(tensor.untyped_storage()), len(numbers))
    return numbers


def held_among(leaves: Sequence[object], storages: Mapping[int, int]) -> Frozen:
    """Which arguments lie in a storage of the model's own."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tuple(storages.get(storage_id(tensor.untyped_storage())) for tensor in tensors)


def _add_module(
    found: Picture, module: nn.Module, path: str, paths: Mapping[nn.Module, str], known: dict[int, str]
) -> None:
    """Its class, its children, and the look of its parameters and buffers, by the name each had first."""
    label = path or "the model"
    if path:
        found.facts[f"class of {label}"] = Same(type(module))
        hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
        found.facts[f"hooks of {label}"] = tuple(Same(each) for each in hooks if not _collects(each))
        for number, hook in enumerate(filter(_computes_a_weight, hooks)):
            for name in vars(hook):
                found.add(f"{name} of hook {number} of {label}", vars(hook), name)
    found.facts[f"modules of {label}"] = tuple(
        (name, None if child is None else paths[child]) for name, child in module._modules.items()
    )
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            full = f"{path}.{name}" if path else name
            first = known.setdefault(id(tensor), full) if tensor is not None else full
            found.facts[full] = (first, look_of(tensor))


def _add_attribute(found: Picture, label: str, module: nn.Module, name: str) -> None:
    """An attribute that is the module's own or its class's; not the forward that `fit` itself replaces."""
    own = vars(module)
    if (
        label == "forward"
        or name == _COLLECTING_NOTED
        or (isinstance(module, nn.RNNBase) and name in _FLAT_WEIGHTS)
    ):
        return
    if name == "__dict__":
        found.sized.append(own)
        found.facts[f"attributes of {label}"] = tuple(own_state(module))
        return
    if name in own:
        found.add(label, own, name)
        return
    if name in module._parameters or name in module._buffers or name in module._modules:
        return
    for kind in type(module).__mro__:
        if name in vars(kind):
            if kind is not nn.Module:
                found.absent.append((own, name))
                found.add(label, found.names_in(kind), name)
            return
    found.facts[label] = None  # asked for, as by hasattr, and not there
    found.absent += ((table, name) for table in (own, module._parameters, module._buffers, module._modules))


def _add_values(found: Picture, labels: tuple[str, ...]) -> None:
    for label in labels:
        if label in found.tensors:
            owner, key = found.tensors[label]
            found.facts[f"values of {label}"] = state_of(owner[key])


def _refuse_writes(change: str | None) -> None:
    if change is not None:
        raise CaptureError(
            f"forward changes the state of the program: {change}",
            advice=(
                "a planned step runs no Python of forward, so this would happen once and never again; keep it"
                " in a buffer, return it, or set it outside forward (what forward builds at its first call"
                f" alone is there if the model is called once before fit), {BY_PARTS}"
            ),
        )


def _refuse_draws(source: str | None) -> None:
    if source is not None:
        raise CaptureError(
            f"forward draws random numbers from {source}, which a planned step does not run",
            advice="draw with torch (torch.rand(()) stays a tensor), or draw outside and pass the number in",
        )


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


def _columns(rows: Iterable[tuple[Any, Any, Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    first, second, third = tuple(zip(*rows, strict=True)) or ((), (), ())
    return list(first), list(second), list(third)


class Guard:
    """The dependencies of a captured step, held against one living model."""

    def __init__(self, dependencies: Dependencies, model: nn.Module) -> None:
        self._dependencies, self._model = dependencies, model
        self.is_set = False
        self.other_answer: str | None = None  # what forward would read otherwise, if that is the change
        self.counts = False  # whether nothing changed but the numbers of counters

    def change(self, leaves: Sequence[object]) -> str | None:
        """What is not as it was when the step was captured; None if all is. `leaves` are of the arguments."""
        picture = self._dependencies.picture(self._model, leaves)
        change = first_change(self._dependencies.facts, picture.facts)
        answers = self._dependencies.answers
        self.other_answer = None if change else answers.other_answer(leaves, self._model)
        self.counts = (
            self.other_answer is not None
            and bool(answers.counters)
            and answers.other_answer(leaves, self._model, counting=False) is None
        )
        change = change or self.other_answer
        self.is_set = change is None
        if change is None:
            self._set(picture)
        return change

    def places(self) -> OutsidePlaces:
        """Where what the program reads and changes beside modules and arguments stands now."""
        known = self._dependencies
        return OutsidePlaces(
            {number: self._tensors_at[label] for number, label in known.places.items()},
            {label: self._containers[now] for label, now in known.containers.items()},
        )

    def _set(self, picture: Picture) -> None:
        places = list(zip(picture.owners, picture.keys, picture.values, strict=True))
        self._owners, self._keys, self._values = _columns(
            place for place in places if not isinstance(place[0], Attributes)
        )
        self._objects, self._names, self._held_by_name = _columns(
            (owner.of, key, value) for owner, key, value in places if isinstance(owner, Attributes)
        )
        self._sized, self._sizes = picture.sized, list(map(len, picture.sized))
        self._absent = [owner for owner, _ in picture.absent], [name for _, name in picture.absent]
        self._states, self._tensors_at = picture.states, picture.tensors
        self._containers = picture.containers
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
        composite = [held for held in self._held if held is not None and is_composite(held)]
        self._wrappers = [SameWrapper(held) for held in composite if is_wrapper(type(held))]
        inside = opened(part for wrapper in self._wrappers for part in wrapper.parts.values())
        self._plain = [*filterfalse(is_composite, (held for held in self._held if held is not None)), *inside]
        loose = [(place, place[0][place[1]]) for place in self._attributes]
        others = [(([t], 0), t) for t in self._held if t is not None and not is_wrapper(type(t))]
        self._composite = [
            (place, look_of(t))
            for place, t in (*loose, *others)
            if has_attachments(type(t)) or is_composite(t)
        ]
        self._unique = self._tensors()
        self._look = TensorLooks(self._unique)
        self._storages = storages_of(self._model)

    def _tensors(self) -> list[Tensor]:
        """The plain tensors among parameters, buffers and attributes, and inside wrappers, each once."""
        others = (owner[key] for owner, key in self._attributes)
        plain = chain(self._plain, filterfalse(is_composite, others))
        return list({id(tensor): tensor for tensor in plain}.values())

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
                and all(map(is_, map(getattr, self._objects, self._names), self._held_by_name))
                and list(map(len, self._sized)) == self._sizes
                and not any(map(contains, *self._absent))
                and [switch() for switch in SWITCHES.values()] == self._switches
                and all(state_of(value) == state for value, state in self._states)
                and all(state_of(owner[key]) == state for (owner, key), state in self._looked_at)
                and self._are_tensors_alike()
                and held_among(leaves, self._storages) == self._dependencies.facts[HELD_ARGUMENTS]
                and self._dependencies.answers.other_answer(leaves, self._model) is None
            )
        except (LookupError, AttributeError, ValueError):  # something that was there is gone
            return False

    def _are_tensors_alike(self) -> bool:
        same = all(map(is_, map(getitem, *self._held_in), self._held))
        same = same and all(wrapper.holds() for wrapper in self._wrappers)
        same = same and all(look_of(owner[key]) == look for (owner, key), look in self._composite)
        return same and self._look.holds(self._tensors() if self._attributes else self._unique)
