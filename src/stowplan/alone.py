"""One thread at a time: what changes in the whole process while a step is captured and planned.

Python and PyTorch keep some things once in a process, such as the methods of `nn.Module`, and a capture
changes them for a while. One thread does so at a time, in `alone`. Each change is noted before it is made, so
that it is undone however the work ends, and in a child process that is forked meanwhile. If the work ends
with an exception, what `KEPT` lists is put back as well: an interrupt may come before a `finally` has begun.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from threading import RLock, get_ident
from traceback import clear_frames
from typing import Any, TypeVar

from stowplan.interrupts import Handlers

Result = TypeVar("Result")

KEPT: list[Callable[[], Callable[[], None]]] = []
"""Each looks at some state of the thread or the process, and returns how to put it back."""


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
_changes: list[tuple[int, Callable[[], None]]] = []  # the thread and how to undo it, the latest last
_is_alone = ContextVar("is alone", default=False)
_handlers = Handlers()  # of the work that is done alone


def alone(work: Callable[[], Result]) -> Result:
    """Do the work while no other thread is in here. Whoever holds another lock too enters this one first."""
    global _handlers
    if _is_alone.get():
        return work()
    context = copy_context()
    context.run(_is_alone.set, True)
    with _ONE_AT_A_TIME.here():
        _handlers = handlers = Handlers()
        kept = [look() for look in KEPT]
        try:
            handlers.take()
            found = context.run(work)
        except BaseException as fault:
            handlers.holding += 1
            _put_back(fault, kept)
            if handlers.raised is not None:
                raise handlers.raised.with_traceback(fault.__traceback__) from None
            raise
        finally:
            handlers.holding += 1
            handlers.give_back()
        if handlers.raised is not None:  # and somebody has caught it
            raise handlers.raised
        return found


def is_only_thread() -> bool:
    """Whether no other thread of Python lives."""
    return len(sys._current_frames()) == 1


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """What is changed within is undone at the end. `undo` may be called twice."""
    change = get_ident(), undo
    _changes.append(change)
    try:
        yield
    finally:
        try:
            undo()
        finally:
            if change in _changes:
                _changes.remove(change)


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Within, an attribute of a class or module has another value, which serves all threads."""
    undo = partial(setattr, owner, name, vars(owner)[name]) if name in vars(owner) else _remover(owner, name)
    with undone(undo):
        setattr(owner, name, value)
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, handlers of signals wait if the work is done alone. For moments, as to replace a file."""
    handlers = _handlers
    handlers.holding += 1
    try:
        yield
    finally:
        handlers.release()


def interruptible() -> None:
    """Call the handlers that wait in `uninterrupted`: an op may raise, and PyTorch's C++ hands the error on.

    Elsewhere it may not: where C++ asks a tensor of Python for its device, an error can end the process.
    """
    _handlers.let_through()


def _remover(owner: Any, name: str) -> Callable[[], None]:
    def remove() -> None:
        if name in vars(owner):
            delattr(owner, name)

    return remove


def _put_back(fault: BaseException, kept: list[Callable[[], None]]) -> None:
    """Undo what no `finally` has undone.

    After an interrupt, frames of the traceback may hold contexts that were not left. These end with their
    frames, in no order; then everything is undone in order.
    """
    changes = [undo for thread, undo in _changes if thread == get_ident()]
    if not isinstance(fault, Exception):
        clear_frames(fault.__traceback__)
    for undo in reversed(changes):
        undo()
    _changes[:] = [change for change in _changes if change[0] != get_ident()]
    for put_back in kept:
        put_back()


def _after_fork() -> None:
    """The other threads are not in the child, and what they changed is undone."""
    for thread, undo in reversed(_changes):
        if thread != get_ident():
            undo()
    _changes[:] = [change for change in _changes if change[0] == get_ident()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
