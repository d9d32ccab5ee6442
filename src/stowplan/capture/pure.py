"""Pure: a step as calls without effects, on values that never change once made."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stowplan.capture.cells import Cell
from stowplan.capture.program import Call


@dataclass(frozen=True, slots=True)
class Value:
    """What a call makes, or what comes from outside. `root` owns the storage that it lives in."""

    id: str
    cell: Cell
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
    """Values by id and calls in order. `updates` is what outsiders contain in the end, where that is new.

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

    base: Cell
    value: str
    views: dict[Cell, str]
    derived: dict[Cell, int] = field(default_factory=dict)

    def overwrite(self, value: str) -> None:
        """The contents are another value now; earlier looks show what was there before."""
        self.value = value
        self.views = {self.base: value}
