"""The tensors of a call: where they are among its arguments, what they share, and stand-ins for them.

Tuples, lists, dicts and other pytrees are opened, and so are mappings, dataclasses and plain objects whose
attributes Python can list. Their tensors are read again at each call. Everything else is a constant of the
captured step and belongs to the form, with its type: `True`, `1` and `1.0` are three different calls.

A storage view is a storage with shape, strides and offset. Tensors with equal storage views are one value.

Stand-ins have a shape, strides and a device but no data. A parameter with two names in a model has one
stand-in, so tied weights stay tied. Tensors that share a storage have stand-ins that share one. Small integer
arguments may keep their values: their stand-ins are copies. The stand-in of a tensor that an op made before
the step is no leaf either: autograd hands its gradient on as it is, and copies that of a leaf into the leaf's
strides.

A slice of a data set counts with its own elements: the rest of its storage is there without the step too.
"""

import ast
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from math import prod
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from stowplan.alone import undone
from stowplan.capture.composite import (
    attached_to,
    attributes_of,
    composite_with,
    contents_of,
    has_attachments,
    is_composite,
    is_divided,
    is_wrapper,
    opened,
    parts_of,
    stand_in_with,
)
from stowplan.capture.sparse import is_sparse
from stowplan.errors import CaptureError
from stowplan.ir import DType
from stowplan.ir import Tensor as GraphTensor
from stowplan.torch_private import FakeTensor, FakeTensorMode, as_parameter, pytree, storage_id

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type(Ellipsis),
    Enum,
    np.generic,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch.Generator,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
)


@dataclass(frozen=True, slots=True)
class Spec:
    """The structure of arguments: a pytree whose leaves may be objects with leaves of their own."""

    tree: pytree.TreeSpec
    objects: tuple[tuple[int, type, "Spec"], ...] = ()  # by position among the leaves of `tree`

    def unflatten(self, leaves: list[object]) -> Any:
        """The arguments with these leaves; objects are shallow copies of the original kind."""
        found, taken = list[object](), iter(leaves)
        objects = {position: (kind, inner) for position, kind, inner in self.objects}
        for position in range(self.tree.num_leaves):
            if position in objects:
                kind, inner = objects[position]
                found.append(_rebuilt(kind, inner.unflatten([next(taken) for _ in range(inner.count)])))
            else:
                found.append(next(taken))
        return pytree.tree_unflatten(found, self.tree)

    @property
    def count(self) -> int:
        """The number of leaves, including those inside objects."""
        return self.tree.num_leaves - len(self.objects) + sum(inner.count for _, _, inner in self.objects)

    def __str__(self) -> str:
        inner = ", ".join(f"{position}: {kind.__qualname__} {spec}" for position, kind, spec in self.objects)
        return f"{self.tree}{' with ' + inner if inner else ''}"


