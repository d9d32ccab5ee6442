"""What forward reads of values: answers that follow from arguments are guards, checks stay checks.

Each test runs a fitted model and an eager twin on several arguments and compares losses and gradients to the
bit, or expects the error that eager raises.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.capture.answers import Answers
from stowplan.errors import CaptureError, NotFinite
from stowplan.plan.draft import AgainstEager, Verdict

AMPLE = 2**40
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Step(nn.Module):
    """A small net and one function of its hidden tensor and an integer argument."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.body = nn.Linear(6, 8), nn.Linear(8, 5), body

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.body(torch.tanh(self.first(x)), n)
        loss: Tensor = self.second(h).square().mean()
        return loss


def fitted(body: Callable[[Tensor, Tensor], Tensor], n: Tensor) -> tuple[Any, Any]:
    eager = Step(body)
    model = stowplan.fit(
        copy.deepcopy(eager), (X, n), budget=AMPLE, allow=["recompute"], search=Search(moves=5)
    )
    return model, eager


def gradients(model: nn.Module, n: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(X, n)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def agree(model: nn.Module, eager: nn.Module, n: Tensor) -> bool:
    pairs = zip(gradients(model, n), gradients(eager, n), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def branch(h: Tensor, n: Tensor) -> Tensor:
    return h if n.bool().all() else h.masked_fill(n[:, None] == 0, 0.0)


def sized(h: Tensor, n: Tensor) -> Tensor:
    return h[: int(n.max())]


def listed(h: Tensor, n: Tensor) -> Tensor:
    return h * float(sum(n.tolist()))


def as_array(h: Tensor, n: Tensor) -> Tensor:
    return h * float(n.numpy().sum())


def rebuilt(h: Tensor, n: Tensor) -> Tensor:
    return h * torch.tensor([n[0], n[1]]).sum()


def masked(h: Tensor, n: Tensor) -> Tensor:
    return h[n > 1]


def selected(h: Tensor, n: Tensor) -> Tensor:
    return h.masked_select((n > 1)[:, None]).view(-1, 8)


def positions(h: Tensor, n: Tensor) -> Tensor:
    return h[torch.nonzero(n > 1).squeeze(1)]


def repeated(h: Tensor, n: Tensor) -> Tensor:
    return h.repeat_interleave(n, 0)


def overwritten(h: Tensor, n: Tensor) -> Tensor:
    n[0] = 1
    return h if n.max() > 2 else 2 * h


def pieces(h: Tensor, n: Tensor) -> Tensor:
    return torch.cat([part * (k + 1) for k, part in enumerate(h.tensor_split(n[:2].sort().values))])


ONE, LIKE_ONE, OTHER = torch.tensor([1, 2, 3, 1]), torch.tensor([1, 1, 3, 2]), torch.tensor([0, 2, 2, 3])


@pytest.mark.parametrize(
    "body",
    [branch, sized, listed, as_array, rebuilt, masked, selected, positions, repeated, overwritten, pieces],
)
def test_a_read_of_an_argument_is_a_guard(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, eager = fitted(body, ONE.clone())
    (plan,) = stowplan.plans_of(model)
    assert plan.against_eager == AgainstEager(Verdict.SAME)
    for n in (ONE, OTHER, LIKE_ONE, ONE):
        assert agree(model, eager, n.clone()), (body, n)
    assert 1 <= len(stowplan.plans_of(model)) <= 3


def test_the_same_answer_needs_no_other_plan() -> None:
    model, eager = fitted(sized, ONE)
    assert agree(model, eager, LIKE_ONE)
    assert len(stowplan.plans_of(model)) == 1


def test_a_guard_that_is_not_asked_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = fitted(branch, ONE)
    monkeypatch.setattr(Answers, "other_answer", lambda _self, _arguments, _model: None)
    assert not agree(model, eager, OTHER)


def test_classes_may_change_below_their_number() -> None:
    model, eager = fitted(lambda h, n: h[:, :4] * F.one_hot(n, 4) @ torch.ones(4, 8), ONE)
    assert agree(model, eager, torch.tensor([0, 0, 1, 1]))
    assert len(stowplan.plans_of(model)) == 1
    with pytest.raises(CaptureError, match="Class values must be smaller"):
        model(X, torch.tensor([0, 0, 1, 4]))


def test_arguments_in_one_storage_keep_their_values() -> None:
    whole = torch.arange(8) % 4
    model, eager = fitted(sized, whole[4:])
    assert agree(model, eager, whole[4:])
    assert agree(model, eager, (torch.arange(8) % 3)[4:])


def test_too_many_answers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stowplan.run.fitting._MOST_ANSWERS", 2)
    model, _ = fitted(listed, ONE)
    model(X, ONE + 1)
    with pytest.raises(CaptureError, match="each needs a plan of its own; pad or bucket"):
        model(X, ONE + 2)


def raising(h: Tensor, _n: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        raise ValueError("h is not finite")
    return h


def asserting(h: Tensor, _n: Tensor) -> Tensor:
    assert (h < 2).all(), "too large"
    torch._assert_async((h == h).all(), "not a number")
    return h


def clamping(h: Tensor, _n: Tensor) -> Tensor:
    return h if torch.isfinite(h).all() else h.nan_to_num()


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (raising, ValueError, "h is not finite"),
        (asserting, AssertionError, "too large"),
        (clamping, NotFinite, "test_answers.py"),
    ],
)
def test_a_check_stays_a_check(
    body: Callable[[Tensor, Tensor], Tensor], error: type[Exception], words: str
) -> None:
    model, eager = fitted(body, ONE)
    assert agree(model, eager, ONE)
    assert agree(model, eager, OTHER)
    assert len(stowplan.plans_of(model)) == 1
    with torch.no_grad():
        model.first.weight.fill_(torch.nan)
    with pytest.raises(error, match=words):
        model(X, ONE)


def test_an_assertion_that_runs_beside_the_step_raises() -> None:
    def body(h: Tensor, _n: Tensor) -> Tensor:
        torch._assert_async((h == h).all(), "not a number")
        return h

    model, eager = fitted(body, ONE)
    assert agree(model, eager, ONE)
    with torch.no_grad():
        model.first.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="not a number"):
        model(X, ONE)


@pytest.mark.parametrize(
    "body",
    [
        lambda h, _n: h if (h > 0).any() else 2 * h,
        lambda h, _n: h * h.max().item(),
        lambda h, n: h if (h.detach().round().long().abs().sum() > n.sum()) else 2 * h,
    ],
)
def test_a_value_that_no_argument_determines_is_refused(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(
        CaptureError,
        match=r"test_answers.py:\d+: (the step reads the values of a"
        " tensor|forward draws from)",
    ):
        fitted(body, ONE)


def test_a_draw_that_decides_nothing_stays_a_draw() -> None:
    model, eager = fitted(lambda h, _n: F.dropout(h) if torch.rand(()) >= 0.0 else 2 * h, ONE)
    assert agree(model, eager, ONE)


class Dropping(nn.Module):
    """LayerDrop: each layer is skipped if a number that is drawn says so, with dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = F.dropout(x, 0.1)
            if torch.rand([]) < 0.5:
                continue
            x = layer(x).tanh()
        return x.square().mean()


def test_draws_that_steer_forward_choose_among_plans() -> None:
    eager, x = Dropping(), torch.randn(4, 8)
    fitted = stowplan.fit(Dropping(), (x,), budget="1MiB", search=Search(moves=3), allow=("recompute",))
    assert stowplan.plans_of(fitted)[0].against_eager == AgainstEager(Verdict.SAME)
    paths = set()
    for seed in range(8):
        for model in (eager, fitted):
            model.zero_grad()
            torch.manual_seed(seed)
            model(x).backward()
        grads = [parameter.grad for parameter in eager.parameters()]
        paths.add(tuple(grad is None for grad in grads))
        for one, other in zip(grads, (p.grad for p in fitted.parameters()), strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)
    assert len(paths) >= 3
    assert len(paths) <= len(stowplan.plans_of(fitted)) <= 4
