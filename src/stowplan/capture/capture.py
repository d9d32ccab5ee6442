"""Capture of a PyTorch model: the Graph of its whole training step, with no tensor allocated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from stowplan.capture.answers import NO_ANSWERS, Answers, answers_among
from stowplan.capture.eager import EagerMemory, eager_memory
from stowplan.capture.functional import Lowering, Value, pruned, with_updates
from stowplan.capture.functionalise import functionalise
from stowplan.capture.layouts import learn_from_kernels, with_swayed_ops_marked
from stowplan.capture.origins import explained
from stowplan.capture.program import Argument, Call, Program
from stowplan.capture.recording import Loss, Recording, Step, record
from stowplan.capture.schema import FILLING, fill_value
from stowplan.capture.storage_views import StorageView
from stowplan.capture.watching import Event
from stowplan.ir import Graph
from stowplan.ir.graph import collector_paused

if TYPE_CHECKING:
    from stowplan.capture.cuda_calls import CudaCalls

_MOST_LAYOUTS = 64  # wrong strides that one step may have, each found by another capture


@dataclass(frozen=True, slots=True)
class Captured:
    """A training step: a Graph to plan on, the Program that runs it, and the memory of the eager run.

    `gradients` has the gradient of every tensor that has one. Two tensors may share it, such as a sum and its
    operand; the graph's `gradient_of` then names the one differentiated first. `forward` are the ops of the
    forward half as they were dispatched. The step is that of arguments for which `answers` hold.
    """

    graph: Graph
    program: Program
    eager: EagerMemory
    gradients: Mapping[str, str]
    forward: tuple[Event, ...] = ()
    answers: Answers = NO_ANSWERS


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
    cuda: "CudaCalls | None" = None,
) -> Captured:
    """The training step of `model(*args, **kwargs)`: forward, loss and backward.

    A function `loss` is captured with the model, as `loss(output)`. Gradients come in from outside: for the
    output that `loss` names, for the outputs at the positions `differentiated`, for the one scalar among the
    outputs unless `all_outputs` is set, or else for every output that has a gradient. Tensors on the meta
    device are captured as if on `device`. A step that branches on data raises CaptureError. With
    `know_values` it may branch on small integer arguments; the caller then has to ask `answers` before each
    call. With `cuda`, forward calls the kernels of a CUDA device on tensors of the CPU: a graph to plan on.
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
    )
    with collector_paused():
        return _captured(step)


def _captured(step: Step) -> Captured:
    for _ in range(_MOST_LAYOUTS):
        with explained():
            recording = record(step)
        ids = _external_ids(recording)
        whole = functionalise(recording, ids)
        if not learn_from_kernels(recording.events):
            break
    lowering = Lowering(recording, with_updates(pruned(whole)), ids)
    eager = eager_memory(recording, whole)
    program, forward = lowering.program(), recording.events[: recording.turn]
    graph = with_swayed_ops_marked(lowering.graph(type(step.model).__name__), program)
    calls = [_without_operand(call.call, whole.values) for call in whole.calls]
    answers = answers_among(
        calls, whole.answers, program.inputs, program.constants, lambda name: whole.values[name].view
    )
    return Captured(graph, program, eager, lowering.gradients, forward, answers)


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
