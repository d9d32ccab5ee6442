"""Pure forms: for an op that writes into its first argument, the op that returns what it would write."""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from stowplan.capture.cells import Cell
from stowplan.capture.schema import overloads_of, signature_of

aten = torch.ops.aten
IRREGULAR: Mapping[OpOverload, OpOverload] = {aten.normal_.default: aten.normal_functional.default}


@cache
def pure_form(target: OpOverload) -> OpOverload | None:
    """`relu` for `relu_`, `bernoulli.p` for `bernoulli_.float`; None where PyTorch has no such op."""
    if target in IRREGULAR:
        return IRREGULAR[target]
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if not name.endswith("_") or not isinstance(packet, OpOverloadPacket):
        return None
    wanted = signature_of(target)
    return next((candidate for candidate in overloads_of(packet) if signature_of(candidate) == wanted), None)


def result_stride(
    target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[int, ...]:
    """The strides of the tensor that a pure op returns for arguments with these cells."""
    given = {name: _on_meta(value) for name, value in kwargs.items()}
    with torch.no_grad():
        result: Tensor = target(*map(_on_meta, args), **given)
    return result.stride()


def _on_meta(value: object) -> object:
    if isinstance(value, Cell):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_on_meta(item) for item in value]
    return value