def flatten(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[list[object], Spec]:
    """The leaves of the arguments, and their structure."""
    return flattened((args, dict(kwargs)))


def leaf_names(args: tuple[object, ...], kwargs: Mapping[str, object], positional: list[str]) -> list[str]:
    """A name per leaf: the parameter of `forward` it belongs to, and the path inside it."""
    return [".".join(path) for path in _paths((args, dict(kwargs)), positional)]


class TensorLook(NamedTuple):
    """What a captured step takes for granted of a tensor that it reads at each call."""

    kind: type[Tensor]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool


def look_of(leaf: object) -> object:
    """Equal for leaves that one captured step serves."""
    if isinstance(leaf, Tensor):
        if is_composite(leaf):
            return _look_of_composite(leaf)
        if has_attachments(type(leaf)):
            return _look_of_attachments(leaf)
        shape, stride = tuple(leaf.shape), leaf.stride()
        wants = leaf.requires_grad, leaf.is_leaf
        return TensorLook(type(leaf), shape, stride, leaf.dtype, leaf.device, *wants)
    if isinstance(leaf, float):  # a NaN is like itself, and -0.0 unlike 0.0
        return type(leaf), leaf.hex()
    if isinstance(leaf, complex):
        return type(leaf), leaf.real.hex(), leaf.imag.hex()
    if isinstance(leaf, slice):
        return slice, look_of(leaf.start), look_of(leaf.stop), look_of(leaf.step)
    if isinstance(leaf, (set, frozenset)):
        return type(leaf), frozenset(map(look_of, leaf))
    return type(leaf), leaf


def _look_of_composite(tensor: Tensor) -> object:
    leaves, spec = flattened(contents_of(tensor))
    return type(tensor), tensor.requires_grad, str(spec), tuple(map(look_of, leaves))


def _look_of_attachments(tensor: Tensor) -> object:
    leaves, spec = flattened(attributes_of(tensor))
    held = (type(leaf) if isinstance(leaf, nn.Module) else look_of(leaf) for leaf in leaves)
    return look_of(tensor.detach()), type(tensor), tensor.requires_grad, str(spec), tuple(held)


def _unlike_attachments(tensor: Tensor) -> str:
    """The same for a parameter of a class of the user's, which may hold tensors in attributes."""
    kind, known = type(tensor).__name__, {id(held) for _, held in attached_to(tensor)}
    if tensor.requires_grad:
        return f"is a {kind} that requires a gradient, which plans have for nn.Parameter itself alone"
    for leaf in flattened(attributes_of(tensor))[0]:
        if isinstance(leaf, Tensor):
            if why := unlike_plain(leaf):
                return f"is a {kind}, and a tensor in an attribute {why}"
            if id(leaf) not in known:
                return f"is a {kind} with tensors in lists or dicts: keep each in an attribute"
        elif not is_constant(leaf) and not isinstance(leaf, nn.Module):
            return f"is a {kind} that keeps a {_kind_name(leaf)}, which cannot be compared at the next call"
    return ""


def unlike_plain(tensor: Tensor) -> str:
    """Why a plan cannot read a tensor, after its name, and what to do; empty for tensors it can read."""
    if tensor.is_nested:
        return (
            "is a nested tensor, whose shapes a plan does not know: pad it, as in"
            " torch.nested.to_padded_tensor(x, 0)"
        )
    if tensor.is_quantized:
        return "is quantized, and its ops have no backward: give x.dequantize()"
    if is_sparse(tensor):
        return (
            "is a sparse tensor that requires a gradient, and plans have gradients for dense tensors alone:"
            " give x.to_dense(), or x.detach()"
            if tensor.requires_grad
            else ""
        )
    if is_wrapper(type(tensor)):
        return _unlike_wrapper(tensor)
    if has_attachments(type(tensor)):
        return _unlike_attachments(tensor)
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return (
            f"has the layout {layout}, and plans are of dense tensors: give x.to_dense(), or fit the parts"
            " of the"
            " model that read dense tensors alone"
        )
    return ""


def _unlike_wrapper(tensor: Tensor) -> str:
    """The same for an object of a wrapper subclass."""
    kind = type(tensor).__name__
    if is_divided(type(tensor)):
        return (
            f"is a {kind} of which this worker has a part: fit first, then divide what fit returns, as in"
            " fully_shard(fit(...)); or give x.to_local() or x.full_tensor()"
        )
    if tensor.requires_grad:
        return (
            f"is a {kind} that requires a gradient, and plans have gradients for plain tensors alone: train"
            " adapters beside it, with requires_grad_(False) on it, or give what it unpacks to"
        )
    leaves, _ = flattened(contents_of(tensor))
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if why := unlike_plain(leaf):
                return f"is a {kind}, and a tensor inside {why}"
            if type(leaf) not in (Tensor, nn.Parameter):
                return f"is a {kind} around a {type(leaf).__name__}, which does not say what is inside"
        elif not is_constant(leaf):
            return f"is a {kind} that keeps a {_kind_name(leaf)}, which cannot be compared at the next call"
    return ""


def refuse_opaque(leaves: list[object], names: list[str]) -> None:
    """Raise CaptureError for the first leaf that may hide tensors or change unnoticed."""
    for leaf, name in zip(leaves, names, strict=True):
        inside = leaf if isinstance(leaf, (set, frozenset)) else (leaf,)
        if not isinstance(leaf, Tensor) and not all(isinstance(item, _PLAIN) for item in inside):
            raise CaptureError(
                f"argument {name!r} is a {_kind_name(leaf)}, whose contents cannot be read at each call",
                advice=f"pass {'a tensor made of it' if isinstance(leaf, np.ndarray) else 'its tensors'};"
                " tuples, lists, dicts, dataclasses and objects with plain attributes are opened",
            )


def flattened(value: object) -> tuple[list[object], Spec]:
    """The leaves of one value, and its structure."""
    outer, tree = pytree.tree_flatten(value)
    leaves, objects = list[object](), list[tuple[int, type, Spec]]()
    for position, leaf in enumerate(outer):
        contents = contents_by_name(leaf)
        if contents is None:
            leaves.append(leaf)
            continue
        inside, spec = flattened(contents)
        leaves += inside
        objects.append((position, type(leaf), spec))
    return leaves, Spec(tree, tuple(objects))


def is_constant(value: object) -> bool:
    """Whether a value holds no tensor and is part of what a call is planned for."""
    return isinstance(value, _PLAIN)


def contents_by_name(leaf: object) -> dict[Any, object] | None:
    """The contents of an object by name; None for a leaf."""
    if isinstance(leaf, Tensor) and is_composite(leaf):
        return contents_of(leaf)
    if isinstance(leaf, (Tensor, nn.Module, np.ndarray, *_PLAIN)):
        return None
    if isinstance(leaf, MutableMapping):
        return dict(leaf)
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    is_plain = type(leaf).__reduce_ex__ is object.__reduce_ex__ and not any(map(_hides, type(leaf).__mro__))
    return dict(vars(leaf)) if is_plain and hasattr(leaf, "__dict__") else None


def _hides(kind: type) -> bool:
    """Whether objects of a class have state beside their attributes: slots, or what C keeps, as in a list."""
    if kind in (object, SimpleNamespace):
        return False
    own = vars(kind)
    return bool(own.get("__slots__")) or isinstance(own.get("__new__"), BuiltinFunctionType)


def _rebuilt(kind: type, contents: dict[Any, object]) -> object:
    """An object of this kind with these contents. No code of a plain class runs, as a copy would."""
    if issubclass(kind, Tensor):
        return composite_with(contents)
    if issubclass(kind, MutableMapping):
        made_of: Callable[..., object] = kind
        return made_of(contents)
    base = SimpleNamespace if issubclass(kind, SimpleNamespace) else object
    made: object = base.__new__(kind)
    for name, value in contents.items():
        object.__setattr__(made, name, value)
    return made


def unopened(
    args: tuple[object, ...], kwargs: Mapping[str, object], positional: list[str]
) -> Iterator[tuple[str, object]]:
    """The leaves of the arguments with their names, objects and composite tensors as they are."""
    return ((".".join(path), leaf) for path, leaf in _outer_paths((args, dict(kwargs)), positional))


def _outer_paths(value: object, positional: list[str]) -> Iterator[tuple[list[str], object]]:
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        side, key, *inner = (str(key).strip("[].'") for key in path)
        yield [positional[int(key)] if side == "0" else key, *inner], leaf


def _paths(value: object, positional: list[str]) -> Iterator[list[str]]:
    for outer, leaf in _outer_paths(value, positional):
        contents = contents_by_name(leaf)
        if contents is None:
            yield outer
        else:  # as keyword arguments, whose names are their own
            yield from ([*outer, *found] for found in _paths(((), contents), []))


def _kind_name(leaf: object) -> str:
    kind = type(leaf)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True, slots=True)
