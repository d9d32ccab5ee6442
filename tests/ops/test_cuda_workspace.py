"""Workspace of kernels on a CUDA device: what PyTorch 2.14 asked for on the hollow card."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stowplan.capture import capture
from stowplan.capture.cuda_calls import CudaCalls
from stowplan.ops.cuda_workspace import Chip, cuda_workspace_of, peak_of
from stowplan.ops.table import site_of
from stowplan.plan.allocator.requests import MemoryRequest, RequestLifetime, requests_of_lifetimes

CHIP = Chip(8.0, 108)


class Applied(nn.Module):
    """A function of a layer's result, or of its input."""

    def __init__(self, function: Callable[[Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, image: Tensor) -> Tensor:
        return self.function(self.layer(image))


def _squares(made: Tensor) -> Tensor:
    return made.square().sum()


def _peaks(model: nn.Module, shape: tuple[int, ...], op_type: str, dtype: torch.dtype) -> list[int]:
    """Of all ops of a type in a step."""
    image = torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)
    model = model.to("meta", dtype)
    graph = capture(model, (image,), loss=_squares, cuda=CudaCalls(("flash", "efficient"))).graph
    ops = [op for op in graph.ops if op.type == f"aten.{op_type}.default"]
    assert ops
    return [peak_of(cuda_workspace_of(site_of(graph, op))(CHIP)) for op in ops]


@pytest.mark.parametrize(
    ("layer", "shape", "op_type", "nbytes"),
    [
        (nn.LayerNorm(64), (65536, 64), "native_layer_norm_backward", 0),
        (nn.LayerNorm(64), (65537, 64), "native_layer_norm_backward", 1327876),
        (nn.LayerNorm(1024), (65537, 1024), "native_layer_norm_backward", 16781344),
        (nn.LayerNorm(1800), (65537, 1800), "native_layer_norm_backward", 0),
        (nn.RMSNorm(128), (100000, 128), "_fused_rms_norm_backward", 4811780),
        (nn.GroupNorm(32, 64), (4, 64, 64, 64), "native_group_norm", 2048),
        (nn.GroupNorm(32, 192), (4, 192, 64, 64), "native_group_norm_backward", 10240),
        (nn.Softmax(1), (1, 4, 64, 64, 64), "_softmax_backward_data", 4194304),
        (nn.Conv3d(32, 32, 3, padding=1), (1, 32, 64, 64, 64), "convolution_backward", 1920),
        (nn.Conv3d(32, 4, 1), (1, 32, 64, 64, 64), "convolution_backward", 528),
        (
            Applied(lambda image: torch.cat((image, image), 1), nn.Conv2d(128, 32, 3, padding=1, bias=False)),
            (8, 128, 16, 16),
            "convolution_backward",
            0,  # the two halves of the gradient are added up first
        ),
        (
            Applied(lambda image: torch.roll(image, (-3, -3), (1, 2)), nn.Identity()),
            (4, 56, 56, 96),
            "roll",
            4816896,
        ),
        (
            Applied(lambda image: F.layer_norm(image.permute(0, 2, 3, 1), (96,)), nn.Identity()),
            (4, 96, 56, 56),
            "native_layer_norm",
            4816896,
        ),
        (
            Applied(lambda image: F.mse_loss(image, torch.zeros_like(image)), nn.Identity()),
            (4, 3, 64, 64),
            "mse_loss",
            393212,
        ),
    ],
)
def test_a_kernel_asks_for_what_pytorch_does(
    layer: nn.Module, shape: tuple[int, ...], op_type: str, nbytes: int
) -> None:
    assert set(_peaks(layer, shape, op_type, torch.float32)) == {nbytes}


def test_narrow_weights_have_narrow_partial_sums() -> None:
    layer, shape = nn.LayerNorm(64), (65537, 64)
    assert _peaks(layer, shape, "native_layer_norm_backward", torch.bfloat16) == [803204]


def test_attention_with_a_mask_across_its_rows_runs_in_its_parts() -> None:
    """The fused kernels take masks whose last dim is the fastest."""
    query, key, value = (torch.empty(2, 4, 16, 8, device="meta", requires_grad=True) for _ in range(3))
    mask = torch.empty(16, 16, 4, device="meta").permute(2, 0, 1)
    calls = CudaCalls(("flash", "efficient"))
    with calls:
        made = F.scaled_dot_product_attention(query, key, value, mask[None])
        assert "Efficient" not in type(made.grad_fn).__name__
        made = F.scaled_dot_product_attention(query, key, value, mask[None].contiguous())
        assert "Efficient" in type(made.grad_fn).__name__


def test_a_workspace_of_several_requests_frees_in_between() -> None:
    requests = requests_of_lifetimes([RequestLifetime(100, 0, 1)], [(), (40, 8, -40, 16)])
    sizes = dict[int, int]()
    signed = list[int]()
    for block, nbytes in requests.iteration:
        signed.append(nbytes or -sizes[block])
        sizes[block] = nbytes
    assert signed == [100, 40, 8, -40, 16, -8, -16, -100]
    assert isinstance(requests.iteration[0], MemoryRequest)
