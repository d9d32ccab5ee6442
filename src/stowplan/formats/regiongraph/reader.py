"""From a page to a Document: names, boxes, numbers, edges, and then a graph with its regions."""

from collections import Counter
from collections.abc import Mapping

from stowplan.errors import BadInput
from stowplan.formats.checked import checked
from stowplan.formats.regiongraph.boxes import boxes_on
from stowplan.formats.regiongraph.damaged import claim_damaged
from stowplan.formats.regiongraph.dims import dims_of
from stowplan.formats.regiongraph.edges import edges_of
from stowplan.formats.regiongraph.graph import graph_of, regions_of
from stowplan.formats.regiongraph.labels import Agreement, compare_labels
from stowplan.formats.regiongraph.names import exact_names
from stowplan.formats.regiongraph.page import Label, Words, tokens_of
from stowplan.formats.regiongraph.rects import rects_of
from stowplan.formats.regiongraph.remarks import Remarks
from stowplan.geometry import Rect
from stowplan.ir import Document, Graph, Shape

FORMAT = "regiongraph"
_HEAD = 1024


def recognise(text: str) -> bool:
    """Whether `text` begins like a region graph: boxes with dims and rects of int32 arrays."""
    head = text[:_HEAD]
    return "dim=" in head and "Rect(array([" in head


def read(text: str) -> Document:
    """The training graph on a page, be it written clean or read by OCR."""
    page = list(tokens_of(text))
    names, rests = exact_names([token for token in page if isinstance(token, Words)])
    remarks = names.remarks
    left = claim_damaged(names, rests)
    names.complete()
    if not names.found:
        raise BadInput("no name of a region graph is on this page", where="line 1")
    boxes = boxes_on(page, names.found.values())
    rects = {name: rects_of(box, remarks) for name, box in boxes.items()}
    dims = dims_of(boxes, rects, remarks)
    edges = edges_of(names)
    labels = [token for token in page if isinstance(token, Label)]
    agreement = compare_labels(labels, left, edges.values(), remarks)
    graph = graph_of(names.found, edges, dims)
    _remark_on_assumptions(graph, remarks)
    lines = {sighting.id: f"line {sighting.line}" for sighting in names.found.values()}
    return Document(
        FORMAT,
        checked(graph, lines, "line 1"),
        regions=regions_of(names.found, rects),
        notes=remarks.in_order(),
        counts=_counts(rects, dims, agreement),
    )


def _remark_on_assumptions(graph: Graph, remarks: Remarks) -> None:
    remarks.inferred(1, "elements are taken to be float32: the page gives no type")
    if any(op.type == "filter" for op in graph.ops):
        what = "filters [out, 1, 1, in, kh, kw, h, w] are untied: a kernel for every output pixel"
        remarks.inferred(1, what)


def _counts(
    rects: Mapping[str, Mapping[str, Rect | None]], dims: Mapping[str, Shape], agreement: Agreement
) -> dict[str, int]:
    written = [(key, rect) for of_box in rects.values() for key, rect in of_box.items()]
    return {
        "rects": sum(rect is not None for _, rect in written),
        "none_rects": sum(rect is None for _, rect in written),
        **Counter(key for key, _ in written),
        "dims": len(dims),
        "edges": agreement.expected,
        "edge_labels": agreement.matched,
    }
