"""Ops as simpler ones, where inductor's own way would keep a tensor whole inside the kernel."""

import torch
from torch import Tensor

aten = torch.ops.aten
_MEAN = 1  # the reduction of a loss, as PyTorch numbers it


def nll_loss_backward(
    gradient: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: Tensor,
) -> Tensor:
    """The gradient by comparing each class with the target; inductor scatters it into a tensor of zeros."""
    channel = min(1, scores.dim() - 1)
    shape = [1] * scores.dim()
    shape[channel] = scores.shape[channel]
    target = target.unsqueeze(channel)
    classes = torch.arange(scores.shape[channel], device=scores.device).view(shape)
    if reduction == _MEAN:
        gradient = gradient / total_weight
    if 0 < gradient.dim() < scores.dim():
        gradient = gradient.unsqueeze(channel)
    if weight is not None:
        gradient = gradient * weight.view(shape)
    hit = torch.where(classes == target, -1.0, 0.0).to(scores.dtype)
    return hit * torch.where(target != ignored, gradient, 0.0)


DECOMPOSITIONS = {
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
}
