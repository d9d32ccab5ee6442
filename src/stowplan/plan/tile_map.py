"""TileMap: a segment and its tiles as a reader of a plan wants to see them, level by level."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stowplan.analyse.tile_costs import Levels
from stowplan.ir import Document, Graph
from stowplan.ir.text import Labels, parse_graph
from stowplan.plan.sockets import Socket
from stowplan.plan.steps import Tile

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TileLevel:
    """One op of a segment: what it makes, whole and in the largest tile, and how much of it all tiles make.

    `work` is 1.0 if no part is made twice. `macs` is the forward work of the whole.
    """

    op: str
    tensor: str
    whole: Shape
    part: Shape
    work: float
    macs: int


@dataclass(frozen=True, slots=True)
class TileMap:
    """A segment, its grid and its costs.

    Peaks are the memory of the largest tile without the segment's inputs, outputs and their gradients. If a
    tile has a plan of its own, `again` are the tensors that it recomputes, and `within` are the segments that
    are tiled inside it. If its backward rematerialises inputs, `made_of` are the tensors kept for that, and
    `made_whole` are the inputs that are recomputed at once and not part by part.
    """

    sweep: str  # the op that runs it
    parts: Shape
    tiles: int
    levels: tuple[TileLevel, ...]
    halo_share: float  # of the forward work, there only because tiles overlap
    extra_macs: int  # over computing and differentiating the segment once
    backward_peak_bytes: int
    again: tuple[str, ...] = ()
    within: tuple["TileMap", ...] = ()
    made_of: tuple[str, ...] = ()
    made_whole: tuple[str, ...] = ()
    text: str = ""  # the segment's ops, in the text form of graphs

    def labels(self) -> Labels:
        """The names that people know the ops and tensors of the segment by."""
        return Labels(parse_graph(self.text) if self.text else Graph({}, ()))

    def find(self, tensor: str) -> "tuple[TileMap, TileLevel] | None":
        """The innermost level that makes a tensor."""
        for inner in self.within:
            if found := inner.find(tensor):
                return found
        return next(((self, level) for level in self.levels if level.tensor == tensor), None)


def tiled_inside(sweep: str, parts: Shape, inside: Iterable[str]) -> dict[str, Tile]:
    """The decisions about tensors inside a sweep; the plan's graph may have tensors of the same names."""
    return {f"{sweep}/{name}": Tile(sweep, parts) for name in inside}


TILE_LEVELS: Socket[Callable[[TileMap, int | None], Levels]] = Socket("plan", "tile")
"""The Rects of some tiles of a map, level by level, for pictures."""

DOCUMENT_TILES: Socket[Callable[[Document], TileMap | None]] = Socket("plan", "tile")
"""Tiles for the network of a file that has a tile schedule, to compare with the file's."""