class StorageView:
    """A storage, by number, and the shape, strides and offset at which a tensor reads it."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    flipped: tuple[bool, bool] = (False, False)  # lazily conjugated, lazily negated

    def is_dense(self) -> bool:
        """Whether its elements fill a block of memory without gaps or overlaps, in some order of dims."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def extent_bytes(self) -> int:
        """Bytes from its first element to its last."""
        return extent_of(self.shape, self.stride) * self.dtype.itemsize

    def element_bytes(self) -> int:
        """Bytes of its elements; one that an expanded dim repeats counts once."""
        sizes = (size for size, step in zip(self.shape, self.stride, strict=True) if step or not size)
        return prod(sizes) * self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Whether its elements lie in the order of its dims."""
        return self.stride == contiguous_stride(self.shape) or (
            self.is_dense() and list(self.stride) == sorted(self.stride, reverse=True)
        )


def extent_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements there are from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major tensor, as PyTorch computes them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def view_bytes(views: Iterable[StorageView], storage_bytes: int) -> int:
    """What `views` read of a storage that was there before the step: their elements, shared ones once."""
    distinct = sorted(set(views), key=lambda view: view.offset * view.dtype.itemsize)
    covered = end = 0
    for view in distinct:
        first = view.offset * view.dtype.itemsize
        last = first + view.extent_bytes()
        covered, end = covered + max(0, last - max(first, end)), max(end, last)
    return min(storage_bytes, covered, sum(view.element_bytes() for view in distinct))


def bytes_read(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The same for the storages of living tensors, by identity."""
    storages, views = dict[int, int](), dict[int, list[StorageView]]()
    for tensor in opened(tensors):
        storage = tensor.untyped_storage()
        number = storage_id(storage)
        storages[number] = storage.nbytes()
        views.setdefault(number, []).append(_view_of(tensor, 0))
    return {number: view_bytes(views[number], nbytes) for number, nbytes in storages.items()}


