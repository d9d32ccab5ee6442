"""Which shares of its output an op can make, each from what it needs alone; other axes are given up."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from stowplan.geometry import Rect
from stowplan.ops.regions.rules import dim_of
from stowplan.ops.table import Site, shape_of
from stowplan.ops.tiling import Part, refusal_of
from stowplan.techniques.shards.plan.cell_relation import CellRelation
from stowplan.techniques.shards.plan.cells import Cells
from stowplan.techniques.shards.plan.even import is_followed, outline
from stowplan.techniques.shards.plan.layout import Layout
from stowplan.techniques.shards.plan.mesh import MeshAxes

SCATTER = "aten.scatter.value"
CAUSAL = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_LOOKED_AT = 64


def allowed(
    site: Site, number: int, rule: CellRelation, layout: Layout, inputs: Sequence[Layout], mesh: MeshAxes
) -> tuple[Layout, str]:
    """The layout without the axes that would give a worker a part which the op cannot make, and why."""
    why = _refused(site, number, rule, layout, inputs, mesh)
    if not why:
        return layout, ""
    for axis in layout.cut_axes:
        fewer = Layout(layout.cells, tuple(None if n == axis else c for n, c in enumerate(layout.axes)))
        if not _refused(site, number, rule, fewer, inputs, mesh):
            return fewer, why
    return Layout(layout.cells, (None,) * len(layout.axes)), why


def _refused(
    site: Site, number: int, rule: CellRelation, layout: Layout, inputs: Sequence[Layout], mesh: MeshAxes
) -> str:
    """Why some worker cannot make its share of output `number`; "" if all can."""
    if layout.is_everywhere:
        return ""
    cut = {
        axis: frozenset([] if cell is None else [layout.cells.sizes[cell]])
        for axis, cell in enumerate(layout.axes)
        if is_followed(axis, rule, layout)
    }
    workers = range(mesh.size) if mesh.size <= _LOOKED_AT else outline(mesh, cut)
    shares = {layout.share(mesh, worker) for worker in workers}
    refusal = refusal_of_parts(site, number, rule, layout, [found.cells for found in inputs])
    return next(filter(None, map(refusal, shares)), "")


def refusal_of_parts(
    site: Site, number: int, rule: CellRelation, layout: Layout, inputs: Sequence[Cells]
) -> Callable[[Rect], str]:
    """Tells of a part of output `number` why the op cannot make it from what it needs for it alone."""
    unmasked = refusal_of(_unmasked(site))

    def refusal(made: Rect) -> str:
        if made.is_empty:
            return ""
        needs = (
            None if need is None else cells.local(need)
            for need, cells in zip(rule.pull(made), inputs, strict=True)
        )
        part = Part(number, layout.cells.local(made), tuple(needs))
        return _scattered(site, part) if site.op.type == SCATTER else unmasked(part)

    return refusal


def _scattered(site: Site, part: Part) -> str:
    """Lines along the scattered dim are written one by one, if each has its own line of the index."""
    shape, index = (shape_of(tensor) for tensor in site.inputs)
    dim = dim_of(site, len(shape))
    others = [other for other in range(len(shape)) if other != dim]
    if any(shape[other] != index[other] for other in others):
        return f"{site.op.id} writes to a part of its input"
    is_whole = (part.made.lo[dim], part.made.hi[dim]) == (0, shape[dim])
    return "" if is_whole else f"{site.op.id} may write anywhere along dim {dim}"


def _unmasked(site: Site) -> Site:
    """Causal attention of some of the queries has a kernel here, with its own mask."""
    if site.op.type != CAUSAL or not site.attributes.get("is_causal"):
        return site
    return replace(site, op=replace(site.op, attributes={**site.attributes, "is_causal": False}))
