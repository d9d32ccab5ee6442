"""The probe: each distinct op of a step runs alone, to measure its seconds and its kernel's workspace.

Operands exist for one op at a time, so a step can be probed on a machine that it does not fit. A signature is
what makes two calls cost the same, whichever tensors they are about.

Operands are real tensors with contents that every op accepts. Floating point numbers lie between 0 and 1, so
that roots, logarithms and probabilities are all legal. Integers are 0, which is an index into anything. What
is large is 0 as well, and takes memory only where it is touched: a sweep over a few tiles of it touches
little.

On large tensors an op takes as long as all its parts together, so one part is probed. Probing an op on
gigabytes takes as long as the op takes in the step, and may need more memory than is free. The same op on
operands that are shorter along one dim costs in proportion, as long as they are far larger than any cache.
PyTorch's count of operations, on tensors without data, shows whether the work is in proportion.
"""

import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import cast

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from stowplan.alone import alone
from stowplan.analyse.facts import estimated_workspaces
from stowplan.capture import Argument, Call, Captured, Handle, Ref
from stowplan.capture.program import (
    ASKING_FOR_GRADIENTS,
    as_in_forward,
    draws,
    filled,
    inputs_of,
    leaves,
    written_arguments,
)
from stowplan.capture.sparse import READ_SPARSE, fill_pointers
from stowplan.capture.stand_ins import contiguous_stride, extent_of, stride_of, torch_dtype
from stowplan.capture.value_derivatives import EAGER_DERIVATIVE, MASKED_TOTAL
from stowplan.errors import NotTileable
from stowplan.ir import Graph, Interval, Op, Phase, Profile
from stowplan.ir import Tensor as GraphTensor
from stowplan.ops.effects import UPDATE
from stowplan.ops.table import shape_of
from stowplan.plan.options import Progress
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine
from stowplan.run.cost.machine import (
    USER_CACHE,
    Cost,
    ProbeCache,
    clock_of,
    device_of,
    free_bytes,
    least_seconds,
    measure_machine,
    platform_of,
    release_free_memory,
    seconds_of,
    settle_heap,
)
from stowplan.run.measure.measure import out_of_sight, rise_while
from stowplan.torch_private import pytree, storage_id, without_functions
from stowplan.watch import patience, tell_phase


