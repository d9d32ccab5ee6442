"""Straight-line code computes what eager computes, bit for bit, and takes no more memory."""

import copy

import pytest
import torch
from torch import Tensor, nn

from stowplan.capture import capture
from stowplan.errors import BadUse
from stowplan.run.measure.measure import measure
from stowplan.run.step.straight import StraightStep
from tests.support.models import Normed, Rewriting, Tied, TwoHeads, images
from tests.support.nets import NETS
from tests.support.side_by_side import differences

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("name", NETS)
def test_every_network_trains_as_in_eager(name: str) -> None:
    model, args = NETS[name].build("tiny")
    assert differences(model, args) == []


@pytest.mark.parametrize("name", NETS)
def test_the_peak_is_not_above_eagers(name: str) -> None:
    model, args = NETS[name].build("tiny")
    straight = StraightStep(capture(model, args), model)

    def peak(run: nn.Module | StraightStep) -> int:
        def step() -> None:
            loss = run(*args)
            assert isinstance(loss, Tensor)
            torch.autograd.backward(loss)

        step()
        model.zero_grad(set_to_none=True)
        rise = measure(step, before=()).measured_rise_bytes
        model.zero_grad(set_to_none=True)
        return rise

    assert peak(straight) <= peak(model)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Normed(), (images(2, 3, 8, 8),)),
        (Tied(), (torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))),
        (Rewriting(), (images(3, 4),)),
    ],
)
def test_hard_traits_train_as_in_eager(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert differences(model, args) == []


def test_outputs_keep_their_structure_and_all_take_gradients() -> None:
    def loss(output: object) -> Tensor:
        assert isinstance(output, dict)
        assert output["scale"] == 1.0
        assert not output["active"].requires_grad
        total: Tensor = output["left"].square().sum() * output["right"].sin().sum()
        return total

    assert differences(TwoHeads(), (images(4, 5),), loss) == []


def test_outputs_that_share_memory_or_come_twice() -> None:
    class Sharing(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]  # on purpose
            y = super().forward(x)
            return y, y.view(-1), x, y.t(), self.weight, y, y.detach()

    def loss(output: object) -> Tensor:
        assert isinstance(output, tuple)
        assert [tensor.requires_grad for tensor in output] == [True, True, False, True, True, True, False]
        y, flat, x, turned, weight, again, detached = output
        terms = (y.sin(), flat.cos(), x * x, turned.exp(), weight * weight, again * detached)
        return torch.stack([term.sum() for term in terms]).sum()

    assert differences(Sharing(4, 4), (images(2, 4),), loss) == []


def test_arguments_by_name_and_inputs_that_want_gradients() -> None:
    model, x = TwoHeads(), images(4, 5).requires_grad_()
    straight = StraightStep(capture(model, (x,), {"scale": 3.0}), model)
    gradients: list[Tensor] = []
    for run in (model, straight):
        output = run(x, scale=3.0)
        assert isinstance(output, dict)
        gradients += torch.autograd.grad(output["left"].sum() + output["right"].sum(), x)
    assert torch.equal(*gradients)


def test_gradients_accumulate() -> None:
    model = Normed().eval()
    twin = copy.deepcopy(model)
    straight = StraightStep(capture(twin, (images(2, 3, 8, 8),)), twin)
    for _ in range(3):
        model(images(2, 3, 8, 8)).backward()
        loss = straight(images(2, 3, 8, 8))
        assert isinstance(loss, Tensor)
        torch.autograd.backward(loss)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_autocast_is_captured_and_not_applied_twice() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)), images(5, 8)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        straight = StraightStep(capture(twin, (x,), loss=torch.sum), twin)
        expected, found = model(x).sum(), straight(x)
    assert isinstance(found, Tensor)
    assert torch.equal(expected, found)
    torch.autograd.backward([expected, found])
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_gradient_that_comes_in_is_let_go_of_when_read() -> None:
    """Autograd holds what it calls a function with: the incoming megabyte must not last through backward."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    straight = StraightStep(capture(model, (images(512, 512),)), model)

    def step() -> None:
        output = straight(images(512, 512))
        assert isinstance(output, Tensor)
        torch.autograd.backward(output, torch.ones_like(output))

    def eager() -> None:
        output = model(images(512, 512))
        torch.autograd.backward(output, torch.ones_like(output))

    step()
    model.zero_grad(set_to_none=True)
    found = measure(step, before=()).measured_rise_bytes
    model.zero_grad(set_to_none=True)
    assert found <= measure(eager, before=()).measured_rise_bytes


def test_backward_runs_again_only_if_the_graph_is_retained() -> None:
    model = nn.Linear(2, 2)
    loss = StraightStep(capture(model, (images(1, 2),), loss=torch.sum), model)(images(1, 2))
    assert isinstance(loss, Tensor)
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)
    with pytest.raises((BadUse, RuntimeError), match="second time"):
        torch.autograd.backward(loss)


def test_a_gradient_for_what_was_not_differentiated_is_refused() -> None:
    class Both(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # on purpose
            y = super().forward(x)
            return y, y.square().sum()

    model = Both(2, 2)
    output = StraightStep(capture(model, (images(1, 2),)), model)(images(1, 2))
    assert isinstance(output, tuple)
    with pytest.raises(BadUse, match="planned for a gradient of output 1 alone"):
        (output[0].sum() + output[1]).backward()


def test_arguments_of_another_shape_are_refused() -> None:
    model = nn.Linear(2, 2)
    straight = StraightStep(capture(model, (images(1, 2),)), model)
    with pytest.raises(BadUse, match=r"'input' is torch.float32 of shape \(3, 2\)"):
        straight(images(3, 2))
    with pytest.raises(BadUse, match="captured for arguments"):
        straight(images(1, 2), images(1, 2))


def test_the_source_can_be_read() -> None:
    model = Normed()
    text = StraightStep(capture(model, (images(2, 3, 8, 8),)), model).source
    assert "# conv  models.py:" in text
    assert "convolution_0 = aten.convolution.default(x0, p0, p1" in text
    assert "# p0: conv.weight\n" in text
    assert "relu_0 = aten.relu_.default(" in text
    assert "\n    del " in text
