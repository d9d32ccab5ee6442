"""Level: one op computed in part, for a tile or for a worker."""

from dataclasses import dataclass

from stowplan.geometry import Rect
from stowplan.ir import Op


@dataclass(frozen=True, slots=True)
class Level:
    """One op on a part: the part of output number `output` it makes, and per input what that needs.

    `needs` are not clipped: what one has outside its tensor is padding. None: nothing of that input.
    """

    op: Op
    output: int
    made: Rect
    needs: tuple[Rect | None, ...]
