"""However gradients come in for the outputs, those of parameters have the bits of eager, or it is said."""

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import capture
from stowplan.capture.layouts import SWAYED
from stowplan.errors import CaptureError
from stowplan.run.fit import fit
from tests.support.side_by_side import AMPLE, fitted_at_both_ends

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

SHAPE = (2, 8, 16, 16)


def by_rows() -> Tensor:
    return torch.randn(SHAPE)


def channels_last() -> Tensor:
    return torch.randn(SHAPE).to(memory_format=torch.channels_last)


def expanded() -> Tensor:
    return torch.randn(()).expand(SHAPE)


def expanded_in_part() -> Tensor:
    return torch.randn(2, 8, 1, 1).expand(SHAPE)


def with_gaps() -> Tensor:
    return torch.randn(2, 8, 16, 32)[..., ::2]


LAYOUTS = (by_rows, channels_last, expanded, expanded_in_part, with_gaps)


class Gates(nn.Module):
    """A product whose gradient may be written over what it is a product of, and is then summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(8, 1, 1))
        self.v = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * self.v) * self.w


class Convolved(nn.Module):
    """A convolution and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.w = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        convolved: Tensor = self.conv(x)
        return convolved.relu() * self.w


class Folded(nn.Module):
    """Its gradient is seen under another shape first."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(128, 16))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = x.reshape(2, 128, 16).tanh() * self.w
        return product.view(SHAPE)


def gradients_of(model: nn.Module, run: nn.Module, x: Tensor, incoming: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(run(x), list(model.parameters()), incoming))


@pytest.mark.parametrize("given", [by_rows, channels_last])
@pytest.mark.parametrize("kind", [Gates, Convolved, Folded])
@pytest.mark.slow
def test_gradients_of_any_layout(
    kind: type[nn.Module], given: Callable[[], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = kind(), given()
    fitted = [fitted for _, fitted in fitted_at_both_ends(model, (x,))]
    for layout in LAYOUTS:
        incoming = layout()
        expected = gradients_of(model, model, x, incoming)
        for planned in fitted:
            caplog.clear()
            found = gradients_of(planned, planned, x, incoming)
            said = any("within rounding" in record.message for record in caplog.records)
            assert layout not in (by_rows, expanded) or not said
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(one, other)
                assert said or torch.equal(one, other), layout.__name__


def _residual(linear: nn.Module, x: Tensor, y: Tensor) -> object:
    return x + linear(y)


def _two_heads(linear: nn.Module, x: Tensor, y: Tensor) -> object:
    return x + y, linear(x.detach())


def _expanding(linear: nn.Module, x: Tensor, y: Tensor) -> object:
    return x.sum() + linear(y.mean(0)).sum()


def _turned(linear: nn.Module, x: Tensor, y: Tensor) -> object:
    return linear((x * y).transpose(0, 1)).square()


def _in_part(linear: nn.Module, x: Tensor, y: Tensor) -> object:
    return x, linear(y[:2])


class Applying(nn.Module):
    def __init__(self, compute: Callable[..., object]) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(8, 8), compute

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.compute(self.linear, x, y)


@pytest.mark.parametrize("compute", [_residual, _two_heads, _expanding, _turned, _in_part])
def test_gradients_leave_for_ops_before_the_model_with_the_strides_of_eager(
    compute: Callable[..., object],
) -> None:
    """Else the kernels there would add in another order than in eager."""
    torch.manual_seed(0)
    model, front, x = Applying(compute), nn.Conv1d(8, 8, 1), torch.randn(4, 8, 6)
    seen: list[tuple[int, ...]] = []

    def arguments() -> tuple[Tensor, ...]:
        given = tuple(front(x * factor).transpose(1, 2) for factor in (1, 2))
        for tensor in given:
            tensor.register_hook(lambda gradient: seen.append(gradient.stride()))
        return given

    def trained(run: nn.Module) -> list[Tensor]:
        seen.clear()
        returned = run(*arguments())
        outputs = returned if isinstance(returned, tuple) else (returned,)
        sum((output * output.detach()).sum() for output in outputs).backward()
        parameters = [*front.parameters(), *model.parameters()]
        found = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        front.zero_grad()
        model.zero_grad()
        return found

    expected, strides = trained(model), list(seen)
    fitted = fit(model, arguments(), budget=AMPLE, search=Search(moves=10))
    assert all(map(torch.equal, expected, trained(fitted)))
    assert sorted(seen) == sorted(strides)
    leaves = [argument.detach().requires_grad_() for argument in arguments()]
    eager = [argument.detach().requires_grad_() for argument in arguments()]
    for run, given in ((model, eager), (fitted, leaves)):
        outputs = run(*given)
        sum(output.sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
    for one, other in zip(eager, leaves, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
        assert one.grad.stride() == other.grad.stride()


def test_writing_into_the_result_of_an_op_before_the_model_is_refused() -> None:
    """Its caller would go on with a tensor that autograd takes for unchanged."""
    model = Applying(lambda linear, x, y: linear(x.mul_(y)))
    h = nn.Linear(8, 8)(torch.randn(4, 8))
    with pytest.raises(CaptureError, match=r"test_incoming_gradients.py:\d+: forward writes into x"):
        fit(model, (h, torch.ones(4, 8)), budget=AMPLE)


def test_what_is_copied_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Folded(), by_rows()
    fitted = fit(copy.deepcopy(model), (x,), budget=AMPLE, allow=["recompute"], search=Search(moves=10))
    with caplog.at_level(logging.WARNING, "stowplan"):
        for _ in range(3):
            gradients_of(fitted, fitted, x, channels_last())
    (said,) = (record.message for record in caplog.records if "copied" in record.message)
    assert "strides (2048, 1, 128, 8)" in said


@pytest.mark.parametrize(("given", "is_swayed"), [(by_rows, False), (channels_last, True)])
def test_overwriting_is_given_up_only_where_usual_gradients_sway_a_layout(
    given: Callable[[], Tensor], is_swayed: bool
) -> None:
    graph = capture(Gates(), (given(),)).graph
    assert any(SWAYED in op.attributes for op in graph.ops) is is_swayed
