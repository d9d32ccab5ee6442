"""Capture of a PyTorch model: the Graph of its whole training step, with no tensor allocated.

The memory of the eager step is captured with it: the storages that came and went while the step was watched.
Autograd keeps what its formulas need, Python what its variables hold; neither follows from the graph. The
watched run shows it exactly, with one exception: on stand-ins, autograd allocates a tensor in some places
where eager overwrites one that nothing else holds. Those allocations are removed here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stowplan.alone import alone
from stowplan.capture.answers import NO_ANSWERS, Answers, answers_among
from stowplan.capture.functional import FunctionalStep, Lowering, Value, pruned, with_updates
from stowplan.capture.functionalise import functionalise
from stowplan.capture.layouts import learn_from_kernels, with_swayed_ops_marked
from stowplan.capture.origins import explained
from stowplan.capture.paths import Paths
from stowplan.capture.program import FILLING, Argument, Call, Program, fill_value
from stowplan.capture.recording import Loss, Recording, Step, record
from stowplan.capture.stand_ins import StorageView
from stowplan.capture.states_on_host import with_states_on_host
from stowplan.capture.watching import Event
from stowplan.errors import CaptureError
from stowplan.ir import Graph, Kind
from stowplan.ir.graph import collector_paused
from stowplan.watch import tell_phase

if TYPE_CHECKING:
    from stowplan.capture.cuda_calls import CudaCalls, OwnBatchNorms

aten = torch.ops.aten

# Autograd's formulas write these in place, unless a tensor is of a subclass, as stand-ins are.
_WRITTEN_BY_FORMULAS = (
    aten.index_put.default,
    aten.scatter_add.default,
    aten.scatter.src,
    aten.index_add.default,
    aten.masked_fill.Scalar,
)


@dataclass(frozen=True, slots=True)
class Span:
    """A storage that exists from one event to another, inclusive; named after the first tensor in it.

    `storage` is its number in the views of the captured events.
    """

    tensor: str
    nbytes: int
    first: int
    last: int
    storage: int | None = None


@dataclass(frozen=True, slots=True)
class EagerMemory:
    """The storages of an eager step. `ops` are the ids of the graph's ops that each event became."""

    ops: tuple[tuple[str, ...], ...]
    spans: tuple[Span, ...]

    def curve_bytes(self, workspace_bytes: Mapping[str, int] | None = None) -> NDArray[np.int64]:
        """Bytes alive during each event, including `workspace_bytes` of kernels, by op id."""
        change = np.zeros(len(self.ops) + 1, dtype=np.int64)
        for span in self.spans:
            change[span.first] += span.nbytes
            change[span.last + 1] -= span.nbytes
        workspace = np.array(self.workspace_of_events(workspace_bytes or {}), dtype=np.int64)
        curve: NDArray[np.int64] = np.cumsum(change[:-1]) + workspace
        return curve

    def workspace_of_events(self, workspace_bytes: Mapping[str, int]) -> list[int]:
        """The workspace of each event's kernels, from that of ops."""
        return [max((workspace_bytes.get(op, 0) for op in ops), default=0) for ops in self.ops]

    def peak_bytes(self, workspace_bytes: Mapping[str, int] | None = None) -> int:
        """The most bytes alive at once, including parameters."""
        return int(self.curve_bytes(workspace_bytes).max(initial=0))


def eager_memory(recording: Recording, functional: FunctionalStep) -> EagerMemory:
    """The spans of everything but constants, which belong to the loaded program."""
    ops: list[list[str]] = [[] for _ in recording.events]
    for call in functional.calls:
        ops[call.event].append(call.id)
    return EagerMemory(tuple(map(tuple, ops)), tuple(_spans(recording, functional)))


