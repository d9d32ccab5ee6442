"""What forward does to PyTorch's generator other than drawing: it seeds it, and keeps and sets its state.

A planned step does the same at the same moments of forward, by three ops. `generator_state` returns the
state, `set_generator_state` sets one that `generator_state` has returned, `seed_generator` seeds. They count
as random ops, so they stay in forward's order.

Capture draws nothing, and other threads go on drawing from the process's generator. So the thread that
captures finds a generator of its own as `torch.default_generator`. It has another state after each random op,
and none of these comes twice: a state that forward sets is found again by its bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

import torch
from torch import Tensor

from stowplan.alone import Lock, undone
from stowplan.capture.origins import Origins
from stowplan.errors import CaptureError
from stowplan.torch_private import OpOverload, default_generator_is, without_functions

_REAL = torch.default_generator
_STATE_BYTES = _REAL.get_state().nbytes
_OURS = 1 << 62  # seeds from here on are of capture

_DRAWS = {"tags": (torch.Tag.nondeterministic_seeded,)}
torch.library.define("stowplan::generator_state", "() -> Tensor", **_DRAWS)
torch.library.define("stowplan::set_generator_state", "(Tensor state) -> Tensor", **_DRAWS)
torch.library.define("stowplan::seed_generator", "(int seed) -> Tensor", **_DRAWS)
_STATE = torch.ops.stowplan.generator_state.default
_SET = torch.ops.stowplan.set_generator_state.default
_SEED = torch.ops.stowplan.seed_generator.default


@torch.library.impl("stowplan::generator_state", "CompositeExplicitAutograd")
def _state() -> Tensor:
    return _REAL.get_state()


@torch.library.impl("stowplan::set_generator_state", "CompositeExplicitAutograd")
def _set_state(state: Tensor) -> Tensor:
    _REAL.set_state(state)
    return torch.empty(0, dtype=torch.uint8)


@torch.library.impl("stowplan::seed_generator", "CompositeExplicitAutograd")
def _seed(seed: int) -> Tensor:
    _REAL.manual_seed(seed)
    return torch.empty(0, dtype=torch.uint8)


@torch.library.register_fake("stowplan::generator_state")  # type: ignore[untyped-decorator]
def _fake_state() -> Tensor:
    return torch.empty(_STATE_BYTES, dtype=torch.uint8)


@torch.library.register_fake("stowplan::set_generator_state")  # type: ignore[untyped-decorator]
def _fake_set(_state: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


@torch.library.register_fake("stowplan::seed_generator")  # type: ignore[untyped-decorator]
def _fake_seed(_seed: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def moves_generator(target: OpOverload) -> bool:
    """Whether an op is one of these three, which eager does not dispatch."""
    return target in (_STATE, _SET, _SEED)


class WatchedGenerator:
    """The generator that one thread's forward sees. With `refuses`, it may only be drawn from."""

    def __init__(self, origins: Origins, refuses: str = "") -> None:
        self._own, self._origins, self._refuses = torch.Generator(), origins, refuses
        self._known: dict[bytes, Tensor] = {}  # stand-ins of states that forward has taken
        self._draws = 0
        self.drawn()

    def drawn(self) -> None:
        """An op draws, now."""
        self._draws += 1
        self._own.manual_seed(_OURS + self._draws)

    def state(self) -> Tensor:
        """What `get_state` returns."""
        self._refuse_others()
        now = self._own.get_state()
        self._known[_bytes_of(now)] = _STATE()
        return now

    def set_state(self, state: Tensor) -> None:
        """Forward sets the state to one that it has taken."""
        self._refuse_others()
        taken = self._known.get(_bytes_of(state))
        if taken is None:
            raise self._refusal("sets PyTorch's generator to a state that it was given")
        _SET(taken)
        self._own.set_state(state)

    def seed(self, seed: int) -> None:
        """Forward seeds it."""
        self._refuse_others()
        _SEED(seed)
        self._own.manual_seed(seed)

    def _refuse_others(self) -> None:
        if self._refuses:
            raise self._refusal(f"seeds PyTorch's generator or sets its state, and {self._refuses}")

    def _refusal(self, what: str) -> CaptureError:
        return CaptureError(
            f"forward {what}",
            where=self._origins.here().source,
            advice="draw without seeding inside forward: make fixed numbers once, outside, and keep them in a"
            " buffer; seed with torch.manual_seed before the call",
        )

    def refuse_unknown_seed(self) -> CaptureError:
        """The refusal of a seed that is another one at each call."""
        return self._refusal("seeds PyTorch's generator with a number that is another one at each call")

    def refuse_reading(self) -> CaptureError:
        """The refusal of a look at the seed, which the captured step would take for a constant."""
        return self._refusal("reads the seed of PyTorch's generator")


def _bytes_of(state: Tensor) -> bytes:
    with without_functions():
        return state.numpy().tobytes()


_watched: dict[int, WatchedGenerator] = {}  # by thread
_lock = Lock()


class _OfThread(torch.Generator):
    """Stands for PyTorch's generator while threads capture: each of these has its own."""

    def get_state(self) -> Tensor:
        watched = _watched.get(get_ident())
        return watched.state() if watched else _REAL.get_state()

    def set_state(self, state: Tensor) -> torch.Generator:
        if watched := _watched.get(get_ident()):
            watched.set_state(state)
        else:
            _REAL.set_state(state)
        return self

    def manual_seed(self, seed: int) -> torch.Generator:
        if watched := _watched.get(get_ident()):
            watched.seed(seed)
        else:
            _REAL.manual_seed(seed)
        return self

    def seed(self) -> int:
        if watched := _watched.get(get_ident()):
            raise watched.refuse_unknown_seed()
        return _REAL.seed()

    def initial_seed(self) -> int:
        if watched := _watched.get(get_ident()):
            raise watched.refuse_reading()
        return _REAL.initial_seed()


_STANDING = _OfThread()


@contextmanager
def generator_watched(watched: WatchedGenerator) -> Iterator[None]:
    """Within, what this thread does to PyTorch's generator is done to another one, and recorded."""
    thread = get_ident()
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
        yield
