"""What eager keeps, told from the watched step, is what eager is measured to keep."""

import pytest
import torch
from torch import Tensor, nn

from stowplan.capture import capture
from stowplan.run.measure.measure import measure
from tests.support.models import Normed, Rewriting, Tied, images
from tests.support.nets import NETS

pytestmark = pytest.mark.torch

WITHOUT_WORKSPACE = (
    *("vit", "swin", "gpt", "llama", "t5", "moe", "lstm", "ssm"),
    *("hf_gpt2", "hf_llama", "hf_t5", "hf_vit"),
)
A_FEW_SCALARS = 64  # autograd keeps numbers as tensors of eight bytes, which no op makes


def measured_peak(model: nn.Module, args: tuple[Tensor, ...]) -> int:
    """Of the second step, for kernels set themselves up in the first."""

    def step() -> Tensor:
        loss: Tensor = model(*args)
        torch.autograd.backward(loss)
        return loss

    for _ in range(2):
        model.zero_grad(set_to_none=True)
        peak = measure(step, before=(*model.parameters(), *model.buffers(), *args)).measured_peak_bytes
    return peak


@pytest.mark.parametrize("name", WITHOUT_WORKSPACE)
@pytest.mark.slow
def test_networks_whose_kernels_need_no_workspace(name: str) -> None:
    model, args = NETS[name].build("tiny")
    projected = capture(model, args).eager.peak_bytes()
    assert abs(measured_peak(model, args) - projected) <= A_FEW_SCALARS


@pytest.mark.parametrize("name", NETS)
@pytest.mark.slow
def test_no_network_needs_less_than_its_tensors(name: str) -> None:
    model, args = NETS[name].build("tiny")
    assert measured_peak(model, args) >= capture(model, args).eager.peak_bytes()


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Tied(), (torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))),
        (Rewriting(), (images(3, 4),)),
    ],
)
def test_hard_traits(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    projected = capture(model, args).eager.peak_bytes()
    assert abs(measured_peak(model, args) - projected) <= A_FEW_SCALARS


def test_workspace_adds_to_the_op_it_belongs_to() -> None:
    captured = capture(Normed(), (images(2, 3, 8, 8),))
    plain = captured.eager.curve_bytes()
    with_workspace = captured.eager.curve_bytes({"convolution_backward": 1000})
    assert sorted(set((with_workspace - plain).tolist())) == [0, 1000]
    (position,) = (i for i, ops in enumerate(captured.eager.ops) if "convolution_backward" in ops)
    assert with_workspace[position] - plain[position] == 1000
