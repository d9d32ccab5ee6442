"""Two forwards before one backward: gradients as in eager, and a word that the budget is for one forward."""

import copy
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from stowplan.plan.steps import RecomputeOp
from stowplan.run.fit import plans_of
from tests.support.models import images
from tests.support.side_by_side import lowest

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Normed(nn.Module):
    """Two norms in a row, of which one is worth recomputing; dropout if asked for."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.one(x)))
        x = torch.tanh(self.norms[1](self.other(nn.functional.dropout(x, self.rate))))
        return torch.tanh(x * 2).square().mean()


def after_two(model: nn.Module, run: nn.Module) -> list[Tensor]:
    """Gradients, buffers and generator of two forwards and one backward."""
    torch.manual_seed(1)
    model.zero_grad()
    (run(images(2, 3, 16, 16)) + run(images(2, 3, 16, 16) * 2)).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*found, *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.slow
def test_norms_and_draws_of_each_forward_are_its_own(rate: float) -> None:
    model, twin = Normed(rate), Normed(rate)
    fitted = lowest(twin, (images(2, 3, 16, 16),))
    again = {step.op for step in plans_of(fitted)[0].steps if isinstance(step, RecomputeOp)}
    assert any("batch_norm" in op for op in again)
    for _ in range(2):
        assert all(map(torch.equal, after_two(model, model), after_two(twin, fitted)))


def test_forwards_of_threads_wait_together() -> None:
    model = Normed(0.0)
    twin = copy.deepcopy(model)
    fitted = lowest(twin, (images(2, 3, 16, 16),))
    inputs = [images(2, 3, 16, 16) * (1 + number) for number in range(2)]
    expected = [torch.autograd.grad(model(x), list(model.parameters())) for x in inputs]
    with ThreadPoolExecutor(2) as threads:
        losses = list(threads.map(fitted, inputs))
        found = list(threads.map(lambda loss: torch.autograd.grad(loss, list(twin.parameters())), losses))
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_second_forward_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fitted, x = lowest(Normed(0.0), (images(2, 3, 16, 16),)), images(2, 3, 16, 16)
    with caplog.at_level(logging.WARNING, "stowplan"):
        for _ in range(3):
            fitted(x).backward()
            fitted.zero_grad()
        fitted(x)
        fitted(x).backward()
        fitted.zero_grad()
        assert not _told(caplog)
        for _ in range(2):
            (fitted(x) + fitted(x)).backward()
            fitted.zero_grad()
    (told,) = _told(caplog)
    assert "a forward of Normed began while an earlier one waits" in told
    assert "kB" in told or "KiB" in told


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Without what is said of models of other tests that are still alive."""
    messages = (record.getMessage() for record in caplog.records)
    return [message for message in messages if not message.startswith("this loop can take")]
