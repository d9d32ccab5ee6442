"""A fitted model trains as in eager, to the bit, and its step stays within the budget, to the byte."""

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import Captured, capture
from stowplan.errors import BudgetTooSmall, IllegalPlan
from stowplan.plan.draft import Draft
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.plan.steps import Compute, RecomputeOp, Step
from stowplan.run.fit import fit, plans_of
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import draft_within, planner_for_captured, replayed_bytes
from stowplan.run.step.straight import StraightStep
from tests.support.models import MOVES, Chain, Normed, TwoHeads, images
from tests.support.nets import NETS
from tests.support.side_by_side import different, scalar, trained

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3)  # of the peak in eager

# Larger than tiny where activations would not outweigh parameters: there must be something to decide.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "unet": {"width": 16},
    "resnet50": {"batch": 8},
    "efficientnet": {"batch": 8},
    "densenet121": {"batch": 4},
    "vgg16": {"batch": 8},
    "vit": {"batch": 16},
    "swin": {"batch": 8},
    "gpt": {"batch": 16, "layers": 6},
    "llama": {"batch": 16},
    "t5": {"batch": 8, "layers": 1},
    "moe": {"batch": 16},
    "lstm": {"batch": 16, "sequence": 4},
    "ssm": {"batch": 8, "sequence": 4},
    "diffusion": {"batch": 8},
    "hf_gpt2": {"batch": 16},
    "hf_llama": {"batch": 16},
    "hf_t5": {"batch": 8, "layers": 1},
    "hf_vit": {"batch": 16},
}
STEPS = 5


def plans_by_budget(planner: Planner) -> dict[int, Draft]:
    """For those shares of the plain peak that a plan exists for, and for the smallest one found."""
    plans = {}
    for allowed in (*(int(share * planner.plain_peak_bytes) for share in SHARES), planner.minimum_bytes):
        with suppress(BudgetTooSmall):
            plans[allowed] = draft_within(planner, allowed)
    return plans


def peak_bytes(step: StraightStep, model: nn.Module, args: tuple[Tensor, ...]) -> int:
    """What was there at once, parameters and all, while forward and backward ran."""

    def forward_and_backward() -> Tensor:
        loss = scalar(step(*args))
        torch.autograd.backward(loss)
        return loss

    model.zero_grad(set_to_none=True)
    standing = [*model.parameters(), *model.buffers(), *args]
    peak = measure(forward_and_backward, before=standing).measured_peak_bytes
    model.zero_grad(set_to_none=True)
    return peak


@pytest.mark.parametrize("name", NETS)
@pytest.mark.slow
def test_every_network_at_every_budget(name: str) -> None:
    model, args = NETS[name].build("tiny", **SETTINGS.get(name, {}))
    captured = capture(model, args)
    planner = planner_for_captured(captured, options=PlanOptions(search=Search(moves=MOVES)))
    eager = copy.deepcopy(model)
    expected = trained(eager, eager, args, steps=STEPS)
    assert all(loss.isfinite() for key, loss in expected.items() if key.startswith("loss"))
    plans = plans_by_budget(planner)
    assert plans
    for allowed, plan in plans.items():
        twin = copy.deepcopy(model)
        step = StraightStep(captured, twin, steps=plan.steps)
        assert different(expected, trained(step, twin, args, steps=STEPS)) == []
        measured = peak_bytes(step, twin, args)
        assert measured <= allowed
        projected = plan.projected_peak_bytes + replayed_bytes(plan)
        # the state to return to is there only while draws are replayed, which need not be at the peak
        assert projected == pytest.approx(measured, rel=0.01, abs=torch.get_rng_state().nbytes)
    assert_monotone(planner)


