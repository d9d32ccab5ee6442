"""A pickle that holds nothing but data, decoded: dicts, lists, tuples, strings and numbers.

`pickletools` reads the opcodes and runs none. Those that import, call or build objects are refused, so
nothing in the file can run. Everything takes memory in proportion to the file: there is no opcode that
copies, and a number by which a value is remembered is a key, where `pickle.Unpickler` makes a table as large.
"""

from collections.abc import Callable
from pickletools import genops
from typing import Any, NoReturn

from stowplan.errors import BadInput

_LARGEST_INTEGER = 2**71
_OUTLAWED = (
    *("GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX"),
    *("PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"),
)


def decode(data: bytes) -> object:
    """The value that a pickle holds; BadInput, with the byte, at the first thing that is not data."""
    machine = _Machine()
    try:
        for opcode, argument, at in genops(data):
            machine.at = at or 0
            if opcode.name in _OUTLAWED:
                machine.refuse(f"opcode {opcode.name} would run code: no memory snapshot holds it")
            action = _ACTIONS.get(opcode.name)
            if action is None:
                machine.refuse(f"opcode {opcode.name} is none of those that spell plain data")
            action(machine, argument)
    except (ValueError, Warning) as fault:  # of pickletools: an early end, or bytes that are no opcode
        raise BadInput(f"is damaged: {fault}", where=f"after byte {machine.at}") from None
    return machine.result()


class _Machine:
    """The stack machine of the format, with the opcodes for data alone."""

    def __init__(self) -> None:
        self.at = 0
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}

    def result(self) -> object:
        """The one value that is left at the end."""
        if len(self._stack) != 1 or self._marks:
            self.refuse(f"ends with {len(self._stack)} values, not one")
        return self._stack[0]

    def refuse(self, what: str) -> NoReturn:
        """The fault, where reading is now."""
        raise BadInput(what, where=f"byte {self.at}")

    def integer(self, value: int) -> None:
        """LONG1: an integer that may have any width, and has at most 72 bits here."""
        if abs(value) > _LARGEST_INTEGER:
            self.refuse(f"an integer of {value.bit_length()} bits")
        self.push(value)

    def text(self, value: str) -> None:
        """A string that UTF-8 can spell; pickles may hold others."""
        try:
            value.encode()
        except UnicodeEncodeError:
            self.refuse("a string that is not UTF-8")
        self.push(value)

    def push(self, value: object) -> None:
        """Onto the stack."""
        self._stack.append(value)

    def pop(self, count: int) -> list[object]:
        """Off the stack, but not past a mark."""
        floor = self._marks[-1] if self._marks else 0
        if len(self._stack) - floor < count:
            self.refuse("takes a value where there is none")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def mark(self) -> None:
        """MARK: a list of values begins."""
        self._marks.append(len(self._stack))

    def since_mark(self) -> list[object]:
        """The values since the last mark, off the stack."""
        if not self._marks:
            self.refuse("closes a list that was not opened")
        values = self.pop(len(self._stack) - self._marks[-1])
        self._marks.pop()
        return values

    def memoize(self, index: int | None = None) -> None:
        """Remember the value on top by a number."""
        self._memo[len(self._memo) if index is None else index] = self._top(object)

    def recall(self, index: int) -> None:
        """What was remembered by a number."""
        if index not in self._memo:
            self.refuse(f"recalls value {index}, which was not kept")
        self.push(self._memo[index])

    def _top(self, kind: type) -> object:
        floor = self._marks[-1] if self._marks else 0
        if len(self._stack) <= floor or not isinstance(self._stack[-1], kind):
            self.refuse(f"needs a {kind.__name__} on the stack")
        return self._stack[-1]

    def append(self, values: list[object]) -> None:
        """Into the list on top."""
        target = self._top(list)
        assert isinstance(target, list)
        target.extend(values)

    def set_items(self, values: list[object]) -> None:
        """Into the dict on top: keys and values in turn."""
        target = self._top(dict)
        assert isinstance(target, dict)
        keys = values[::2]
        if len(values) % 2 or not all(isinstance(key, str | int) for key in keys):
            self.refuse("a dict whose keys are not strings or integers")
        target.update(zip(keys, values[1::2], strict=True))

    def protocol(self, version: int) -> None:
        """PROTO."""
        if version not in range(2, 6):
            self.refuse("a protocol that is not 2 to 5")


_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    "PROTO": _Machine.protocol,
    **dict.fromkeys(("FRAME", "STOP"), lambda *_: None),  # a frame helps those who read with a buffer
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(("BININT1", "BININT2", "BININT", "BINFLOAT"), _Machine.push),
    "LONG1": _Machine.integer,
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _Machine.text),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": lambda machine, _: machine.mark(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "APPEND": lambda machine, _: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "MEMOIZE": lambda machine, _: machine.memoize(),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
}
