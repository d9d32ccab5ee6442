"""Shapes from bytes: a Chainer file has no shapes, dtypes or kernel sizes, but its byte counts imply them.

A scalar loss gives the element size. A deconvolution gives the batch: its output size is an attribute, and
its bias gives its channels. A weight of a x b x k x k elements has few factorings into channels and a square
kernel; the sizes of its input, bias and output leave one. An input of unknown shape is taken as a square
image. The rules of `ops/` give all other shapes, op by op. A shape that contradicts the file's bytes is
reported and not used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt, prod
from typing import TypeAlias

from stowplan.errors import BadUse, MissingRule
from stowplan.ir import DType, Kind, Note, NoteKind, Op, Shape, Tensor, bytes_of_shape
from stowplan.ops.shapes import output_shapes_of
from stowplan.ops.table import Site

DECONVOLUTION = "Deconvolution2DFunction"
_LARGEST_KERNEL = 64

Layer: TypeAlias = tuple[Shape, Shape, Shape]
"""The shapes of a layer's input, weight and bias."""


def layers_of(site: Site, elements: Callable[[Tensor], int], batch: int | None) -> Iterator[Layer]:
    """Every layer with a square kernel that fits the elements of the op's inputs and output."""
    groups = site.attributes.get("groups", 1)
    if len(site.inputs) < 2 or not isinstance(groups, int) or groups < 1:
        return
    bias = elements(site.inputs[2]) if len(site.inputs) > 2 else None
    weights = elements(site.inputs[1]) * groups
    for kernel in range(1, min(_LARGEST_KERNEL, isqrt(weights)) + 1):
        channels, rest = divmod(weights, kernel * kernel)
        image = None if rest else _image_of(site.inputs[0], channels, bias, elements, batch)
        layer = None if image is None else _layer(site, image, channels, groups, kernel)
        if layer and bias in (None, *layer[2]) and _makes(site, layer) == elements(site.outputs[0]):
            yield layer


