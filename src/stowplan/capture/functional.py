"""FunctionalStep: a step as calls without side effects, on values that never change.

`pruned` drops calls that no result, gradient or update depends on. `with_updates` adds the calls that write
new contents into buffers, each as early as possible: later readers then read the buffer, and the contents are
not kept twice. Views of the new contents become views of the buffer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from stowplan.capture.answers import Answer
from stowplan.capture.program import Argument, Call, Ref, inputs_of
from stowplan.capture.schema import bound_arguments
from stowplan.capture.storage_views import StorageView
from stowplan.ops.aten import RANDOM
from stowplan.torch_private import OpOverload


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
class Place:
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


def draws(target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call may draw random numbers, by PyTorch's tag, which misses a few ops.

    The tag of attention does not tell that it draws only for dropout, and that its backward is given what was
    drawn.
    """
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return str(target) in RANDOM
    bound = bound_arguments(target, args, kwargs)
    return bound.get("dropout_p") != 0.0 and "philox_seed" not in bound


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
            calls.append(replace(call, call=_renamed(call.call, renamed)))
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


def _renamed(call: Call, names: dict[str, str]) -> Call:
    if not names:
        return call
    args = tuple(_renamed_argument(value, names) for value in call.args)
    kwargs = {name: _renamed_argument(value, names) for name, value in call.kwargs.items()}
    return replace(call, args=args, kwargs=kwargs)


def _renamed_argument(value: Argument, names: dict[str, str]) -> Argument:
    if isinstance(value, Ref):
        return Ref(names.get(value.tensor, value.tensor))
    if isinstance(value, tuple):
        return tuple(_renamed_argument(item, names) for item in value)
    return value
