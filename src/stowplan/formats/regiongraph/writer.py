"""A region graph as clean text: one block per box, the labels of an op's arrows above and below it."""

from collections.abc import Iterable, Iterator, Sequence

from stowplan.errors import BadInput, BadUse
from stowplan.formats.regiongraph.grammar import FORMS, TENSOR_FIELDS
from stowplan.formats.regiongraph.graph import BACKWARD, PORTS
from stowplan.formats.regiongraph.reader import read
from stowplan.formats.regiongraph.values import dims_text, rect_text
from stowplan.ir import Document, Graph, Op, Regions, Tensor


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

    def __init__(self, graph: Graph, regions: Regions) -> None:
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
        form = FORMS.get(op.type.removesuffix(BACKWARD))
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
        form = FORMS[op.type.removesuffix(BACKWARD)]
        forward = self._ops.get(op.adjoint_of or "")
        if forward is None:
            return form.reads, form.makes
        port_of = {use.tensor: port for use, port in zip(forward.inputs, form.reads, strict=False)}
        values = (self._graph.tensors[use.tensor].gradient_of for use in op.outputs)
        return ("output.delta", *form.saves), [f"{port_of.get(value or '', '')}.delta" for value in values]


def _block(name: str, fields: Iterable[tuple[str, str]]) -> str:
    return "\n".join((name, *(f"{key}={value}" for key, value in fields)))