def _spans(recording: Recording, functional: FunctionalStep) -> Iterator[Span]:
    names = {
        value.view.storage: name
        for name, value in reversed(list(functional.values.items()))
        if value.root == name
    }
    constants = {o.view.storage for o in recording.externals if o.kind is Kind.CONSTANT}
    tangents = {
        view.storage: _tangent_end(recording, view) for view in recording.tangents if view is not None
    }
    latest = len(recording.events) - 1  # before the turn if gradients pass through a backward without ops
    last = [latest if life.died is None else life.died for life in recording.lifetimes]
    taken_over = _taken_over(recording, last)
    for later, earlier in reversed(taken_over.items()):
        last[earlier] = last[later]
    for number, life in enumerate(recording.lifetimes):
        if number in tangents:
            first, end = min(recording.turn, latest), min(tangents[number], latest)
        else:
            first, end = max(0, life.born), last[number]
        if number not in constants and number not in taken_over and first <= end:
            yield Span(names.get(number, ""), life.nbytes, first, end, number)


def _taken_over(recording: Recording, last: list[int]) -> dict[int, int]:
    """Storages that eager does not allocate, and the storages it overwrites in their place.

    Eager overwrites only a tensor that nothing else holds; a view holds the tensor it views.
    """
    taken: dict[int, int] = {}
    views: set[StorageView] = set()
    for position, event in enumerate(recording.events):
        source, result = event.args[0] if event.args else None, next(iter(event.results), None)
        if _writes_in_eager(event) and isinstance(source, StorageView) and result is not None:
            sole = last[source.storage] == position and source not in views
            if sole and source.is_dense():
                taken[result.storage] = source.storage
        views.update(
            view for view in event.results if view and recording.lifetimes[view.storage].born != position
        )
    return taken


def _writes_in_eager(event: Event) -> bool:
    return event.merges or (event.node is not None and event.target in _WRITTEN_BY_FORMULAS)


def _tangent_end(recording: Recording, tangent: StorageView) -> int:
    """The call of backward holds the gradient of a loss; others die at their last reader or are handed on."""
    handed_on = {gradient.storage for gradient in recording.gradients.values()}
    if not tangent.shape or tangent.storage in handed_on:
        return len(recording.events) - 1
    readers = (position for position, event in enumerate(recording.events) if tangent in event.args)
    return max(readers, default=recording.turn)


_MOST_LAYOUTS = 64  # wrong strides that one step may have, each found by another capture


@dataclass(frozen=True, slots=True)
class Captured:
    """A training step: a Graph to plan on, the Program that runs it, and the memory of the eager run.

    `gradients` has the gradient of every tensor that has one. Two tensors may share it, such as a sum and its
    operand; the graph's `gradient_of` then names the one differentiated first. `forward` are the ops of the
    forward half as they were dispatched. The step is that of arguments for which `answers` hold. `paths` tell
    which ops of backward run if gradients come in for some outputs only. `slices` are the tensors from
    outside that are a part of their storage, with its bytes; `containers` those in which forward may leave
    tensors, by label. Unless it `records`, forward runs under torch.no_grad().
    """

    graph: Graph
    program: Program
    eager: EagerMemory
    gradients: Mapping[str, str]
    forward: tuple[Event, ...] = ()
    answers: Answers = NO_ANSWERS
    paths: Paths = field(default_factory=Paths)
    slices: Mapping[str, int] = field(default_factory=dict)
    containers: Mapping[str, Any] = field(default_factory=dict)
    records: bool = True


def is_same_step(one: Captured, other: Captured) -> bool:
    """Whether two captures do the same with the same tensors."""
    mine, theirs = one.program.constants, other.program.constants
    return (
        one.graph.ops == other.graph.ops
        and one.program.calls == other.program.calls
        and mine.keys() == theirs.keys()
        and all(mine[name] is theirs[name] or torch.equal(mine[name], theirs[name]) for name in mine)
    )


