"""FunctionalStep: a step as calls without side effects, on values that never change.

`pruned` drops calls that no result, gradient or update depends on. `with_updates` adds the calls that write
new contents into buffers, each as early as possible: later readers then read the buffer, and the contents are
not kept twice. Views of the new contents become views of the buffer. `Lowering` makes of it the Graph that
plans are made on and the Program that runs it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from stowplan.capture.answers import Answer
from stowplan.capture.origins import Origin
from stowplan.capture.paths import NOTHING, Paths
from stowplan.capture.program import Call, Program, Ref, attributes_of, draws, inputs_of, reading
from stowplan.capture.recording import Recording
from stowplan.capture.stand_ins import StorageView, contiguous_stride
from stowplan.errors import CaptureError
from stowplan.ir import DType, Graph, Kind, Op, Phase, Role, Tensor, Use, validate


@dataclass(frozen=True, slots=True)
class Value:
    """The result of a call, or an external tensor. `root` owns its storage."""

    id: str
    view: StorageView
    root: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class FunctionalCall:
    """A call under its id, and the position of the event it was made for."""

    id: str
    call: Call
    event: int


@dataclass(frozen=True, slots=True)
class FunctionalStep:
    """Values by id and calls in order.

    `updates` maps external tensors to their final contents, where these changed. `incoming` are the gradients
    that autograd's nodes received, by node, for each output of the op.
    """

    values: Mapping[str, Value]
    calls: tuple[FunctionalCall, ...]
    outputs: tuple[object, ...]
    gradients: Mapping[str, str]
    incoming: Mapping[int, tuple[str | None, ...]]
    updates: Mapping[str, str]
    answers: tuple[tuple[int, Answer], ...] = ()  # each with the number of calls before it


@dataclass(slots=True)
class StorageState:
    """A storage at one moment: the value of its contents and the values that view it.

    `derived` has, for each view, the position of the event that first took it.
    """

    base: StorageView
    value: str
    views: dict[StorageView, str]
    derived: dict[StorageView, int] = field(default_factory=dict)

    def overwrite(self, value: str) -> None:
        """The contents are another value now; earlier views show the old contents."""
        self.value = value
        self.views = {self.base: value}


def pruned(functional: FunctionalStep) -> FunctionalStep:
    """Only the calls that something depends on. Random calls all stay: they advance the generator."""
    needed = {leaf.tensor for leaf in functional.outputs if isinstance(leaf, Ref)}
    needed |= {*functional.gradients.values(), *functional.updates.values()}
    kept = []
    for call in reversed(functional.calls):
        if draws(call.call.target, call.call.args, call.call.kwargs) or any(
            output in needed for output in call.call.outputs
        ):
            needed.update(inputs_of(call.call))
            kept.append(call)
    return replace(functional, calls=tuple(reversed(kept)))


UPDATE = "update_"
aten = torch.ops.aten


def with_updates(functional: FunctionalStep) -> FunctionalStep:
    """Add calls that write each new value into its buffer, after the last reader of the old one."""
    due = _positions(functional)
    values, calls = dict(functional.values), list[FunctionalCall]()
    renamed: dict[str, str] = {}
    for position in range(-1, len(functional.calls)):
        if position >= 0:
            call = functional.calls[position]
            calls.append(replace(call, call=reading(call.call, renamed)))
            for view, read in _views(functional, call.call):
                values[view] = replace(values[view], root=values[renamed.get(read, read)].root)
        for buffer in due.get(position, ()):
            calls.append(_update(functional, buffer, calls[-1].event if calls else 0))
            values[_updated(buffer)] = replace(functional.values[buffer], id=_updated(buffer), root=buffer)
            renamed[functional.updates[buffer]] = _updated(buffer)
    return replace(functional, values=values, calls=tuple(calls))


def _views(functional: FunctionalStep, call: Call) -> Iterator[tuple[str, str]]:
    """The views that a call makes, each with the tensor it views."""
    for made in filter(None, call.outputs):
        root = functional.values[made].root
        viewed = (read for read in inputs_of(call) if functional.values[read].root == root != made)
        yield from ((made, read) for read in islice(viewed, 1))


def is_update(call: FunctionalCall) -> bool:
    """Whether the call writes a buffer's new contents into it."""
    return call.id.startswith(UPDATE) and call.call.target is aten.copy_.default


def _updated(buffer: str) -> str:
    return f"{buffer}.updated"


def _update(functional: FunctionalStep, buffer: str, event: int) -> FunctionalCall:
    value = functional.updates[buffer]
    call = Call(aten.copy_.default, (Ref(buffer), Ref(value)), {}, (_updated(buffer),), single=True)
    return FunctionalCall(f"{UPDATE}{buffer}", call, event)


