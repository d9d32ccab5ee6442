"""What forward changes other than by ops, so that every planned call changes it too.

A step is recorded on stand-ins of all tensors that existed before it, in copies of the containers that its
arguments come in. What forward did to these is known when it has returned:

| forward | a planned call |
|---|---|
| binds a parameter or buffer to new memory: `k.data = ...`, `set_` | writes the new contents into the old |
| binds an argument to new memory | binds it to the result |
| sets `requires_grad`; sets `.grad` to None | does so |
| changes a container or object among the arguments: `batch["x"] = x` | does so, with its own results |
| stores tensors that it makes: `self.maps = maps`, `LOG["h"] = h`, `kept.append(h)` | does so, with its own |
| changes a shape or strides, or makes two tensors share memory | refused |

`Beside` carries tensors that only such changes need as further results of the step.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stowplan.alone import uninterrupted
from stowplan.capture.origins import Origins
from stowplan.capture.stand_ins import Spec, contents_by_name, flattened, is_constant
from stowplan.errors import CaptureError
from stowplan.torch_private import FakeTensor, pytree

Place: TypeAlias = int | str
"""A tensor of the user's: a leaf of the arguments by position, a parameter or buffer by name."""

CELL = "cell_contents"
"""The key of what a variable of a closure, or a list as a whole, holds."""

Path: TypeAlias = tuple[Any, ...]
"""Keys, indices and attributes that lead from `(args, kwargs)` to something in it."""


@dataclass(frozen=True, slots=True)
class At:
    """What stood at this place of the arguments before the step."""

    path: Path


@dataclass(frozen=True, slots=True)
class NewEntry:
    """The tensor with this number among those beside what the step returns."""

    number: int


@dataclass(frozen=True, slots=True)
class New:
    """A container that forward made, of values like these."""

    spec: Spec
    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A container or object among the arguments, and all that it holds after forward."""

    path: Path
    items: tuple[tuple[Any, object], ...]  # values are At, Result, New, or constants


@dataclass(frozen=True, slots=True)
class OldEntry:
    """What stood at this index of a list before the step."""

    index: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What forward leaves under a key of a container: of the module at the path `label`, or of another.

    Of a list it is all that is in it then, as a tuple: a list is as long before each call, for it is guarded.
    """

    label: str
    key: Any
    value: object  # of At, Result, New, or constants; in a list of Before too
    in_module: bool

    @property
    def name(self) -> str:
        """What the user calls it."""
        if self.in_module:
            return f"{self.label}.{self.key}".lstrip(".")
        return self.label if self.key == CELL else f"{self.key!r} of {self.label}"

    def numbers(self) -> Iterator[int]:
        """The numbers of the results in it."""
        return _numbers(self.value)

    def put_into(self, holder: Any, made: Callable[[object], object]) -> None:
        """Do what forward did to the container."""
        if not isinstance(self.value, tuple):
            holder[self.key] = made(self.value)
            return
        before = list(holder)
        now = [before[value.index] if isinstance(value, OldEntry) else made(value) for value in self.value]
        holder.clear()
        holder.extend(now)


@dataclass(frozen=True, slots=True)
class Changes:
    """What each call of a step does beside its ops."""

    flags: tuple[tuple[Place, bool], ...] = ()  # `requires_grad`
    cleared: tuple[Place, ...] = ()  # whose `.grad` becomes None
    bound: tuple[tuple[Place, int], ...] = ()  # to the memory of the result with this number
    rewritten: tuple[Rewritten, ...] = ()
    stored: tuple[Stored, ...] = ()

    def told(self) -> str:
        """The first of them, as what forward does."""
        if self.flags:
            return f"sets requires_grad of {self.flags[0][0]!r}"
        if self.cleared:
            return f"drops the gradient of {self.cleared[0]!r}"
        if self.stored:
            return f"stores tensors in {self.stored[0].name!r}"
        return "binds an argument to other memory" if self.bound else "changes a container of its arguments"

    def stays(self) -> tuple[int, ...]:
        """The numbers of the results that are held until the next call stores others."""
        return tuple(dict.fromkeys(number for each in self.stored for number in each.numbers()))

    def before(self, find: Callable[[Place], Tensor]) -> None:
        """What has to be done before the step runs, so that gradients come where eager has them."""
        for place in self.cleared:
            find(place).grad = None
        for place, flag in self.flags:
            if flag:
                find(place).requires_grad_()

    def after(
        self,
        find: Callable[[Place], Tensor],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        results: Sequence[Tensor],
        holder_of: Callable[[Stored], Any],
    ) -> None:
        """The rest, with the tensors beside what the step returns."""
        for place, number in self.bound:
            find(place).data = results[number].detach()
        for place, flag in self.flags:
            if not flag:
                find(place).requires_grad_(False)
        whole = (args, kwargs)
        ready = [
            (at(whole, each.path), [(key, _made(value, whole, results)) for key, value in each.items])
            for each in self.rewritten
        ]
        for container, items in ready:
            _rewrite(container, items)
        for each in self.stored:
            each.put_into(holder_of(each), lambda value: _made(value, whole, results))


