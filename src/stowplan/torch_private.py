"""All that stowplan uses of PyTorch beyond its public interface, in one place, and the versions that have it.

PyTorch may change these names in any release. `tests/test_torch_private.py` holds each to what is used of it,
and keeps other modules from using private names. `docs/compatibility.md` has the results by version.
"""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from shutil import which
from subprocess import run
from threading import get_ident, local
from types import CellType, CodeType, FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn, overrides
from torch._C._dynamo.guards import TensorGuards
from torch._C._profiler import (
    ProfilerConfig,
    ProfilerState,
    _ExperimentalConfig,
    _ExtraFields_Allocation,
    _ProfilerEvent,
)
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.autograd import Function, forward_ad
from torch.autograd.graph import Node
from torch.nn import functional
from torch.nn.modules import module as torch_modules
from torch.profiler import profile
from torch.utils import _python_dispatch as python_dispatch
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpoint_module
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec
from torch.utils.hooks import RemovableHandle

from stowplan.alone import KEPT, Lock, is_only_thread, replaced, undone
from stowplan.errors import TorchTooOld

if TYPE_CHECKING:  # a PyTorch may be built without
    from datetime import timedelta

    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

Result = TypeVar("Result")

__all__ = [
    "FORWARD_HOOKS",
    "GLOBAL_HOOKS",
    "HOOKS",
    "MODULE_CALL",
    "PACK_SEQUENCES",
    "PAD_SEQUENCES",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TreeSpec",
    "UnsupportedOperatorException",
    "abort",
    "after_backward",
    "allocations_seen",
    "allocations_within",
    "another_derivative",
    "autograd_in_kernels",
    "below",
    "below_autograd",
    "check_version",
    "checkpoints_as_calls",
    "compiled_by_inductor",
    "cpp_compiler",
    "default_device",
    "default_generator_is",
    "dispatch_modes",
    "dispatched_without_data",
    "fake_tensor_logger",
    "idle_conversions_skipped",
    "inside_ddp",
    "is_batched",
    "is_compiled",
    "is_exporting",
    "is_profiled",
    "is_tracing",
    "is_view",
    "keeps_graph",
    "mark_parameter",
    "mode_in_the_way",
    "neighbours_set_aside",
    "node_class",
    "nodes_made",
    "own_saved_tensors",
    "pytree",
    "remove_hook_of_all",
    "running_backward",
    "running_node",
    "saved_tensors_are_packed",
    "schema_of",
    "script_calls_handed_to",
    "sequence_number",
    "shaped_by_kernel",
    "storage_id",
    "store_of",
    "tell_of_checkpoints",
    "tensor_guards",
    "timeout_of",
    "uncovered",
    "untested",
    "version_of",
    "will_accumulate",
    "writes_out",
]

OLDEST, NEWEST_TESTED = (2, 6), (2, 15)

PACK_SEQUENCES, PAD_SEQUENCES = torch._pack_padded_sequence, torch._pad_packed_sequence
"""Functions that take the lengths of sequences from a tensor, without an op that reads it."""


def untested(version: str) -> str | None:
    """Why this PyTorch may not do, though it is tried: it is newer than all that were tested."""
    if _numbers(version) <= NEWEST_TESTED:
        return None
    return f"torch {version} is newer than {NEWEST_TESTED[0]}.{NEWEST_TESTED[1]}, the newest that is tested"


def check_version(version: str) -> None:
    """Refuse a PyTorch that is too old, and log a warning for one that is untested."""
    if _numbers(version) < OLDEST:
        raise TorchTooOld(
            f"torch {version} is too old: stowplan needs {OLDEST[0]}.{OLDEST[1]} or newer: upgrade it with"
            f" pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'"
        )
    if why := untested(version):
        logging.getLogger("stowplan").warning(why)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


check_version(str(torch.__version__))

fake_tensor_logger = logging.getLogger("torch._subclasses.fake_tensor")
"""Where PyTorch logs what failed on tensors without data."""

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
"""The attributes of a module that hold its hooks."""