def _view_of(tensor: Tensor, storage: int) -> StorageView:
    return StorageView(
        storage,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
        (tensor.is_conj(), tensor.is_neg()),
    )


@dataclass(slots=True)
class Lifetime:
    """A storage's bytes, the event that made it (-1: it existed before) and the last event it saw."""

    nbytes: int
    born: int
    died: int | None = None


class StorageBook:
    """Numbers storages as they appear and records when they are freed, as eager would free them."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.lifetimes: list[Lifetime] = []
        self._now = now
        self._open: dict[
            int, tuple[int, object]
        ] = {}  # address -> number and the weak reference that closes it

    def knows(self, tensor: Tensor) -> bool:
        """Whether the storage of `tensor` has been seen."""
        return storage_id(tensor.untyped_storage()) in self._open

    def view_of(self, tensor: Tensor, *, born: int = -1) -> StorageView:
        """The storage view of `tensor`; a new storage is recorded as born at event `born`."""
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} has the layout {tensor.layout}",
                advice="forward may read sparse tensors, and neither make nor return them: give x.to_dense();"
                " embeddings take sparse=False",
            )
        return _view_of(tensor, self._number_of(tensor.untyped_storage(), born))

    def enter(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Note all tensors that are there before the step: what they read of their storages counts.

        Returns the bytes of the storages, by number, of which they read a part.
        """
        views, parts = dict[int, list[StorageView]](), dict[int, int]()
        for view in map(self.view_of, tensors):
            views.setdefault(view.storage, []).append(view)
        for number, read in views.items():
            life = self.lifetimes[number]
            whole, life.nbytes = life.nbytes, view_bytes(read, life.nbytes)
            if life.nbytes < whole:
                parts[number] = whole
        return parts

    def living_bytes(self) -> int:
        """Bytes of the storages that exist now."""
        return sum(self.lifetimes[number].nbytes for number, _ in self._open.values())

    def _number_of(self, storage: torch.UntypedStorage, born: int) -> int:
        address = storage_id(storage)
        if address in self._open:
            return self._open[address][0]
        number = len(self.lifetimes)
        self.lifetimes.append(Lifetime(storage.nbytes(), born))
        self._open[address] = number, weakref.ref(storage, lambda _: self._close(address, number))
        return number

    def _close(self, address: int, number: int) -> None:
        self._open.pop(address, None)
        self.lifetimes[number].died = self._now() - 1


