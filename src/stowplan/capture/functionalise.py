"""From events on storages to calls on values: every in-place write becomes a new value.

Eager code writes into tensors. A plan must be able to recompute any op, so no op may have an effect other
than its outputs. Each write to a storage makes a value; a tensor that is read later is looked up in the value
that the storage then has.
"""

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from stowplan.capture.answers import Answer
from stowplan.capture.functional import FunctionalCall, FunctionalStep, StorageState, Value
from stowplan.capture.program import (
    Argument,
    Call,
    Ref,
    bound_arguments,
    draws,
    functional_variant,
    handle_or_text,
    inputs_of,
    is_copied_out,
    leaves,
    result_stride,
    written_arguments,
)
from stowplan.capture.recording import Recording
from stowplan.capture.stand_ins import StorageView
from stowplan.capture.watching import Event, Incoming
from stowplan.errors import CaptureError
from stowplan.torch_private import OpOverload, schema_of

aten = torch.ops.aten

# Running statistics that these ops accept and, in training, do not read. As arguments they would be kept for
# backward, and another forward must not change them until then.
_IGNORED_IN_TRAINING = {
    aten.native_batch_norm_backward.default: ("running_mean", "running_var"),
    aten.cudnn_batch_norm_backward.default: ("running_mean", "running_var"),
    aten.miopen_batch_norm_backward.default: ("running_mean", "running_var"),
}


def functionalise(recording: Recording, externals: Mapping[StorageView, str]) -> FunctionalStep:
    """The recording as functional calls; `externals` has the ids of the external tensors.

    What forward binds to other memory gets its new contents by a write. If the step still needs the old ones,
    in backward or as a result, it reads a copy of them.
    """
    step = _functionalised(recording, externals, frozenset())
    outlived = frozenset(_outlived(recording, externals, step))
    return _functionalised(recording, externals, outlived) if outlived else step


def _outlived(
    recording: Recording, externals: Mapping[StorageView, str], step: FunctionalStep
) -> Iterator[str]:
    """The tensors bound to other memory whose old contents are needed after the write of the new ones."""
    later = {name for c in step.calls if c.event >= recording.turn for name in inputs_of(c.call)}
    later.update(leaf.tensor for leaf in step.outputs if isinstance(leaf, Ref))
    later.update(step.updates.values())
    roots = {step.values[name].root for name in later}
    yield from (externals[view] for view in recording.replaced if externals[view] in roots)


def _functionalised(
    recording: Recording, externals: Mapping[StorageView, str], copied: Container[str]
) -> FunctionalStep:
    functionaliser = _Functionaliser(recording, externals, copied)
    for position in range(recording.turn):
        functionaliser.add(position)
    functionaliser.end_forward()
    incoming = deque(recording.incoming)
    for position in range(recording.turn, len(recording.events)):
        while incoming and incoming[0].position <= position:
            functionaliser.enter_node(incoming.popleft())
        functionaliser.add(position)
    return functionaliser.end()


