"""Calls as PyTorch makes them on a CUDA device, for a step that is captured without one.

Some functions choose among kernels by device: attention, batch norm, RMS norm and dropout save other tensors
for backward on a CUDA device than on a CPU. A PyTorch without CUDA cannot choose for it, nor follow backward
on tensors without data that claim to be there. Within `CudaCalls` the functions call what PyTorch 2.13 calls
on a CUDA device; shapes and dtypes of the results come from PyTorch's own shape functions.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from math import sqrt
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stowplan.errors import CaptureError
from stowplan.torch_private import below_autograd, uncovered

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_MOST_FLASH_FEATURES, _MOST_CUDNN_FEATURES = 256, 128
_MOST_CUDNN_BATCH = {True: 880801, False: 65535}  # samples that cuDNN's batch norm takes, by `training`
_MASK_ALIGNMENT = 16  # elements of a row of a mask, for efficient attention
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class Chosen(StrEnum):
    """Functions for which PyTorch chooses the kernel by device."""

    ATTENTION = "attention"
    BATCH_NORM = "batch norm"
    DROPOUT = "dropout"
    RMS_NORM = "RMS norm"


class CudaCalls(TorchFunctionMode):
    """Within, functions of the kinds `chosen` call the kernels of a CUDA device; `counts` says how often.

    `attentions` are the attention kernels of the device, the preferred one first. `has_tensor_cores` for
    float32 and bfloat16: from compute capability 8.0 on.
    """

    def __init__(
        self,
        attentions: tuple[str, ...],
        *,
        has_tensor_cores: bool = True,
        chosen: Collection[Chosen] = tuple(Chosen),
    ) -> None:
        super().__init__()
        self.counts: Counter[Chosen] = Counter()
        self._attentions, self._has_tensor_cores = attentions, has_tensor_cores
        rules: dict[Any, tuple[Chosen, Callable[..., Tensor | None]]] = {
            F.scaled_dot_product_attention: (Chosen.ATTENTION, self._attention),
            torch.batch_norm: (Chosen.BATCH_NORM, _batch_norm),
            torch.instance_norm: (Chosen.BATCH_NORM, _instance_norm),
            torch.dropout: (Chosen.DROPOUT, _dropout),
            torch.rms_norm: (Chosen.RMS_NORM, _rms_norm),
        }
        self._rules = {function: rule for function, rule in rules.items() if rule[0] in chosen}

    def anew(self) -> "CudaCalls":
        """The same, with nothing counted: a step is recorded several times until all of it is known."""
        self.counts.clear()
        return self

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise CaptureError(
                "forward runs under autocast, whose choice of dtypes on a CUDA device is not projected",
                advice="cast the model and its inputs, as in model.to(torch.bfloat16)",
            )
        if func in _RECURRENT:
            raise CaptureError(
                f"{func.__name__} runs in cuDNN on a CUDA device, and only cuDNN knows what it reserves",
                advice="plan on the device itself",
            )
        if func in self._rules:
            cause, rule = self._rules[func]
            result = rule(*args, **given)
            if result is not None:
                self.counts[cause] += 1
                return result
        if isinstance(func, FunctionType) and func.__module__ == F.__name__:
            with self:  # it calls others of these functions
                return uncovered(func)(*args, **given)
        return func(*args, **given)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The first kernel of the device that accepts the call; else the ops that it is made of."""
        shared = query.ndim == 4 and key.shape[1] != query.shape[1]
        with_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        for name in self._attentions:
            if shared and not _accepts_shared_heads(name, key, value, enable_gqa=enable_gqa):
                continue
            if not self._accepts(name, query, key, value, attn_mask):
                continue
            if name == "flash":
                return _flash(query, key, value, dropout_p, is_causal, scale)
            mask = None if attn_mask is None else _bias(attn_mask, query, key)
            given = query, key, value, mask, with_grad, dropout_p, is_causal
            if name == "cudnn":
                return _first(aten._scaled_dot_product_cudnn_attention(*given, False, scale=scale))
            return _first(aten._scaled_dot_product_efficient_attention(*given, scale=scale))
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

    def _accepts(self, name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        if any(t.ndim != 4 or t.stride(-1) != 1 or 0 in t.shape for t in (query, key, value)):
            return False
        if mask is not None and mask.stride(-1) != 1:
            return False
        features, half = query.shape[-1], query.dtype in _HALF
        if name == "flash":
            same = features == value.shape[-1] <= _MOST_FLASH_FEATURES
            return half and same and mask is None
        if name == "cudnn":
            aligned = all(
                t.shape[-1] % 8 == 0 and t.shape[-1] <= _MOST_CUDNN_FEATURES for t in (query, value)
            )
            return half and aligned and mask is None
        if query.dtype not in ((torch.float32, *_HALF) if self._has_tensor_cores else _BEFORE_AMPERE):
            return False
        alignment = 8 if half else 4 if self._has_tensor_cores else 1
        return all(t.shape[-1] % alignment == 0 for t in (query, value))


_BEFORE_AMPERE = (torch.float32, torch.float16)


def _accepts_shared_heads(name: str, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    """Whether a kernel takes keys and values that several heads share."""
    if name == "efficient" and torch.__version__ >= "2.14":
        return key.shape[1] == value.shape[1] and (enable_gqa or key.shape[1] == 1)
    return name == "flash"


def _first(results: Any) -> Tensor:
    first: Tensor = results[0]
    return first


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Features are padded to a multiple of 8; the scale is that of the features before."""
    features = query.shape[-1]
    scale = 1.0 / sqrt(features) if scale is None else scale
    missing = -features % 8
    padded = [F.pad(t, (0, missing)) if missing else t for t in (query, key, value)]
    result = _first(aten._scaled_dot_product_flash_attention(*padded, dropout, is_causal, False, scale=scale))
    return result[..., :features] if missing else result


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the fused kernels take it: numbers in rows of aligned length, for every head."""
    if mask.dtype is torch.bool:
        never = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, 0.0, never)
    columns = mask.shape[-1]
    if missing := -columns % _MASK_ALIGNMENT:
        mask = F.pad(mask, (0, missing))[..., :columns]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _batch_norm(
    image: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor | None:
    """cuDNN's, which returns a reserve for backward; None where PyTorch uses its own."""
    if not cudnn_enabled or weight is None or bias is None or image.ndim < 3:
        return None
    if image.dtype is torch.bfloat16 or weight.dtype is torch.bfloat16:
        return None
    if image.dtype is torch.float16 and weight.dtype is not torch.float32:
        return None
    if (mean is None) != (variance is None) or (mean is None and not training):
        return None
    if image.shape[0] > _MOST_CUDNN_BATCH[training]:
        return None
    dense = image.contiguous(memory_format=_memory_format(image))
    return _first(aten.cudnn_batch_norm(dense, weight, bias, mean, variance, training, momentum, eps))


def _memory_format(image: Tensor) -> torch.memory_format:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.ndim)
    is_last = last is not None and image.is_contiguous(memory_format=last) and not image.is_contiguous()
    return last if last is not None and is_last else torch.contiguous_format


def _instance_norm(
    image: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    *,
    norm: Callable[..., Tensor | None] | None = None,
) -> Tensor | None:
    """A batch norm of one sample that has all channels of all samples; cuDNN's without another `norm`."""
    samples, channels = image.shape[:2]
    weights, biases, means, variances = (
        None if t is None else t.repeat(samples) for t in (weight, bias, mean, variance)
    )
    one = image.contiguous().view(1, samples * channels, *image.shape[2:])
    how = use_input_stats, momentum, eps, cudnn_enabled
    made = (norm or _batch_norm)(one, weights, biases, means, variances, *how)
    if made is None:
        return None
    if use_input_stats:
        for running, of_samples in ((mean, means), (variance, variances)):
            if running is not None and of_samples is not None:
                running.copy_(of_samples.view(samples, channels).mean(0))
    return made.view(image.shape)


def _dropout(image: Tensor, p: float, train: bool) -> Tensor | None:
    """One kernel, which keeps a mask of truth values."""
    if not train or not 0 < p < 1 or not image.numel():
        return None
    return _first(torch.native_dropout(image, p, train))


def _rms_norm(
    image: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    """One kernel, which keeps a factor for each row; PyTorch has it from 2.9 on."""
    if not hasattr(aten, "_fused_rms_norm"):
        return None
    apply: Callable[..., Tensor] = _FusedRMSNorm.apply
    return apply(image, list(normalized_shape), weight, eps)


class _FusedRMSNorm(torch.autograd.Function):
    """Below autograd the op is recorded whole; above, PyTorch splits it on a CPU tensor."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        with below_autograd():
            made, factors = aten._fused_rms_norm(image, shape, weight, eps)
        ctx.save_for_backward(image, factors, weight)
        ctx.shape = shape
        result: Tensor = made
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        image, factors, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with below_autograd():
            for_image, for_weight = aten._fused_rms_norm_backward(
                gradients[0], image, ctx.shape, factors, weight, wanted
            )
        return for_image, None, for_weight, None


class OwnBatchNorms(TorchFunctionMode):
    """Within, batch and instance norm run in PyTorch's own kernels on a CUDA device, and not in cuDNN's.

    cuDNN's write into the running statistics, and have no form for a part of a batch.
    """

    def anew(self) -> "OwnBatchNorms":
        """The same: it counts nothing."""
        return self

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (F.batch_norm, F.instance_norm):
            with self:
                return uncovered(func)(*args, **(kwargs or {}))
        if func is torch.batch_norm and args[0].is_cuda:
            return _own_batch_norm(*args)
        if func is torch.instance_norm and args[0].is_cuda:
            return _instance_norm(*args, norm=_own_batch_norm)
        return func(*args, **(kwargs or {}))


def _own_batch_norm(
    image: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    _cudnn_enabled: bool,
) -> Tensor:
    return _first(torch.native_batch_norm(image, weight, bias, mean, variance, training, momentum, eps))
