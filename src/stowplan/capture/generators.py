"""PyTorch's generator while forward is captured: whether forward seeds it or sets its state.

A planned step makes forward's random draws in forward's order, one after another. That gives eager's numbers
only if nothing but draws moves the generator. Capture draws nothing, and other threads go on drawing from the
process's generator. So the thread that captures finds a generator of its own as `torch.default_generator`,
which moves on by one number for each random op. A step is refused where an op would draw from another state
than the draw before has left.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

import torch
from torch import Tensor

from stowplan.alone import Lock, undone
from stowplan.capture.origins import Origins
from stowplan.errors import CaptureError
from stowplan.torch_private import default_generator_is, without_functions

_ADVICE = (
    "draw without seeding inside forward: make fixed numbers once, outside, and keep them in a buffer; seed"
    " with torch.manual_seed before the call"
)


class WatchedGenerator:
    """The generator that one thread's forward sees, and the line that moved it last."""

    def __init__(self, origins: Origins) -> None:
        self.own = torch.Generator()
        self.own.set_state(torch.default_generator.get_state())
        self._origins, self._line = origins, ""
        self._expected = self._state()

    def moved(self) -> None:
        """Forward seeds the generator or sets its state."""
        self._line = self._origins.here().source

    def drawn(self) -> None:
        """An op draws, now."""
        self.refuse_moved()
        torch.rand((), generator=self.own)
        self._expected = self._state()

    def refuse_moved(self) -> None:
        """Raise CaptureError unless the generator is where the last draw has left it."""
        if self._state() != self._expected:
            raise CaptureError(
                "forward seeds PyTorch's generator or sets its state", where=self._line, advice=_ADVICE
            )

    def _state(self) -> bytes:
        with without_functions():
            return self.own.get_state().numpy().tobytes()


_REAL = torch.default_generator
_watched: dict[int, WatchedGenerator] = {}  # by thread
_lock = Lock()


class _OfThread(torch.Generator):
    """Stands for PyTorch's generator while threads capture: each of these has its own."""

    def get_state(self) -> Tensor:
        return self._of().get_state()

    def set_state(self, state: Tensor) -> torch.Generator:
        self._moved()
        self._of().set_state(state)
        return self

    def manual_seed(self, seed: int) -> torch.Generator:
        self._moved()
        self._of().manual_seed(seed)
        return self

    def seed(self) -> int:
        self._moved()
        return self._of().seed()

    def initial_seed(self) -> int:
        if watched := _watched.get(get_ident()):
            watched.moved()
            raise CaptureError(
                "forward reads the seed of PyTorch's generator",
                advice="pass the number in, or set it before fit",
            )
        return _REAL.initial_seed()

    def _of(self) -> torch.Generator:
        watched = _watched.get(get_ident())
        return watched.own if watched else _REAL

    def _moved(self) -> None:
        if watched := _watched.get(get_ident()):
            watched.moved()


_STANDING = _OfThread()


@contextmanager
def generator_watched(origins: Origins) -> Iterator[WatchedGenerator]:
    """Within, what this thread does to PyTorch's generator is done to another one."""
    thread, watched = get_ident(), WatchedGenerator(origins)
    outer = _watched.get(thread)

    def leave() -> None:
        with _lock.here():
            if outer is None:
                _watched.pop(thread, None)
            else:
                _watched[thread] = outer
            if not _watched:
                default_generator_is(_REAL)

    with undone(leave):
        with _lock.here():
            _watched[thread] = watched
            default_generator_is(_STANDING)
        yield watched