@dataclass(frozen=True, slots=True)
class Beside:
    """What a step returns, and tensors for what it changes."""

    returned: object
    tensors: tuple[Tensor, ...]
    changes: Changes


pytree.register_pytree_node(
    Beside,
    lambda beside: ([beside.returned, *beside.tensors], beside.changes),
    lambda children, changes: Beside(next(iter(children)), tuple(children)[1:], changes),
)


def changes_of(output_spec: pytree.TreeSpec) -> Changes | None:
    """What a step with this result changes beside its ops."""
    if output_spec.type is not Beside:
        return None
    changes: Changes = output_spec.context
    return changes


def at(whole: object, path: Path) -> Any:
    """What stands there now."""
    found: Any = whole
    for key in path:
        found = found[key] if isinstance(found, (Mapping, Sequence)) else getattr(found, key)
    return found


def _numbers(value: object) -> Iterator[int]:
    if isinstance(value, NewEntry):
        yield value.number
    elif isinstance(value, (New, tuple)):
        for inner in value.values if isinstance(value, New) else value:
            yield from _numbers(inner)


def _made(value: object, whole: object, results: Sequence[Tensor]) -> object:
    match value:
        case At(path):
            return at(whole, path)
        case NewEntry(number):
            return results[number]
        case New(spec, values):
            return spec.unflatten([_made(inner, whole, results) for inner in values])
        case _:
            return value


def _rewrite(container: Any, items: Sequence[tuple[Any, object]]) -> None:
    """Give a container these items, in this order."""
    if isinstance(container, MutableMapping):
        container.clear()
        container.update(items)
    elif isinstance(container, (list, deque)):
        container.clear()
        container.extend(value for _, value in items)
    else:
        names = dict(items)
        for gone in [name for name in _contents(container) if name not in names]:
            delattr(container, gone)
        for name, value in items:
            setattr(container, name, value)