def _image_of(
    tensor: Tensor, channels: int, bias: int | None, elements: Callable[[Tensor], int], batch: int | None
) -> Shape | None:
    """The input's shape: as known, or the square image with `channels` / `bias` channels."""
    if tensor.shape is not None:
        return tensor.shape if len(tensor.shape) == 4 and tensor.shape[1] else None
    if not batch or not bias or channels % bias:
        return None
    pixels, rest = divmod(elements(tensor), batch * (channels // bias))
    side = isqrt(pixels)
    return (batch, channels // bias, side, side) if not rest and side * side == pixels else None


def _layer(site: Site, image: Shape, channels: int, groups: int, kernel: int) -> Layer | None:
    """The layer with this kernel, where `channels` is its input channels times its output channels."""
    outputs, rest = divmod(channels, image[1])
    first, second = (image[1], outputs) if site.op.type == DECONVOLUTION else (outputs, image[1])
    if rest or second % groups:
        return None
    return image, (first, second // groups, kernel, kernel), (outputs,)


def _makes(site: Site, layer: Layer) -> int | None:
    """How many elements the output of this layer would have."""
    inputs = tuple(replace(tensor, shape=shape) for tensor, shape in zip(site.inputs, layer, strict=False))
    try:
        return prod(output_shapes_of(replace(site, inputs=inputs))[0])
    except (MissingRule, BadUse):
        return None


_LOSS = "SoftmaxCrossEntropy"
_FLOATS = {2: DType.FLOAT16, 4: DType.FLOAT32, 8: DType.FLOAT64}
_INTEGERS = {1: DType.INT8, 2: DType.INT16, 4: DType.INT32, 8: DType.INT64}


@dataclass(slots=True)
class Inference:
    """The facts inferred so far, and the notes on them."""

    tensors: dict[str, Tensor]
    where: Mapping[str, str]
    notes: list[Note] = field(default_factory=list)
    element: DType = DType.FLOAT32
    batch: int | None = None

    def note(self, kind: NoteKind, name: str, what: str) -> None:
        """A remark about the line of a tensor or op."""
        self.notes.append(Note(kind, self.where.get(name, ""), what))

    def site(self, op: Op) -> Site:
        """An op with its tensors as known so far."""
        inputs, outputs = (
            tuple(self.tensors[use.tensor] for use in uses) for uses in (op.inputs, op.outputs)
        )
        return Site(op, inputs, outputs)

    def elements(self, tensor: Tensor) -> int:
        """How many elements of the common type fill a tensor's bytes."""
        return (tensor.nbytes or 0) // self.element.itemsize

    def settle(self, name: str, shape: Shape, dtype: DType) -> None:
        """Accept a shape unless it contradicts the file's bytes or an earlier finding."""
        tensor = self.tensors[name]
        if tensor.shape is None and bytes_of_shape(shape, dtype) == tensor.nbytes:
            self.tensors[name] = replace(tensor, shape=shape, dtype=dtype)
        elif tensor.shape != shape:
            found = f"{tensor.nbytes} bytes" if tensor.shape is None else _dims(tensor.shape)
            self.note(NoteKind.ODD, name, f"{name!r} should be {dtype} {_dims(shape)}, but is {found}")


def infer_shapes(
    tensors: Mapping[str, Tensor], ops: Sequence[Op], where: Mapping[str, str]
) -> tuple[dict[str, Tensor], list[Note]]:
    """The tensors with every shape that follows, and notes. `ops` are in executable order."""
    state = Inference(dict(tensors), where)
    _infer_element(state, ops)
    _infer_batch(state, ops)
    for op in ops:
        _OPERANDS.get(op.type, _nothing)(state, op)
        _infer_outputs(state, op)
    known = sum(tensor.shape is not None for tensor in state.tensors.values())
    state.note(NoteKind.INFERRED, "", f"shapes of {known} of {len(tensors)} variables, from their bytes")
    return state.tensors, state.notes


def _infer_element(state: Inference, ops: Sequence[Op]) -> None:
    for op in ops:
        nbytes = state.tensors[op.outputs[0].tensor].nbytes
        if op.type == _LOSS and op.attributes.get("reduce") == "mean" and nbytes in _FLOATS:
            state.element = _FLOATS[nbytes]
            what = f"elements are {state.element}: the scalar loss takes {nbytes} bytes"
            state.note(NoteKind.INFERRED, op.id, what)
            return
    state.note(NoteKind.INFERRED, "", f"elements are taken to be {state.element}: there is no scalar loss")


def _infer_batch(state: Inference, ops: Sequence[Op]) -> None:
    found = {_batch_of(state, op): op.id for op in ops if op.type == DECONVOLUTION}
    found.pop(None, None)
    if len(found) == 1:
        ((state.batch, op_id),) = found.items()
        what = f"batch {state.batch}: elements of the output / (channels x outh x outw)"
        state.note(NoteKind.INFERRED, op_id, what)
    else:
        given = " and ".join(map(str, sorted(filter(None, found)))) or "none"
        state.note(NoteKind.ODD, "", f"batch unknown: the deconvolutions give {given}")


def _batch_of(state: Inference, deconvolution: Op) -> int | None:
    site = state.site(deconvolution)
    sides = [site.attributes.get(key) for key in ("outh", "outw")]
    if len(site.inputs) < 3 or not all(isinstance(side, int) and side > 0 for side in sides):
        return None
    image = state.elements(site.inputs[2]) * prod(side for side in sides if isinstance(side, int))
    batch, rest = divmod(state.elements(site.outputs[0]), image) if image else (0, 0)
    return batch if batch and not rest else None


def _nothing(_: Inference, __: Op) -> None:
    """Most ops imply nothing about their operands."""


def _infer_filter(state: Inference, op: Op) -> None:
    """Settle the weight, the bias and, where it is unknown, the input of a (de)convolution."""
    site = state.site(op)
    if site.inputs[0].shape is None and state.batch is None:
        return
    fits = list(layers_of(site, state.elements, state.batch))
    if len(fits) == 1:
        _settle_layer(state, site, fits[0])
    else:
        what = f"{len(fits)} kernel sizes fit the bytes of {op.id!r}, so its shapes stay unknown"
        state.note(NoteKind.ODD, op.id, what)


def _settle_layer(state: Inference, site: Site, layer: Layer) -> None:
    image, weight, _ = layer
    if site.inputs[0].shape is None:
        what = (
            f"{site.inputs[0].id!r} is {_dims(image)} and the kernel {_dims(weight[2:])}: nothing else fits"
        )
        state.note(NoteKind.INFERRED, site.op.id, what)
    for tensor, shape in zip(site.inputs, layer, strict=False):
        state.settle(tensor.id, shape, state.element)


def _infer_label(state: Inference, op: Op) -> None:
    """Labels are integers, one per score vector: the scores' shape without its channels."""
    scores, labels = state.site(op).inputs
    if scores.shape is None or len(scores.shape) < 2 or labels.kind is not Kind.INPUT:
        return
    shape = (scores.shape[0], *scores.shape[2:])
    width = (labels.nbytes or 0) // (prod(shape) or 1)
    state.settle(labels.id, shape, _INTEGERS.get(width, DType.INT32))


_OPERANDS: dict[str, Callable[[Inference, Op], None]] = {
    "Convolution2DFunction": _infer_filter,
    DECONVOLUTION: _infer_filter,
    _LOSS: _infer_label,
}


def _infer_outputs(state: Inference, op: Op) -> None:
    site = state.site(op)
    if any(tensor.shape is None for tensor in site.inputs):
        return
    try:
        for tensor, shape in zip(site.outputs, output_shapes_of(site), strict=False):
            state.settle(tensor.id, shape, state.element)
    except (MissingRule, BadUse) as reason:
        state.note(NoteKind.ODD, op.id, f"no shapes from here on: {reason}")


def _dims(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a scalar"