def stride_of(tensor: GraphTensor) -> tuple[int, ...]:
    """The strides of a graph's tensor; row-major unless the layout states them."""
    found: tuple[int, ...] = (
        ast.literal_eval(tensor.layout) if tensor.layout else contiguous_stride(tensor.shape or ())
    )
    return found


def torch_dtype(dtype: DType | None) -> torch.dtype:
    """PyTorch's dtype for a graph's."""
    name = "float8_e4m3fn" if dtype is DType.FLOAT8 else str(dtype)
    found: torch.dtype = getattr(torch, name)
    return found


def same_strides(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two strides place the elements alike; the stride of a dim of size 1 does not matter."""
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size > 1)


def is_permuted(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements lie in another order than row by row, ignoring gaps and repeated ones."""
    steps = [step for size, step in zip(shape, stride, strict=True) if size > 1 and step]
    return steps != sorted(steps, reverse=True)


_KNOWN_BYTES = 1 << 19  # of a storage whose values are known


class StandIns:
    """Makes one stand-in for each of `tensors` and remembers the original.

    Storages that contain nothing but `known` tensors, which must be small integers, are copied.
    """

    def __init__(
        self, device: torch.device, tensors: Iterable[Tensor] = (), known: Iterable[Tensor] = ()
    ) -> None:
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._made: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # also holds the original, so that its id stays unique
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # likewise
        self._begins: dict[int, int] = {}  # by storage, the first byte in use
        self._known: set[int] = set()  # storages whose stand-ins have values
        self.results: dict[Tensor, _Gradient] = {}  # of the stand-ins that are no leaves
        self._wrappers: list[tuple[Tensor, dict[str, object], object]] = []  # as they were made
        self.origins: list[Tensor] = []  # what autograd takes them to be computed from
        values = {id(tensor) for tensor in known if is_small_integer(tensor)}
        unknown: set[int] = set()
        for tensor in filter(_is_plain, opened(tensors)):
            storage = storage_id(tensor.untyped_storage())
            if id(tensor) in values and storage not in unknown:
                self._known.add(storage)
            else:
                unknown.add(storage)
                self._known.discard(storage)
            self._begins[storage] = min(self._begins.get(storage, _first_byte(tensor)), _first_byte(tensor))

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of `tensor`; for a tensor on the meta device, on the device of the step."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._make(tensor)
        return self._made[id(tensor)][1]

    def gradient_of(self, stand_in: Tensor) -> Tensor | None:
        """What backward left for a stand-in that requires a gradient."""
        return self.results[stand_in].arrived if stand_in in self.results else stand_in.grad

    def changed_wrapper(self) -> tuple[Tensor, str] | None:
        """A stand-in of a wrapper subclass that is not as it was made, and what is another about it."""
        for made, held, look in self._wrappers:
            now = vars(made)
            for name in (*held, *now):
                if name not in now or name not in held or now[name] is not held[name]:
                    return made, repr(name)
            if look_of(made) != look:
                return made, "shape, strides, requires_grad or what its class says"
        return None

    def has_new_history(self, stand_in: Tensor) -> bool:
        """Whether the step wrote into a tensor that autograd then follows as the result of that write."""
        return stand_in in self.results and stand_in.grad_fn is not self.results[stand_in].node

    def _make(self, tensor: Tensor) -> Tensor:
        if is_composite(tensor) and not unlike_plain(tensor):
            held = {name: self.of(part) for name, part in parts_of(tensor).items()}
            made = composite_with({**contents_of(tensor), **held})
            if is_wrapper(type(tensor)):
                self._wrappers.append((made, dict(vars(made)), look_of(made)))
            return made
        if not _is_plain(tensor):
            shape = "x".join(map(str, tensor.shape)) if tensor.layout is torch.strided else "any shape"
            why = (
                unlike_plain(tensor)
                or f"is of {type(tensor).__name__}, a subclass of tensors, which cannot be captured: give"
                " x.as_subclass(torch.Tensor), if its ops are those of tensors"
            )
            raise CaptureError(f"a tensor of {shape} {why}")
        device = self._device if tensor.is_meta else tensor.device
        if storage_id(tensor.untyped_storage()) in self._known:
            return self._copy_of(tensor)
        storage, offset = self._storage_of(tensor), self._offset_of(tensor)
        with torch.no_grad():
            meta = torch.empty(0, dtype=tensor.dtype, device="meta")
            meta.set_(storage, offset, tensor.shape, tensor.stride())
        made = FakeTensor(self.fakes, meta, device)
        if has_attachments(type(tensor)):
            leaves, spec = flattened(attributes_of(tensor))
            again = [self.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            seen = stand_in_with(made, type(tensor), spec.unflatten(again))
            self._wrappers.append((seen, dict(vars(seen)), look_of(seen)))
            return seen
        if isinstance(tensor, nn.Parameter):
            return as_parameter(made, requires_grad=tensor.requires_grad)
        if tensor.is_leaf:
            return made.requires_grad_(tensor.requires_grad)
        gradient = _Gradient()
        origin = torch.empty(0, requires_grad=True)
        self.origins.append(origin)
        result = _as_result(origin, made, gradient)
        gradient.node, self.results[result] = result.grad_fn, gradient
        return result

    def _copy_of(self, tensor: Tensor) -> Tensor:
        original = tensor.untyped_storage()
        if storage_id(original) not in self._storages:
            held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(original)
            used = held[self._begins[storage_id(original)] :]
            made = torch.zeros_like(held)
            made[: len(used)] = used
            self._storages[storage_id(original)] = original, made.untyped_storage()
        storage, offset = self._storages[storage_id(original)][1], self._offset_of(tensor)
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, offset, tensor.shape, tensor.stride())

    def _storage_of(self, tensor: Tensor) -> torch.UntypedStorage:
        original = tensor.untyped_storage()
        if storage_id(original) not in self._storages:
            made = torch.empty(original.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self._storages[storage_id(original)] = original, made
        return self._storages[storage_id(original)][1]

    def _offset_of(self, tensor: Tensor) -> int:
        """Counted from the first tensor in the storage: the next batch may lie elsewhere in it."""
        first = _first_byte(tensor)
        begin = self._begins.get(storage_id(tensor.untyped_storage()), first)
        offset, odd = divmod(first - begin, tensor.element_size())
        if odd:
            raise CaptureError(
                f"a tensor of {tensor.dtype} shares memory with others and begins between their elements",
                advice="pass a copy of it",
            )
        return offset

    def inside(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within, the parameters and buffers of `model` are stand-ins; afterwards its own."""
        return with_tensors(model, self.of)


@dataclass(slots=True, eq=False)
class _Gradient:
    """The gradient of a tensor that is no leaf, when it has come to the node of that tensor."""

    arrived: Tensor | None = None
    node: Node | None = None


class _Result(torch.autograd.Function):
    """Stands for the op that made a tensor before the step."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, made: Tensor, gradient: _Gradient) -> Tensor:
        del before  # autograd differentiates the result because of it
        ctx.gradient = gradient
        ctx.mark_dirty(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ctx.gradient.arrived,) = gradients
        return None, None, None


_as_result: Callable[..., Tensor] = _Result.apply


@contextmanager
def with_tensors(model: nn.Module, other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, each parameter and buffer of `model` is replaced by `other` of it."""
    tables = [
        cast(dict[str, Tensor | None], table)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        if isinstance(table, dict)  # those of scripted modules cannot be written
    ]
    originals = [dict(table) for table in tables]

    def put_back() -> None:
        for table, original in zip(tables, originals, strict=True):
            table.clear()
            table.update(original)

    with undone(put_back):
        for table in tables:
            table.update({name: other(held) for name, held in table.items() if held is not None})
        yield


def is_small_integer(tensor: Tensor) -> bool:
    """Whether the values of a tensor are few and whole, so that they can be known."""
    small = tensor.untyped_storage().nbytes() <= _KNOWN_BYTES
    return small and not tensor.is_meta and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _is_plain(tensor: Tensor) -> bool:
    known = type(tensor) in (Tensor, nn.Parameter) or has_attachments(type(tensor))
    return known and not unlike_plain(tensor)


def _first_byte(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()
