"""Region rules over cells: which cells of each input a Rect of an output's cells needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from stowplan.geometry import Rect
from stowplan.ops.regions import DimKind, Need, Relation, regions_of
from stowplan.ops.regions.maps import Along, Digit, Grouped, Prefix, Sliding
from stowplan.ops.table import Site
from stowplan.ops.tiling import RESHAPES
from stowplan.ops.windows import Span, Window
from stowplan.techniques.shards.plan.cells import Cells

_POINT = Window()


@dataclass(frozen=True, slots=True)
class CellRelation:
    """A relation between cells. That of a reshape is the reshape's own rule, with cells for dims."""

    relation: Relation
    inputs: tuple[Cells, ...]
    output: Cells

    def pull(self, outputs: Rect) -> tuple[Rect | None, ...]:
        """Per input, the cells needed; not clipped, like the rule's."""
        inside = outputs.clip(self.output.sizes)
        if inside.is_empty:
            return (None,) * len(self.inputs)
        needed = self.relation.pull(self.output.flat(inside))
        pairs = zip(self.relation.needs, needed, self.inputs, strict=True)
        return tuple(self._cells(need, rect, cells, inside) for need, rect, cells in pairs)

    def _cells(self, need: Need | None, rect: Rect | None, cells: Cells, outputs: Rect) -> Rect | None:
        if need is None or rect is None or cells.is_plain:
            return rect
        spans: list[Span] = []
        for dim in range(len(cells.groups)):
            same, piece = self._same(need, cells, dim), self._piece(need, cells, dim)
            if same is not None:
                spans += self.output.spans(outputs, same)
            elif piece is not None:
                number, along = piece
                spans += ((number, number + 1), *self.output.spans(outputs, along))
            else:
                spans += cells.box(dim, (rect.lo[dim], rect.hi[dim]))
        return Rect(tuple(low for low, _ in spans), tuple(high for _, high in spans))

    def _same(self, need: Need, cells: Cells, dim: int) -> int | None:
        """The output dim whose cells the cells of an input dim are, one by one."""
        found = followed_dim(need, dim)
        if found is None or self.output.groups[found] != cells.groups[dim]:
            return None
        return found

    def _piece(self, need: Need, cells: Cells, dim: int) -> tuple[int, int] | None:
        """The index of an input dim's first cell that a slice of it is, and the output dim it becomes."""
        found = sliced_dim(need, dim)
        if found is None:
            return None
        along, start = found
        first, *rest = cells.groups[dim]
        size = prod(rest)
        if not rest or self.output.groups[along] != tuple(rest) or start % size or start >= first * size:
            return None
        return start // size, along

    def seen(self, number: int, outputs: Rect, need: Rect, cells: Cells) -> Rect:
        """The needed rect of an input as the op sees it, without cells."""
        if cells.is_plain or self.inputs[number] != cells:
            return cells.local(need)
        flat = self.relation.pull(self.output.flat(outputs))[number]
        rule = self.relation.needs[number]
        assert flat is not None
        assert rule is not None
        local = cells.local(need)
        spans = [
            (local.lo[dim], local.hi[dim])
            if self._same(rule, cells, dim) is not None or self._piece(rule, cells, dim) is not None
            else (flat.lo[dim], flat.hi[dim])
            for dim in range(local.ndim)
        ]
        return Rect(tuple(low for low, _ in spans), tuple(high for _, high in spans))

    def follower(self, number: int, cell: int) -> int | None:
        """The output cell that a cell of input `number` goes along with; None for one that is run over."""
        need, cells = self.relation.needs[number], self.inputs[number]
        if need is None:
            return None
        dim = cells.dim_of(cell)
        same = self._same(need, cells, dim)
        if same is not None:
            return self.output.first(same) + cell - cells.first(dim)
        piece = self._piece(need, cells, dim)
        if piece is not None:
            inside = cell - cells.first(dim) - 1
            return None if inside < 0 else self.output.first(piece[1]) + inside
        if cell != cells.first(dim):
            return None
        dim_map = need.dims[dim]
        if isinstance(dim_map, Along):
            return self._only_cell(dim_map.dim)
        if isinstance(dim_map, Digit):
            leads = dim_map.below * dim_map.size == prod(dim_map.sizes) and not dim_map.shift
            return self._only_cell(dim_map.dims[0]) if leads else None
        return None

    def moves_along(self, cell: int) -> bool:
        """Whether an index of an output cell needs that index, those up to it, or always the same."""
        dim = self.output.dim_of(cell)
        pairs = zip(self.relation.needs, self.inputs, strict=True)
        return all(need is None or self._moves_along(need, cells, dim) for need, cells in pairs)

    def _moves_along(self, need: Need, cells: Cells, dim: int) -> bool:
        if need.within is not None and need.within[0] == dim:
            return False
        maps = enumerate(need.dims)
        return all(m.kind_of(dim) is DimKind.SHARED or self._is_index(need, cells, n) for n, m in maps)

    def _is_index(self, need: Need, cells: Cells, dim: int) -> bool:
        if self._same(need, cells, dim) is not None or self._piece(need, cells, dim) is not None:
            return True
        dim_map = need.dims[dim]
        if not isinstance(dim_map, Prefix | Grouped) or (isinstance(dim_map, Grouped) and dim_map.overlaps):
            return False
        return len(cells.groups[dim]) == len(self.output.groups[dim_map.dim]) == 1

    def _only_cell(self, dim: int) -> int | None:
        return self.output.first(dim) if len(self.output.groups[dim]) == 1 else None


def followed_dim(need: Need, dim: int) -> int | None:
    """The output dim that an input dim is, index by index; None if it is none."""
    dim_map = need.dims[dim]
    return dim_map.dim if isinstance(dim_map, Sliding) and dim_map.window == _POINT else None


def sliced_dim(need: Need, dim: int) -> tuple[int, int] | None:
    """The output dim that adjacent indices of an input dim are, and the first of them; None if it is none."""
    dim_map = need.dims[dim]
    if not isinstance(dim_map, Sliding) or dim_map.window != replace(_POINT, before=dim_map.window.before):
        return None
    return dim_map.dim, -dim_map.window.before


def cell_relation(site: Site, relation: Relation, inputs: Sequence[Cells], output: Cells) -> CellRelation:
    """The relation of one output of an op between cells."""
    if site.op.type not in RESHAPES:
        return CellRelation(relation, tuple(inputs), output)
    cell_site = replace(
        site,
        inputs=tuple(replace(t, shape=c.sizes) for t, c in zip(site.inputs, inputs, strict=True)),
        outputs=tuple(replace(t, shape=output.sizes) for t in site.outputs),
    )
    plain = tuple(Cells.of_shape(cells.sizes) for cells in inputs)
    return CellRelation(regions_of(cell_site).outputs[0], plain, Cells.of_shape(output.sizes))
