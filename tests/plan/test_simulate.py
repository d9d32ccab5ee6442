"""The judge's numbers, counted by hand on a step small enough to do so."""

from dataclasses import replace

import pytest

from stowplan.errors import IllegalPlan
from stowplan.ir import Graph, Kind, Op, Phase, Role, Tensor, Use
from stowplan.plan.judge.engines import Stall
from stowplan.plan.judge.simulate import alive_at, simulate
from stowplan.plan.pricing import Basis, Pricing, Tier
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Step, Store

TENSORS = (
    Tensor("xt", Kind.INPUT, nbytes=1, alias_of="x"),
    Tensor("x", Kind.INPUT, nbytes=1),
    Tensor("nothing", Kind.INPUT, nbytes=0),
    Tensor("w", Kind.PARAMETER, nbytes=2),
    Tensor("table", Kind.CONSTANT, nbytes=1000),
    Tensor("count", Kind.BUFFER, nbytes=4),
    Tensor("count.updated", Kind.BUFFER, nbytes=4, alias_of="count"),
    Tensor("flags", Kind.BUFFER, nbytes=0),
    Tensor("flags.updated", Kind.BUFFER, nbytes=0, alias_of="flags"),
    Tensor("void", Kind.ACTIVATION, nbytes=0),
    Tensor("a", Kind.ACTIVATION, nbytes=10),
    Tensor("at", Kind.ACTIVATION, nbytes=10, alias_of="a"),
    Tensor("att", Kind.ACTIVATION, nbytes=10, alias_of="at"),
    Tensor("m", Kind.ACTIVATION, nbytes=20),
    Tensor("b", Kind.ACTIVATION, nbytes=10),
    Tensor("loss", Kind.ACTIVATION, nbytes=40),
    Tensor("gb", Kind.GRADIENT, nbytes=100),
    Tensor("gw", Kind.GRADIENT, nbytes=200),
    Tensor("ga", Kind.GRADIENT, nbytes=400),
)
STANDING = 1 + 2 + 4  # x, w and count: a view is no more, and constants do not count


def _graph() -> Graph:
    """Views of an input and of an activation, an op with more outputs, a sum into a gradient, nothings."""
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    ops = (
        Op("make", "Wide", forward, (Use("xt"), Use("w"), Use("table")), (Use("a"), Use("m"), Use("void"))),
        Op("look", "View", forward, (Use("a"),), (Use("at"),)),
        Op("look on", "View", forward, (Use("at"),), (Use("att"),)),
        Op("relu", "Relu", forward, (Use("att"),), (Use("b"),)),
        Op("end", "Wide", forward, (Use("b"),), (Use("loss"),)),
        Op("count", "update", Phase.UPDATE, (Use("b"),), (Use("count.updated"),)),
        Op("flag", "update", Phase.UPDATE, (Use("nothing"),), (Use("flags.updated"),)),
        Op("back end", "Back", backward, (Use("loss"), Use("b", Role.SAVED)), (Use("gb"), Use("gw"))),
        Op("back", "Back", backward, (Use("gb"), Use("m")), (Use("ga"), Use("gw", Role.ACCUMULATE))),
    )
    return Graph({tensor.id: tensor for tensor in TENSORS}, ops, frozenset({"gw", "loss"}))


PRICES = Pricing({op.id: float(2**number) for number, op in enumerate(_graph().ops)}, Basis.MEASURED)
FORWARD: tuple[Step, ...] = tuple(map(Compute, ("make", "look", "look on", "relu", "end")))
BACKWARD: tuple[Step, ...] = (Compute("back end"), Compute("back"))


def _curve(*steps: Step, tier: Tier | None = None) -> list[int]:
    return [level - STANDING for level in simulate(_graph(), steps, replace(PRICES, tier=tier)).curve_bytes]


def test_nothing_needs_nothing() -> None:
    nothing = simulate(_graph(), (), PRICES)
    assert (nothing.peak_bytes, nothing.seconds, nothing.stall_seconds) == (0, 0.0, 0.0)


def test_views_cost_nothing_and_sums_are_made_aside() -> None:
    assert _curve(*FORWARD, *BACKWARD) == [30, 30, 30, 40, 80, 380, 980]


def test_a_sum_straight_into_its_tensor_is_not_made_aside() -> None:
    graph = _graph()
    back = Op("back", "GetItem.backward", Phase.BACKWARD, (Use("gb"),), (Use("gw", Role.ACCUMULATE),))
    graph = Graph(graph.tensors, (*graph.ops[:-1], back), graph.held)
    curve = simulate(graph, (*FORWARD, *BACKWARD), PRICES).curve_bytes
    assert curve[-1] == curve[-2]


def test_a_storage_goes_with_the_last_of_its_names() -> None:
    names = (Free(("a",)), Free(("att",)), Free(("at",)), Free(("b", "m")))
    assert _curve(*FORWARD[:4], *names) == [30, 30, 30, 40, 40, 40, 30, 0]


def test_a_view_is_of_what_its_op_reads_though_its_owner_is_gone() -> None:
    steps = (*FORWARD[:2], Free(("a",)), FORWARD[2], Free(("at",)), FORWARD[3])
    assert _curve(*steps) == [30, 30, 30, 30, 30, 40]


