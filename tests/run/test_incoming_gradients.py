"""However gradients come in for the outputs, those of parameters have the bits of eager, or it is said."""

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stowplan.capture import capture
from stowplan.capture.layouts import SWAYED
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


def test_what_is_copied_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Folded(), by_rows()
    fitted = fit(copy.deepcopy(model), (x,), budget=AMPLE, allow=["recompute"], moves=10)
    with caplog.at_level(logging.WARNING, "stowplan"):
        for _ in range(3):
            gradients_of(fitted, fitted, x, channels_last())
    assert len(caplog.records) == 1
    assert "strides (2048, 1, 128, 8)" in caplog.records[0].message


@pytest.mark.parametrize(("given", "is_swayed"), [(by_rows, False), (channels_last, True)])
def test_overwriting_is_given_up_only_where_usual_gradients_sway_a_layout(
    given: Callable[[], Tensor], is_swayed: bool
) -> None:
    graph = capture(Gates(), (given(),)).graph
    assert any(SWAYED in op.attributes for op in graph.ops) is is_swayed
