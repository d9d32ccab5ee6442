"""Kernels on a part: how each op computes a part of its output from parts of its inputs.

Padding belongs to the borders of the whole image. A window op receives its inputs clipped to the image and
runs with the padding of this part. If the padding of two sides differs, it runs with the larger one on both
and the additional outputs are cut off. If strides do not allow that, it runs on a padded copy.

Causal attention of some queries: their mask depends on their position among all queries.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from stowplan.ops.tiling import CAUSAL_IN_TILES, PADS, RESHAPES, RESIZES, part_kernels
from stowplan.run.parts.deferred import deferred
from stowplan.run.parts.folding import factors_of, written_over
from stowplan.run.parts.normalise import normalised
from stowplan.run.parts.part import LocalCall, call_with, index_of
from stowplan.run.parts.pooling import are_slices_faster, max_of_slices
from stowplan.run.parts.resizing import padded, resized


def attended(call: LocalCall, given: Mapping[str, Any]) -> Tensor:
    """The values that a tile of queries attends to; with a causal mask keys and values end with the tile."""
    first = call.made.lo[-2]
    if given["is_causal"] and first:
        given = {**given, "is_causal": False, "attn_mask": _mask(given["query"], given["key"], first)}
    made: Any = call_with(call.target, given)
    part: Tensor = made[0]
    return part


def _mask(query: Tensor, key: Tensor, first: int) -> Tensor:
    """Zero for keys up to each query's own position, minus infinity for later ones."""
    shape = (query.shape[-2], key.shape[-2])
    hidden = torch.full(shape, float("-inf"), dtype=query.dtype, device=query.device)
    return hidden.triu(first + 1)


aten = torch.ops.aten
Given: TypeAlias = dict[str, Any]
PartKernel: TypeAlias = Callable[[LocalCall, Given], Tensor]


def run_local(call: LocalCall, values: Mapping[str, Tensor]) -> Tensor:
    """The part that `call` computes, from the parts that the tile holds."""
    kind = str(call.target)
    if call.over is not None:
        made = written_over(call, values)
    elif call.statistics:
        made = _normalise(call.given(values), [source.of(values) for source in call.statistics])
    else:
        factors = factors_of(call, call.norm, values) if call.norm else {}
        kernel = _KERNELS.get(kind) or part_kernels.get(kind, _as_is)
        made = kernel(call, {**call.given(values), **factors})
    if tuple(made.shape) != call.shape:
        raise RuntimeError(f"{kind} made {tuple(made.shape)} of {call.name}, not {call.shape}")
    return made


def _as_is(call: LocalCall, given: Given) -> Tensor:
    """Called on the parts, the op makes the part: it is one of `AS_IS`, or given all that it looks at."""
    if call.by is not None:
        return call.by(given)
    if call.idle and torch.is_grad_enabled():
        return deferred(call.target, given)
    made = call_with(call.target, given)
    return made if isinstance(made, Tensor) else made[call.output]  # type: ignore[index]


def _normalise(given: Given, statistics: Sequence[Tensor]) -> Tensor:
    mean, variance = statistics
    return normalised(given["input"], mean, variance, given["weight"], given["bias"], given["eps"])


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of the spatial dims: `both` by the op itself, `apart` by a copy; outputs start at `start`."""

    both: list[int]
    apart: list[tuple[int, int]]
    start: list[int]

    def padded(self, image: Tensor, fill: float) -> Tensor:
        """The image with the padding that the op cannot add itself."""
        if not any(map(any, self.apart)):
            return image
        flat = [side for pair in reversed(self.apart) for side in pair]
        return F.pad(image, flat, value=fill)

    def cut(self, made: Tensor, shape: Sequence[int]) -> Tensor:
        """The outputs that were asked for."""
        first = made.dim() - len(self.start)
        for dim, start in enumerate(self.start, first):
            if made.shape[dim] != shape[dim]:
                made = made.narrow(dim, start, shape[dim])
        return made


def _frame(overhang: Sequence[tuple[int, int]], strides: Sequence[int], most: Sequence[int]) -> Padding:
    """`most` is the largest padding that the op can add itself."""
    frame = Padding([], [], [])
    for (before, after), stride, limit in zip(overhang, strides, most, strict=True):
        larger = max(before, after)
        itself = larger <= limit and (larger - before) % stride == 0
        frame.both.append(larger if itself else 0)
        frame.apart.append((0, 0) if itself else (before, after))
        frame.start.append((larger - before) // stride if itself else 0)
    return frame


def _convolution(call: LocalCall, given: Given) -> Tensor:
    if given["transposed"]:
        return _transposed(call, given)
    image, stride = given["input"], given["stride"]
    overhang = call.overhang(0)[2:]
    if max(given["weight"].shape[2:]) == 1 < max(stride) and not any(map(any, overhang)):
        return _as_is(call, _at_places_read(given))
    frame = _frame(overhang, stride, [max(pair) for pair in overhang])
    framed = {**given, "input": frame.padded(image, 0.0), "padding": frame.both}
    return frame.cut(_as_is(call, framed), call.shape)


def _at_places_read(given: Given) -> Given:
    """A strided 1x1 convolution as one without strides on a strided view, which is several times faster."""
    seen = (slice(None), slice(None), *(slice(None, None, step) for step in given["stride"]))
    ones = [1 for _ in given["stride"]]
    return {**given, "input": given["input"][seen], "stride": ones, "padding": [0 for _ in ones]}


def _transposed(call: LocalCall, given: Given) -> Tensor:
    """Without padding all that the part's inputs add up to is made, of which the part is cut out."""
    made, source = call.made, call.sources[0]
    first = source.start if source else ()
    strides, padding = given["stride"], given["padding"]
    kernel, dilation = given["weight"].shape[2:], given["dilation"]
    start, missing = [], []
    for dim, stride in enumerate(strides):
        begins = first[dim + 2] * stride - padding[dim]
        length = (given["input"].shape[dim + 2] - 1) * stride + dilation[dim] * (kernel[dim] - 1) + 1
        start.append(made.lo[dim + 2] - begins)
        missing.append(max(0, made.hi[dim + 2] - begins - length))
    bare = {**given, "padding": [0] * len(strides), "output_padding": missing}
    return Padding([], [], start).cut(_as_is(call, bare), call.shape)


