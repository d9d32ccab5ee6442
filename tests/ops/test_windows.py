"""Sliding windows: closed forms against brute force, and the spellings of each framework."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowplan.errors import BadUse, MissingRule
from stowplan.geometry import Rect
from stowplan.ir import Attributes, Kind, Op, Phase, Shape, Tensor
from stowplan.ops.table import Site
from stowplan.ops.windows import Span, Window, output_sizes, pull, push, reach, windows_of

WINDOWS = st.builds(
    Window,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    dilation=st.integers(1, 3),
    transposed=st.booleans(),
)
SPANS = st.tuples(st.integers(-12, 12), st.integers(1, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))
NEARBY = range(-90, 90)


def taps(window: Window, position: int) -> set[int]:
    """Where the kernel sits for one position, straight from the definition."""
    return {position * window.stride - window.before + window.dilation * tap for tap in range(window.kernel)}


def needs(window: Window, output: int) -> set[int]:
    """The inputs that one output is made from."""
    if window.transposed:
        return {position for position in NEARBY if output in taps(window, position)}
    return taps(window, output)


def hull(points: set[int]) -> range:
    return range(min(points), max(points) + 1) if points else range(0)


@given(WINDOWS, SPANS)
@pytest.mark.slow
def test_pull_is_what_the_outputs_need(window: Window, outputs: Span) -> None:
    needed = hull(set().union(*(needs(window, output) for output in range(*outputs))))
    pulled = range(*window.pull(outputs))
    assert set(needed) <= set(pulled)
    if window.dilation == 1 or not window.transposed:
        assert needed == pulled


@given(WINDOWS, SPANS)
@pytest.mark.slow
def test_reach_is_what_reads_the_inputs(window: Window, inputs: Span) -> None:
    readers = hull({output for output in NEARBY if needs(window, output) & set(range(*inputs))})
    reached = range(*window.reach(inputs))
    assert set(readers) <= set(reached)
    if window.dilation == 1 or window.transposed:
        assert readers == reached


@given(WINDOWS, SPANS)
def test_push_is_what_the_inputs_suffice_for(window: Window, inputs: Span) -> None:
    pushed, given_inputs = range(*window.push(inputs)), set(range(*inputs))
    for output in range(-40, 40):
        needed = set(range(*window.pull((output, output + 1))))
        if output in pushed:
            assert needed <= given_inputs
        elif needed:
            assert not needed <= given_inputs


@given(WINDOWS, st.integers(1, 12))
def test_output_size_counts_the_windows_that_fit_the_padded_input(window: Window, size: int) -> None:
    if window.transposed:
        highest = max(position for i in range(size) for position in taps(window, i))
        assert window.output_size(size) == max(0, highest + 1 - window.after)
    else:
        fitting = (o for o in range(40) if max(taps(window, o)) < size + window.after)
        assert window.output_size(size) == len(list(fitting))


@given(st.lists(WINDOWS, min_size=2, max_size=2), SPANS, SPANS)
def test_rects_are_products_of_spans(windows: list[Window], rows: Span, columns: Span) -> None:
    rect = Rect((rows[0], columns[0]), (rows[1], columns[1]))
    for of_rect, of_span in ((pull, Window.pull), (reach, Window.reach), (push, Window.push)):
        by_dim = of_span(windows[0], rows), of_span(windows[1], columns)
        assert of_rect(windows, rect) == Rect(*map(tuple, zip(*by_dim, strict=True)))


@given(WINDOWS)
def test_nothing_needs_nothing(window: Window) -> None:
    assert [range(*of((3, 3))) for of in (window.pull, window.push, window.reach)] == [range(0)] * 3


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(BadUse, match="stride 0"):
        Window(stride=0)


def site(op_type: str, attributes: Attributes, *shapes: Shape) -> Site:
    tensors = tuple(Tensor(str(i), Kind.ACTIVATION, shape) for i, shape in enumerate(shapes))
    return Site(Op("op", op_type, Phase.FORWARD, attributes=attributes), tensors, ())


CHAINER = {"sy": 2, "sx": 2, "ph": 0, "pw": 0}
MEGENGINE = {
    f"{name}_{side}": value for name, value in (("stride", 2), ("pad", 3), ("dilate", 1)) for side in "hw"
}
TORCH = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
NCHW: Attributes = {"data_format": "NCHW", "strides": (1, 1, 2, 2), "padding": "VALID", "ksize": (1, 1, 3, 3)}
SPELLINGS = [
    (
        site("MaxPooling2D", CHAINER | {"kh": 2, "kw": 2, "cover_all": True}, (8, 64, 57, 56)),
        (57, 56),
        (29, 28),
    ),
    (
        site("Deconvolution2DFunction", CHAINER | {"outh": 56, "outw": 57}, (8, 9, 28, 28), (9, 4, 2, 2)),
        (28, 28),
        (56, 57),
    ),
    (site("ConvolutionForward", MEGENGINE, (10, 3, 224, 224), (64, 3, 7, 7)), (224, 224), (112, 112)),
    (
        site("Conv2D", {"strides": (1, 4, 4, 1), "padding": "SAME"}, (2, 224, 224, 3), (11, 11, 3, 64)),
        (224, 224),
        (56, 56),
    ),
    (site("MaxPool", NCHW, (128, 64, 56, 56)), (56, 56), (27, 27)),
    (site("conv2d", TORCH), (16, 16), (16, 16)),
]


@pytest.mark.parametrize(
    ("site", "inputs", "outputs"),
    SPELLINGS,
    ids=lambda value: getattr(getattr(value, "op", None), "type", None),
)
def test_spellings(site: Site, inputs: Shape, outputs: Shape) -> None:
    assert output_sizes(windows_of(site), inputs) == outputs


@pytest.mark.parametrize("attributes", [{}, {"kernel_size": (3, None)}, TORCH | {"stride": 2}])
def test_missing_attributes_are_named(attributes: Attributes) -> None:
    with pytest.raises(MissingRule, match="attribute"):
        windows_of(site("conv2d", attributes))