GLOBAL_HOOKS: tuple[Mapping[int, object], ...] = tuple(getattr(torch_modules, f"_global{n}") for n in HOOKS)
"""The hooks of all modules, in the same order."""


MODULE_CALL: CodeType = nn.Module._call_impl.__code__
"""The code of a frame in which a module is called."""


def remove_hook_of_all(handle: RemovableHandle) -> None:
    """Remove a hook of all modules, and what PyTorch keeps of one `with_kwargs`: torch.compile sees it."""
    handle.remove()
    torch_modules._global_forward_hooks_with_kwargs.pop(handle.id, None)


def has_hooks(tensor: Tensor) -> bool:
    """Whether hooks wait for the gradient of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def hooks_of(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """The hooks that wait for the gradient of a tensor that is no leaf, in order."""
    return list((tensor._backward_hooks or {}).values())


class _NotAsked:
    """Stands in for a hook that autograd calls without a gradient, and that eager would not call.

    The first call puts the hook back. If this backward fails before, a call of a later backward does.
    """

    def __init__(self, hooks: dict[int, Any], key: int, came: Callable[[Any], bool]) -> None:
        self._hooks, self._key, self._hook, self._task = hooks, key, hooks[key], running_backward()
        self._came = came
        hooks[key] = self

    def __call__(self, given: Any) -> Any:
        if self._hooks.get(self._key) is self:
            self._hooks[self._key] = self._hook
        if self._task == running_backward() and not self._came(given):
            return None
        return self._hook(given)


def ask_no_hooks(tensor: Tensor) -> None:
    """Let no hook of a tensor see that the backward that is running has no gradient for it.

    Another part of the graph may bring one after all: a hook of our own notes it, and then all are called.
    """
    hooks: dict[int, Any] = tensor._backward_hooks or {}
    for key in list(hooks):
        _NotAsked(hooks, key, lambda gradient: gradient is not None)
    final: dict[int, Any] = tensor._post_accumulate_grad_hooks or {}
    if not final:
        return
    came: list[bool] = []

    def note(gradient: Tensor | None) -> None:
        handle.remove()
        came.append(gradient is not None)

    register: Callable[..., RemovableHandle] = tensor.register_hook
    handle = register(note)
    for key in list(final):
        _NotAsked(final, key, lambda _: all(came))


def hooks_behind(handle: RemovableHandle) -> list[Callable[..., object]]:
    """The hook that a handle removes, if it has not done so."""
    table = handle.hooks_dict_ref()
    return [] if table is None or handle.id not in table else [table[handle.id]]


def node_class(function: type[Function]) -> type:
    """The class of the nodes that a function of autograd makes."""
    made: type = vars(function)["_backward_cls"]
    return made


def dispatched_without_data(
    fakes: FakeTensorMode, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """The result of an op on stand-ins, for a dispatch mode that got this op.

    It is what `with fakes: target(*args, **kwargs)` gives, without another way through the dispatcher.
    """
    return fakes.__torch_dispatch__(target, (), args, kwargs)


def shaped_by_kernel(
    fakes: FakeTensorMode,
    target: OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    device: torch.device,
) -> Tensor | list[Tensor]:
    """The result of an op on stand-ins of one device, by the shape function of the op's own kernel.

    The mode would get there too, after a look at caches and decompositions that takes several times as long.
    """
    with in_kernel_invocation_manager(fakes):
        made: Tensor | Sequence[Tensor] = target(*args, **kwargs)
    if isinstance(made, Tensor):
        return FakeTensor(fakes, made, device)
    return [FakeTensor(fakes, each, device) for each in made]


def as_parameter(made: FakeTensor, *, requires_grad: bool) -> Tensor:
    """A stand-in that nothing else has, as `nn.Parameter` would make of it, without a dispatched detach."""
    made._is_param = True
    return made.requires_grad_(requires_grad)


def mark_parameter(tensor: Tensor) -> Tensor:
    """The same tensor, which `nn.Parameter` then takes for one of its own, as what it makes of a wrapper."""
    marked: Any = tensor
    marked._is_param = True
    return tensor


def below(made: FakeTensor) -> Tensor:
    """The tensor on the meta device that a stand-in is a face of."""
    with in_kernel_invocation_manager(made.fake_mode):
        return made.detach()


without_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Within, no TorchFunctionMode is asked."""


