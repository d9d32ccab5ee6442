"""The search in C and the one in Python: the same accounts, moves and frontiers, to the bit."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from stowplan.formats import chainer
from stowplan.plan import frontier
from stowplan.plan.annealing import Annealer, Twins
from stowplan.plan.frontier import Frontier, frontier_of, twins_of
from stowplan.plan.ledger import Ledger, State
from stowplan.plan.native.annealer import NativeAnnealer, NativeLedger, Refused, annealer_of, loaded
from stowplan.plan.native.build import compiler
from stowplan.plan.prices import price_by_macs
from stowplan.plan.problem import Problem, problem_of, ticks_of
from stowplan.plan.select import problem_in_order
from stowplan.watch import Patience, ended_by
from tests.support.steps import random_step, uneven_prices

_GRAPHS = 50


@pytest.fixture
def library() -> ctypes.CDLL:
    found, why_not = loaded()
    if found is None:
        assert compiler() is None, f"{why_not}; python -m stowplan.plan.native.build"
        pytest.skip(why_not)
    return found


def _problem(seed: int, layers: int | None = None) -> Problem:
    """Seconds that are no whole numbers: their sums depend on the order of the terms."""
    graph = random_step(seed, layers=layers or 4 + seed % 14)
    seconds = uneven_prices(graph, seed).seconds
    return problem_of(
        graph, [seconds[op.id] / 7 for op in graph.ops], {op.id: 8 * (seed % 3) for op in graph.ops}
    )


@pytest.mark.parametrize("seed", range(20))
def test_accounts_are_the_same_after_any_changes(seed: int, library: ctypes.CDLL) -> None:
    problem, random = _problem(seed), Random(seed)
    one, other = Ledger(problem), NativeLedger(problem, twins_of(problem), library)
    for turn in range(40):
        for _ in range(random.randint(1, 4)):
            gap, state = random.randrange(len(one.states)), random.choice(list(State))
            one.set_state(gap, state)
            other.set_state(gap, state)
        if turn % 10 == 9:
            states = [random.choice(list(State)) for _ in one.states]
            one.load(states)
            other.load(bytes(states))
        for ledger in (one, other):
            (ledger.commit if turn % 2 else ledger.roll_back)()
        curve, policy, ticks = other.read()
        assert (curve.tolist(), policy, ticks) == (
            one.curve_bytes().tolist(),
            bytes(one.states),
            one.extra_ticks,
        )


Searches = Callable[[Problem, int], tuple[Frontier, Frontier]]


@pytest.fixture
def searches(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Searches:
    """The frontiers by both."""

    def native(problem: Problem, twins: Twins) -> NativeAnnealer:
        return NativeAnnealer(problem, twins, library)  # which no refusal sends back to Python

    def search(problem: Problem, moves: int) -> tuple[Frontier, Frontier]:
        monkeypatch.setattr(frontier, "annealer_of", Annealer)
        reference = frontier_of(problem, moves)
        monkeypatch.setattr(frontier, "annealer_of", native)
        return reference, frontier_of(problem, moves)

    return search


@pytest.mark.slow
def test_frontiers_are_the_same(searches: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole frontiers: every peak, the seconds to the last bit, every state."""
    monkeypatch.setattr(frontier, "_ANCHORS", 3)
    points = 0
    for seed in range(_GRAPHS):
        reference, native = searches(_problem(seed), 100)
        assert native == reference, f"graph {seed}"
        points += len(native.points)
    assert points > 5 * _GRAPHS


@pytest.mark.slow
def test_the_frontier_of_a_real_step_is_the_same(searches: Searches, dump: Callable[[str], Path]) -> None:
    """With moves that the library does in several calls."""
    graph = chainer.read(dump("chainer").read_text(), chainer.SavedView.RETAIN).graph
    reference, native = searches(problem_in_order(graph, price_by_macs(graph)), 1500)
    assert native == reference
    assert len(native.points) > 50


def test_ticks_are_the_seconds_to_forty_bits() -> None:
    problem = _problem(4, layers=40)
    ticks, tick_seconds = ticks_of(problem)
    plain = sum(problem.seconds)
    assert 2**43 <= sum(ticks) <= 2**44 + len(ticks)
    assert all(
        abs(n * tick_seconds - s) <= plain / 2**43 for n, s in zip(ticks, problem.seconds, strict=True)
    )
    assert ticks_of(replace(problem, seconds=tuple(s * 1024 for s in problem.seconds)))[0] == ticks
    assert ticks_of(replace(problem, seconds=(0.0,) * len(ticks)))[0] == (0,) * len(ticks)
    assert ticks_of(replace(problem, seconds=(5e-324, *(0.0,) * (len(ticks) - 1))))[0][0] == 1
    assert sum(ticks_of(replace(problem, seconds=(1e308,) * len(ticks)))[0]) >= 2**43


