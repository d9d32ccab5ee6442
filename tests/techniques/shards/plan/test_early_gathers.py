"""Early gathers of a step of four layers: as early as they must be to be hidden, and as the budget allows."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from stowplan.errors import IllegalPlan
from stowplan.ir import Graph, Kind, Op, Phase, Tensor, Use, validate
from stowplan.ops.effects import BEGIN_GATHER, END_GATHER
from stowplan.plan.draft import Draft
from stowplan.plan.judge.verify import verify
from stowplan.plan.planner import Planner
from stowplan.plan.pricing import Basis, Pricing
from stowplan.plan.problem import problem_of
from stowplan.plan.steps import Compute
from stowplan.techniques.shards.plan.early_gathers import with_early_gathers

LAYERS = 4
SHARD, WHOLE, VALUE = 500, 1000, 100
ROOMY = 100_000


def step() -> Graph:
    """Each layer gathers its weight from the shard, and multiplies."""
    tensors, ops = [Tensor("value 0", Kind.INPUT, nbytes=VALUE)], list[Op]()
    for n in range(1, LAYERS + 1):
        tensors += (
            Tensor(f"shard {n}", Kind.PARAMETER, nbytes=SHARD),
            Tensor(f"buffer {n}", Kind.ACTIVATION, nbytes=WHOLE),
            Tensor(f"weight {n}", Kind.ACTIVATION, nbytes=WHOLE, alias_of=f"buffer {n}"),
            Tensor(f"value {n}", Kind.ACTIVATION, nbytes=VALUE),
        )
        ops += (
            Op(f"begin {n}", BEGIN_GATHER, Phase.FORWARD, (Use(f"shard {n}"),), (Use(f"buffer {n}"),)),
            Op(f"end {n}", END_GATHER, Phase.FORWARD, (Use(f"buffer {n}"),), (Use(f"weight {n}"),)),
            Op(
                f"multiply {n}",
                "mm",
                Phase.FORWARD,
                (Use(f"value {n - 1}"), Use(f"weight {n}")),
                (Use(f"value {n}"),),
            ),
        )
    graph = Graph({tensor.id: tensor for tensor in tensors}, tuple(ops), frozenset({f"value {LAYERS}"}))
    validate(graph)
    return graph


def planned(gather_seconds: float = 1.0) -> Draft:
    """The step in its order, where a multiplication takes a second."""
    graph = step()
    kinds: Mapping[str, float] = {BEGIN_GATHER: gather_seconds, END_GATHER: 0.0, "mm": 1.0}
    pricing = Pricing({op.id: kinds[op.type] for op in graph.ops}, Basis.MEASURED)
    problem = problem_of(graph, [pricing.seconds[op.id] for op in graph.ops])
    return Planner.unsearched(problem, pricing, ROOMY).draft(ROOMY)


def order(plan: Draft) -> str:
    """b1: the first gather begins; e1: it is waited for; m1: its weight is read."""
    run = [step.op for step in plan.steps if isinstance(step, Compute)]
    return " ".join(f"{name[0]}{name[-1]}" for name in run)


@pytest.mark.parametrize(
    ("gather_seconds", "expected"),
    [
        (0.5, "b1 e1 b2 m1 e2 b3 m2 e3 b4 m3 e4 m4"),
        (2.0, "b1 e1 b2 b3 m1 e2 b4 m2 e3 m3 e4 m4"),
        (9.0, "b1 e1 b2 b3 b4 m1 e2 m2 e3 m3 e4 m4"),
    ],
)
def test_a_gather_begins_as_early_as_it_takes(gather_seconds: float, expected: str) -> None:
    assert order(with_early_gathers(planned(gather_seconds), ROOMY)) == expected


@pytest.mark.parametrize(("buffers", "expected"), [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_buffers_under_way_are_within_the_budget(buffers: int, expected: int) -> None:
    plan = planned(gather_seconds=9.0)
    allowed = plan.projected_peak_bytes + (buffers - 1) * WHOLE
    early = with_early_gathers(plan, allowed)
    assert early.projected_peak_bytes == allowed
    assert order(early).split(" m1")[0].count("b") == 1 + expected
    if not expected:
        assert early is plan


def test_a_plan_that_reads_before_the_wait_is_illegal() -> None:
    early = with_early_gathers(planned(), ROOMY)
    steps = list(early.steps)
    ops = [step.op if isinstance(step, Compute) else "" for step in steps]
    steps.insert(ops.index("multiply 2"), steps.pop(ops.index("end 2")))
    with pytest.raises(IllegalPlan, match="'weight 2', which does not hold its value"):
        verify(replace(early, steps=tuple(steps)))