def schema_of(target: OpOverload) -> torch.FunctionSchema:
    """The name, arguments and returns of an op."""
    return target._schema


def writes_out(target: OpOverload) -> bool:
    """Whether an op writes its result into an argument `out`, in a kernel of its own.

    Variants that PyTorch generates compute their result aside and copy it.
    """
    return any(a.is_out for a in target._schema.arguments) and torch.Tag.generated not in target.tags


def storage_id(storage: UntypedStorage) -> int:
    """A number that tells a living storage from all others, whether or not it has data."""
    number: int = storage._cdata
    return number


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written in place; None where PyTorch does not count."""
    return None if tensor.is_inference() else tensor._version


TensorBase: Any = torch._C.TensorBase
"""The class in which Python finds the attributes of all tensors, `.grad` and `.data` among them."""


def gradient_of(tensor: Tensor) -> Tensor | None:
    """What `.grad` holds, without asking a class that tells who looks (`iteration/run/between.py`)."""
    found: Tensor | None = TensorBase.grad.__get__(tensor)
    return found


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another."""
    return tensor._is_view()


def tensor_guards(tensors: list[Tensor]) -> TensorGuards:
    """What `check` compares tensors with: types, shapes, strides, dtypes, devices and `requires_grad`."""
    exact: Any = {  # which the stubs of torch call lists of numbers; they are lists of shapes
        "dynamic_dims_sizes": [list(tensor.shape) for tensor in tensors],
        "dynamic_dims_strides": [list(tensor.stride()) for tensor in tensors],
    }
    return TensorGuards(*tensors, **exact)


def nodes_made() -> int:
    """The number of autograd nodes this thread has made: each gets the next number."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def sequence_number(node: Node) -> int:
    """The number of an autograd node."""
    return node._sequence_nr()


def running_node() -> int | None:
    """The number of the autograd node whose backward is running."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def running_backward() -> int:
    """A number that tells the call of backward that is running from all others; -1 outside of one."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the backward that is running was called with `retain_graph=True`."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def saved_tensors_are_packed() -> bool:
    """Whether hooks take what autograd saves: of torch.utils.checkpoint, save_on_cpu or the user."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def will_accumulate(leaf: Tensor) -> bool:
    """Whether the backward that is running adds to the gradient of a leaf; torch.autograd.grad does not."""
    with torch.enable_grad():
        view: Any = leaf.view_as(leaf)
    (accumulates, _), *_ = view.grad_fn.next_functions
    try:
        return torch._C._will_engine_execute_node(accumulates)
    except RuntimeError:  # the gradient of a leaf is returned
        return False


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made this module around another, its `_orig_mod`."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # loaded by the first torch.compile
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def is_batched(gradient: Tensor) -> bool:
    """Whether this is many gradients at a time, as autograd makes them with `is_grads_batched`."""
    found: bool = torch._C._functorch.is_legacy_batchedtensor(gradient)
    return found


@contextmanager
def own_saved_tensors() -> Iterator[None]:
    """Within, autograd keeps what it saves itself, whatever hooks are around, as of a checkpoint."""
    hooks = list[Any]()
    while found := torch._C._autograd._top_saved_tensors_default_hooks(True):
        hooks.append(found)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def inside_ddp() -> bool:
    """Whether a DistributedDataParallel is calling its module."""
    kind: Any = torch.nn.parallel.DistributedDataParallel
    return getattr(kind, "_active_ddp_module", None) is not None


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that is running has ended without an error."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


# Public since 2.7. Before, torch.export cannot be told from torch.compile.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)

is_tracing: Callable[[], bool] = torch._C._is_tracing
_unpack_dual: Callable[[Tensor], Any] = forward_ad.unpack_dual


