"""A call of every ATen op with a region rule that no family of samples draws: each has its own arguments."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch._ops import OpOverload

from tests.support.op_samples import NUMBERS, Sample, aten, indices, numbers

ops = torch.ops.aten

# Contents left undefined, and kernels that a CPU does not have: their rule is shared with sampled ops.
UNCHECKED = frozenset(
    {
        "aten.empty.memory_format",
        "aten.empty_like.default",
        "aten.new_empty.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten.cudnn_batch_norm.default",
    }
)


def aten_types() -> list[str]:
    """Every ATen op that PyTorch has, spelled as an op type."""
    names = (
        name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if "aten::" in name
    )
    return sorted(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names)


def overload_of(name: str) -> OpOverload:
    """The op of an op type like "aten.add.Tensor"."""
    _, packet, overload = name.split(".")
    found: OpOverload = getattr(getattr(ops, packet), overload)
    return found


def example_of(name: str) -> Sample:
    """A call of this op: written down here, or for ops on single elements made from the schema."""
    return EXAMPLES[name]() if name in EXAMPLES else from_schema(overload_of(name))


def from_schema(target: OpOverload) -> Sample:
    """Tensors of one shape where the schema wants tensors, a number where it wants one without default."""
    given: dict[str, object] = {}
    whole = "bitwise" in str(target)
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            given[argument.name] = indices(4, 2, 3) if whole else numbers(2, 3).sigmoid()
        elif not argument.has_default_value():
            given[argument.name] = 2 if whole or kind == "int" else 0.5
    return aten(target, *(given.get(a.name, a.default_value) for a in target._schema.arguments))


def _image(*shape: int) -> Tensor:
    return numbers(1, 2, *shape)


def _norm_vectors() -> tuple[Tensor, ...]:
    return numbers(2), numbers(2), numbers(2), numbers(2).abs()


EXAMPLES: Mapping[str, Callable[[], Sample]] = {
    "aten.bernoulli.p": lambda: aten(ops.bernoulli.p, numbers(2, 3), 0.5),
    "aten.clamp.default": lambda: aten(ops.clamp.default, numbers(2, 3), -0.5, 0.5),
    "aten.clamp.Tensor": lambda: aten(ops.clamp.Tensor, numbers(2, 3), numbers(3), None),
    "aten.div.Tensor_mode": lambda: aten(ops.div.Tensor_mode, numbers(2, 3), numbers(3), rounding_mode=None),
    "aten.div.Scalar_mode": lambda: aten(ops.div.Scalar_mode, numbers(2, 3), 0.7, rounding_mode=None),
    "aten.masked_fill.Scalar": lambda: aten(ops.masked_fill.Scalar, numbers(2, 3), numbers(3) > 0, 0.5),
    "aten.masked_fill.Tensor": lambda: aten(ops.masked_fill.Tensor, numbers(2, 3), numbers(3) > 0, numbers()),
    "aten.native_dropout_backward.default": lambda: aten(
        ops.native_dropout_backward.default, numbers(2, 3), numbers(2, 3) > 0, 2.0
    ),
    "aten.where.self": lambda: aten(ops.where.self, numbers(2, 3) > 0, numbers(3), numbers(2, 1)),
    "aten.where.ScalarOther": lambda: aten(ops.where.ScalarOther, numbers(2, 3) > 0, numbers(3), 0.5),
    "aten.where.ScalarSelf": lambda: aten(ops.where.ScalarSelf, numbers(2, 3) > 0, 0.5, numbers(3)),
    "aten.zeros.default": lambda: aten(ops.zeros.default, [2, 3]),
    "aten.ones.default": lambda: aten(ops.ones.default, [2, 3]),
    "aten.full.default": lambda: aten(ops.full.default, [2, 3], 0.5),
    "aten.rand.default": lambda: aten(ops.rand.default, [2, 3]),
    "aten.randn.default": lambda: aten(ops.randn.default, [2, 3]),
    "aten.arange.default": lambda: aten(ops.arange.default, 4),
    "aten.arange.start": lambda: aten(ops.arange.start, 1, 4),
    "aten.arange.start_step": lambda: aten(ops.arange.start_step, 1, 7, 2),
    "aten.full_like.default": lambda: aten(ops.full_like.default, numbers(2, 3), 0.5),
    "aten.new_zeros.default": lambda: aten(ops.new_zeros.default, numbers(2), [2, 3]),
    "aten.new_ones.default": lambda: aten(ops.new_ones.default, numbers(2), [2, 3]),
    "aten.new_full.default": lambda: aten(ops.new_full.default, numbers(2), [2, 3], 0.5),
    "aten.pad.default": lambda: aten(ops.pad.default, _image(4, 4), [1, 2, 0, 1], "reflect"),
    "aten.reflection_pad1d.default": lambda: aten(ops.reflection_pad1d.default, _image(5), [2, 3]),
    "aten.reflection_pad3d.default": lambda: aten(
        ops.reflection_pad3d.default, _image(3, 3, 3), [1, 2, 0, 1, 2, 0]
    ),
    "aten.replication_pad1d.default": lambda: aten(ops.replication_pad1d.default, _image(5), [2, 3]),
    "aten.replication_pad3d.default": lambda: aten(
        ops.replication_pad3d.default, _image(3, 3, 3), [1, 2, 0, 1, 2, 0]
    ),
    "aten.scatter.value": lambda: aten(ops.scatter.value, numbers(4, 5), 1, indices(5, 4, 1), 0.5),
    "aten.scatter_add.default": lambda: aten(
        ops.scatter_add.default, numbers(4, 5), 0, indices(4, 2, 5), numbers(2, 5)
    ),
    "aten.index_add.default": lambda: aten(
        ops.index_add.default, numbers(4, 5), 1, torch.randperm(5)[:3], numbers(4, 3)
    ),
    "aten._unsafe_index.Tensor": lambda: aten(
        ops._unsafe_index.Tensor, numbers(1, 2, 3, 4), [None, None, indices(3, 5, 1), indices(4, 6)]
    ),
    "aten._native_batch_norm_legit.default": lambda: aten(
        ops._native_batch_norm_legit.default, numbers(3, 2, 2), *_norm_vectors(), False, 0.1, 1e-5
    ),
    "aten._native_batch_norm_legit_no_training.default": lambda: aten(
        ops._native_batch_norm_legit_no_training.default, numbers(3, 2, 2), *_norm_vectors(), 0.1, 1e-5
    ),
    "aten.native_batch_norm.default": lambda: aten(
        ops.native_batch_norm.default, numbers(3, 2, 2), numbers(2), numbers(2), None, None, True, 0.1, 1e-5
    ),
    "aten._batch_norm_with_update_functional.default": lambda: aten(
        ops._batch_norm_with_update_functional.default, numbers(3, 2, 2), *_norm_vectors(), 0.1, 1e-5
    ),
    "aten.rms_norm.default": lambda: aten(ops.rms_norm.default, numbers(2, 3, 4), [4], numbers(4), 1e-5),
    "aten.any.dim": lambda: aten(ops.any.dim, numbers(2, 3) > 0.5, 1),
    "aten.all.dim": lambda: aten(ops.all.dim, numbers(2, 3) > -0.5, 1),
    "aten.any.dims": lambda: aten(ops.any.dims, numbers(2, 3, 2) > 0.5, [0, 2]),
    "aten.all.dims": lambda: aten(ops.all.dims, numbers(2, 3, 2) > -0.5, [0, 2]),
    "aten.any.default": lambda: aten(ops.any.default, numbers(2, 2) > 0.5),
    "aten.all.default": lambda: aten(ops.all.default, numbers(2, 2) > -0.5),
    "aten.min.dim": lambda: aten(ops.min.dim, numbers(2, 3), 0, True),
    "aten.argmax.default": lambda: aten(ops.argmax.default, numbers(2, 3), 1),
    "aten.argmin.default": lambda: aten(ops.argmin.default, numbers(2, 3)),
    "aten.prod.dim_int": lambda: aten(ops.prod.dim_int, numbers(2, 3), -1),
    "aten.var.correction": lambda: aten(ops.var.correction, numbers(2, 3, 2), [0, 2], correction=0),
    "aten.std.correction": lambda: aten(ops.std.correction, numbers(2, 3), [1], correction=1, keepdim=True),
    "aten._safe_softmax.default": lambda: aten(ops._safe_softmax.default, numbers(2, 3, 4), 1),
    "aten.softmax.int": lambda: aten(ops.softmax.int, numbers(2, 3, 4), 0),
    "aten.log_softmax.int": lambda: aten(ops.log_softmax.int, numbers(2, 3, 4), -1),
    "aten.cumprod.default": lambda: aten(ops.cumprod.default, numbers(2, 4), 1, disturbances=NUMBERS),
    "aten.logcumsumexp.default": lambda: aten(
        ops.logcumsumexp.default, numbers(2, 4), 1, disturbances=NUMBERS
    ),
    "aten.binary_cross_entropy.default": lambda: aten(
        ops.binary_cross_entropy.default,
        numbers(2, 3).sigmoid(),
        numbers(2, 3).sigmoid(),
        None,
        0,
        disturbances=(0.25, 0.75),
    ),
    "aten.cross_entropy_loss.default": lambda: aten(
        ops.cross_entropy_loss.default, numbers(3, 4), indices(4, 3), None, 0, -100, 0.1
    ),
    "aten.upsample_nearest1d.default": lambda: aten(ops.upsample_nearest1d.default, _image(5), [8], 1.7),
    "aten.upsample_nearest3d.default": lambda: aten(
        ops.upsample_nearest3d.default, _image(2, 3, 2), [3, 4, 5]
    ),
    "aten._upsample_nearest_exact1d.default": lambda: aten(
        ops._upsample_nearest_exact1d.default, _image(5), [8]
    ),
    "aten._upsample_nearest_exact2d.default": lambda: aten(
        ops._upsample_nearest_exact2d.default, _image(3, 4), [5, 2]
    ),
    "aten._upsample_nearest_exact2d.vec": lambda: aten(
        ops._upsample_nearest_exact2d.vec, _image(3, 4), None, [1.5, 2.0]
    ),
    "aten._upsample_nearest_exact3d.default": lambda: aten(
        ops._upsample_nearest_exact3d.default, _image(2, 3, 2), [3, 4, 5]
    ),
    "aten.upsample_linear1d.default": lambda: aten(ops.upsample_linear1d.default, _image(5), [8], False, 1.7),
    "aten.upsample_trilinear3d.default": lambda: aten(
        ops.upsample_trilinear3d.default, _image(2, 3, 2), [3, 4, 5], True
    ),
    "aten.upsample_bicubic2d.default": lambda: aten(
        ops.upsample_bicubic2d.default, _image(5, 6), [8, 4], False
    ),
    "aten.chunk.default": lambda: aten(ops.chunk.default, numbers(5, 3), 2, 0),
    "aten._unsafe_view.default": lambda: aten(ops._unsafe_view.default, numbers(2, 6), [4, 3]),
    "aten.reshape.default": lambda: aten(ops.reshape.default, numbers(2, 6), [3, 4]),
    "aten.unsqueeze.default": lambda: aten(ops.unsqueeze.default, numbers(2, 3), -2),
    "aten.squeeze.default": lambda: aten(ops.squeeze.default, numbers(2, 1, 3, 1)),
    "aten.squeeze.dim": lambda: aten(ops.squeeze.dim, numbers(2, 1, 3), 1),
    "aten.squeeze.dims": lambda: aten(ops.squeeze.dims, numbers(2, 1, 3, 1), [1, 3]),
    "aten._reshape_alias.default": lambda: aten(ops._reshape_alias.default, numbers(2, 6), [3, 4], [4, 1]),
    "aten.flatten.using_ints": lambda: aten(ops.flatten.using_ints, numbers(2, 3, 4), 1, 2),
    "aten.unflatten.int": lambda: aten(ops.unflatten.int, numbers(2, 6), 1, [2, 3]),
    "aten.expand_as.default": lambda: aten(ops.expand_as.default, numbers(3, 1), numbers(2, 3, 4)),
    "aten.broadcast_to.default": lambda: aten(ops.broadcast_to.default, numbers(3, 1), [2, 3, 4]),
    "aten.max_pool2d.default": lambda: aten(ops.max_pool2d.default, _image(5, 5), [3, 2], [2, 1], [1, 0]),
    "aten.adaptive_avg_pool1d.default": lambda: aten(ops.adaptive_avg_pool1d.default, _image(5), [3]),
    "aten.adaptive_avg_pool2d.default": lambda: aten(ops.adaptive_avg_pool2d.default, _image(4, 5), [3, 2]),
    "aten.adaptive_avg_pool3d.default": lambda: aten(
        ops.adaptive_avg_pool3d.default, _image(3, 4, 3), [2, 3, 1]
    ),
    "aten.adaptive_max_pool3d.default": lambda: aten(
        ops.adaptive_max_pool3d.default, _image(3, 4, 3), [2, 3, 1]
    ),
}
