"""Region graphs: a drawn training step that shows which rect of each tensor a worker reads and writes.

    tensor := name "dim=[" n.. "]" "read_rect=" rect "write_rect=" (rect | "None")
    op     := name "result_dim=[" n.. "]" ["dist_input=" rect "dist_filters=" rect] "dist_result=" rect
    rect   := "Rect(array([lo..], dtype=int32), array([hi..], dtype=int32))"      half-open
    edge   := "->" port (tensor to op) | port "->" (op to tensor)
    name   := layer "." (filter|filterA|filterNL|W|a|b) [".output"] [".grad"] [".set_zero"]
            | "update_" parameter | data.. | classifier..

The reader accepts clean text with one box per block, and pages that OCR read from a drawing row by row, with
several boxes on a line and OCR damage. The writer writes clean text.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from stowplan.errors import BadInput, BadUse
from stowplan.formats.checked import checked
from stowplan.formats.regiongraph.boxes import boxes_on, dims_of, rects_of
from stowplan.formats.regiongraph.edges import Agreement, compare_labels, edges_of
from stowplan.formats.regiongraph.grammar import OP_DRAWINGS, TENSOR_FIELDS
from stowplan.formats.regiongraph.graph import BACKWARD, PORTS, graph_of, regions_of
from stowplan.formats.regiongraph.names import claim_damaged, exact_names
from stowplan.formats.regiongraph.page import Label, Remarks, Words, dims_text, rect_text, tokens_of
from stowplan.geometry import Rect
from stowplan.ir import Document, Graph, Op, RegionLists, Shape, Tensor

__all__ = ["FORMAT", "read", "recognise", "write"]


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


def write(document: Document) -> str:
    """The text of a document whose names follow the grammar; `read` gives its graph and regions back."""
    if document.regions is None:
        raise BadUse("this document has no regions, which are what a region graph shows")
    text = "\n\n".join(_Writer(document.graph, document.regions).blocks()) + "\n"
    try:
        same = read(text)
    except BadInput as error:
        raise BadUse(
            f"a region graph names things by its own grammar, which these names break: {error}"
        ) from None
    if (same.graph, same.regions) != (document.graph, document.regions):
        raise BadUse("these names imply another graph than the one they are in; write it as .stow.json")
    return text


class _Writer:
    """The blocks of one document."""

    def __init__(self, graph: Graph, regions: RegionLists) -> None:
        self._graph, self._regions = graph, regions
        self._ops = {op.id: op for op in graph.ops}
        self._written: set[str] = set()

    def blocks(self) -> Iterator[str]:
        """Every op after the tensors that it reads and before those that it makes."""
        for op in self._graph.ops:
            yield from self._tensors(use.tensor for use in op.inputs)
            yield self._op(op)
            yield from self._tensors(use.tensor for use in op.outputs)
        yield from self._tensors(self._graph.tensors)

    def _tensors(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            if name not in self._written:
                self._written.add(name)
                yield self._tensor(self._graph.tensors[name])

    def _tensor(self, tensor: Tensor) -> str:
        region = self._regions.tensors.get(tensor.id)
        if region is None or tensor.shape is None:
            raise BadUse(f"tensor {tensor.id!r} has no shape or no region to write")
        values = (dims_text(tensor.shape), rect_text(region.read), rect_text(region.write))
        return _block(tensor.id, zip(TENSOR_FIELDS, values, strict=True))

    def _op(self, op: Op) -> str:
        form = OP_DRAWINGS.get(op.type.removesuffix(BACKWARD))
        if form is None:
            raise BadUse(f"op {op.id!r}: a region graph has no type {op.type!r}")
        rects = {
            PORTS[port]: rect for port, rect in self._regions.ops.get(op.id, {}).items() if port in PORTS
        }
        result = op.attributes.get("result_dim")
        values = {key: rect_text(rects[key]) for key in form.fields if key in rects}
        if isinstance(result, tuple):
            values = {"result_dim": dims_text(result), **values}
        reads, makes = self._ports(op)
        above = " ".join(f"->{port}" for port in reads)
        below = " ".join(f"{port}->" for port in makes)
        return "\n".join(filter(None, (above, _block(op.id, values.items()), below)))

    def _ports(self, op: Op) -> tuple[Sequence[str], Sequence[str]]:
        """The labels of an op's arrows, in the order of its lists."""
        form = OP_DRAWINGS[op.type.removesuffix(BACKWARD)]
        forward = self._ops.get(op.adjoint_of or "")
        if forward is None:
            return form.reads, form.makes
        port_of = {use.tensor: port for use, port in zip(forward.inputs, form.reads, strict=False)}
        values = (self._graph.tensors[use.tensor].gradient_of for use in op.outputs)
        return ("output.delta", *form.saves), [f"{port_of.get(value or '', '')}.delta" for value in values]


def _block(name: str, fields: Iterable[tuple[str, str]]) -> str:
    return "\n".join((name, *(f"{key}={value}" for key, value in fields)))
