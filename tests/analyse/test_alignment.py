"""One curve on the axis of another: peaks survive, and places agree."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stowplan.analyse.timeline import Doing, OpRun, Timeline, curve_onto, stretched, timed_onto, timeline_of
from tests.support.steps import training_step


def test_a_curve_onto_itself_is_itself() -> None:
    timeline = timeline_of(training_step(80))
    assert curve_onto(timeline, timeline).tolist() == timeline.curve_bytes().tolist()


def test_runs_that_the_other_has_not_carry_its_value_on() -> None:
    plain = timeline_of(training_step(80))
    repeated = OpRun(plain.runs[3].op, Doing.RECOMPUTE)
    longer = Timeline(plain.graph, (*plain.runs[:10], repeated, *plain.runs[10:]), ())
    curve = plain.curve_bytes().tolist()
    assert curve_onto(longer, plain).tolist() == [*curve[:10], curve[9], *curve[10:]]


def test_what_happens_between_shared_runs_is_not_lost() -> None:
    plain = timeline_of(training_step(80))
    few = Timeline(plain.graph, tuple(plain.runs[i] for i in range(0, len(plain.runs), 2)), ())
    assert curve_onto(few, plain).max() == plain.curve_bytes().max()


def test_steps_that_have_little_in_common_are_stretched() -> None:
    one, other = timeline_of(training_step(80)), timeline_of(training_step(800))
    assert len(curve_onto(one, other)) == len(one.runs)
    assert curve_onto(one, other).max() == other.curve_bytes().max()


@given(st.lists(st.integers(0, 100), min_size=1), st.integers(1, 40))
def test_stretching_keeps_the_peak(values: list[int], length: int) -> None:
    curve = stretched(np.array(values, dtype=np.int64), length)
    assert len(curve) == length
    assert curve.max() == max(values)


@given(
    st.lists(st.integers(0, 100), min_size=1),
    st.lists(st.floats(0, 9), min_size=1, max_size=40),
)
def test_times_place_every_value(values: list[int], durations: list[float]) -> None:
    curve = timed_onto(durations, np.array(values, dtype=np.int64), [float(at) for at in range(len(values))])
    assert len(curve) == len(durations)
    assert curve.max() == max(values)


def test_a_value_stands_at_the_run_that_was_under_way() -> None:
    curve = np.array([1, 5, 2, 9], dtype=np.int64)
    assert timed_onto([1.0, 2.0, 1.0], curve, [0.0, 1.5, 2.5, 4.0]).tolist() == [1, 5, 9]
