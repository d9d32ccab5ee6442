"""Shapes that follow from a Chainer file's bytes, on nets whose shapes are known."""

import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowplan.analyse import facts_of, liveness_of
from stowplan.formats import chainer
from stowplan.ir import DType, NoteKind
from tests.support.chainer_dump import Call, Json, dump


def encoder_decoder(batch: int, channels: int, width: int, kernel: int, side: int, item: int = 4) -> str:
    """Convolution, ReLU, pool, deconvolution, scores and loss, dumped with bytes alone."""
    shapes = encoder_decoder_shapes(batch, channels, width, kernel, side)
    labels = {"image": "0", "label": "1"}
    variables = {
        name: (prod(shape) * (4 if name == "label" else item), labels.get(name, name if "/" in name else "_"))
        for name, shape in shapes.items()
    }
    window: dict[str, Json] = {"sy": 1, "sx": 1, "ph": 0, "pw": 0, "groups": 1}
    up = shapes["up"][2]
    pooling = {**window, "kh": 2, "kw": 2, "sy": 2, "sx": 2, "cover_all": True}
    upward = {**window, "sy": 2, "sx": 2, "outh": up, "outw": up}
    return dump(
        variables,
        [
            Call("Convolution2DFunction", ["image", "/conv/W", "/conv/b"], ["conv"], window),
            Call("ReLU", ["conv"], ["relu"]),
            Call("MaxPooling2D", ["relu"], ["pool"], pooling),
            Call("Deconvolution2DFunction", ["pool", "/up/W", "/up/b"], ["up"], upward),
            Call("Convolution2DFunction", ["up", "/score/W"], ["score"], window),
            Call("SoftmaxCrossEntropy", ["score", "label"], ["loss"], {"reduce": "mean"}),
        ],
    )


def encoder_decoder_shapes(
    batch: int, channels: int, width: int, kernel: int, side: int
) -> dict[str, tuple[int, ...]]:
    inner = side - kernel + 1
    pooled = -(-inner // 2)
    return {
        "image": (batch, channels, side, side),
        "label": (batch, 2 * pooled, 2 * pooled),
        "/conv/W": (width, channels, kernel, kernel),
        "/conv/b": (width,),
        "/up/W": (width, 3, 2, 2),
        "/up/b": (3,),
        "/score/W": (5, 3, 1, 1),
        "conv": (batch, width, inner, inner),
        "relu": (batch, width, inner, inner),
        "pool": (batch, width, pooled, pooled),
        "up": (batch, 3, 2 * pooled, 2 * pooled),
        "score": (batch, 5, 2 * pooled, 2 * pooled),
        "loss": (),
    }


NETS = st.tuples(
    *(st.integers(1, most) for most in (9, 4, 12)), st.sampled_from([1, 2, 3, 5, 7]), st.integers(8, 40)
)


@given(NETS)
@pytest.mark.slow
def test_shapes_of_other_nets_are_right_or_unknown(net: tuple[int, int, int, int, int]) -> None:
    tensors = chainer.read(encoder_decoder(*net)).graph.tensors
    for name, shape in encoder_decoder_shapes(*net).items():
        assert tensors[name].shape in (shape, None)


@pytest.mark.parametrize(("item", "dtype"), [(2, DType.FLOAT16), (4, DType.FLOAT32), (8, DType.FLOAT64)])
def test_shapes_in_any_precision(item: int, dtype: DType) -> None:
    net = (2, 3, 16, 5, 33)
    tensors = chainer.read(encoder_decoder(*net, item)).graph.tensors
    assert {name: tensors[name].shape for name in encoder_decoder_shapes(*net)} == encoder_decoder_shapes(
        *net
    )
    assert tensors["conv.grad"].dtype is dtype
    assert tensors["label"].dtype is DType.INT32


def test_of_several_kernels_the_one_that_makes_the_output_is_taken() -> None:
    net = (1, 4, 16, 3, 12)  # 36 x 1 x 1, 9 x 2 x 2, 4 x 3 x 3 and 1 x 6 x 6 all leave a square image
    tensors = chainer.read(encoder_decoder(*net)).graph.tensors
    assert tensors["/conv/W"].shape == (16, 4, 3, 3)
    assert tensors["image"].shape == (1, 4, 12, 12)


def test_a_shape_that_contradicts_the_bytes_is_told_and_not_used() -> None:
    net = (2, 3, 16, 5, 33)
    wrong = re.sub(r"(?m)^relu \d+ _$", "relu 4096 _", encoder_decoder(*net))
    document = chainer.read(wrong)
    assert document.graph.tensors["relu"].shape is None
    (note,) = (note for note in document.notes if note.kind is NoteKind.ODD and "'relu'" in note.what)
    assert note.where == f"line {wrong.split(chr(10)).index('relu 4096 _') + 1}"
    assert "2x16x29x29" in note.what
    assert "4096 bytes" in note.what


def test_without_shapes_the_bytes_still_tell() -> None:
    document = chainer.read(
        dump(
            {"0": (16, "0"), "1": (64, "/fc/W"), "2": (8, "_"), "3": (8, "_")},
            [Call("LinearFunction", ["0", "1"], ["2"]), Call("ReLU", ["2"], ["3"])],
        )
    )
    assert document.counts["shapes"] == 0
    assert facts_of(document.graph).peak.bytes > 64
    assert liveness_of(document.graph).storages.nbytes.sum() == 16 + 64 + 8 + 8 + 64 + 8 + 8