def another_derivative(tensors: Iterable[object]) -> str:
    """What differentiates or batches these tensors other than autograd's backward; empty if nothing does."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func, such as vmap, grad or jvp"
    if forward_ad._current_level >= 0:
        duals = (_unpack_dual(tensor) for tensor in tensors if isinstance(tensor, Tensor))
        if any(dual.tangent is not None for dual in duals):
            return "forward-mode differentiation (torch.autograd.forward_ad)"
    return ""


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Within, ops go to their kernels and autograd records nothing, while gradients may count as enabled."""

_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


@contextmanager
def autograd_in_kernels() -> Iterator[None]:
    """Within, autograd records also inside the kernel of a custom op, where PyTorch has switched it off."""
    was_off = torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_AUTOGRAD, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_AUTOGRAD, was_off)


_GENERATOR = "_checkpoint_without_reentrant_generator"
_SINCE_2_15 = f"{_GENERATOR}_impl"  # which the old name only calls
_VARIANTS = ("CheckpointFunction", _SINCE_2_15 if hasattr(checkpoint_module, _SINCE_2_15) else _GENERATOR)


_COVERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def uncovered(function: FunctionType) -> Callable[..., Any]:
    """A function of `torch.nn.functional` without its first question: whether a TorchFunctionMode takes it.

    The mode then sees the functions that this one calls. A function that only chooses between two others, as
    `max_pool2d` does by `return_indices`, keeps them in its closure: they ask the question.
    """
    names = function.__globals__ | dict.fromkeys(_COVERS, lambda *_: False)
    closure = tuple(map(_uncovered_cell, function.__closure__ or ()))
    open_one = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure or None
    )
    open_one.__kwdefaults__ = function.__kwdefaults__
    return open_one


def _uncovered_cell(cell: CellType) -> CellType:
    function = cell.cell_contents
    is_chosen = isinstance(function, FunctionType) and function.__module__ == functional.__name__
    return CellType(uncovered(function)) if is_chosen else cell


class _Checkpoints:
    """What stands for the two variants of `torch.utils.checkpoint` while a step is captured."""

    def __init__(self) -> None:
        self._lock, self._users = Lock(), set[object]()
        self._capturing = local()
        self._own = tuple(vars(checkpoint_module)[name] for name in _VARIANTS)

    @contextmanager
    def as_calls(self) -> Iterator[None]:
        was, user = getattr(self._capturing, "here", False), object()
        try:
            self._capturing.here = True
            self._users.add(user)
            self._stand_in()
            yield
        finally:
            self._capturing.here = was
            self._users.discard(user)
            self._stand_in()

    def forget_others(self) -> None:
        """In a child process, which has no other threads."""
        self._users.clear()
        if getattr(self._capturing, "here", False):
            self._users.add(get_ident())
        self._stand_in()

    def _stand_in(self) -> None:
        with self._lock.here():
            found = (self, self.around) if self._users else self._own
            vars(checkpoint_module).update(zip(_VARIANTS, found, strict=True))

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """The reentrant variant: nothing has a gradient if no argument has."""
        if not getattr(self._capturing, "here", False):  # another thread trains meanwhile
            return self._own[0].apply(function, preserve, *args)
        tell_of_checkpoints()
        wanted = any(arg.requires_grad for arg in args if isinstance(arg, Tensor))
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return function(*args)

    def around(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """The other variant: runs up to its `yield` before the function and from there on after it."""
        if not getattr(self._capturing, "here", False):
            own: Iterator[None] = self._own[1](*args, **kwargs)
            return own
        tell_of_checkpoints()
        return iter((None,))


_CHECKPOINTS = _Checkpoints()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_CHECKPOINTS.forget_others)


def checkpoints_as_calls() -> AbstractContextManager[None]:
    """Within, and in this thread, `torch.utils.checkpoint` only calls the function that it is given."""
    return _CHECKPOINTS.as_calls()