def assert_monotone(planner: Planner) -> None:
    """Over 20 budgets: a larger one never costs time, a smaller one never memory."""
    low, high, found = planner.minimum_bytes, planner.plain_peak_bytes, list[Draft]()
    for number in range(20):
        with suppress(BudgetTooSmall):  # at the low end there may be no room for the states of draws
            found.append(draft_within(planner, low + (high - low) * number // 19))
    seconds = [plan.projected_seconds for plan in found]
    peaks = [plan.projected_peak_bytes for plan in found]
    assert len(found) > 10
    assert seconds == sorted(seconds, reverse=True)
    assert peaks == sorted(peaks)


@pytest.mark.slow
def test_recomputed_draws_are_the_same() -> None:
    """With activations of a megabyte, a mask is dearer to keep than the generator's state."""
    model, x = Chain(dropout=0.15), images(4096, 16)
    budget = smallest_budget(model, x)
    fitted = fit(copy.deepcopy(model), (x,), budget=budget, allow=["recompute"], search=Search(moves=2000))
    (plan,) = plans_of(fitted)
    assert replayed_bytes(plan) > 0
    assert different(trained(model, model, (x,)), trained(fitted, fitted, (x,))) == []


def smallest_budget(model: nn.Module, x: Tensor) -> int:
    """The smallest with which `fit` succeeds without tiles, and a little."""
    with pytest.raises(BudgetTooSmall) as caught:
        fit(model, (x,), budget=1, allow=["recompute"], search=Search(moves=2000))
    return caught.value.minimum_bytes + 64 * 1024


@pytest.mark.slow
def test_a_fitted_model_is_the_model() -> None:
    model, x = Chain(), images(64, 16)
    fitted = fit(model, (x,), budget="1GiB", search=Search(moves=MOVES))
    assert isinstance(fitted, Chain)
    assert list(fitted.state_dict()) == list(model.state_dict())
    assert [id(p) for p in fitted.parameters()] == [id(p) for p in model.parameters()]


@pytest.mark.slow
def test_a_new_shape_is_planned_once() -> None:
    model = Chain(dropout=0.1)
    fitted = fit(copy.deepcopy(model), (images(64, 16),), budget="1GiB", search=Search(moves=MOVES))
    for rows in (64, 72, 64, 72, 32, 32):  # 32 runs as it is
        args = (images(rows, 16),)
        assert different(trained(model, model, args), trained(fitted, fitted, args)) == []
    assert len(plans_of(fitted)) == 2


@pytest.mark.slow
def test_another_dtype_of_the_parameters_is_another_step() -> None:
    model, x = Chain(), images(64, 16)
    fitted = fit(copy.deepcopy(model), (x,), budget="1GiB", search=Search(moves=MOVES)).double()
    model.double()
    assert different(trained(model, model, (x.double(),)), trained(fitted, fitted, (x.double(),))) == []


@pytest.mark.slow
def test_training_and_evaluation_mode() -> None:
    model, args = Normed(), (images(2, 3, 8, 8),)
    fitted = fit(copy.deepcopy(model), args, budget="1GiB", search=Search(moves=MOVES))
    for mode in (True, False, True):
        model.train(mode)
        fitted.train(mode)
        assert different(trained(model, model, args), trained(fitted, fitted, args)) == []
    assert len(plans_of(fitted)) == 2


def test_without_gradients_the_plain_forward_runs() -> None:
    model, x = Normed(), images(2, 3, 8, 8)
    fitted = fit(copy.deepcopy(model), (x,), budget="1GiB", search=Search(moves=MOVES))
    for mode in (True, False):
        results = []
        for each in (model.train(mode), fitted.train(mode)):
            torch.manual_seed(0)
            with torch.no_grad():
                results.append(each(images(5, 3, 8, 8)))
        assert torch.equal(*results)
        assert not results[1].requires_grad
    assert different(dict(model.named_buffers()), dict(fitted.named_buffers())) == []
    assert len(plans_of(fitted)) == 1


@pytest.mark.slow
def test_an_output_that_the_loss_does_not_depend_on() -> None:
    def of_one_head(output: object) -> Tensor:
        assert isinstance(output, dict)
        loss: Tensor = output["left"].square().sum()
        return loss

    model, args = TwoHeads(), (images(4, 5),)
    fitted = fit(copy.deepcopy(model), args, budget="1GiB", search=Search(moves=MOVES))
    expected, found = trained(model, model, args, of_one_head), trained(fitted, fitted, args, of_one_head)
    assert found.keys() == expected.keys()  # None for the head that the loss does not use, as in eager
    assert different(expected, found) == []


def test_the_gradient_that_comes_in_is_left_as_it_is() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), images(8, 16)
    fitted = fit(model, (x,), budget="1GiB", search=Search(moves=MOVES))
    gradient = images(8, 16)
    fitted(x).backward(gradient)
    assert torch.equal(gradient, images(8, 16))


def test_hooks_of_the_model_run_once_around_the_step() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(0)), images(8, 4)
    calls = []
    model.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    model.register_forward_hook(lambda _, __, made: calls.append(1) or made.sum())  # type: ignore[func-returns-value]
    twin = copy.deepcopy(model)
    fitted = fit(twin, (x,), budget="1GiB", search=Search(moves=MOVES))
    calls.clear()
    assert torch.equal(model(x), fitted(x))
    assert len(calls) == 2