def _max_pool(call: LocalCall, given: Given) -> Tensor:
    kernel = given["kernel_size"]
    stride, overhang = given["stride"] or kernel, _spatial(call, len(kernel))
    if are_slices_faster(given):
        image = Padding([], list(overhang), []).padded(given["self"], float("-inf"))
        return max_of_slices(image, kernel, stride, given["dilation"])
    frame = _frame(overhang, stride, [size // 2 for size in kernel])
    image = frame.padded(given["self"], float("-inf"))
    framed = {**given, "self": image, "padding": frame.both, "ceil_mode": False}
    return frame.cut(_as_is(call, framed), call.shape)


def _average_pool(call: LocalCall, given: Given) -> Tensor:
    kernel = given["kernel_size"]
    frame = _frame(_spatial(call, len(kernel)), given["stride"] or kernel, [size // 2 for size in kernel])
    image = frame.padded(given["self"], 0.0)
    framed = {**given, "self": image, "padding": frame.both, "ceil_mode": False}
    return frame.cut(_as_is(call, framed), call.shape)


def _spatial(call: LocalCall, count: int) -> tuple[tuple[int, int], ...]:
    return call.overhang(0)[-count:]


def _reshape(call: LocalCall, given: Given) -> Tensor:
    return given["self"].reshape(call.shape)  # type: ignore[no-any-return]


def _expand(call: LocalCall, given: Given) -> Tensor:
    return given["self"].expand(call.shape)  # type: ignore[no-any-return]


def _slice(_: LocalCall, given: Given) -> Tensor:
    """The needed input begins and ends with a selected index; without gaps it is the part itself."""
    part: Tensor = given["self"]
    return part if given["step"] == 1 else aten.slice.Tensor(part, given["dim"], 0, None, given["step"])


def _itself(_: LocalCall, given: Given) -> Tensor:
    part: Tensor = given["self"]
    return part


def _cut_out(call: LocalCall, given: Given) -> Tensor:
    return _as_is(call, given)[index_of(call.made)]


def _select(_: LocalCall, given: Given) -> Tensor:
    return given["self"].squeeze(given["dim"])  # type: ignore[no-any-return]


def _pad(call: LocalCall, given: Given) -> Tensor:
    flat = [side for pair in reversed(call.overhang(0)) for side in pair]
    return F.pad(given["self"], flat, value=given["value"]) if any(flat) else given["self"]


def _batch_norm(_: LocalCall, given: Given) -> Tensor:
    """With fixed statistics."""
    return _normalise(given, [given["running_mean"], given["running_var"]])


def _group_norm(call: LocalCall, given: Given) -> Tensor:
    return _as_is(call, {**given, "N": call.shape[0]})


_KERNELS: Mapping[str, PartKernel] = {
    "aten.convolution.default": _convolution,
    **dict.fromkeys(
        ("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default"), _max_pool
    ),
    **dict.fromkeys(("aten.avg_pool2d.default", "aten.avg_pool3d.default"), _average_pool),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(("aten.split.Tensor", "aten.split_with_sizes.default"), _itself),
    **dict.fromkeys(("aten.select.int", "aten.unbind.int"), _select),
    "aten.expand.default": _expand,
    "aten.repeat.default": _cut_out,
    "aten.slice.Tensor": _slice,
    "aten.constant_pad_nd.default": _pad,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_group_norm.default": _group_norm,
    **dict.fromkeys(RESIZES, resized),
    **dict.fromkeys(PADS, padded),
    CAUSAL_IN_TILES: attended,
}