def capture(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Loss | None = None,
    device: torch.device | str = "cpu",
    all_outputs: bool = False,
    differentiated: tuple[int, ...] | None = None,
    know_values: bool = False,
    cuda: "CudaCalls | OwnBatchNorms | None" = None,
    containers: Mapping[str, Any] = MappingProxyType({}),
    records: bool = True,
) -> Captured:
    """The training step of `model(*args, **kwargs)`: forward, loss and backward.

    A function `loss` is captured with the model, as `loss(output)`. Gradients come in from outside: for the
    output that `loss` names, for the outputs at the positions `differentiated`, for the one scalar among the
    outputs unless `all_outputs` is set, or else for every output that has a gradient. Tensors on the meta
    device are captured as if on `device`. A step that branches on data raises CaptureError. With
    `know_values` it may branch on small integer arguments; the caller then has to ask `answers` before each
    call. With `cuda`, forward calls other kernels: those of a CUDA device on tensors of the CPU give a
    graph to plan on. In `containers`, by label, it may leave tensors that it makes. Without `records`, or if
    nothing requires a gradient, the step is forward alone.
    """
    step = Step(
        model,
        tuple(args),
        dict(kwargs or {}),
        loss,
        torch.device(device),
        all_outputs,
        differentiated,
        know_values,
        cuda,
        containers,
        records,
    )
    return alone(partial(_captured, step))


@collector_paused()
def _captured(step: Step) -> Captured:
    for _ in range(_MOST_LAYOUTS):
        with explained():
            recording = record(step)
        tell_phase("building the graph")
        ids = _external_ids(recording)
        whole = functionalise(recording, ids)
        if not learn_from_kernels(recording.events):
            break
    lowering = Lowering(recording, with_updates(pruned(whole)), ids)
    eager = eager_memory(recording, whole)
    program, forward = lowering.program(), recording.events[: recording.turn]
    graph = with_swayed_ops_marked(lowering.graph(type(step.model).__name__), program)
    calls = [_without_operand(call.call, whole.values) for call in whole.calls]
    buffers = {name: paths[0] for name, paths in program.buffers.items() if not paths[0].startswith("loss.")}
    answers = answers_among(
        calls,
        whole.answers,
        program.inputs,
        program.constants,
        buffers,
        lambda name: whole.values[name].view,
        program.updates,
    )
    _refuse_unsized(graph, program)
    slices = {ids[e.view]: recording.slices.get(e.view.storage, 0) for e in recording.externals}
    parts = {name: nbytes for name, nbytes in slices.items() if nbytes}
    captured = Captured(
        graph,
        program,
        eager,
        lowering.gradients,
        forward,
        answers,
        lowering.paths(),
        parts,
        step.containers,
        step.records,
    )
    return with_states_on_host(captured)


def _refuse_unsized(graph: Graph, program: Program) -> None:
    """Refuse to write into empty buffers: kernels of quantisation give them their size in the first call."""
    for name in program.updates:
        if name in program.buffers and graph.tensors[name].nbytes == 0:
            raise CaptureError(
                f"forward writes into the buffer {program.buffers[name][0]!r}, which has no elements yet",
                advice="call the model once before fit, so that its buffers have their sizes",
            )


def _without_operand(call: Call, values: Mapping[str, Value]) -> Call:
    """`ones_like(h)` as a call that needs no h, so that an answer that depends on it can be asked for."""
    output = call.outputs[0] if call.target in FILLING else None
    if output is None:
        return call
    made, value = values[output].view, cast(Argument, fill_value(call.target, call.args, call.kwargs))
    return replace(
        call, target=torch.ops.aten.full.default, args=(made.shape, value), kwargs={"dtype": made.dtype}
    )


def _external_ids(recording: Recording) -> dict[StorageView, str]:
    ids: dict[StorageView, str] = {}
    taken: set[str] = set()
    for external in recording.externals:
        name = external.names[0]
        while name in taken:
            name += "_"
        taken.add(name)
        ids[external.view] = name
    return ids
