"""Following the storages of tensors below autograd: a dispatch mode that sees each op and changes none.

The mode calls the op as it came, notes the storages of its results, and keeps a weak reference to each. The
first time an op meets such arguments, PyTorch's old profiler, which is of one thread, counts what its kernel
takes and gives back: that is memory without a tensor.
"""

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn

from stowplan.observe.blocks import BEFORE, BlockOrigin, Blocks, LiveBlock
from stowplan.observe.record import GRADIENTS
from stowplan.torch_private import (
    MODULE_CALL,
    OpOverload,
    TorchDispatchMode,
    allocations_within,
    dispatch_modes,
    is_profiled,
    nodes_made,
    pytree,
    running_node,
    schema_of,
    storage_id,
)

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in {
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.__file__),
        str(Path(torch.__file__).parent),
        str(Path(__file__).parents[1]),
    }
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OWN = tuple(os.path.join(folder, "") for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_USERS, _LIBRARY = "the user's", "a library's"
_MUCH, _MORE = 2**26, 1.25  # bytes from which on growth is written, and by how much each time
_RESIZING = {"aten::resize_", "aten::set_", "aten::resize_as_"}


class Follower(Protocol):
    """Who knows where the script is, and what to do when memory ends."""

    def origin(self) -> BlockOrigin:
        """The place of what is allocated now."""
        ...

    def node_origin(self, number: int) -> BlockOrigin | None:
        """The place of the op that an autograd node differentiates."""
        ...

    def note_nodes(self, since: int, until: int, origin: BlockOrigin) -> None:
        """These autograd nodes were made there."""
        ...

    def grows(self) -> None:
        """More is alive than ever."""
        ...

    def fails(self, error: BaseException, op: str) -> None:
        """An op ends with an error that may be for want of memory."""
        ...


class _OutOfLimit(torch.OutOfMemoryError):
    """Shown under the name of PyTorch's error, which a script may expect."""


_OutOfLimit.__name__ = _OutOfLimit.__qualname__ = "OutOfMemoryError"
_OutOfLimit.__module__ = "torch"


class ObservedMemory:
    """The storages that are alive, by number."""

    def __init__(self, follower: Follower, limit_bytes: int | None = None) -> None:
        self.blocks = Blocks()
        self.is_partial = False  # whether kernels were not counted
        self.counts_kernels = True
        self._follower, self._limit_bytes = follower, limit_bytes
        self._alive: dict[int, LiveBlock] = {}
        self._refs: dict[int, Any] = {}
        self._extra: dict[object, int] = {}
        self._files: dict[str, str] = {}
        self._told_bytes = _MUCH
        self.mode = _Mode(self)
        self.is_on = self.is_entered = False  # whether ops are seen, and whether the mode is around
        self.device = "cpu"  # the type of the device whose memory is followed

    def start(self, device: str) -> None:
        """See each op of this thread from now on, and the tensors on this type of device."""
        self.device, self.is_on, self.is_entered = device, True, True
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """See no more ops. Below a mode that was entered since, ours passes ops on until the next call."""
        self.is_on = False
        if self.is_entered and dispatch_modes()[-1:] == [self.mode]:
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.is_entered = False

    def forget(self) -> None:
        """Follow no storage any more."""
        self._refs.clear()
        self._alive.clear()

    def alive(self) -> list[LiveBlock]:
        """The blocks that are alive now."""
        return list(self._alive.values())

    def block_of(self, tensor: Tensor) -> LiveBlock | None:
        """The block of a tensor that is known."""
        storage = self._storage_of(tensor)
        return None if storage is None else self._alive.get(storage_id(storage))

    def note(
        self, tensor: Tensor, kind: str = "", origin: BlockOrigin | None = None, op: str = ""
    ) -> LiveBlock | None:
        """Follow the storage of a tensor. Without an origin it is older than observing."""
        storage = self._storage_of(tensor)
        if storage is None:
            return None
        number = storage_id(storage)
        block = self._alive.get(number)
        if block is None:
            nbytes = storage.nbytes()
            if not nbytes:
                return None
            block = self.blocks.begin(nbytes, origin or BEFORE, op, kind, is_old=origin is None)
            self._alive[number] = block
            self._refs[number] = ref(storage, lambda _: self._ended(number, block))
        elif kind and not block.kind:
            block.kind = kind
        return block

    def _ended(self, number: int, block: LiveBlock) -> None:
        if self._alive.get(number) is block:
            del self._alive[number]
            self._refs.pop(number, None)
            self.blocks.end(block)
            if block.kind == GRADIENTS and self.blocks.keeps:
                block.ended = self._follower.origin()

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op, and note what it allocates."""
        before = nodes_made()
        try:
            result, extra = self._counted(op, args, kwargs)
        except BaseException as error:
            self._follower.fails(error, _name(op))
            raise
        origin: BlockOrigin | None = None
        node = running_node()
        if node is not None:
            origin = self._follower.node_origin(node)
        origin = origin or self._follower.origin()
        for tensor in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.note(tensor, origin=origin, op=_name(op))
        if extra:
            self.blocks.within(extra, origin, _name(op))
        if self.blocks.alive_bytes > self._told_bytes:
            self._told_bytes = int(self.blocks.alive_bytes * _MORE)
            self._follower.grows()
        self._follower.note_nodes(before - 1, nodes_made(), origin)
        if _name(op) in _RESIZING:
            self._resized(args[0])
        if self._limit_bytes is not None and self.blocks.alive_bytes + extra > self._limit_bytes:
            self._refuse(op, extra)
        return result

    def _counted(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """The result, and the bytes that the kernel took for a while beyond those that remain."""
        key = _key(op, args, kwargs)
        known = self._extra.get(key)
        if known is not None:
            return op(*args, **kwargs), known
        if self.device != "cpu" or not self.counts_kernels or is_profiled():
            self.is_partial = True
            return op(*args, **kwargs), 0
        counted = allocations_within(lambda: op(*args, **kwargs))
        if counted is None:
            self.is_partial = True
            return op(*args, **kwargs), 0
        result, sizes = counted
        alive = most = 0
        for nbytes in sizes:
            alive += nbytes
            most = max(most, alive)
        self._extra[key] = most - max(0, alive)
        return result, self._extra[key]

    def _resized(self, tensor: Any) -> None:
        storage = self._storage_of(tensor) if isinstance(tensor, Tensor) else None
        block = None if storage is None else self._alive.get(storage_id(storage))
        if block is not None and storage is not None and block.nbytes != storage.nbytes():
            self.blocks.resize(block, storage.nbytes())

    def _refuse(self, op: OpOverload, extra: int) -> None:
        error = _OutOfLimit(
            f"the limit of {self._limit_bytes:,} bytes is exceeded: {_name(op)} would make it"
            f" {self.blocks.alive_bytes + extra:,} bytes of tensors"
        )
        self._follower.fails(error, _name(op))
        raise error

    def _storage_of(self, tensor: Tensor) -> UntypedStorage | None:
        """None for tensors without memory of their own: of subclasses, sparse, elsewhere."""
        if type(tensor) not in _PLAIN or tensor.device.type != self.device:
            return None
        try:
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None

    def line(self, frame: Any, calls: int = 0) -> tuple[str, int]:
        """The innermost line of the user's code.

        Within that many `calls` of modules it is a line inside the outermost one: of another package, if
        the model is that package's. A model without any, of PyTorch's own layers, has the line that calls it.
        """
        passed, library = 0, ("", 0)
        while frame is not None:
            code = frame.f_code
            kind = self._files.get(code.co_filename)
            if kind is None:
                kind = self._files[code.co_filename] = _kind_of(code.co_filename)
            passed += code is MODULE_CALL
            if kind == _USERS:
                return library if library[0] and passed >= calls > 0 else (code.co_filename, frame.f_lineno)
            if kind == _LIBRARY and passed < calls and not library[0]:
                library = code.co_filename, frame.f_lineno
            frame = frame.f_back
        return library


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves __init_subclass__ untyped
    def __init__(self, memory: ObservedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._memory.is_on:
            return func(*args, **(kwargs or {}))
        return self._memory.run(func, args, kwargs or {})


def _kind_of(file: str) -> str:
    if is_users_file(file):
        return _USERS
    is_other = not file.startswith(("<", *_OWN)) and any(part in file for part in _INSTALLED)
    return _LIBRARY if is_other else ""


def is_users_file(file: str) -> bool:
    """Whether a file is neither of Python, an installed package nor stowplan, and is one."""
    if file.startswith(("<", *_LIBRARIES)):
        return False
    return not any(part in file for part in _INSTALLED)


def caller(depth: int) -> Any:
    """The frame that many calls above."""
    return sys._getframe(depth + 1)


def _name(op: OpOverload) -> str:
    return schema_of(op).name


def _key(op: OpOverload, args: Iterable[Any], kwargs: dict[str, Any]) -> object:
    found: list[object] = [op]
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append((value.shape, value.dtype, value.device, _strides(value)))
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Tensor | None):
            found.append(tuple(None if v is None else (v.shape, v.dtype) for v in value))
        else:
            found.append(str(value) if isinstance(value, list | dict) else value)
    try:
        hash(key := tuple(found))
    except TypeError:
        return str(found)
    return key


def _strides(tensor: Tensor) -> object:
    return tensor.stride() if tensor.layout is torch.strided else None