class Containers:
    """The containers and objects of one call's arguments, as they were before the step."""

    def __init__(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._whole = args, kwargs
        self._paths: dict[int, Path] = {}  # of tensors, containers and objects, by identity
        self._before: list[tuple[Path, Any, dict[Any, object]]] = []
        for path, value in _walk(self._whole, ()):
            self._paths.setdefault(id(value), path)
            if not isinstance(value, (Tensor, tuple)):
                self._before.append((path, value, _contents(value)))

    def rewritten(
        self, result_of: Callable[[Tensor, str], NewEntry], name_of: Callable[[Path], str]
    ) -> Iterator[Rewritten]:
        """Those that are not as they were; raises CaptureError if a call could not do the same."""
        for path, container, before in self._before:
            now = _contents(container)
            if list(now) == list(before) and all(map(_is_same, now.values(), before.values())):
                continue
            name = name_of(path)
            is_plain = isinstance(container, (MutableMapping, list, deque))
            if not is_plain and contents_by_name(container) is None:
                raise CaptureError(
                    f"forward changes {name!r}, a {type(container).__name__} among the arguments",
                    advice="change it outside forward, or use a dict or a list there",
                )
            held = tuple(
                (key, self.told(value, result_of, f"the argument at {name}[{key!r}]"))
                for key, value in now.items()
            )
            yield Rewritten(path, held)

    def told(self, value: object, result_of: Callable[[Tensor, str], NewEntry], name: str) -> object:
        if id(value) in self._paths:
            return At(self._paths[id(value)])
        if isinstance(value, Tensor):
            return result_of(value, name)
        if is_constant(value):
            return value
        leaves, spec = flattened(value)
        if len(leaves) == 1 and leaves[0] is value:
            raise CaptureError(
                f"forward puts a {type(value).__name__} into {name}",
                advice="put tensors and plain values there, or do it outside forward",
            )
        return New(spec, tuple(self.told(leaf, result_of, name) for leaf in leaves))


class Stores:
    """Where forward may leave tensors beside its result, and what stood there before.

    These are the attributes of modules, and the `containers` that its code comes to, by label.
    """

    def __init__(
        self, modules: Mapping[nn.Module, str], containers: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        own = [(path, vars(module), True) for module, path in modules.items()]
        others = [(label, container, False) for label, container in containers.items()]
        self._before = [
            (label, holder, _contents(holder), in_module) for label, holder, in_module in (*own, *others)
        ]

    def stored(self, told: Callable[[object, str], object]) -> Iterator[Stored]:
        """Places that hold tensors now; raises CaptureError if they also hold what a call could not make."""
        for label, holder, before, in_module in self._before:
            found = _with_tensors(holder, before)
            if found and isinstance(holder, (list, deque)):
                old = list(map(id, before.values()))
                values = (OldEntry(old.index(id(v))) if id(v) in old else told(v, label) for v in holder)
                yield Stored(label, CELL, tuple(values), in_module)
                continue
            for key, value in found:
                name = Stored(label, key, None, in_module).name
                yield Stored(label, key, told(value, name), in_module)

    def put_back(self) -> None:
        """Remove stand-ins: what stood there before stands there again."""
        for _, holder, before, _ in self._before:
            found = [key for key, _ in _with_tensors(holder, before)]
            if found and isinstance(holder, (list, deque)):
                holder.clear()
                holder.extend(before.values())
                continue
            for key in found:
                if key in before:
                    holder[key] = before[key]
                else:
                    del holder[key]


def _with_tensors(holder: Any, before: Mapping[Any, object]) -> list[tuple[Any, object]]:
    """The items of a container that are others than before, and have tensors."""
    return [
        (key, value)
        for key, value in _contents(holder).items()
        if key not in _TABLES and not (key in before and before[key] is value) and not is_constant(value)
        if any(isinstance(leaf, Tensor) for leaf in flattened(value)[0])
    ]


_TABLES = ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs")  # an RNN's too


def _is_same(one: object, other: object) -> bool:
    return one is other or (is_constant(one) and type(one) is type(other) and one == other)


def _walk(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """All tensors, containers and objects in a value, with the way to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (set, frozenset)) or not is_constant(value):
        yield path, value
        for key, inner in _contents(value).items():
            yield from _walk(inner, (*path, key))


def _contents(value: Any) -> dict[Any, object]:
    """What a container or object holds, by key, index or attribute."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    found = contents_by_name(value)
    return found if found is not None else dict(enumerate(pytree.tree_iter(value)))


_DATA_SET, _FLAG_SET = Tensor.data.__set__, Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_GRAD_SET, _GRAD_GET = Tensor.grad.__set__, Tensor.grad.__get__  # type: ignore[union-attr]


class SettersWatched(TorchFunctionMode):
    """Notes which tensors forward binds to other memory and whose gradients it drops, and at which line.

    `held` are the stand-ins by identity, with their names. A tensor that is neither one of these nor made by
    the step is the user's own, in an attribute or a global: it must not be touched. Those `without_gradient`
    have none and will have none: forward may ask for it.
    """

    def __init__(
        self,
        held: Mapping[int, str],
        is_made: Callable[[Tensor], bool],
        origins: Origins,
        without_gradient: Collection[int] = (),
    ) -> None:
        super().__init__()
        self._without_gradient = without_gradient
        self.lines: dict[int, str] = {}
        self.cleared: dict[int, None] = {}
        self._held, self._is_made, self._origins = held, is_made, origins

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _WATCHED and isinstance(args[0], Tensor):
            tensor = args[0]
            name = self._held.get(id(tensor))
            if name is not None or not (isinstance(tensor, FakeTensor) or self._is_made(tensor)):
                self._look(func, tensor, name, (*args, *given.values()))
        with uninterrupted():  # see `interruptible`
            return func(*args, **given)

    def _look(self, func: Any, tensor: Tensor, name: str | None, args: tuple[Any, ...]) -> None:
        what, value = _WATCHED[func], args[1] if len(args) > 1 else True
        if func == _GRAD_GET:
            if name is not None and id(tensor) not in self._without_gradient:
                raise CaptureError(
                    f"forward reads the gradient of {name}",
                    where=self._origins.here().source,
                    advice="a plan does not keep what .grad held before the call: pass it in as an argument",
                )
            return
        if what == "requires_grad" and value == tensor.requires_grad:
            return
        if name is None:
            raise CaptureError(
                f"forward sets {what} of a tensor of shape {tuple(tensor.shape)} that is no argument,"
                " parameter or buffer",
                where=self._origins.here().source,
                advice="register it with register_buffer, or set it outside forward",
            )
        if func == _GRAD_SET:
            if value is not None:
                raise CaptureError(
                    f"forward sets the gradient of {name}",
                    where=self._origins.here().source,
                    advice="set it after backward, or let autograd compute it",
                )
            self.cleared[id(tensor)] = None
        self.lines[id(tensor)] = self._origins.here().source


_WATCHED = {
    _DATA_SET: "the .data",
    _GRAD_SET: "the .grad",
    _GRAD_GET: "the .grad",
    _FLAG_SET: "requires_grad",
    Tensor.requires_grad_: "requires_grad",
}


@dataclass(frozen=True, slots=True)
class _Kept:
    """One tensor of the user's as it was: where its memory is, and what autograd knows of it."""

    tensor: Tensor
    memory: Tensor
    requires_grad: bool
    gradient: Tensor | None

    def put_back(self) -> None:
        now, was = self.tensor, self.memory
        look = (was.data_ptr(), was.shape, was.stride(), was.dtype)
        if (now.data_ptr(), now.shape, now.stride(), now.dtype) != look:
            now.data = was
        if now.is_leaf and now.requires_grad != self.requires_grad:
            now.requires_grad_(self.requires_grad)
        if now.is_leaf and now.grad is not self.gradient:
            now.grad = self.gradient


class AsBefore:
    """Tensors of the user's whose own forward is about to run: on leaving, each is put back as it was."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        plain = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self._kept = [
            _Kept(tensor, tensor.data, tensor.requires_grad, tensor.grad if tensor.is_leaf else None)
            for tensor in plain
        ]

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, *_: object) -> None:
        for kept in self._kept:
            kept.put_back()
