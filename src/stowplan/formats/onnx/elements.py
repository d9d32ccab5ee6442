"""ONNX's numbers for element types, and the types that ops make where the file does not tell."""

from stowplan.errors import BadInput
from stowplan.ir import Attribute, DType

_DTYPES = {
    1: DType.FLOAT32,
    2: DType.UINT8,
    3: DType.INT8,
    4: DType.UINT16,
    5: DType.INT16,
    6: DType.INT32,
    7: DType.INT64,
    9: DType.BOOL,
    10: DType.FLOAT16,
    11: DType.FLOAT64,
    12: DType.UINT32,
    13: DType.UINT64,
    14: DType.COMPLEX64,
    15: DType.COMPLEX128,
    16: DType.BFLOAT16,
    17: DType.FLOAT8,
    18: DType.FLOAT8,
    19: DType.FLOAT8,
    20: DType.FLOAT8,
}
FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
_TO_BOOL = frozenset(
    f"onnx.{name}"
    for name in (
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        *("Not", "And", "Or", "Xor", "IsNaN", "IsInf"),
    )
)
_TO_INDICES = frozenset(f"onnx.{name}" for name in ("Shape", "Size", "ArgMax", "ArgMin", "NonZero"))


def dtype_of(element: int, where: str) -> DType:
    """The element type of a number."""
    if element not in _DTYPES:
        raise BadInput(f"element type {element} has no size in bytes here", where=where)
    return _DTYPES[element]


def made_by(op_type: str, cast_to: Attribute, operands: list[DType], output: int, where: str) -> DType:
    """The element type of an op's output: of its first float operand, with few exceptions."""
    if op_type in _TO_BOOL or (op_type == "onnx.Dropout" and output == 1):
        return DType.BOOL
    if op_type in _TO_INDICES or (op_type in ("onnx.MaxPool", "onnx.TopK") and output == 1):
        return DType.INT64
    if isinstance(cast_to, int) and op_type in ("onnx.Cast", "onnx.ConstantOfShape"):
        return dtype_of(cast_to, where)
    if op_type == "onnx.Where":
        operands = operands[1:]
    return operands[0] if operands else DType.FLOAT32
