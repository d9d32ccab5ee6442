"""Which ops can be part of a compiled kernel, and the size of the loop that each runs."""

from collections.abc import Container
from math import prod

from stowplan.ir import Graph, Op, Phase
from stowplan.ops import aten
from stowplan.ops.effects import Effect, effect_of
from stowplan.ops.table import site_of

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"

POINTWISE = frozenset((*aten.POINTWISE, *aten.POINTWISE_FIRST)) | {
    f"aten.{name}"
    for name in (
        *("eq.Scalar", "eq.Tensor", "ge.Scalar", "ge.Tensor", "gt.Scalar", "gt.Tensor", "le.Scalar"),
        *("le.Tensor", "lt.Scalar", "lt.Tensor", "ne.Scalar", "ne.Tensor", "rsub.Scalar", "rsub.Tensor"),
        *("bitwise_and.Tensor", "bitwise_not.default", "bitwise_or.Tensor", "where.ScalarSelf"),
        *("clone.default", "_to_copy.default", "hardswish_backward.default", "mish_backward.default"),
        *("native_dropout_backward.default", "log_sigmoid_backward.default"),
    )
}
"""Each element of an output needs that element of the inputs alone, so a second run is cheap."""

_OTHERS = frozenset(
    f"aten.{name}"
    for name in (
        *("_softmax.default", "_log_softmax.default", "_softmax_backward_data.default"),
        *("_log_softmax_backward_data.default", "_safe_softmax.default"),
        *("native_layer_norm.default", "native_layer_norm_backward.default"),
        *("native_group_norm.default", "native_group_norm_backward.default"),
        *(BATCH_NORM.removeprefix("aten."), "native_batch_norm_backward.default"),
        *("sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "amax.default", "amin.default"),
        *("var_mean.correction", "var.correction", "logsumexp.default"),
        *("nll_loss_forward.default", "nll_loss_backward.default"),
        *("nll_loss2d_forward.default", "nll_loss2d_backward.default"),
        *("mse_loss.default", "mse_loss_backward.default", "smooth_l1_loss.default"),
        *("smooth_l1_loss_backward.default", "binary_cross_entropy_with_logits.default"),
    )
)
FUSIBLE = POINTWISE | _OTHERS

SINGLES = frozenset(
    f"aten.{name}"
    for name in (
        *("_log_softmax.default", "_log_softmax_backward_data.default"),
        *("native_layer_norm.default", "native_layer_norm_backward.default"),
        *("native_group_norm.default", "native_group_norm_backward.default"),
        *(BATCH_NORM.removeprefix("aten."), "native_batch_norm_backward.default"),
    )
)
"""Ops that may be worth a kernel of their own: eager computes them in several passes."""
_HALVES = (Phase.FORWARD, Phase.BACKWARD)


def is_view(graph: Graph, op: Op) -> bool:
    """Whether the op only looks at a storage in another way, and may do so again."""
    aliases = all(graph.tensors[name].alias_of is not None for name in op.writes())
    return op.type in aten.VIEWS and aliases and op.phase in _HALVES


def is_fusible(graph: Graph, op: Op, updated: Container[str]) -> bool:
    """Whether a kernel can have the op: it makes tensors of its own and does nothing else.

    It reads no buffer that is `updated` in the step, but for statistics that nothing else depends on.
    """
    if op.type not in FUSIBLE or op.phase not in _HALVES or op.device != "cpu":
        return False
    if op.type != BATCH_NORM and any(graph.storage_of(name) in updated for name in op.reads()):
        return False
    own = all(graph.tensors[name].alias_of is None for name in op.writes())
    return own and not op.attributes.get("swayed") and effect_of(site_of(graph, op)) is Effect.NONE


def domain_of(graph: Graph, op: Op) -> int:
    """The elements that the op's loop runs over: those of its largest tensor."""
    return max((prod(graph.tensors[use.tensor].shape or ()) for use in (*op.inputs, *op.outputs)), default=0)
