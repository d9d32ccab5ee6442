"""Halos of convolutions: computed by the worker that needs them, or received, whichever takes less time.

A computed halo takes multiply-accumulates, forward and twice as many backward. A received halo takes two
messages, and copies of the held part, forward and backward. Both costs are in multiply-accumulates, because
their ratio differs less from machine to machine than seconds do, and all workers must decide alike.
"""

from collections.abc import Sequence
from math import prod

from stowplan.geometry import Rect
from stowplan.ops.macs import macs_of
from stowplan.ops.table import Site, shape_of

_LITTLE = 1.1  # times a worker's share: more of it would take memory that shards are there to save
_MACS_PER_MESSAGE = 2e7  # half a millisecond of a core, with the wait for the other worker
_MACS_PER_BYTE = 5  # read or written


def is_made(site: Site, shares: Sequence[Rect], wanted: Sequence[Rect]) -> bool:
    """Whether workers make what they want of a convolution's output, beyond their shares."""
    growth = _growth(shares, wanted)
    largest = prod(max(along) for along in zip(*(share.shape for share in shares), strict=True))
    part = largest / max(1, prod(shape_of(site.outputs[0])))
    held_bytes = (site.outputs[0].nbytes or 0) * part * growth
    made = 3 * macs_of(site) * part * (growth - 1)
    return growth <= _LITTLE and made <= 2 * _MACS_PER_MESSAGE + 4 * _MACS_PER_BYTE * held_bytes


def _growth(shares: Sequence[Rect], wanted: Sequence[Rect]) -> float:
    """How many times its share a worker would make at most, which those on the axes of a mesh tell."""
    pairs = [(w.shape, s.shape) for w, s in zip(wanted, shares, strict=True) if not s.is_empty]
    ratios = [[more / size for more, size in zip(*pair, strict=True)] for pair in pairs]
    growth: float = prod(max(along) for along in zip(*ratios, strict=True))
    return growth