@pytest.mark.slow
def test_too_small_a_budget_is_refused_before_anything_runs() -> None:
    model, x = Chain(dropout=0.1), images(4096, 16)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(BudgetTooSmall) as caught:
        fit(model, (x,), budget="300KiB", search=Search(moves=MOVES))
    assert caught.value.binding
    assert different(before, model.state_dict()) == []
    assert torch.equal(generator, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_what_is_reserved_is_left_free() -> None:
    model, x = Chain(), images(4096, 16)
    smallest = smallest_budget(model, x)
    fit(
        model, (x,), budget=smallest + 1024**2, reserve="1MiB", allow=["recompute"], search=Search(moves=2000)
    )
    with pytest.raises(BudgetTooSmall):
        fit(model, (x,), budget=smallest, reserve="1MiB", allow=["recompute"], search=Search(moves=2000))


def test_a_copy_is_a_model_of_its_own() -> None:
    model, args = Normed(), (images(2, 3, 8, 8),)
    fitted = fit(copy.deepcopy(model), args, budget="1GiB", search=Search(moves=MOVES))
    other = copy.deepcopy(fitted)
    trained(fitted, fitted, args)
    assert different(trained(model, model, args), trained(other, other, args)) == []


class TestFaults:
    """Faults planted into a plan: each must be seen by the check that is there for it."""

    @pytest.fixture
    def captured(self) -> tuple[Captured, nn.Module, Tensor]:
        model, x = Chain(), images(4096, 16)
        return capture(model, (x,)), model, x

    def test_a_missing_second_run_is_refused(self, captured: tuple[Captured, nn.Module, Tensor]) -> None:
        planner = planner_for_captured(captured[0], options=PlanOptions(search=Search(moves=MOVES)))
        plan = planner.plan(planner.minimum_bytes)
        place = next(n for n, step in enumerate(plan.steps) if isinstance(step, RecomputeOp))
        with pytest.raises(IllegalPlan):
            verify(replace(plan.draft(), steps=plan.steps[:place] + plan.steps[place + 1 :]))

    def test_an_overwritten_activation_shows(self, captured: tuple[Captured, nn.Module, Tensor]) -> None:
        step, model, x = captured
        planner = planner_for_captured(step, options=PlanOptions(search=Search(moves=MOVES)))
        plan = planner.plan(planner.plain_peak_bytes)
        ops = {op.id: op for op in step.graph.ops}

        def spoiled(each: Step) -> Step:
            if isinstance(each, Compute) and ops[each.op].type == "aten.gelu.default":
                op = ops[each.op]
                return Compute(op.id, ((next(iter(op.writes())), next(iter(op.reads()))),))
            return each

        steps = tuple(map(spoiled, plan.steps))
        with pytest.raises(IllegalPlan):
            verify(replace(plan.draft(), steps=steps))
        twin = copy.deepcopy(model)
        broken = StraightStep(step, twin, steps=steps)
        assert different(trained(model, model, (x,)), trained(broken, twin, (x,)))

    def test_a_plan_over_its_budget_shows(self, captured: tuple[Captured, nn.Module, Tensor]) -> None:
        step, model, x = captured
        planner = planner_for_captured(step, options=PlanOptions(search=Search(moves=MOVES)))
        plain = StraightStep(step, model, steps=planner.plan(planner.plain_peak_bytes).steps)
        assert peak_bytes(plain, model, (x,)) > planner.minimum_bytes
