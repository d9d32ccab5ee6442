"""The shapes that ONNX's ops make are those that ONNX itself infers; what it does not infer is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from stowplan.errors import BadInput
from stowplan.formats.onnx import read

Constants = Mapping[str, Sequence[int] | Sequence[float]]


def model_of(
    op: str, shapes: Sequence[Sequence[int]], constants: Constants, attributes: Mapping[str, Any]
) -> onnx.ModelProto:
    """One op from inputs and constants, in this order, to "y"."""
    inputs = [
        helper.make_tensor_value_info(f"x{at}", TensorProto.FLOAT, shape) for at, shape in enumerate(shapes)
    ]
    weights = [
        helper.make_tensor(
            name,
            TensorProto.FLOAT if any(isinstance(n, float) for n in numbers) else TensorProto.INT64,
            (len(numbers),),
            numbers,
        )
        for name, numbers in constants.items()
        if not name.startswith("left out")
    ]
    names = [*(f"x{at}" for at in range(len(shapes)))]
    names += ["" if name.startswith("left out") else name for name in constants]
    node = helper.make_node(op, names, ["y"], **attributes)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", inputs, [result], initializer=weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


CASES: list[tuple[str, Sequence[Sequence[int]], Constants, Mapping[str, Any]]] = [
    ("Conv", [(1, 3, 9, 8), (4, 3, 3, 3)], {}, {"strides": [2, 2], "pads": [1, 0, 1, 2]}),
    ("Conv", [(1, 3, 9, 8), (4, 3, 3, 2)], {}, {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("Conv", [(1, 3, 9, 8), (4, 3, 3, 3)], {}, {"dilations": [2, 3], "auto_pad": "SAME_LOWER"}),
    ("Conv", [(1, 3, 9, 8), (4, 3, 3, 3)], {}, {"auto_pad": "VALID"}),
    ("ConvTranspose", [(1, 4, 5, 5), (4, 2, 3, 3)], {}, {"strides": [2, 2], "output_padding": [1, 0]}),
    ("ConvTranspose", [(1, 4, 5, 5), (4, 2, 3, 3)], {}, {"group": 2, "pads": [1, 1, 1, 0]}),
    ("ConvTranspose", [(1, 4, 5, 5), (4, 2, 3, 3)], {}, {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("ConvTranspose", [(1, 4, 5, 5), (4, 2, 3, 3)], {}, {"strides": [2, 2], "output_shape": [10, 11]}),
    ("MaxPool", [(1, 3, 8, 9)], {}, {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", [(1, 3, 8, 9)], {}, {"kernel_shape": [3, 3], "auto_pad": "SAME_LOWER"}),
    ("GlobalAveragePool", [(2, 3, 8, 9)], {}, {}),
    ("MatMul", [(5, 1, 2, 3), (4, 3, 6)], {}, {}),
    ("MatMul", [(3,), (3, 6)], {}, {}),
    ("MatMul", [(2, 5, 3), (3,)], {}, {}),
    ("Gemm", [(3, 2), (4, 3)], {}, {"transA": 1, "transB": 1}),
    ("Flatten", [(2, 3, 4)], {}, {"axis": 2}),
    ("Flatten", [(2, 3, 4)], {}, {"axis": -1}),
    ("Flatten", [(2, 3, 4)], {}, {"axis": 0}),
    ("Reshape", [(2, 3, 4)], {"shape": [0, -1]}, {}),
    ("Reshape", [(2, 3, 4)], {"shape": [4, 6]}, {}),
    ("Reshape", [(0, 3, 4)], {"shape": [3, 0, 4]}, {"allowzero": 1}),
    ("Transpose", [(2, 3, 4)], {}, {}),
    ("Transpose", [(2, 3, 4)], {}, {"perm": [2, 0, 1]}),
    ("Squeeze", [(1, 3, 1)], {}, {}),
    ("Squeeze", [(1, 3, 1)], {"axes": [-1]}, {}),
    ("Unsqueeze", [(3, 4)], {"axes": [0, -1]}, {}),
    ("Concat", [(2, 3), (2, 5)], {}, {"axis": -1}),
    ("Gather", [(7, 4)], {"indices": [0, 2, 1]}, {"axis": 1}),
    ("ReduceMean", [(2, 3, 4)], {"axes": [-1]}, {"keepdims": 0}),
    ("ReduceSum", [(2, 3, 4)], {"axes": [0, 2]}, {}),
    ("ReduceMax", [(2, 3, 4)], {}, {"keepdims": 0}),
    ("ReduceSum", [(2, 3, 4)], {"axes": []}, {"noop_with_empty_axes": 1}),
    ("Expand", [(3, 1)], {"shape": [2, 1, 6]}, {}),
    ("Resize", [(1, 2, 4, 6)], {"left out": [], "scales": [1.0, 1.0, 2.0, 0.5]}, {}),
    ("Resize", [(1, 2, 4, 6)], {"left out": [], "left out too": [], "sizes": [1, 2, 9, 3]}, {}),
    ("Add", [(2, 1, 4), (3, 1)], {}, {}),
]


def _name(case: tuple[str, Any, Any, Mapping[str, Any]]) -> str:
    op, shapes, constants, attributes = case
    return f"{op} {shapes} {dict(constants)} {dict(attributes)}"


@pytest.mark.parametrize("case", CASES, ids=map(_name, CASES))
def test_a_shape_is_the_one_onnx_infers(case: tuple[str, Any, Any, Mapping[str, Any]]) -> None:
    model = model_of(*case)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output[0].type.tensor_type
    graph = read(model.SerializeToString()).graph
    assert graph.tensors["y"].shape == tuple(dim.dim_value for dim in inferred.shape.dim)


REFUSED: list[tuple[str, Sequence[Sequence[int]], Constants, Mapping[str, Any]]] = [
    ("Reshape", [(2, 3)], {"shape": [-1, -1]}, {}),
    ("Reshape", [(2, 3)], {"shape": [2, -2]}, {}),
    ("Reshape", [(2, 3), (2,)], {}, {}),
    ("Transpose", [(2, 3)], {}, {"perm": [0, 0]}),
    ("Unsqueeze", [(2, 3)], {"axes": [0, -4]}, {}),
    ("Concat", [(2, 3), (2, 3, 4)], {}, {"axis": 0}),
    ("Concat", [(2, 3), (2, 3)], {}, {"axis": 2}),
    ("Gather", [()], {"indices": [0]}, {}),
    ("Resize", [(1, 2, 4, 6)], {"left out": [], "scales": [2.0, 2.0]}, {}),
    ("Conv", [(1, 3, 9, 8), (4, 3, 3, 3)], {}, {"strides": [2]}),
]


@pytest.mark.parametrize("case", REFUSED, ids=map(_name, REFUSED))
def test_what_has_no_shape_is_refused(case: tuple[str, Any, Any, Mapping[str, Any]]) -> None:
    with pytest.raises(BadInput, match="y") as refused:
        read(model_of(*case).SerializeToString())
    assert refused.value.where == "graph.node[0]"
