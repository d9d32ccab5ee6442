"""NativeAnnealer: the annealer of `plan/annealing.py` in C.

The library checks every number of a problem before it walks it, and refuses what it could not walk safely.
Such problems, and all where no library was built, are searched in Python.
"""

import ctypes
import logging
from collections.abc import Iterable, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from stowplan.plan.annealing import Annealer, Pause, Twins
from stowplan.plan.ledger import Gaps, Policy, gaps_of
from stowplan.plan.native.build import SWITCH, is_switched_off, library_path
from stowplan.plan.problem import Problem, ticks_of

_LOGGER = logging.getLogger("stowplan")
_DONE, _NO_MEMORY, _BAD_PROBLEM = range(3)
ADVICE = "python -m stowplan.plan.native.build builds it if there is a C compiler"


def annealer_of(problem: Problem, twins: Twins) -> "Annealer | NativeAnnealer":
    """An annealer of the problem: in C if the library is there, else in Python."""
    library, why_not = loaded()
    if library is None:
        if not is_switched_off():
            _say_once(why_not)
        return Annealer(problem, twins)
    try:
        return NativeAnnealer(problem, twins, library)
    except (OverflowError, Refused):
        return Annealer(problem, twins)


def loaded() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why it is not used."""
    return (None, f"{SWITCH}=0 is set") if is_switched_off() else _loaded()


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    path = library_path()
    if not path.exists():
        return None, "it was not built"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as fault:
        return None, f"it cannot be loaded ({fault})"
    for name, result, arguments in _FUNCTIONS:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library, ""


@cache
def _say_once(why_not: str) -> None:
    _LOGGER.warning("planning is slower without its library in C: %s; %s", why_not, ADVICE)


class _Table(ctypes.Structure):
    _fields_ = (("starts", c_void_p), ("items", c_void_p), ("count", c_int64))


class _Problem(ctypes.Structure):
    """As in `core.h`."""

    _fields_ = (
        *((name, c_int32) for name in ("ops", "values", "gaps", "groups", "turn")),
        ("standing_bytes", c_int64),
        *(
            (name, c_void_p)
            for name in ("nbytes", "temporary_bytes", "ticks", "producer", "held", "droppable")
        ),
        *((name, _Table) for name in ("reads", "writes", "targets", "victims")),
        ("group_of", c_void_p),
        ("twins", _Table),
    )


_FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("stow_open", c_int, [POINTER(_Problem), POINTER(c_void_p)]),
    ("stow_close", None, [c_void_p]),
    ("stow_seed", c_int, [c_void_p, c_void_p]),
    ("stow_load", c_int, [c_void_p, c_char_p]),
    ("stow_set_state", c_int, [c_void_p, c_int32, c_int32]),
    ("stow_commit", c_int, [c_void_p]),
    ("stow_roll_back", c_int, [c_void_p]),
    ("stow_read", c_int, [c_void_p, c_void_p, c_void_p, POINTER(c_int64)]),
    ("stow_look", c_int, [c_void_p, POINTER(c_int64), POINTER(c_int32)]),
    ("stow_anneal", c_int, [c_void_p, c_void_p, c_int64, POINTER(c_int64), c_double, c_double]),
    ("stow_keep_what_fits", c_int, [c_void_p, c_int64, POINTER(c_int32)]),
    ("stow_point_count", c_int64, [c_void_p]),
    ("stow_read_points", None, [c_void_p, c_void_p, c_void_p]),
    ("stow_points_within", c_int64, [c_void_p, c_int64]),
    ("stow_read_point", c_int, [c_void_p, c_int64, POINTER(c_int64), c_void_p]),
)


class Refused(Exception):
    """The library does not walk this problem."""


class _Arrays:
    """The arrays that a problem in C points to."""

    def __init__(self) -> None:
        self._kept: list[NDArray[Any]] = []

    def array(self, numbers: Iterable[int], kind: type[np.generic]) -> int:
        """The address of these numbers; OverflowError if one is too large for the kind."""
        made = np.array([*numbers, 0], dtype=kind)  # never empty
        self._kept.append(made)
        return int(made.ctypes.data)

    def table(self, rows: Sequence[Sequence[int]]) -> _Table:
        """The rows in one array, with the starts of each."""
        starts = list(accumulate(map(len, rows), initial=0))
        items = (item for row in rows for item in row)
        return _Table(self.array(starts, np.int32), self.array(items, np.int32), starts[-1])


class NativeLedger:
    """A ledger in C: one schedule and its exact memory curve, as `plan.ledger.Ledger` has it."""

    def __init__(self, problem: Problem, twins: Twins, library: ctypes.CDLL) -> None:
        self.gaps: Gaps = gaps_of(problem)
        self._library, self._ops, self._gap_count = library, len(problem.reads), len(self.gaps.value_of)
        self._arrays = _Arrays()
        self._core = c_void_p()
        described = self._described(problem, twins)
        code = library.stow_open(byref(described), byref(self._core))
        if code == _BAD_PROBLEM:
            raise Refused
        self._check(code)
        finalize(self, library.stow_close, self._core)

    def _described(self, problem: Problem, twins: Twins) -> _Problem:
        array, table = self._arrays.array, self._arrays.table
        group_of = {gap: number for number, group in enumerate(twins) for gap in group}
        pairs = [pair for op in problem.in_place for pair in op]
        targets = [[target for target, _ in op] for op in problem.in_place]
        ticks, _ = ticks_of(problem)
        sizes = (self._ops, len(problem.nbytes), self._gap_count, len(twins), problem.turn)
        if max(sizes) >= 2**31 or not 0 <= problem.standing_bytes < 2**63:  # ctypes would cut them
            raise Refused
        return _Problem(
            *sizes,
            problem.standing_bytes,
            array(problem.nbytes, np.int64),
            array(problem.temporary_bytes, np.int64),
            array(ticks, np.int64),
            array(problem.producer, np.int32),
            array(problem.held, np.uint8),
            array(problem.droppable, np.uint8),
            table(problem.reads),
            table(problem.writes),
            table(targets),
            table([victims for _, victims in pairs]),
            array((group_of[gap] for gap in range(self._gap_count)), np.int32),
            table(twins),
        )

    def curve_bytes(self) -> NDArray[np.int64]:
        """The highest memory while each op of the schedule or its chain runs."""
        return self.read()[0]

    def read(self) -> tuple[NDArray[np.int64], Policy, int]:
        """The curve, the state of each gap, and the extra ticks."""
        curve, states = np.zeros(self._ops, np.int64), np.zeros(self._gap_count, np.uint8)
        ticks = c_int64()
        self._check(self._library.stow_read(self._core, curve.ctypes.data, states.ctypes.data, byref(ticks)))
        return curve, states.tobytes(), ticks.value

    def set_state(self, gap: int, state: int) -> None:
        """Decide otherwise about one gap."""
        self._check(self._library.stow_set_state(self._core, gap, state))

    def commit(self) -> None:
        """Make the changes since the last commit final."""
        self._check(self._library.stow_commit(self._core))

    def roll_back(self) -> None:
        """Take back the changes since the last commit."""
        self._check(self._library.stow_roll_back(self._core))

    def load(self, policy: Policy) -> None:
        """Go on from another schedule."""
        if len(policy) != self._gap_count:
            raise ValueError(f"{len(policy)} states for {self._gap_count} gaps")
        self._check(self._library.stow_load(self._core, policy))

    @staticmethod
    def _check(code: int) -> None:
        if code == _NO_MEMORY:
            raise MemoryError("the search for a plan needs more memory than there is")
        if code != _DONE:
            raise ValueError("a call that the search's library does not allow")


class NativeAnnealer(NativeLedger):
    """One schedule, its changes and the archive, in C. The library returns every few hundred moves."""

    def __init__(self, problem: Problem, twins: Twins, library: ctypes.CDLL) -> None:
        super().__init__(problem, twins, library)
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Begin another sequence of random numbers: that of `random.Random`."""
        state = np.array(Random(seed).getstate()[1], np.uint32)
        self._check(self._library.stow_seed(self._core, state.ctypes.data))

    def peak_bytes(self) -> int:
        """The present peak. If nothing beats the present schedule, it goes into the archive."""
        peak, op = c_int64(), c_int32()
        self._check(self._library.stow_look(self._core, byref(peak), byref(op)))
        return peak.value

    def offers(self) -> list[tuple[int, int]]:
        """The peaks and extra ticks in the archive: ascending peaks, descending ticks."""
        count = self._library.stow_point_count(self._core)
        peaks, ticks = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._library.stow_read_points(self._core, peaks.ctypes.data, ticks.ctypes.data)
        return list(zip(peaks.tolist(), ticks.tolist(), strict=True))

    def policy_at(self, place: int) -> Policy:
        """The schedule of one of the offers."""
        states, ticks = (c_uint8 * self._gap_count)(), c_int64()
        self._check(self._library.stow_read_point(self._core, place, byref(ticks), byref(states)))
        return bytes(states)

    def place_within(self, budget: float) -> int | None:
        """The place of the fastest offer within a budget."""
        count = int(self._library.stow_points_within(self._core, int(budget)))
        return count - 1 if count else None

    def anneal(self, budgets: Sequence[float], temperature: float, penalty: float, pause: Pause) -> None:
        """A move per budget, or one for its twins as well; a worse one may stay while it is warm."""
        array, place = np.array(budgets, np.float64), c_int64()
        moves = (array.ctypes.data, len(array), byref(place), temperature, penalty)
        self.peak_bytes()
        while place.value < len(array):
            pause()
            self._check(self._library.stow_anneal(self._core, *moves))

    def keep_what_fits(self, budget: int, pause: Pause) -> None:
        """Keep every dropped value that can be kept within a budget, and costs less so."""
        value, values = c_int32(), len(self.gaps.uses)
        while value.value < values:
            pause()
            self._check(self._library.stow_keep_what_fits(self._core, budget, byref(value)))
