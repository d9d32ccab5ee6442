"""A pickle that holds nothing but data, decoded: dicts, lists, tuples, strings and numbers.

Opcodes that import, call or build objects are refused, so nothing in the file can run. Everything takes
memory in proportion to the file: there is no opcode that copies.
"""

import struct
from collections.abc import Callable
from typing import NoReturn

from stowplan.errors import BadInput

_MOST_LONG_BYTES = 9
_OUTLAWED = {
    b"c": "GLOBAL",
    b"\x93": "STACK_GLOBAL",
    b"i": "INST",
    b"o": "OBJ",
    b"R": "REDUCE",
    b"b": "BUILD",
    b"\x81": "NEWOBJ",
    b"\x92": "NEWOBJ_EX",
    b"P": "PERSID",
    b"Q": "BINPERSID",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
}


def decode(data: bytes) -> object:
    """The value that a pickle holds; BadInput, with the byte, at the first thing that is not data."""
    return _Machine(data).run()


class _Machine:
    """The stack machine of the format, with the opcodes for data alone."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        """Up to the opcode STOP, which leaves one value."""
        while (opcode := self._take(1)) != b".":
            action = _ACTIONS.get(opcode)
            if action is None:
                self._refuse_opcode(opcode)
            action(self)
        if len(self._stack) != 1 or self._marks:
            self.refuse(f"ends with {len(self._stack)} values, not one")
        return self._stack[0]

    def _refuse_opcode(self, opcode: bytes) -> NoReturn:
        self._at -= 1
        if opcode in _OUTLAWED:
            self.refuse(f"opcode {_OUTLAWED[opcode]} would run code: no memory snapshot holds it")
        self.refuse(f"opcode {opcode!r} is none of those that spell plain data")

    def refuse(self, what: str) -> NoReturn:
        """The fault, where reading is now."""
        raise BadInput(what, where=f"byte {self._at}")

    def _take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            self.refuse(f"ends where {count} more bytes should be")
        self._at += count
        return taken

    def number(self, spelling: str) -> int:
        """An integer in a spelling of `struct`."""
        (value,) = struct.unpack(spelling, self._take(struct.calcsize(spelling)))
        return int(value)

    def float(self) -> None:
        """BINFLOAT."""
        self.push(struct.unpack(">d", self._take(8))[0])

    def long(self) -> None:
        """LONG1: an integer of a stated width."""
        width = self.number("<B")
        if width > _MOST_LONG_BYTES:
            self.refuse(f"an integer of {width} bytes")
        self.push(int.from_bytes(self._take(width), "little", signed=True))

    def text(self, length: int) -> None:
        """A string in UTF-8."""
        try:
            self.push(self._take(length).decode("utf-8"))
        except UnicodeDecodeError:
            self.refuse("a string that is not UTF-8")

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

    def frame(self) -> None:
        """FRAME: how many bytes follow, which only a buffered reader wants to know."""
        self.number("<Q")

    def protocol(self) -> None:
        """PROTO."""
        if self.number("<B") not in range(2, 6):
            self.refuse("a protocol that is not 2 to 5")


_ACTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.protocol,
    b"\x95": _Machine.frame,
    b"N": lambda machine: machine.push(None),
    b"\x88": lambda machine: machine.push(True),
    b"\x89": lambda machine: machine.push(False),
    b"K": lambda machine: machine.push(machine.number("<B")),
    b"M": lambda machine: machine.push(machine.number("<H")),
    b"J": lambda machine: machine.push(machine.number("<i")),
    b"\x8a": _Machine.long,
    b"G": _Machine.float,
    b"\x8c": lambda machine: machine.text(machine.number("<B")),
    b"X": lambda machine: machine.text(machine.number("<I")),
    b"\x8d": lambda machine: machine.text(machine.number("<Q")),
    b"}": lambda machine: machine.push({}),
    b"]": lambda machine: machine.push([]),
    b")": lambda machine: machine.push(()),
    b"(": _Machine.mark,
    b"t": lambda machine: machine.push(tuple(machine.since_mark())),
    b"\x85": lambda machine: machine.push(tuple(machine.pop(1))),
    b"\x86": lambda machine: machine.push(tuple(machine.pop(2))),
    b"\x87": lambda machine: machine.push(tuple(machine.pop(3))),
    b"a": lambda machine: machine.append(machine.pop(1)),
    b"e": lambda machine: machine.append(machine.since_mark()),
    b"s": lambda machine: machine.set_items(machine.pop(2)),
    b"u": lambda machine: machine.set_items(machine.since_mark()),
    b"\x94": _Machine.memoize,
    b"q": lambda machine: machine.memoize(machine.number("<B")),
    b"r": lambda machine: machine.memoize(machine.number("<I")),
    b"h": lambda machine: machine.recall(machine.number("<B")),
    b"j": lambda machine: machine.recall(machine.number("<I")),
}