@contextmanager
def script_calls_handed_to(follow: Callable[..., object]) -> Iterator[None]:
    """Within, and in this thread, a call of a TorchScript function is `follow(function, *args, **kwargs)`.

    TorchScript makes tensors of numbers without an op that a dispatch mode would see.
    """
    kind: Any = torch.jit.ScriptFunction
    thread, plain = get_ident(), kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:
            return plain(function, *args, **kwargs)
        return follow(partial(plain, function), *args, **kwargs)

    with replaced(kind, "__call__", call):
        yield


@contextmanager
def idle_conversions_skipped() -> Iterator[None]:
    """Within, and in this thread, `module.to(dtype)` leaves tensors alone that are as they shall be.

    PyTorch swaps tensors without data for themselves, which it refuses for tensors that others know of.
    """
    kind: Any = nn.Module
    thread, plain = get_ident(), kind._apply

    def apply(module: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        if get_ident() != thread:
            return plain(module, fn, recurse)
        own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if any(fn(tensor) is not tensor for tensor in own):
            return plain(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        return module

    with replaced(kind, "_apply", apply):
        yield


@cache
def tell_of_checkpoints() -> None:
    """Log, once in a process, that checkpoints give way to plans."""
    logging.getLogger("stowplan").warning(
        "torch.utils.checkpoint (gradient_checkpointing) is switched off in a planned step: the plan decides"
        " what to recompute"
    )


Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def compiled_by_inductor(
    function: Callable[[list[Tensor]], list[Tensor]],
    looks: Iterable[Look],
    decompositions: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType({}),
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """A function of a list of tensors on the CPU, compiled for tensors of these shapes, strides and dtypes.

    The compiled one empties the list that it is given. Inductor keeps what it compiles on disk, and finds it
    there again in another process. `decompositions` come before its own.
    """
    with warnings.catch_warnings():  # of PyTorch about itself
        warnings.simplefilter("ignore")
        return _compiled_by_inductor(function, looks, decompositions)


def _compiled_by_inductor(
    function: Callable[[list[Tensor]], list[Tensor]],
    looks: Iterable[Look],
    decompositions: Mapping[OpOverload, Callable[..., Any]],
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    from torch._dynamo.utils import get_metrics_context
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fakes = FakeTensorMode(shape_env=ShapeEnv())  # without one, inductor's cache of whole graphs is not asked
    with torch.no_grad(), fakes:
        given = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in looks]
        traced = make_fx(lambda *given: function(list(given)), {**select_decomp_table(), **decompositions})(
            *given
        )
    (output,) = traced.graph.find_nodes(op="output")
    results: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = list(range(len(results)))  # these keep their strides
    output.meta["original_output_strides"] = [node.meta["val"].stride() for node in results]
    with (
        torch.no_grad(),
        tracing(TracingContext(fakes)),
        config.patch(compile_threads=1),
        get_metrics_context(),  # until PyTorch 2.7, inductor counts what it finds on disk in one, or fails
    ):
        compiled: Callable[[list[Tensor]], Sequence[Tensor]] = compile_fx_inner(traced, given)
    return compiled


@cache
def cpp_compiler() -> str:
    """The C++ compiler that inductor uses, and its version; empty if there is none."""
    found = which(os.environ.get("CXX", "g++"))
    if found is None:
        return ""
    told = run([found, "--version"], capture_output=True, text=True, check=False)
    return told.stdout.partition("\n")[0]


def store_of(group: "ProcessGroup") -> "Store":
    """The store through which the members of a group found each other."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    from torch.distributed.distributed_c10d import _get_process_group_store  # before PyTorch 2.7

    store: Store = _get_process_group_store(group)
    return store


def abort(group: "ProcessGroup") -> None:
    """Give up what a group waits for, where PyTorch can (2.7 and newer)."""
    if hasattr(group, "abort"):
        group.abort()


def timeout_of(group: "ProcessGroup") -> "timedelta":
    """How long a group waits for a message."""
    return group._get_backend(group._device_types[0]).options._timeout


def allocations_seen(profiler: profile) -> Iterator[tuple[int, int, int]]:
    """Nanoseconds, address and bytes of each allocation (and free, below 0) on the CPU; in no order."""
    assert profiler.profiler is not None
    waiting: list[_ProfilerEvent] = list(_event_trees(profiler.profiler.kineto_results))
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == "cpu":
            yield event.start_time_ns, fields.ptr, fields.alloc_size


def _event_trees(results: Any) -> Iterable[_ProfilerEvent]:
    trees: Iterable[_ProfilerEvent] = results.experimental_event_tree()
    return trees


_LEGACY = getattr(torch._C._autograd, "_enable_profiler_legacy", None)


def allocations_within(run: Callable[[], Result]) -> tuple[Result, list[int]] | None:
    """The bytes of each allocation on the CPU while `run` runs, and of each free, below 0, in their order.

    The old profiler is of one thread, while PyTorch has its newer one once in a process, where it may be the
    user's. None where PyTorch has the old one no more.
    """
    if _LEGACY is None:
        return None
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _LEGACY(config)
    try:
        result = run()
    finally:
        events = torch._C._autograd._disable_profiler_legacy()
    own = (event for thread in events for event in thread if str(event.kind()) == "memory_alloc")
    return result, [event.cpu_memory_usage() for event in own]


def is_profiled() -> bool:
    """Whether a profiler follows this thread."""
    return torch._C._autograd._profiler_enabled()


def default_generator_is(generator: torch.Generator) -> None:
    """What functions such as `torch.manual_seed` act on. Ops draw from PyTorch's own all the same."""
    vars(torch.random)["default_generator"] = generator
    vars(torch)["default_generator"] = generator


def _autocast() -> tuple[object, ...]:
    torch.autocast_increment_nesting()
    kinds = ("cpu", "cuda")
    looks = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.autocast_decrement_nesting(), *looks


def _set_autocast(was: tuple[Any, ...]) -> None:
    depth, *kinds = was
    for kind, enabled, dtype in kinds:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    while torch.autocast_increment_nesting() <= depth:
        pass
    while torch.autocast_decrement_nesting() > depth:
        pass
    torch.clear_autocast_cache()


_dispatch: Any = python_dispatch  # which is not typed, as are parts of torch._C
_core: Any = torch._C
_functions: Any = overrides


def _set_dispatch_modes(modes: list[Any]) -> None:
    for _ in range(_dispatch._len_torch_dispatch_stack()):
        _dispatch._pop_mode()
    for mode in modes:
        _dispatch._push_mode(mode)


def _set_function_modes(modes: list[Any]) -> None:
    while torch._C._len_torch_function_stack():
        _functions._pop_mode()
    for mode in modes:
        _functions._push_mode(mode)


def _saved_hooks() -> list[Any]:
    """Those that autograd calls for what it saves, the latest last."""
    found: list[Any] = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.insert(0, hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    _add_saved_hooks(found)
    return found


def _add_saved_hooks(found: list[Any]) -> None:
    for hooks in found:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _set_saved_hooks(was: list[Any]) -> None:
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    _add_saved_hooks(was)


def _flags() -> dict[str, object]:
    """What the module of dispatch modes notes of those that are entered."""
    return {name: value for name, value in vars(python_dispatch).items() if name.startswith("_is_in_")}


def _set_profiled(was: bool) -> None:
    if not was and _LEGACY is not None:
        torch._C._autograd._disable_profiler_legacy()


def _set_filters(was: Any) -> None:
    own: Any = warnings
    own.filters = was
    own._filters_mutated()


_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (python_dispatch._get_current_dispatch_mode_stack, _set_dispatch_modes),
    (overrides._get_current_function_mode_stack, _set_function_modes),
    (_flags, vars(python_dispatch).update),
    (_saved_hooks, _set_saved_hooks),
    (is_profiled, _set_profiled),
    (_autocast, _set_autocast),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (_core._get_torch_function_state, _core._set_torch_function_state),
    (torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors),
    (torch.get_default_dtype, torch.set_default_dtype),
    (gc.isenabled, lambda was: gc.enable() if was else gc.disable()),
)


@contextmanager
def neighbours_set_aside() -> Iterator[None]:
    """Within, gradients are recorded, and modes and hooks of the user's see no op and no saved tensor."""
    modes, hooks = python_dispatch._get_current_dispatch_mode_stack(), _saved_hooks()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def put_back() -> None:
        _set_dispatch_modes(modes)
        _set_saved_hooks(hooks)
        torch.set_anomaly_enabled(*anomaly)

    with undone(put_back), torch.inference_mode(False), torch.enable_grad():
        _set_dispatch_modes([])
        _set_saved_hooks([])
        torch.set_anomaly_enabled(False)
        yield


def default_device() -> str:
    """Where tensors are made of which nobody says where; empty if that is the CPU as ever."""
    contexts = [mode for mode in _function_modes() if isinstance(mode, DeviceContext)]
    return str(contexts[-1].device) if contexts else ""


def dispatch_modes() -> list[TorchDispatchMode]:
    """The modes that see the ops of this thread, the innermost last."""
    found: list[TorchDispatchMode] = python_dispatch._get_current_dispatch_mode_stack()
    return found


_UNPLANNED = {
    "FakeTensorMode": "under it nothing is computed",
    "_CloneArgBeforeMutateMode": "torch.autograd.graph.allow_mutation_on_saved_tensors does not know ops that"
    " write into a given tensor",
}


def mode_in_the_way() -> str:
    """A mode of the user's that a planned step cannot run under, and why; empty if there is none."""
    kinds = [type(mode) for mode in _function_modes() if not isinstance(mode, DeviceContext)]
    for kind in kinds:
        if not kind.__module__.startswith("stowplan."):
            return f"{kind.__qualname__}: a planned step calls none of the functions that this mode would see"
    if _dispatch._len_torch_dispatch_stack():
        for mode in python_dispatch._get_current_dispatch_mode_stack():
            if why := _UNPLANNED.get(type(mode).__name__):
                return f"{type(mode).__name__}: {why}"
    return ""


@contextmanager
def own_modes_unseen() -> Iterator[None]:
    """Within, modules that ask whether a function mode is active see those of the user's alone.

    Modules of PyTorch run faster kernels where there is none, which have other bits.
    """
    asked, thread = overrides.has_torch_function, get_ident()

    def has_torch_function(relevant: Iterable[Any]) -> bool:
        relevant = tuple(relevant)
        if get_ident() != thread or any(
            not type(mode).__module__.startswith("stowplan.") for mode in _function_modes()
        ):
            return asked(relevant)
        plain = (Tensor, nn.Parameter, FakeTensor)
        return any(type(each) not in plain and hasattr(each, "__torch_function__") for each in relevant)

    with replaced(overrides, "has_torch_function", has_torch_function):
        yield


@contextmanager
def said_to_infer(infers: bool) -> Iterator[None]:
    """Within, code of this thread that asks whether inference mode is on finds this answer."""
    asked, thread = torch.is_inference_mode_enabled, get_ident()
    with replaced(torch, "is_inference_mode_enabled", lambda: infers if get_ident() == thread else asked()):
        yield


def _function_modes() -> list[Any]:
    if not torch._C._len_torch_function_stack():
        return []
    found: list[Any] = _functions._get_current_function_mode_stack()
    return found


def _state() -> Callable[[], None]:
    """How to put back what modes, hooks and switches there are now, in this thread and in the process.

    Contexts of PyTorch are left by functions of Python, and an interrupt may come before these have begun.
    """
    before, filters = [read() for read, _ in _STATES], warnings.filters

    def put_back() -> None:
        for (read, write), was in zip(_STATES, before, strict=True):
            if read() != was:
                write(was)
        if warnings.filters is not filters:
            _set_filters(filters)

    return put_back


def _generator() -> Callable[[], None]:
    before = torch.get_rng_state()

    def put_back() -> None:
        if is_only_thread():  # others may have drawn meanwhile
            torch.set_rng_state(before)

    return put_back


KEPT.extend((_state, _generator))