@dataclass(frozen=True, slots=True)
class Operand:
    """How a tensor that a call reads looks; its contents are not part of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def extent(self) -> int:
        """How many elements there are from the first to the last."""
        return extent_of(self.shape, self.stride)

    def __str__(self) -> str:
        dense = self.stride == contiguous_stride(self.shape)
        layout = "" if dense else f" by {_joined(self.stride)}"
        return f"{_bare(self.dtype)}[{_joined(self.shape)}]{layout} on {self.device.type}"


@dataclass(frozen=True, slots=True)
class Signature:
    """A call on anonymous tensors: `Ref("%0")` is the first of the operands, which come in order of use.

    `text` has one spelling for one signature: `aten.mm.default(%0, %1) of float32[2,3] on cpu; ...`.
    """

    call: Call
    operands: tuple[Operand, ...]
    text: str

    @property
    def operand_bytes(self) -> int:
        """The bytes of all operands."""
        return sum(operand.extent * operand.dtype.itemsize for operand in self.operands)


def call_signature(graph: Graph, call: Call) -> Signature:
    """The signature of one of the calls that `graph` was captured with."""
    names = list(dict.fromkeys(inputs_of(call)))
    numbers = {name: f"%{number}" for number, name in enumerate(names)}
    args = tuple(anonymous(value, numbers) for value in call.args)
    kwargs = {name: anonymous(value, numbers) for name, value in sorted(call.kwargs.items())}
    operands = tuple(operand_of(graph.tensors[name]) for name in names)
    given = [
        *map(spelled_argument, args),
        *(f"{name}={spelled_argument(value)}" for name, value in kwargs.items()),
    ]
    copied = ".clone()" if call.copied else ""
    text = f"{call.target}({', '.join(given)}){copied} of {'; '.join(map(str, operands))}"
    return Signature(replace(call, args=args, kwargs=kwargs, outputs=()), operands, text)


def anonymous(value: Argument, numbers: Mapping[str, str]) -> Argument:
    """An argument with other names for its tensors."""
    match value:
        case Ref(name):
            return Ref(numbers[name])
        case tuple():
            return tuple(anonymous(item, numbers) for item in value)
        case torch.Generator():
            return None  # the default generator draws at the same price
        case _:
            return value


def operand_of(tensor: GraphTensor) -> Operand:
    """How a tensor of a graph looks."""
    dtype, device = torch_dtype(tensor.dtype), torch.device(tensor.device)
    return Operand(shape_of(tensor), stride_of(tensor), dtype, device)


def spelled_argument(value: Argument) -> str:
    """One spelling for one argument."""
    match value:
        case Ref(name):
            return name
        case tuple():
            return f"[{', '.join(map(spelled_argument, value))}]"
        case Handle():
            return repr(value.likeness)
        case _:
            return repr(value)


def _joined(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def _bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


LARGE_BYTES = 2**28
# Their workspace grows with what a mask selects, so all is selected.
_SELECTING = (torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default, MASKED_TOTAL)
_BLOCK = 2**16  # numbers that are drawn; a larger tensor repeats them


_KEPT: ContextVar[dict[tuple[int, torch.dtype, torch.device], Tensor] | None] = ContextVar(
    "kept", default=None
)
"""Contents of operands by position, kept while many ops are probed: to write new memory takes longer than
many ops take."""


@contextmanager
def _contents_kept() -> Iterator[None]:
    before = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(before)


def operands_of(signature: Signature) -> list[Tensor]:
    """Tensors that look as the signature says."""
    kept, changed = _KEPT.get(), _changed(signature.call)
    found = list[Tensor]()
    for place, operand in enumerate(signature.operands):
        count, key = operand.extent, (place, operand.dtype, operand.device)
        if kept is None or f"%{place}" in changed or count * operand.dtype.itemsize > LARGE_BYTES:
            values = _values(count, operand)
        else:
            if key not in kept or len(kept[key]) < count:
                kept.pop(key, None)  # before there is a larger one
                kept[key] = _values(count, operand)
            values = _first(kept[key], count)
        found.append(values.as_strided(operand.shape, operand.stride))
    if signature.call.target in _SELECTING:
        for tensor in found:
            if tensor.dtype is torch.bool:
                tensor.fill_(True)
    if signature.call.target is EAGER_DERIVATIVE:  # one zero among the factors takes the most
        found[1].fill_(1).view(-1)[:1] = 0
    if signature.call.target is READ_SPARSE:
        fill_pointers(cast(str, signature.call.args[0]), found)
    return found


def _first(values: Tensor, count: int) -> Tensor:
    """The first numbers, in a storage that ends with them: some ops copy the whole storage of an operand."""
    if len(values) == count:
        return values
    storage = values.untyped_storage()[: count * values.itemsize]
    return values.new_empty(0).set_(storage, 0, (count,), (1,))


def _changed(call: Call) -> set[str]:
    """The operands whose contents the op changes, or that have other contents than those of other ops."""
    if call.target in (*_SELECTING, EAGER_DERIVATIVE, READ_SPARSE):
        return set(inputs_of(call))
    written = written_arguments(call.target, call.args, call.kwargs)
    return {leaf.tensor for leaf in leaves(tuple(written.values())) if isinstance(leaf, Ref)}


def call_on(signature: Signature, operands: Sequence[Tensor]) -> Callable[[], object]:
    """The signature's op on these tensors, ready to be called."""
    named = {f"%{number}": tensor for number, tensor in enumerate(operands)}
    call = signature.call
    args = [filled(value, named) for value in call.args]
    kwargs = {name: filled(value, named) for name, value in call.kwargs.items()}
    if call.target in ASKING_FOR_GRADIENTS:
        return lambda: as_in_forward(call.target, *args, **kwargs)
    if call.copied:
        return lambda: call.target(*args, **kwargs).clone()
    return lambda: call.target(*args, **kwargs)


def _values(count: int, operand: Operand) -> Tensor:
    if count * operand.dtype.itemsize > LARGE_BYTES and operand.device.type == "cpu":
        return torch.frombuffer(mmap.mmap(-1, count * operand.dtype.itemsize), dtype=operand.dtype)
    if operand.dtype is torch.bool:
        return _repeated((_drawn(count) < 0.5).to(operand.device), count)
    if operand.dtype.is_floating_point or operand.dtype.is_complex:
        return _repeated(_drawn(count).to(operand.device, operand.dtype), count)
    return torch.zeros(count, dtype=operand.dtype, device=operand.device)


