"""Shapes that ops of files make, against NumPy where it has the op; what has no shape is refused by name."""

from types import EllipsisType

import numpy as np
import pytest

from stowplan.errors import MissingRule
from stowplan.ir import Attribute, Attributes, Kind, Op, Phase, Shape, Tensor
from stowplan.ops.shapes import output_shapes_of
from stowplan.ops.table import Site


def site(op_type: str, attributes: Attributes, *shapes: Shape, outputs: tuple[Tensor, ...] = ()) -> Site:
    inputs = tuple(Tensor(f"x{at}", Kind.ACTIVATION, shape) for at, shape in enumerate(shapes))
    made = outputs or (Tensor("y", Kind.ACTIVATION),)
    return Site(Op("op", op_type, Phase.FORWARD, attributes=attributes), inputs, made)


def _spelled(index: slice | int | EllipsisType | None) -> Attribute:
    match index:
        case slice():
            return (index.start, index.stop, index.step)
        case EllipsisType():
            return "..."
        case _:
            return index


@pytest.mark.parametrize(
    "index",
    [
        (slice(1, None, 2), 3),
        (..., slice(-3, -1)),
        (None, slice(None), ..., 0),
        (slice(None, None, -2), None, slice(4, 2)),
        (0, 1, 2),
    ],
    ids=str,
)
def test_an_index_takes_what_numpy_takes(index: tuple[slice | int | EllipsisType | None, ...]) -> None:
    slices = tuple(map(_spelled, index))
    assert output_shapes_of(site("GetItem", {"slices": slices}, (5, 6, 7))) == (
        np.zeros((5, 6, 7))[index].shape,
    )


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_a_product_of_matrices_is_numpys(left: bool, right: bool) -> None:
    one, other = np.zeros((2, 3)), np.zeros((3, 5))
    shapes = (one.T if left else one).shape, (other.T if right else other).shape
    found = output_shapes_of(site("MatrixMul", {"transposeA": left, "transposeB": right}, *shapes))
    assert found == ((one @ other).shape,)


def test_operands_are_broadcast_as_numpy_does() -> None:
    shapes = ((4, 1, 3), (2, 1), (), (0, 1, 1, 1))
    assert output_shapes_of(site("Elemwise", {}, *shapes)) == (np.broadcast_shapes(*shapes),)


def test_a_reduced_dim_stays() -> None:
    assert output_shapes_of(site("Reduce", {"axis": 1}, (2, 3, 4))) == (
        np.zeros((2, 3, 4)).sum(1, keepdims=True).shape,
    )


def test_tensorflow_has_images_in_either_order() -> None:
    windows: Attributes = {
        "padding": "VALID",
        "data_format": "NCHW",
        "strides": (1, 1, 2, 2),
        "ksize": (1, 1, 3, 3),
    }
    assert output_shapes_of(site("MaxPool", windows, (2, 5, 9, 7))) == ((2, 5, 4, 3),)
    assert output_shapes_of(site("Conv2D", windows, (2, 5, 9, 7), (3, 3, 5, 8))) == ((2, 8, 4, 3),)
    last = {**windows, "data_format": "NHWC", "strides": (1, 2, 2, 1), "ksize": (1, 3, 3, 1)}
    assert output_shapes_of(site("MaxPool", last, (2, 9, 7, 5))) == ((2, 4, 3, 5),)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (site("MaxPool", {}, (2, 3)), "'op' reads images"),
        (site("Concat", {"axis": 1}, (2, 3), (3, 3)), r"cannot join .* along dim 1"),
        (site("Concat", {"axis": 2}, (2, 3), (2, 3)), r"cannot join .* along dim 2"),
        (site("Concat", {}, (2, 3)), "needs an integer, not None"),
        (site("GetItem", {"slices": "lists"}, (2, 3)), "not slices and integers"),
        (site("GetItem", {"slices": (0, 0, 0)}, (2, 3)), "3 indices for"),
        (site("GetItem", {"slices": ((0, 2, 0),)}, (2, 3)), "has the index"),
        (site("GetItem", {"slices": ((0, 2.5, 1),)}, (2, 3)), "needs an integer, not 2.5"),
        (site("Reduce", {"axis": 2}, (2, 3)), "reduces dim 2"),
        (site("filter", {}, (1, 2, 3, 4), (1, 2)), "not of 8 dims"),
        (
            site("linear.grad", {}, (2, 3), outputs=(Tensor("g", Kind.GRADIENT, gradient_of="w"),)),
            "does not read what 'g' is a gradient of",
        ),
    ],
)
def test_what_has_no_shape_is_refused_by_name(refused: Site, reason: str) -> None:
    with pytest.raises(MissingRule, match=reason):
        output_shapes_of(refused)
