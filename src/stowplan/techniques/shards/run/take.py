"""Take: a part of what a worker holds of a tensor, laid out as an op expects it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stowplan.geometry import Rect
from stowplan.ir import Shape
from stowplan.ir import Tensor as Described
from stowplan.ops.table import shape_of
from stowplan.run.parts.part import Index, empty_like_described, index_within
from stowplan.techniques.shards.plan.cells import Cells


@dataclass(frozen=True, slots=True)
class Take:
    """The part `index` of a tensor's cells, with cells merged into dims, and of that the part `cut`."""

    tensor: str
    index: Index | None
    shape: Shape | None
    cut: Index | None

    def of(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The part, of what is held."""
        part = parts[self.tensor]
        part = part if self.index is None else part[self.index]
        part = part if self.shape is None else part.reshape(self.shape)
        return part if self.cut is None else part[self.cut]


@dataclass(frozen=True, slots=True)
class Blank:
    """In place of an input that only tells its looks, or of a part of which a worker has nothing."""

    described: Described
    shape: Shape

    def of(self, _: Mapping[str, Tensor]) -> Tensor:
        """A tensor of this shape whose contents are not looked at, laid out like the whole if it is that."""
        if self.shape == shape_of(self.described):
            return empty_like_described(self.described, torch.device(self.described.device))
        return self.zeros()

    def zeros(self) -> Tensor:
        """As a part that adds nothing."""
        dtype = getattr(torch, str(self.described.dtype))
        return torch.zeros(self.shape, dtype=dtype, device=self.described.device)


def take(tensor: str, cells: Cells, held: Rect, wanted: Rect, flat: Rect | None = None) -> Take:
    """`wanted` of what is held, both over cells; with `flat`, just these indices of the dims themselves."""
    index = None if wanted == held else index_within(wanted, held)
    if cells.is_plain:
        return Take(tensor, index, None, None)
    local, whole = cells.local(wanted), cells.flat(wanted)
    is_all = flat is None or flat.shape == local.shape
    return Take(tensor, index, local.shape, None if is_all or flat is None else index_within(flat, whole))