def _drawn(count: int) -> Tensor:
    return torch.rand(min(count, _BLOCK), generator=torch.Generator().manual_seed(0))


def _repeated(block: Tensor, count: int) -> Tensor:
    if count == len(block):
        return block
    whole = block.new_empty(count)
    for start in range(0, count, len(block)):
        part = whole[start : start + len(block)]
        part.copy_(block[: len(part)])
    return whole


OP_LIMIT_SECONDS = 0.06  # of all runs of a short op
_SHORT_SECONDS = 0.03  # an op that takes longer is run twice in all
_LONG_SECONDS = 2.0  # and one that takes longer than this once
_STEADY_SECONDS = 0.1  # or than this, if it is an op of PyTorch on the CPU: its first call is like others
_ROOM = 4  # this many times the operands' bytes must be free, because results and workspace may be larger


PROBES: dict[str, Callable[[Signature, torch.device], Cost | None]] = {}
"""By op type, the probes of ops that techniques add: running these whole would take too long."""


def cost_of_call(
    signature: Signature, device: torch.device, *, repeats: int, once: bool = False
) -> Cost | None:
    """The cost of a call; None if the op refuses the operands, or memory is too short to probe it.

    With `once` the op runs a single time.
    """
    if own := PROBES.get(str(signature.call.target)):
        return own(signature, device)
    fraction = fraction_of(signature)
    if fraction and (part := cost_of_call(fraction.signature, device, repeats=repeats, once=once)):
        return fraction.whole(part)
    if _ROOM * signature.operand_bytes > free_bytes(device):
        (_KEPT.get() or {}).clear()
        if _ROOM * signature.operand_bytes > free_bytes(device):
            return None
    is_steady = device.type == "cpu" and signature.call.target.namespace == "aten"
    long_seconds = 0.0 if once else _STEADY_SECONDS if is_steady else _LONG_SECONDS
    return probed_cost(signature, device, repeats=repeats, long_seconds=long_seconds)


def probed_cost(
    signature: Signature, device: torch.device, *, repeats: int, long_seconds: float = _LONG_SECONDS
) -> Cost | None:
    """The measured cost of a call; None if the op refuses the generated operands.

    One that takes longer than `long_seconds` at first is run once.
    """
    with undisturbed(device, drawing=may_draw(signature.call)):
        try:
            return _cost(signature, device, repeats, long_seconds)
        except (RuntimeError, ValueError, IndexError):
            return None


def _cost(signature: Signature, device: torch.device, repeats: int, long_seconds: float) -> Cost:
    operands = operands_of(signature)
    run = call_on(signature, operands)
    seconds, rise_bytes = rise_while(lambda: seconds_of(run, device), device=device, before=operands)
    if seconds > long_seconds:
        return Cost(seconds, rise_bytes)
    if seconds < _SHORT_SECONDS:
        seconds = least_seconds(run, device, repeats=repeats, limit_seconds=OP_LIMIT_SECONDS)
    # Memory comes last, for a first call also builds what kernels keep; a slow op is timed here again, warm.
    last, rise_bytes = rise_while(lambda: seconds_of(run, device), device=device, before=operands)
    return Cost(min(seconds, last), rise_bytes)


def may_draw(call: Call) -> bool:
    """Whether an op may draw random numbers; ops that techniques add may run any others."""
    return call.target.namespace != "aten" or draws(call.target, call.args, call.kwargs)


@contextmanager
def undisturbed(device: torch.device, *, drawing: bool) -> Iterator[None]:
    """Random ops draw from copies of the generators; no backward is recorded, nothing is cast on the way.

    Generators of ops that do not draw are left alone, for other threads draw from them.
    """
    accelerators = [] if device.type == "cpu" else [device]
    kind = device.type if accelerators else "cuda"
    with (
        torch.random.fork_rng(accelerators, enabled=drawing, device_type=kind),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        without_functions(),  # which torch.set_default_device would change
    ):
        yield


_SIDE = 64  # an operand smaller than the largest by this factor, such as a weight, stays whole
_MARGIN = 1024  # results // this are added as a margin: a step of 25 GiB took 2 kB more than its parts
_META = torch.device("meta")
_ATEN = torch.ops.aten
_UNCOUNTED = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: q.numel() * k[-2],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__, **___: q.numel() * k[-2],
}  # operations that PyTorch has no count of, though they grow with the square


