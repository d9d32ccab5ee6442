"""Handle: an object that an op of stowplan works by, such as a sweep; for it, the op is given a string.

A call of a program holds its handle, and nothing else does: two steps never share one, and it goes with its
step. Graphs, plans and prices know it by its name, which says nothing of this process.
"""

from itertools import count
from weakref import WeakValueDictionary

from stowplan.errors import BadUse

_numbers = count(1)


class Handle:
    """`name` tells what is computed; `key`, which ops are given, is of no other handle of this process.

    The key is part of generated code: it begins with a `title` in which no name of the user's may occur.
    """

    name: str
    key: str

    def __init__(self, name: str, title: str) -> None:
        self._title = title
        self.identify(name)

    def identify(self, name: str) -> None:
        """Take a name, and with it a new key: a copy that computes something else is another handle."""
        self.name, self.key = name, f"{self._title} #{next(_numbers)}"
        _living[self.key] = self


_living: WeakValueDictionary[str, Handle] = WeakValueDictionary()


def handle_or_text(text: str) -> Handle | str:
    """The handle whose key this is, or the text itself."""
    return _living.get(text, text)


def handle_of(key: str) -> Handle:
    """The handle that an op was given by its key; BadUse if the step that it belongs to is gone."""
    found = _living.get(key)
    if found is None:
        raise BadUse(f"{key!r} belongs to a step that is gone, or to one of another process; call fit again")
    return found


def living_handles() -> int:
    """How many handles there are in this process."""
    return len(_living)
