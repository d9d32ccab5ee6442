"""Capturing takes no memory and changes nothing: model, generator and buffers are as they were."""

import pytest
import torch
from torch import Tensor, nn

from stowplan.capture import capture
from stowplan.errors import CaptureError
from stowplan.ir import Kind
from tests.support.models import Normed, Rewriting, images
from tests.support.nets import NETS

pytestmark = pytest.mark.torch


def test_model_buffers_and_generator_are_untouched() -> None:
    model, x = Rewriting(), images(3, 4)
    held = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    dropping = Normed()
    state = torch.get_rng_state()
    capture(model, (x,))
    capture(dropping, (images(2, 3, 8, 8),))
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == held[name][0]
        assert torch.equal(tensor, held[name][1])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failure_leaves_the_model_whole() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(f"not today, {tuple(x.shape)}")

    model = Failing(2, 2)
    before = model.weight
    with pytest.raises(CaptureError, match="not today"):
        capture(model, (images(1, 2),))
    assert model.weight is before


@pytest.mark.slow
def test_a_model_on_the_meta_device_gives_the_same_graph() -> None:
    net = NETS["gpt"]
    real, meta = net.build("tiny"), net.build("tiny", device="meta")
    assert capture(*real).graph == capture(*meta).graph


def test_meta_tensors_stand_on_the_device_asked_for() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(2, 2), torch.empty(1, 2)
    graph = capture(model, (x,), device="cpu").graph
    assert {tensor.device for tensor in graph.tensors.values()} == {"cpu"}
    assert graph.tensors["weight"].kind is Kind.PARAMETER