@dataclass(frozen=True, slots=True)
class Fraction:
    """A part of an op, and how many of them are the whole."""

    signature: Signature
    parts: int
    result_bytes: int  # of the part
    whole_result_bytes: int

    def whole(self, part: Cost) -> Cost:
        """The cost of the whole op from the cost of a part: workspace in proportion, results as known."""
        workspace = self.parts * max(0, part.rise_bytes - self.result_bytes)
        margin = self.whole_result_bytes // _MARGIN
        return Cost(self.parts * part.seconds, workspace + self.whole_result_bytes + margin)


@dataclass(frozen=True, slots=True)
class _Made:
    """The results and the work of an op, found without data."""

    shapes: tuple[tuple[int, ...], ...]
    new_bytes: int
    operations: int


def fraction_of(signature: Signature, *, large_bytes: int = LARGE_BYTES) -> Fraction | None:
    """A part of the op whose operands are not large; None if they are not, or if it has no such part.

    What ops other than PyTorch's own do with a part of their operands is not known.
    """
    largest = max(signature.operands, key=_bytes_of, default=None)
    if signature.call.target.namespace != "aten" or largest is None or _bytes_of(largest) <= large_bytes:
        return None
    parts = 1 << (_bytes_of(largest) // large_bytes).bit_length()
    whole = _made(signature)
    for operands in _shorter(signature.operands, largest, parts):
        part = replace(signature, operands=operands)
        made = whole and _made(part)
        if whole and made and _is_fraction(made, whole, parts):
            return Fraction(part, parts, made.new_bytes, whole.new_bytes)
    return None


def _bytes_of(operand: Operand) -> int:
    return prod(operand.shape) * operand.dtype.itemsize


def _shorter(operands: Sequence[Operand], largest: Operand, parts: int) -> Iterator[tuple[Operand, ...]]:
    """All but small operands shorter along one dim, counted from the first or, as they broadcast, the last.

    Long dims come first: short ones may be channels, whose number other arguments state as well.
    """
    least, rank = _bytes_of(largest) // _SIDE, len(largest.shape)
    for dim in sorted((*range(rank), *range(-rank, 0)), key=lambda dim: -largest.shape[dim]):
        if largest.shape[dim] % parts == 0:
            yield tuple(_cut(each, dim, parts) if _bytes_of(each) >= least else each for each in operands)


def _cut(operand: Operand, dim: int, parts: int) -> Operand:
    if not -len(operand.shape) <= dim < len(operand.shape) or operand.shape[dim] % parts:
        return operand
    shape = list(operand.shape)
    shape[dim] //= parts
    return replace(operand, shape=tuple(shape), stride=_dense(shape, operand.stride))


def _dense(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in the order of others; what was the same along a dim still is."""
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        if like[dim]:
            stride[dim], step = step, step * shape[dim]
    return tuple(stride)


def _made(signature: Signature) -> _Made | None:
    """None if the op refuses such operands: without data many ops are Python code, which asserts."""
    tensors = [
        torch.empty_strided(operand.shape, operand.stride, dtype=operand.dtype, device=_META)
        for operand in signature.operands
    ]
    try:
        with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
            results = [
                made for made in pytree.tree_leaves(call_on(signature, tensors)()) if torch.is_tensor(made)
            ]
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None
    given = {storage_id(tensor.untyped_storage()) for tensor in tensors}
    new = {storage_id(r.untyped_storage()): r.untyped_storage().nbytes() for r in results}
    new_bytes = sum(size for storage, size in new.items() if storage not in given)
    return _Made(tuple(tuple(r.shape) for r in results), new_bytes, counter.get_total_flops())


def _is_fraction(made: _Made, whole: _Made, parts: int) -> bool:
    """Whether each result is shorter along one dim, or a sum over it, and the work is so much less."""
    pairs = zip(made.shapes, whole.shapes, strict=True)
    return made.operations * parts == whole.operations and all(
        _is_shorter(part, of, parts) or part == of for part, of in pairs
    )


def _is_shorter(part: Sequence[int], whole: Sequence[int], parts: int) -> bool:
    differing = [(a, b) for a, b in zip(part, whole, strict=True) if a != b]
    return len(differing) == 1 and differing[0][0] * parts == differing[0][1]


CLOCK = "probe"
PROBING_SECONDS = 120.0  # after which further ops run once
_RELEASED_BYTES = 2**25  # of operands, after which memory that probes have freed goes back to the system


@dataclass(frozen=True, slots=True)
class Probed:
    """The cost of a captured step on this machine, op by op.

    `workspace_bytes` is the memory of kernels beyond operands and results. `estimated` are the ops that could
    not be probed: their figures come from tables and the machine's roofline.
    """

    profile: Profile
    workspace_bytes: Mapping[str, int]
    estimated: frozenset[str]


def probe(
    captured: Captured,
    *,
    repeats: int = 5,
    limit_seconds: float = PROBING_SECONDS,
    progress: Progress | None = None,
    cache: ProbeCache | None = USER_CACHE,
) -> Probed:
    """Probe each distinct op of the step on real tensors, except those that `cache` knows.

    `progress(done, of)` is called after each op. The most expensive ops come first; after `limit_seconds`,
    each of the others runs once: a table of workspaces may say less than a kernel takes.
    """
    graph, device = captured.graph, device_of(captured.graph)
    signatures = {op.id: call_signature(graph, captured.program.calls[op.id]) for op in _dearest_first(graph)}
    found = costs_of_calls(
        signatures.values(),
        device,
        repeats=repeats,
        limit_seconds=limit_seconds,
        progress=progress,
        cache=cache,
    )
    costs = {op: found[signature.text] for op, signature in signatures.items()}
    return _probed(captured, costs, lambda: measure_machine(device, cache=cache))


def probe_memory(
    captured: Captured,
    known_workspace: Callable[[Signature], int | None],
    *,
    cache: ProbeCache | None = USER_CACHE,
) -> Mapping[str, int] | None:
    """The workspace of each op, for a step whose seconds do not matter; None if `cache` knows all costs.

    Ops that `known_workspace` does not know, and the cache neither, run three times each. What they took is
    not kept in the cache, for their seconds are not exact.
    """
    graph, calls = captured.graph, captured.program.calls
    signatures = {op.id: call_signature(graph, calls[op.id]) for op in _dearest_first(graph)}
    book = _CostBook(device_of(graph), cache)
    if all(signature.text in book.costs for signature in signatures.values()):
        return None
    known = {signature.text: known_workspace(signature) for signature in signatures.values()}
    unknown = {s.text: s for s in signatures.values() if s.text not in book.costs and known[s.text] is None}
    book.fill(list(unknown.values()), 0, PROBING_SECONDS, None, keep=False)
    costs = {op: book.costs.get(s.text) for op, s in signatures.items() if known[s.text] is None}
    workspaces = dict(_probed(captured, costs, Machine).workspace_bytes)
    workspaces.update((op, known[s.text] or 0) for op, s in signatures.items() if op not in costs)
    return workspaces


def known_seconds(captured: Captured, *, cache: ProbeCache | None = USER_CACHE) -> dict[str, float]:
    """The seconds of the ops that the cache knows."""
    graph, calls = captured.graph, captured.program.calls
    costs = _CostBook(device_of(graph), cache).costs
    found = {op.id: costs.get(call_signature(graph, calls[op.id]).text) for op in _dearest_first(graph)}
    return {op: cost.seconds for op, cost in found.items() if cost is not None}


def costs_of_calls(
    signatures: Iterable[Signature],
    device: torch.device,
    *,
    repeats: int = 5,
    limit_seconds: float = PROBING_SECONDS,
    progress: Progress | None = None,
    cache: ProbeCache | None = USER_CACHE,
) -> Mapping[str, Cost | None]:
    """Costs by the text of signatures, probed in their order; None for calls that were not probed."""
    distinct = {signature.text: signature for signature in signatures}
    book = _CostBook(device, cache)
    missing = [signature for text, signature in distinct.items() if text not in book.costs]
    book.fill(missing, repeats, limit_seconds, progress)
    return {text: book.costs.get(text) for text in distinct}


class _CostBook:
    """Costs by the text of signatures: those that the cache had, and those found out since."""

    def __init__(self, device: torch.device, cache: ProbeCache | None) -> None:
        self._device, self._cache, self._platform = device, cache, platform_of(device)
        self.costs = dict(cache.read(self._platform).costs) if cache else {}

    def fill(
        self,
        signatures: list[Signature],
        repeats: int,
        limit_seconds: float,
        progress: Progress | None,
        *,
        keep: bool = True,
    ) -> None:
        """Probe these, as far as there is time; with `keep`, for the cache, even if interrupted."""
        alone(partial(out_of_sight, partial(self._fill, signatures, repeats, limit_seconds, progress, keep)))

    def _fill(
        self,
        signatures: list[Signature],
        repeats: int,
        limit_seconds: float,
        progress: Progress | None,
        keep: bool,
    ) -> None:
        found, hasty = dict[str, Cost](), dict[str, Cost]()
        released = 0  # bytes of operands since free memory was last given back
        clock, deadline = clock_of(self._device), time.perf_counter() + patience().seconds_left / 2
        begun = clock()
        settle_heap(self._device)
        try:
            with _contents_kept():
                for number, signature in enumerate(signatures, start=1):
                    in_time = clock() - begun < limit_seconds and time.perf_counter() < deadline
                    target = str(signature.call.target)
                    is_needed = in_time or target == UPDATE or target not in PROBES
                    if is_needed and (
                        cost := cost_of_call(signature, self._device, repeats=repeats, once=not in_time)
                    ):
                        (found if in_time else hasty)[signature.text] = cost
                        released += signature.operand_bytes
                        if released > _RELEASED_BYTES:
                            release_free_memory(self._device)
                            released = 0
                    tell_phase("probing ops", number, len(signatures))
                    if progress:
                        progress(number, len(signatures))
        finally:
            release_free_memory(self._device)
            self.costs.update(found | hasty)
            if self._cache and found and keep:
                self._cache.add(self._platform, found)


def _probed(captured: Captured, costs: Mapping[str, Cost | None], machine: Callable[[], Machine]) -> Probed:
    """The account of the whole step: ops without an entry only look, those with None are estimated."""
    graph, calls = captured.graph, captured.program.calls
    seconds = dict.fromkeys((op.id for op in graph.ops), 0.0)
    workspaces = dict.fromkeys(seconds, 0)
    estimated = frozenset(op for op, cost in costs.items() if cost is None)
    _refuse_unprobed(graph, estimated)
    if estimated:
        guessed, workspace = price_by_roofline(graph, machine()).seconds, estimated_workspaces(graph)
        seconds.update((op, guessed[op]) for op in estimated)
        workspaces.update((op, workspace[op]) for op in estimated)
    for op, cost in costs.items():
        if cost is not None:
            seconds[op] = cost.seconds
            workspaces[op] = max(0, cost.rise_bytes - _result_bytes(graph, calls[op]))
    return Probed(_profile(seconds, estimated.issuperset(costs)), workspaces, estimated)


def _refuse_unprobed(graph: Graph, estimated: frozenset[str]) -> None:
    """No table has the memory of an op with a probe of its own: one that was not probed cannot be planned."""
    for op in graph.ops:
        if op.id in estimated and op.type in PROBES:
            raise NotTileable(f"{op.id} could not be probed on this machine")


def _result_bytes(graph: Graph, call: Call) -> int:
    """Bytes that the op itself allocates for its results. What it overwrites was copied before."""
    results = call.outputs[: len(call.outputs) - len(call.fresh)]
    tensors = (graph.tensors[name] for name in results if name is not None)
    return sum(tensor.nbytes or 0 for tensor in tensors if tensor.alias_of is None)


def _profile(seconds: Mapping[str, float], is_estimated: bool) -> Profile:
    """A clock on which the ops follow each other without a gap."""
    now, intervals = 0.0, {}
    for op, duration in seconds.items():
        intervals[op] = Interval(now, now, now + duration)
        now += duration
    return Profile({CLOCK: intervals}, is_estimated)


def _dearest_first(graph: Graph) -> list[Op]:
    """The ops that do something: those with a probe of their own, then others by roofline."""
    expected = price_by_roofline(graph, Machine()).seconds
    ops = (op for op in graph.ops if not _only_looks(graph, op))
    return sorted(ops, key=lambda op: (op.type not in PROBES, -expected[op.id]))


def _only_looks(graph: Graph, op: Op) -> bool:
    """Whether the op makes nothing but views."""
    aliases = all(graph.tensors[name].alias_of is not None for name in op.writes())
    return aliases and op.phase is not Phase.UPDATE
