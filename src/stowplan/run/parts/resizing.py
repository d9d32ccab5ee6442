"""Interpolation and mirrored padding of a part: where its outputs sample the image, the op itself is asked.

Run on a ramp, such an op answers with positions. What lies around them is weighed dim by dim, in coordinates
of the image, so that no part knows of its neighbours.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stowplan.run.parts.part import LocalCall

aten = torch.ops.aten
_PRECISE = torch.float64
_ALONG = {
    "upsample_nearest": aten.upsample_nearest1d.default,
    "_upsample_nearest_exact": aten._upsample_nearest_exact1d.default,
}
_PADS = {"reflection": aten.reflection_pad1d.default, "replication": aten.replication_pad1d.default}


def resized(call: LocalCall, given: dict[str, Any]) -> Tensor:
    """The part that an interpolation makes, from the part of the image that it needs."""
    ramps = _ramps(call, len(given["output_size"]))
    return _at(call, given, [_positions(call, given, ramp, number) for number, ramp in enumerate(ramps)])


def padded(call: LocalCall, given: dict[str, Any]) -> Tensor:
    """The part that a padding by mirroring or repeating makes; paddings are listed from the last dim on."""
    pads = list(zip(given["padding"][::2], given["padding"][1::2], strict=True))[::-1]
    along = _PADS[str(call.target).split(".")[1].split("_")[0]]
    ramps = zip(_ramps(call, len(pads)), pads, strict=True)
    return _at(call, given, [along(ramp, list(pad)).flatten() for ramp, pad in ramps])


def _ramps(call: LocalCall, count: int) -> list[Tensor]:
    """The indices of the image along its last dims, each as an image of its own."""
    source = call.sources[0]
    assert source is not None
    return [torch.arange(size, dtype=_PRECISE).view(1, 1, -1) for size in source.whole[-count:]]


def _at(call: LocalCall, given: dict[str, Any], positions: Sequence[Tensor]) -> Tensor:
    """The image at these positions along its last dims, of which the part has some.

    A part with whole positions is interpolated as well, unless all positions of the image are whole. Parts of
    equal shapes then take equal memory, so that probes of a few parts hold for all.
    """
    source = call.sources[0]
    assert source is not None
    part: Tensor = given["self"]
    for dim, along in enumerate(positions, part.dim() - len(positions)):
        inside = along[call.made.lo[dim] : call.made.hi[dim]] - source.start[dim]
        is_between = bool((along != along.floor()).any())
        part = _sampled(part, dim, inside.to(part.device), is_between=is_between)
    return part


def _positions(call: LocalCall, given: dict[str, Any], ramp: Tensor, number: int) -> Tensor:
    """By output index along one dim, where it samples the image."""
    scales = [value for name, value in given.items() if name.startswith("scales")]
    length, name = [given["output_size"][number]], str(call.target).split(".")[1]
    nearest = _ALONG.get(name.rstrip("123d"))
    if nearest is not None:
        precision = torch.promote_types(given["self"].dtype, torch.float32)  # which decides what is nearest
        made: Tensor = nearest(ramp.to(precision), length, scales[number]).to(_PRECISE)
    else:
        made = aten.upsample_linear1d.default(ramp, length, given["align_corners"], scales[number])
    return made.flatten()


def _sampled(part: Tensor, dim: int, positions: Tensor, *, is_between: bool) -> Tensor:
    below = positions.floor()
    index = below.to(torch.int64)
    lower = part.index_select(dim, index)
    if not is_between:
        return lower
    share = (positions - below).to(part.dtype)
    upper = part.index_select(dim, (index + 1).clamp(max=part.shape[dim] - 1))
    return torch.lerp(lower, upper, share.view(_along(dim, part.dim())))


def _along(dim: int, ndim: int) -> Sequence[int]:
    return [-1 if each == dim else 1 for each in range(ndim)]
