"""Layout: how a mesh cuts a tensor. Each axis cuts one cell of the tensor, or none."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from stowplan.geometry import Rect
from stowplan.ir import Shape
from stowplan.ops.windows import Span
from stowplan.techniques.shards.plan.cells import Cells
from stowplan.techniques.shards.plan.mesh import MeshAxes


@dataclass(frozen=True, slots=True)
class Layout:
    """By axis of the mesh, the cell that it cuts; None for an axis along which all workers have the same."""

    cells: Cells
    axes: tuple[int | None, ...]

    @staticmethod
    def everywhere(shape: Shape, mesh: MeshAxes) -> "Layout":
        """The same on all workers."""
        return Layout(Cells.of_shape(shape), (None,) * len(mesh.axes))

    @property
    def is_everywhere(self) -> bool:
        return all(cell is None for cell in self.axes)

    @property
    def cut_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, cell in enumerate(self.axes) if cell is not None)

    @property
    def cut_cells(self) -> tuple[int, ...]:
        return tuple(cell for cell in self.axes if cell is not None)

    def share(self, mesh: MeshAxes, worker: int) -> Rect:
        """The part that belongs to a worker: along the axes that cut, parts are disjoint and cover all."""
        return _share(self, mesh, worker)

    def is_first(self, mesh: MeshAxes, worker: int) -> bool:
        """Whether a worker is the one, among all that have the same share, that counts as its owner."""
        return all(mesh.place(worker)[axis] == 0 for axis, cell in enumerate(self.axes) if cell is None)

    def holders(self, mesh: MeshAxes, worker: int, rect: Rect) -> Iterator[tuple[int, Rect]]:
        """Whose shares make up `rect`, and which part of it each has; replicas serve their own row."""
        place = mesh.place(worker)
        choices: list[Sequence[int]] = []
        for axis, (cell, at) in enumerate(zip(self.axes, place, strict=True)):
            if cell is None:
                choices.append((at,))
            else:
                wanted = rect.lo[cell], rect.hi[cell]
                choices.append(mesh.axes[axis].places_of(self.cells.sizes[cell], wanted))
        for found in product(*choices):
            holder = mesh.worker(found)
            part = rect.intersect(self.share(mesh, holder))
            if not part.is_empty:
                yield holder, part


@lru_cache(2**16)  # many tensors have one layout
def _share(layout: Layout, mesh: MeshAxes, worker: int) -> Rect:
    sizes = layout.cells.sizes
    spans: list[Span] = [(0, size) for size in sizes]
    place = mesh.place(worker)
    for axis, cell in enumerate(layout.axes):
        if cell is not None:
            spans[cell] = mesh.axes[axis].span(sizes[cell], place[axis])
    return Rect(tuple(low for low, _ in spans), tuple(high for _, high in spans))