class _Functionaliser:
    def __init__(
        self, recording: Recording, externals: Mapping[StorageView, str], copied: Container[str]
    ) -> None:
        """The step reads a copy of those external tensors that are `copied`, made before its first op."""
        self._recording, self._externals = recording, externals
        self._position = 0
        self._used = dict.fromkeys(externals.values(), 0)  # names, and how often each was requested again
        self._places: dict[int, StorageState] = {}
        self._values: dict[str, Value] = {}
        self._calls: list[FunctionalCall] = []
        self._outputs: tuple[object, ...] = ()
        self._replaced: dict[str, str] = {}
        self._incoming: dict[int, tuple[str | None, ...]] = {}
        self._waiting, self._answers = deque(recording.answers), list[tuple[int, Answer]]()
        for view, name in externals.items():
            if (place := self._places.get(view.storage)) is None:
                self._enter(view, name)
            else:  # a second tensor of the user's in one storage
                self._look(place, view, name)
        self._copies = {name: self._copy_first(view) for view, name in externals.items() if name in copied}

    def _copy_first(self, view: StorageView) -> str:
        place = self._places[view.storage]
        name = self._as_captured(place)
        place.overwrite(name)
        return name

    def add(self, position: int) -> None:
        """Process the next event."""
        self._answer_reads(before=position)
        self._position, event = position, _without_ignored(self._recording.events[position])
        given = set(leaves((event.args, tuple(event.kwargs.values()))))
        written = written_arguments(event.target, event.args, event.kwargs)
        if event.target is aten.lift_fresh.default:
            self._adopt(event)
        elif torch.Tag.inplace_view in event.target.tags:
            self._look_in_place(event)
        elif written:
            self._write(event, written)
        elif not all(result in given for result in event.results):  # else it returns its arguments
            self._make(event.target, event, single=event.single)

    def _answer_reads(self, before: int) -> None:
        """Record the reads up to an event: the values of what was read then."""
        while self._waiting and self._waiting[0].position <= before:
            read = self._waiting.popleft()
            names = tuple(map(self._read, read.views))
            self._answers.append((len(self._calls), Answer(read.ask, names, read.answer, read.origin.source)))

    def end_forward(self) -> None:
        """Answer the outputs of forward before backward begins."""
        self._answer_reads(before=self._recording.turn)
        recorded = self._recording.outputs
        self._outputs = tuple(
            Ref(self._read(leaf)) if isinstance(leaf, StorageView) else leaf for leaf in recorded
        )
        for buffer, view in self._recording.replaced.items():
            name, value = self._externals[buffer], self._read(view)
            if value not in (name, self._copies.get(name)):
                self._replaced[name] = value

    def enter_node(self, given: Incoming) -> None:
        """Record the gradients a node receives, where they are values."""
        self._incoming[given.node] = tuple(
            None if view is None else self._places[view.storage].views.get(view) for view in given.gradients
        )

    def end(self) -> FunctionalStep:
        """Answer the gradients, and the contents of external tensors that were written."""
        self._answer_reads(before=len(self._recording.events))
        gradients = {
            self._externals[wanted]: self._read(gradient)
            for wanted, gradient in self._recording.gradients.items()
        }
        updates = dict(self._contents()) | self._replaced
        return FunctionalStep(
            self._values,
            tuple(self._calls),
            self._outputs,
            gradients,
            self._incoming,
            updates,
            tuple(self._answers),
        )

    def _contents(self) -> Iterator[tuple[str, str]]:
        """The external tensors that were written, with their new contents."""
        for view, name in self._externals.items():
            place = self._places[view.storage]
            first = self._externals[place.base]  # in this storage
            if place.value in (first, self._copies.get(first)):
                continue
            if name != first:
                raise CaptureError(
                    f"the step writes into {first}, which shares memory with {name}",
                    advice=f"pass a copy of one of them: {name}.clone()",
                )
            yield name, place.value

    def _adopt(self, event: Event) -> None:
        """`lift_fresh` passes a constant to the step: its contents in another storage."""
        for source, result in zip(event.args, event.results, strict=True):
            if isinstance(source, StorageView) and result is not None:
                value = self._read(source)
                self._places.setdefault(result.storage, StorageState(result, value, {result: value}))

    def _look_in_place(self, event: Event) -> None:
        """`unsqueeze_` and similar ops change a tensor's shape in place, which is a view of it."""
        if event.target is aten.resize_.default:
            self._resize(event)
            return
        (made,), viewed = event.results, event.args[0]
        assert isinstance(made, StorageView)
        assert isinstance(viewed, StorageView)
        if made.storage != viewed.storage and made.storage in self._places:
            return  # `set_`: from now on in that memory
        target = functional_variant(event.target)
        if target is None:
            raise CaptureError(f"{event.target} changes a tensor's shape in place", where=event.origin.source)
        if made not in event.args:
            self._make(target, event, single=True)

    def _resize(self, event: Event) -> None:
        """A tensor without elements becomes an uninitialised one, as in `w.new().resize_(n).normal_()`."""
        (made,), before = event.results, event.args[0]
        assert isinstance(made, StorageView)
        assert isinstance(before, StorageView)
        place = self._places[made.storage]
        if made.extent_bytes() <= place.base.extent_bytes() and made.offset == place.base.offset:
            return  # of a part of its memory
        if 0 not in before.shape or place.base.extent_bytes():
            raise CaptureError(
                f"forward resizes a tensor of shape {before.shape} to {made.shape}, which has more elements",
                where=event.origin.source,
                advice="make a new tensor, with torch.empty or torch.cat",
            )
        how = {"dtype": made.dtype, "device": made.device}
        (name,) = self._emit(aten.empty.memory_format, (made.shape,), how, (made,))
        self._places[made.storage] = StorageState(made, str(name), {made: str(name)})
        self._values[str(name)] = Value(str(name), made, str(name), made.extent_bytes())

    def _write(self, event: Event, written: Mapping[str, object]) -> None:
        """An overwritten tensor becomes a new value, made by the functional variant of the op if any."""
        views = [view for view in written.values() if isinstance(view, StorageView)]
        if len(views) < len(written):
            raise CaptureError(f"{event.target} writes into a list of tensors", where=event.origin.source)
        if event.target is aten.native_batch_norm.default:
            self._make(aten._native_batch_norm_legit_functional.default, event, views)
            return
        target, full = functional_variant(event.target), _spelled_out(event)
        if target is None or not self._keeps_layout(target, full, views[0]):
            self._make(event.target, event, views, single=event.single, fresh=tuple(written))
        else:
            self._make(target, full, views, single=True)

    def _keeps_layout(self, target: OpOverload, event: Event, view: StorageView) -> bool:
        """Whether a new value may replace the storage, or part of it.

        A part may be replaced with two exceptions. Random numbers are drawn in memory order, and `aten.copy`
        clones the whole storage of the part.
        """
        if self._places[view.storage].base == view:
            return result_stride(target, event.args, event.kwargs) == view.stride
        if target is aten.copy.default:
            return False
        lying = result_stride(aten.clone.default, (view,), {})
        return (
            not draws(target, event.args, event.kwargs)
            or result_stride(target, event.args, event.kwargs) == lying
        )

    def _make(
        self,
        target: OpOverload,
        event: Event,
        written: Sequence[StorageView] = (),
        *,
        single: bool = False,
        fresh: tuple[str, ...] = (),
    ) -> None:
        """Call `target`, which returns the event's results, then the new contents of what it writes."""
        results = [result for result in event.results if result not in written]
        views = (*results, *written)
        names = self._emit(target, event.args, event.kwargs, views, single=single, fresh=fresh)
        for view, name in zip(views, names, strict=True):
            if view is not None and name is not None:
                (self._overwrite if view in written else self._enter)(view, name)

    def _emit(
        self,
        target: OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        views: Sequence[StorageView | None],
        *,
        single: bool = True,
        fresh: tuple[str, ...] = (),
    ) -> tuple[str | None, ...]:
        """Append a call and return the ids of its outputs."""
        given = tuple(self._argument(value) for value in args)
        named = {name: self._argument(value) for name, value in kwargs.items()}
        name = self._new_name(target)
        outputs = tuple(
            None if view is None else name if single and len(views) == 1 else f"{name}.{index}"
            for index, view in enumerate(views)
        )
        copied = single and self._is_copied_out(target, views[0])
        call = Call(target, given, named, outputs, single, fresh, copied)
        self._calls.append(FunctionalCall(name, call, self._position))
        return outputs

    def _is_copied_out(self, target: OpOverload, result: StorageView | None) -> bool:
        return result is not None and is_copied_out(
            target, result, self._recording.lifetimes[result.storage].nbytes
        )

    def _argument(self, value: object) -> Argument:
        if isinstance(value, StorageView):
            return Ref(self._read(value))
        if isinstance(value, tuple):
            return tuple(self._argument(item) for item in value)
        if isinstance(value, str):
            return handle_or_text(value)
        return value  # type: ignore[return-value]  # what the dispatcher passes is an Argument

    def _new_name(self, target: OpOverload) -> str:
        plain = schema_of(target).name.partition("::")[2]
        count = self._used.get(plain, -1) + 1
        self._used[plain] = count
        name = f"{plain}_{count}" if count else plain
        return name if name == plain or name not in self._used else self._new_name(target)

    def _read(self, view: StorageView) -> str:
        """The value that a tensor with this storage view has now."""
        place = self._places[view.storage]
        if view in place.views:
            return place.views[view]
        if view in place.derived:
            event = self._recording.events[place.derived[view]]
            self._make(functional_variant(event.target) or event.target, event, single=event.single)
        else:
            look = (view.shape, view.stride, view.offset)
            (name,) = self._emit(aten.as_strided.default, (Ref(place.value), *look), {}, (view,))
            self._look(place, view, str(name))
        return place.views[view]

    def _enter(self, view: StorageView, name: str) -> None:
        """A value in a new storage, or a view of an existing one."""
        place = self._places.get(view.storage)
        if place is None:
            self._places[view.storage] = StorageState(view, name, {view: name})
            copied = bool(self._calls) and self._calls[-1].call.copied
            nbytes = view.extent_bytes() if copied else self._recording.lifetimes[view.storage].nbytes
            self._values[name] = Value(name, view, name, nbytes)
        else:
            self._look(place, view, name)
            if view != place.base:
                place.derived.setdefault(view, self._position)

    def _look(self, place: StorageState, view: StorageView, name: str) -> None:
        place.views[view] = name
        self._values[name] = Value(name, view, self._values[place.value].root, view.extent_bytes())

    def _overwrite(self, view: StorageView, name: str) -> None:
        """From now on the storage contains the value `name` at `view`."""
        place = self._places[view.storage]
        stride = view.stride if view.is_dense() else result_stride(aten.clone.default, (view,), {})
        own = replace(view, stride=stride, offset=0)
        self._values[name] = Value(name, own, name, own.extent_bytes())
        place.overwrite(name if view == place.base else self._written_through(place, view, name))

    def _written_through(self, place: StorageState, view: StorageView, name: str) -> str:
        """The contents of the whole storage after `name` is written at `view`."""
        base = place.base
        if view.dtype != base.dtype:
            raise CaptureError(
                f"the step writes into a tensor of {base.dtype} through a view of {view.dtype}",
                where=self._recording.events[self._position].origin.source,
                advice="compute a new tensor instead, such as with torch.view_as_complex or torch.complex",
            )
        if view.is_contiguous() and base.is_contiguous() and prod(view.shape) == prod(base.shape):
            (whole,) = self._emit(aten.view.default, (Ref(name), base.shape), {}, (base,))
            root = name
        else:
            args = (Ref(self._as_captured(place)), Ref(name), view.shape, view.stride, view.offset)
            (whole,) = self._emit(aten.as_strided_scatter.default, args, {}, (base,))
            root = str(whole)
        self._values[str(whole)] = Value(str(whole), base, root, base.extent_bytes())
        return str(whole)

    def _as_captured(self, place: StorageState) -> str:
        """The contents of a storage at the captured offsets.

        An external tensor may start elsewhere in its storage at the next call, so it is copied before a part
        of it is written by offset.
        """
        if place.value != self._externals.get(place.base):
            return place.value
        if not place.base.is_dense():
            raise CaptureError(
                f"the step writes into a part of {place.value}, whose elements are not adjacent in memory",
                where=self._recording.events[self._position].origin.source,
                advice=f"pass {place.value}.contiguous()",
            )
        (name,) = self._emit(aten.clone.default, (Ref(place.value),), {}, (place.base,))
        self._values[str(name)] = Value(str(name), place.base, str(name), place.base.extent_bytes())
        return str(name)


def _without_ignored(event: Event) -> Event:
    """The event without arguments that its op does not read."""
    names = _IGNORED_IN_TRAINING.get(event.target, ())
    bound = bound_arguments(event.target, event.args, event.kwargs)
    if not names or not bound.get("train", True):
        return event
    order = [argument.name for argument in schema_of(event.target).arguments]
    ignored = {order.index(name) for name in names}
    return replace(event, args=tuple(None if n in ignored else value for n, value in enumerate(event.args)))


def _spelled_out(event: Event) -> Event:
    """The event with every argument given, because a functional variant may have other defaults."""
    bound = bound_arguments(event.target, event.args, event.kwargs)
    by_name = {a.name for a in schema_of(event.target).arguments if a.kwarg_only}
    return replace(
        event,
        args=tuple(value for name, value in bound.items() if name not in by_name),
        kwargs={name: value for name, value in bound.items() if name in by_name},
    )