def test_writing_over_takes_the_place() -> None:
    over = Compute("relu", (("b", "att"),))
    assert _curve(*FORWARD[:3], over, Free(("a", "at", "att")), Free(("b",))) == [30, 30, 30, 30, 30, 20]


def test_outputs_that_a_second_run_throws_away_are_there_while_it_runs() -> None:
    again = (*FORWARD, Free(("m",)), RecomputeOp("make", ("m",)), Free(("m",)))
    assert _curve(*again) == [30, 30, 30, 40, 80, 60, 90, 60]


def test_a_view_that_is_not_wanted_again_is_not_bound() -> None:
    steps = (*FORWARD[:2], Free(("at",)), RecomputeOp("look", ()), Free(("a",)))
    assert _curve(*steps) == [30, 30, 30, 30, 20]


def test_workspace_counts_while_its_op_runs() -> None:
    curve = simulate(_graph(), FORWARD[:3], replace(PRICES, workspace_bytes={"look": 7})).curve_bytes
    assert [level - STANDING for level in curve] == [30, 37, 30]


def test_seconds_of_second_runs_are_told_apart() -> None:
    played = simulate(_graph(), (*FORWARD, RecomputeOp("make", ("a",)), RecomputeOp("relu", ("b",))), PRICES)
    assert (played.seconds, played.extra_seconds) == (31.0 + 9.0, 9.0)


EMPTY = ("nothing", "flags", "void")


def test_what_is_there_at_a_step_is_named_largest_first() -> None:
    steps = (*FORWARD[:4], Free(("a",)), FORWARD[4])
    assert alive_at(_graph(), steps, 3) == ("m", "a", "b", "count", "w", "x", *EMPTY)
    assert alive_at(_graph(), steps, 4) == ("m", "at", "b", "count", "w", "x", *EMPTY)
    assert alive_at(_graph(), steps, 5)[:2] == ("loss", "m")


AWAY: tuple[Step, ...] = (Store(("a", "at", "att")), Free(("a", "at", "att")), Load(("a", "at", "att")))
TIER = Tier("host", 1000, 5.0, 2.0, staging_bytes=3000)
WITH_TIER = replace(PRICES, tier=TIER)


def test_moving_takes_staging_and_copies_of_buffers_all_along() -> None:
    beside = 3000 + 4
    levels = [30, 30, 30, 40, 40, 30, 40]
    assert _curve(*FORWARD[:4], *AWAY, tier=TIER) == [level + beside for level in levels]
    assert _curve(*FORWARD[:4], tier=TIER) == levels[:4]


def test_what_comes_back_has_all_its_names_and_what_is_empty_stays_so() -> None:
    beside = 3000 + 4
    names = (Free(("a", "at")), Free(("att",)), Store(("void",)), Free(("void",)), Load(("void",)))
    levels = _curve(*FORWARD[:3], *AWAY, *names, tier=TIER)
    assert [level - beside for level in levels] == [30, 30, 30, 30, 20, 30, 30, 20, 20, 20, 20]


def test_what_waits_for_transfers_is_told() -> None:
    played = simulate(_graph(), (*FORWARD[:4], *AWAY), WITH_TIER)
    written = Stall(5, "a", 15.0, 17.0)
    read = Stall(7, "a", 17.0, 22.0)
    assert played.stalls == (written, read)
    assert (played.stall_seconds, played.seconds) == (7.0, 22.0)
    assert [(move.nbytes, move.is_store) for move in played.transfers] == [(10, True), (10, False)]


def test_an_op_waits_for_what_it_adds_into() -> None:
    moves = (Store(("gw",)), Free(("gw",)), Load(("gw",)))
    steps = (*FORWARD, BACKWARD[0], *moves, BACKWARD[1])
    played = simulate(_graph(), steps, WITH_TIER)
    assert [(stall.step, stall.tensor) for stall in played.stalls] == [(7, "gw"), (9, "gw")]


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (FORWARD[1:2], "step 0: look reads 'a', which is not in memory"),
        ((FORWARD[0], Free(("b",))), "step 1: frees 'b', which is not there"),
        ((FORWARD[0], Free(("w",))), "step 1: frees 'w', which is not there to be freed"),
        ((FORWARD[0], Store(("b",))), "stores b, not one storage"),
        ((FORWARD[0], Store(("a", "m"))), "stores a, m, not one storage"),
        ((FORWARD[0], Store(("w",))), "stores w, not one storage that may leave"),
        ((*FORWARD[:3], AWAY[0], Free(("a",)), AWAY[2]), "step 5 loads 'at', which is in memory"),
        ((*FORWARD[:3], AWAY[0], AWAY[1], Load(("a",))), "step 5 loads a, which was not stored by these"),
    ],
)
def test_a_step_that_cannot_run_is_refused(steps: tuple[Step, ...], reason: str) -> None:
    with pytest.raises(IllegalPlan, match=reason):
        simulate(_graph(), steps, WITH_TIER)


def test_moving_without_a_tier_is_refused() -> None:
    with pytest.raises(IllegalPlan, match="names no tier"):
        simulate(_graph(), (*FORWARD[:3], *AWAY), PRICES)


def test_a_tensor_recomputed_while_it_exists_is_counted_twice_until_it_is_made() -> None:
    steps = (Compute("make"), RecomputeOp("make", ("m",)), Free(("a", "m")))
    assert _curve(*steps) == [30, 30 + 20 + 10, 0]
