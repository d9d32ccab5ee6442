"""One thread at a time: what changes in the whole process while a step is captured and planned.

Python and PyTorch keep some things once in a process, such as the methods of `nn.Module`, and a capture
changes them for a while. One thread does so at a time, in `alone`. Each change is noted before it is made, so
that it is undone however the work ends, and in a child process that is forked meanwhile.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock, get_ident
from typing import Any, TypeVar

Result = TypeVar("Result")


class Lock:
    """For one thread at a time, which may enter again. In a forked child it is free."""

    def __init__(self) -> None:
        self._lock, self._process = RLock(), os.getpid()

    def here(self) -> Any:
        """To be entered by `with`."""
        if self._process != os.getpid():
            self._lock, self._process = RLock(), os.getpid()
        return self._lock


_ONE_AT_A_TIME = Lock()
_changes: list[Callable[[], None]] = []  # how to undo what is changed now, the latest last
_thread: int | None = None  # that works alone


def alone(work: Callable[[], Result]) -> Result:
    """Do the work while no other thread is in here. Whoever holds another lock too enters this one first."""
    global _thread
    with _ONE_AT_A_TIME.here():
        if _thread is not None:
            return work()
        try:
            _thread = get_ident()
            return work()
        finally:
            _undo_all()
            _thread = None


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Within, an attribute of a class or module has another value, which serves all threads."""
    undo = partial(setattr, owner, name, vars(owner)[name]) if name in vars(owner) else _remover(owner, name)
    _changes.append(undo)
    try:
        setattr(owner, name, value)
        yield
    finally:
        undo()
        if undo in _changes:
            _changes.remove(undo)


def _remover(owner: Any, name: str) -> Callable[[], None]:
    def remove() -> None:
        if name in vars(owner):
            delattr(owner, name)

    return remove


def _undo_all() -> None:
    while _changes:
        _changes[-1]()
        _changes.pop()


def _after_fork() -> None:
    """The thread that worked alone is not in the child, unless it is the one that forked."""
    global _thread
    if _thread not in (None, get_ident()):
        _undo_all()
        _thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
