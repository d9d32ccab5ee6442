"""Draws: whether forward draws from the generators of Python and NumPy, which all threads share.

A state that is as before shows that nobody drew. If it changed while other threads live, forward is captured
a second time, and the functions of the generators note which thread calls them.
"""

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from threading import get_ident
from types import ModuleType
from typing import Any

import numpy as np

from stowplan.alone import KEPT, is_only_thread, replaced


@dataclass(frozen=True, slots=True)
class _Generator:
    """A generator that all threads share, and the functions that draw from it or seed it."""

    name: str
    state: Callable[[], object]
    put_back: Callable[[Any], None]
    functions: tuple[Callable[..., Any], ...]


def _functions_of(module: Any, generator: object) -> tuple[Callable[..., Any], ...]:
    """Modules offer the methods of their generator as functions."""
    found = {name: value for name, value in vars(module).items() if callable(value)}
    return tuple(
        value
        for name, value in found.items()
        if name not in ("getstate", "get_state") and getattr(value, "__self__", None) is generator
    )


_GENERATORS = (
    _Generator(
        "random",
        random.getstate,
        random.setstate,
        _functions_of(random, getattr(random.random, "__self__", None)),
    ),
    _Generator(
        "numpy.random",
        lambda: pickle.dumps(np.random.get_state(legacy=False)),
        lambda state: np.random.set_state(pickle.loads(state)),  # noqa: S301 -- it was written here
        (np.random.seed, *_functions_of(np.random, getattr(np.random.rand, "__self__", None))),
    ),
)


class Draws:
    """What this thread draws, to be refused and put back; not what other threads draw meanwhile.

    After `unclear` ones, whose states changed, the calls of the functions are noted.
    """

    def __init__(self, unclear: "Draws | None" = None) -> None:
        self._notes_calls = unclear is not None
        self._before: dict[str, object] = unclear._before if unclear else _states()
        self._after: dict[str, object] = dict(unclear._after) if unclear else {}
        self._own = list[str]()  # generators that this thread drew from
        self._others = False  # whether somebody else was seen to draw

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, forward runs. Raises SomebodyDrew if it is not clear who drew."""
        if self._notes_calls:
            with self._noting_calls():
                yield
            return
        try:
            yield
        except Exception:
            self._compare_states()  # captured again, it raises again
            raise
        self._compare_states()

    def _compare_states(self) -> None:
        self._after = _states()
        changed = [name for name, state in self._after.items() if state != self._before[name]]
        if changed and not is_only_thread():
            raise SomebodyDrew(self)
        self._own = changed

    def used(self) -> str | None:
        """A generator that this thread has drawn from."""
        return self._own[0] if self._own else None

    def put_back(self) -> None:
        """Take back what this thread drew, unless somebody else drew too."""
        if self._own and not self._others and _states() == self._after:
            for generator in _GENERATORS:
                generator.put_back(self._before[generator.name])

    @contextmanager
    def _noting_calls(self) -> Iterator[None]:
        """Modules have the functions under names of their own: `from random import random`."""
        noting = {id(f): self._noting(generator, f) for generator in _GENERATORS for f in generator.functions}
        modules = [module for module in sys.modules.copy().values() if isinstance(module, ModuleType)]
        with ExitStack() as stack:
            for module in modules:
                for name, value in vars(module).copy().items():
                    if id(value) in noting:
                        stack.enter_context(replaced(module, name, noting[id(value)]))
            yield

    def _noting(self, generator: _Generator, function: Callable[..., Any]) -> Callable[..., Any]:
        thread, name = get_ident(), generator.name

        def noting(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                return function(*args, **kwargs)
            before = generator.state()
            try:
                return function(*args, **kwargs)
            finally:
                after = generator.state()
                self._others = self._others or before != self._after[name]
                self._after[name] = after
                if after != before:
                    self._own.append(name)

        return update_wrapper(noting, function, updated=())


class SomebodyDrew(Exception):
    """A generator was drawn from while other threads live: capture again, to see by whom."""

    def __init__(self, unclear: Draws) -> None:
        super().__init__()
        self.unclear = unclear


def _states() -> dict[str, object]:
    return {generator.name: generator.state() for generator in _GENERATORS}


def _state() -> Callable[[], None]:
    before = _states()

    def put_back() -> None:
        if is_only_thread():
            for generator in _GENERATORS:
                generator.put_back(before[generator.name])

    return put_back


KEPT.append(_state)