def _positions(functional: FunctionalStep) -> dict[int, list[str]]:
    """Buffers by the position of the call that their update follows."""
    latest = dict.fromkeys(functional.updates, -1)
    of_value = {value: buffer for buffer, value in functional.updates.items()}
    for position, call in enumerate(functional.calls):
        old = (functional.values[name].root for name in inputs_of(call.call))
        new = (of_value[name] for name in call.call.outputs if name in of_value)
        latest.update((buffer, position) for buffer in (*old, *new) if buffer in latest)
    due: dict[int, list[str]] = {}
    for buffer, position in latest.items():
        due.setdefault(position, []).append(buffer)
    return due


UPDATE_BUFFER = "stowplan.update_buffer"


class Lowering:
    """Builds the graph and the program of one recording from its functional step."""

    def __init__(
        self, recording: Recording, functional: FunctionalStep, ids: Mapping[StorageView, str]
    ) -> None:
        self._recording, self._functional, self._ids = recording, functional, ids
        self._makers = {
            name: call for call in functional.calls for name in call.call.outputs if name is not None
        }
        self._externals = {ids[external.view]: external for external in recording.externals}
        self._adjoints = self._forward_calls_by_node()
        self.gradients = self._gradients()

    def graph(self, name: str) -> Graph:
        """The graph, with ops in the recorded order."""
        tensors = {tensor.id: tensor for tensor in self._tensors()}
        outputs = {leaf.tensor for leaf in self._functional.outputs if isinstance(leaf, Ref)}
        inputs = {tensor.id for tensor in tensors.values() if tensor.kind is Kind.INPUT}
        # The call of backward holds the gradient of a loss; other gradients die when read.
        tangents = {self._ids[view] for view in self._recording.tangents if view and not view.shape}
        held = frozenset(outputs | inputs | tangents | set(self._functional.gradients.values()))
        return validate(Graph(tensors, tuple(map(self._op, self._functional.calls)), held, name))

    def program(self) -> Program:
        """The calls by op id, and the inputs and outputs."""
        recording = self._recording
        return Program(
            calls={call.id: call.call for call in self._functional.calls},
            parameters=self._names_of(Kind.PARAMETER),
            buffers=self._names_of(Kind.BUFFER),
            constants={self._ids[view]: tensor for view, tensor in recording.constants.items()},
            literals=frozenset(self._ids[view] for view in recording.literals),
            looks_at_values=recording.looks_at_values,
            inputs=tuple(None if view is None else self._ids[view] for view in recording.inputs),
            input_spec=recording.input_spec,
            outputs=self._functional.outputs,
            attached=recording.attached,
            output_spec=recording.output_spec,
            tangents=tuple(None if view is None else self._ids[view] for view in recording.tangents),
            gradients=self._functional.gradients,
            updates=self._functional.updates,
        )

    def paths(self) -> Paths:
        """Which incoming gradients the ops of backward need. There is no choice with a single one."""
        incoming = [self._ids[view] for view in self._recording.tangents if view is not None]
        if len(incoming) < 2:
            return Paths()
        backward = [call for call in self._functional.calls if self._phase(call) is Phase.BACKWARD]
        received = {
            call.id: tuple(name for name in self._functional.incoming.get(event.node, ()) if name is not None)
            for call in backward
            if (event := self._recording.events[call.event]).node is not None and not event.merges
        }
        sums = frozenset(call.id for call in backward if self._recording.events[call.event].merges)
        found = Paths(received, sums).sources([(call.id, call.call) for call in backward], incoming)
        gradients = self._functional.gradients.items()
        return Paths(received, sums, {name: found.get(gradient, NOTHING) for name, gradient in gradients})

    def _names_of(self, kind: Kind) -> dict[str, tuple[str, ...]]:
        return {name: external.names for name, external in self._externals.items() if external.kind is kind}

    def _phase(self, call: FunctionalCall) -> Phase:
        if is_update(call):
            return Phase.UPDATE
        return Phase.FORWARD if call.event < self._recording.turn else Phase.BACKWARD

    def _op(self, call: FunctionalCall) -> Op:
        if is_update(call):
            return self._update(call)
        phase, event = self._phase(call), self._recording.events[call.event]
        if phase is Phase.BACKWARD and draws(call.call.target, call.call.args, call.call.kwargs):
            raise CaptureError(
                f"{call.call.target} draws random numbers during backward",
                where=event.origin.source,
                advice="if a package's own checkpointing does that, remove it: the plan recomputes",
            )
        adjoint = self._adjoint(call)
        origin = event.origin if event.origin.source or adjoint is None else self._origin(adjoint)
        return Op(
            id=call.id,
            type=str(call.call.target),
            phase=phase,
            inputs=tuple(Use(name, self._role(name, phase)) for name in inputs_of(call.call)),
            outputs=tuple(Use(name) for name in call.call.outputs if name is not None),
            attributes=attributes_of(call.call),
            device=self._device(call),
            adjoint_of=None if adjoint is None else adjoint.id,
            scope=origin.scope,
            source=origin.source,
        )

    def _update(self, call: FunctionalCall) -> Op:
        """Writes into a buffer: reads the new contents, and makes an alias of the buffer that has them."""
        _, value = inputs_of(call.call)
        outputs = tuple(Use(name) for name in call.call.outputs if name is not None)
        return Op(call.id, UPDATE_BUFFER, Phase.UPDATE, (Use(value),), outputs, device=self._device(call))

    def _device(self, call: FunctionalCall) -> str:
        return str(
            self._functional.values[next(name for name in call.call.outputs if name is not None)].view.device
        )

    def _role(self, name: str, phase: Phase) -> Role:
        maker = self._makers.get(name)
        saved = phase is Phase.BACKWARD and maker is not None and self._phase(maker) is Phase.FORWARD
        return Role.SAVED if saved else Role.DATA

    def _origin(self, call: FunctionalCall) -> Origin:
        return self._recording.events[call.event].origin

    def _adjoint(self, call: FunctionalCall) -> FunctionalCall | None:
        """The forward call that a backward call differentiates; none for the engine's sums of gradients."""
        event = self._recording.events[call.event]
        if self._phase(call) is not Phase.BACKWARD or event.merges or event.node is None:
            return None
        return self._adjoints.get(event.node)

    def _forward_calls_by_node(self) -> dict[int, FunctionalCall]:
        return {
            node: call
            for call in self._functional.calls
            if self._phase(call) is Phase.FORWARD
            for node in self._recording.events[call.event].nodes
        }

    def _gradients(self) -> dict[str, str]:
        """The whole gradient of each tensor that has one: of forward's values, then of the leaves."""
        found = {
            made: gradient
            for node, given in self._functional.incoming.items()
            if node in self._adjoints
            for made, gradient in zip(self._adjoints[node].call.outputs, given, strict=False)
            if made is not None and gradient is not None and self._fit(made, gradient)
        }
        return found | dict(self._functional.gradients)

    def _fit(self, made: str, gradient: str) -> bool:
        """Whether `gradient` fits `made`; nodes receive none for outputs that are not differentiable."""
        one, other = self._functional.values[made].view, self._functional.values[gradient].view
        there = gradient in self._makers or gradient in self._externals
        return there and (one.shape, one.dtype) == (other.shape, other.dtype)

    def _tensors(self) -> Iterator[Tensor]:
        gradient_of = {gradient: wanted for wanted, gradient in reversed(self.gradients.items())}
        gradient_of |= {gradient: wanted for wanted, gradient in self._functional.gradients.items()}
        for value in self._functional.values.values():
            maker = self._makers.get(value.id)
            if value.id in self._externals or (maker is not None and is_update(maker)):
                external = self._externals[value.root]
                yield _tensor(value, external.kind, external.names[0], gradient_of.get(value.id))
            elif maker is not None:
                yield _tensor(value, self._kind(value), "", gradient_of.get(value.id))

    def _kind(self, value: Value) -> Kind:
        if value.view.dtype is torch.bool:
            return Kind.MASK
        inexact = value.view.dtype.is_floating_point or value.view.dtype.is_complex
        backward = self._phase(self._makers[value.id]) is Phase.BACKWARD
        return Kind.GRADIENT if backward and inexact else Kind.ACTIVATION


def _tensor(value: Value, kind: Kind, name: str, gradient_of: str | None) -> Tensor:
    view = value.view
    return Tensor(
        id=value.id,
        kind=kind,
        shape=view.shape,
        dtype=_dtype(view.dtype),
        nbytes=value.nbytes,
        name=name,
        layout="" if view.stride == contiguous_stride(view.shape) else str(view.stride),
        device=str(view.device),
        gradient_of=gradient_of,
        alias_of=None if value.root == value.id else value.root,
    )


def _dtype(dtype: torch.dtype) -> DType:
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return DType.FLOAT8
    if name not in DType.__members__.values():
        raise CaptureError(f"tensors of {dtype} are not supported")
    return DType(name)