def test_long_work_pauses_every_few_hundred_moves(library: ctypes.CDLL) -> None:
    """Between two pauses Python handles Ctrl-C, and looks at the time limit."""
    problem = _problem(6, layers=20)
    annealer = NativeAnnealer(problem, twins_of(problem), library)
    pauses: list[None] = []
    annealer.anneal([0.0] * 20_000, 1.0, 1.0, lambda: pauses.append(None))
    assert 20_000 / 512 <= len(pauses) <= 20_000 / 32
    with ended_by(over := Patience()):
        over.end("Ctrl-C")
        assert frontier_of(problem, 10**6).ended == "Ctrl-C"


class _Enough(Exception):
    pass


def test_what_a_pause_raises_ends_the_work(library: ctypes.CDLL) -> None:
    problem, pauses = _problem(6, layers=20), iter(range(3))
    annealer = NativeAnnealer(problem, twins_of(problem), library)

    def pause() -> None:
        if next(pauses, None) is None:
            raise _Enough

    with pytest.raises(_Enough):
        annealer.anneal([0.0] * 10**6, 1.0, 1.0, pause)
    assert annealer.peak_bytes() > 0


def _with(problem: Problem, field: str, number: object) -> Problem:
    """The problem with a number of a row, or of rows, replaced."""
    numbers = list(getattr(problem, field))
    place = next(i for i, each in enumerate(numbers) if each or field == "ticks")
    row = isinstance(numbers[place], tuple)
    numbers[place] = (number, *numbers[place][1:]) if row else number
    return replace(problem, **{field: tuple(numbers)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "number"),
    [
        ("reads", -1),
        ("writes", -1),
        ("writes", 10**6),
        ("in_place", (10**6, ())),
        ("in_place", (0, (10**6,))),
        ("in_place", (0, (-1,))),
        ("producer", 10**6),
        ("producer", -2),
        ("nbytes", -1),
        ("nbytes", 2**60),
        ("nbytes", 2**63),
        ("temporary_bytes", -1),
        ("temporary_bytes", 2**52),
        ("seconds", -1.0),
    ],
)
def test_damaged_problems_are_refused(field: str, number: object, library: ctypes.CDLL) -> None:
    """What Python itself would stumble over in counting the gaps is left to the fuzzer."""
    problem = _problem(5, layers=12)
    twins = twins_of(problem)
    with pytest.raises((Refused, OverflowError)):
        NativeAnnealer(_with(problem, field, number), twins, library)


@pytest.mark.parametrize(
    ("field", "number"), [("turn", -1), ("turn", 10**6), ("standing_bytes", -1), ("standing_bytes", 2**52)]
)
def test_figures_out_of_range_are_refused(field: str, number: int, library: ctypes.CDLL) -> None:
    problem = _problem(5, layers=12)
    with pytest.raises(Refused):
        NativeAnnealer(replace(problem, **{field: number}), twins_of(problem), library)  # type: ignore[arg-type]


def test_a_value_read_before_it_is_made_is_refused(library: ctypes.CDLL) -> None:
    problem = _problem(5, layers=12)
    last = next(values[0] for values in reversed(problem.writes) if values)
    with pytest.raises(Refused):
        NativeAnnealer(_with(problem, "reads", last), twins_of(problem), library)


@pytest.mark.usefixtures("library")
def test_a_refused_problem_has_an_annealer_in_python() -> None:
    problem = _problem(5, layers=12)
    assert isinstance(annealer_of(problem, twins_of(problem)), NativeAnnealer)
    huge = replace(problem, standing_bytes=2**60)
    assert isinstance(annealer_of(huge, twins_of(huge)), Annealer)


def test_calls_that_make_no_sense_are_errors(library: ctypes.CDLL) -> None:
    problem = _problem(5, layers=12)
    annealer = NativeAnnealer(problem, twins_of(problem), library)
    gaps = len(annealer.gaps.value_of)
    for wrong in (
        lambda: annealer.set_state(gaps, 0),
        lambda: annealer.set_state(-1, 0),
        lambda: annealer.set_state(0, 4),
        lambda: annealer.load(bytes(gaps + 1)),
        lambda: annealer.load(b"\4" * gaps),
        lambda: annealer.policy_at(10**6),
        lambda: annealer.policy_at(-1),
    ):
        with pytest.raises(ValueError, match=r"states for|does not allow"):
            wrong()
