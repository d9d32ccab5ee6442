"""A step that fits the budget as it is: planned without timing its ops.

Such a plan recomputes nothing, so seconds decide nothing, and a roofline states them. Memory decides whether
the step fits: the workspace of each op is probed, except for kernels that are known to have none.
"""

from dataclasses import replace

import torch

from stowplan.capture.stand_ins import contiguous_stride
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine
from stowplan.plan.select import problem_in_order
from stowplan.run.cost.probe import Operand, Signature, probe_memory
from stowplan.run.planning.planner import DraftedStep, Subject, draft_within, takes_longer

aten = torch.ops.aten

_SCALARS_BYTES = 64  # numbers among the arguments become tensors without dims
# One loop over operands of one dtype, whatever their strides.
_POINTWISE = (
    aten.add.Tensor,
    aten.clone.default,
    aten.div.Scalar,
    aten.div.Tensor,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.relu.default,
    aten.sigmoid.default,
    aten.sigmoid_backward.default,
    aten.silu.default,
    aten.silu_backward.default,
    aten.sub.Tensor,
    aten.tanh.default,
    aten.tanh_backward.default,
    aten.threshold_backward.default,
)
# Products of matrices that lie in memory by rows or by columns, as BLAS takes them.
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
# Kernels that read contiguous operands where they are.
_ON_CONTIGUOUS = (
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten.embedding.default,
    aten.embedding_dense_backward.default,
    aten.nll_loss_backward.default,
)
KNOWN = frozenset((*_POINTWISE, *_PRODUCTS, *_ON_CONTIGUOUS))
_FLOATS = (torch.float32, torch.float64)


def plan_unprobed(subject: Subject, allowed_bytes: int, options: PlanOptions) -> DraftedStep | None:
    """The step with a plan that keeps everything; None if that does not fit, or if all costs are known."""
    captured = subject.captured
    may_be = not subject.replacements and not options.offloads and options.prefer == "exactness"
    if not may_be or options.execution.is_compiled or takes_longer(captured):
        return None
    workspaces = probe_memory(captured, known_workspace)
    if workspaces is None:
        return None
    pricing = replace(price_by_roofline(captured.graph, Machine()), workspace_bytes=workspaces)
    peak = captured.eager.peak_bytes(workspaces)
    planner = Planner.unsearched(problem_in_order(captured.graph, pricing), pricing, peak)
    if max(peak, planner.minimum_bytes) > allowed_bytes:
        return None
    return DraftedStep(draft_within(planner, allowed_bytes), captured)


def known_workspace(signature: Signature) -> int | None:
    """The bytes that the kernel of a call takes beside operands and results, where they are known."""
    target = signature.call.target
    operands = [operand for operand in signature.operands if operand.shape]
    if signature.call.copied or any(operand.device.type != "cpu" for operand in signature.operands):
        return None
    dtypes = {operand.dtype for operand in operands if operand.dtype is not torch.int64}
    if len(dtypes) != 1 or not dtypes.issubset(_FLOATS):
        return None
    if target in _POINTWISE:
        return _SCALARS_BYTES if all(operand.dtype in _FLOATS for operand in operands) else None
    if target in _PRODUCTS:
        return _SCALARS_BYTES if all(map(_is_by_rows_or_columns, operands)) else None
    if target in _ON_CONTIGUOUS:
        return _SCALARS_BYTES if all(map(_is_contiguous, operands)) else None
    return None


def _is_contiguous(operand: Operand) -> bool:
    return operand.stride == contiguous_stride(operand.shape)


def _is_by_rows_or_columns(operand: Operand) -> bool:
    if _is_contiguous(operand):
        return True
    *batch, rows, columns = operand.shape if len(operand.shape) > 1 else (1, *operand.shape)
    *outer, row, column = operand.stride if len(operand.shape) > 1 else (0, *operand.stride)
    return (*outer, column, row) == contiguous_stride((*batch, columns, rows))
