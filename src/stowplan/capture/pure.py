"""Pure: a step as calls without effects, on values that never change once made.

`pruned` drops calls that no result, gradient or update depends on. `with_updates` adds the calls that write
new contents into buffers, each as early as possible: later readers then read the buffer, and the contents are
not kept twice. Views of the new contents become views of the buffer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch._ops import OpOverload

from stowplan.capture.program import Argument, Call, Ref, inputs_of
from stowplan.capture.storage_views import StorageView
from stowplan.ops.aten import RANDOM


@dataclass(frozen=True, slots=True)
class Value:
    """What a call makes, or what comes from outside. `root` owns the storage that it lives in."""

    id: str
    view: StorageView
    root: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PureCall:
    """A call under its id, and the position of the event it was made for."""

    id: str
    call: Call
    event: int


@dataclass(frozen=True, slots=True)
class Pure:
    """Values by id and calls in order. `updates` is what externals contain in the end, where that is new.

    `incoming` are the gradients that autograd's nodes were given, by node, for each output of its op.
    """

    values: Mapping[str, Value]
    calls: tuple[PureCall, ...]
    outputs: tuple[object, ...]
    gradients: Mapping[str, str]
    incoming: Mapping[int, tuple[str | None, ...]]
    updates: Mapping[str, str]


@dataclass(slots=True)
class Place:
    """A storage at one moment: the value of its contents and the values that look at it.

    `derived` has, for each look, the number of the event that first took it.
    """

    base: StorageView
    value: str
    views: dict[StorageView, str]
    derived: dict[StorageView, int] = field(default_factory=dict)

    def overwrite(self, value: str) -> None:
        """The contents are another value now; earlier looks show what was there before."""
        self.value = value
        self.views = {self.base: value}


def pruned(pure: Pure) -> Pure:
    """Only the calls that something depends on. Random ones all stay: they move the generator on."""
    needed = {leaf.tensor for leaf in pure.outputs if isinstance(leaf, Ref)}
    needed |= {*pure.gradients.values(), *pure.updates.values()}
    kept = []
    for call in reversed(pure.calls):
        if draws(call.call.target) or any(output in needed for output in call.call.outputs):
            needed.update(inputs_of(call.call))
            kept.append(call)
    return replace(pure, calls=tuple(reversed(kept)))


def draws(target: OpOverload) -> bool:
    """Whether an op may draw random numbers, by what PyTorch says of it, which forgets a few."""
    return torch.Tag.nondeterministic_seeded in target.tags or str(target) in RANDOM


UPDATE = "update_"
aten = torch.ops.aten


def with_updates(pure: Pure) -> Pure:
    """Calls that write each new value into its buffer, after the last reader of the old one."""
    due = _positions(pure)
    values, calls = dict(pure.values), list[PureCall]()
    renamed: dict[str, str] = {}
    for position in range(-1, len(pure.calls)):
        if position >= 0:
            call = pure.calls[position]
            calls.append(replace(call, call=_renamed(call.call, renamed)))
            for view, read in _views(pure, call.call):
                values[view] = replace(values[view], root=values[renamed.get(read, read)].root)
        for buffer in due.get(position, ()):
            calls.append(_update(pure, buffer, calls[-1].event if calls else 0))
            values[_updated(buffer)] = replace(pure.values[buffer], id=_updated(buffer), root=buffer)
            renamed[pure.updates[buffer]] = _updated(buffer)
    return replace(pure, values=values, calls=tuple(calls))


def _views(pure: Pure, call: Call) -> Iterator[tuple[str, str]]:
    """The views that a call makes, each with what it is a view of."""
    for made in filter(None, call.outputs):
        root = pure.values[made].root
        viewed = (read for read in inputs_of(call) if pure.values[read].root == root != made)
        yield from ((made, read) for read in islice(viewed, 1))


def is_update(call: PureCall) -> bool:
    """Whether the call writes a buffer's new contents into it."""
    return call.id.startswith(UPDATE) and call.call.target is aten.copy_.default


def _updated(buffer: str) -> str:
    return f"{buffer}.updated"


def _update(pure: Pure, buffer: str, event: int) -> PureCall:
    value = pure.updates[buffer]
    call = Call(aten.copy_.default, (Ref(buffer), Ref(value)), {}, (_updated(buffer),), single=True)
    return PureCall(f"{UPDATE}{buffer}", call, event)


def _positions(pure: Pure) -> dict[int, list[str]]:
    """Buffers by the position of the call that their update follows."""
    latest = dict.fromkeys(pure.updates, -1)
    of_value = {value: buffer for buffer, value in pure.updates.items()}
    for position, call in enumerate(pure.calls):
        old = (pure.values[name].root for name in inputs_of(call.call))
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
