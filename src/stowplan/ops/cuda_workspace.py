"""Workspace of kernels on a CUDA device in addition to operands and results, as PyTorch 2.13 allocates it.

Only ops with large workspace have a rule. What cuDNN takes for a convolution depends on the algorithm that it
chooses on the card: it has no rule here, and counts as nothing.
"""

from stowplan.ir import DType
from stowplan.ops.table import Site, Table, elements_of, shape_of
from stowplan.ops.workspace import no_workspace

_FLOAT = 4
_FLASH_ROWS, _FLASH_FEATURES = 128, 32  # to which flash attention rounds up queries and features
_INDEX = 8
_WARP = 32

cuda_workspace_of: Table[int] = Table("workspace on a CUDA device", default=no_workspace)


@cuda_workspace_of.entry("aten._scaled_dot_product_flash_attention_backward.default")
def flash_attention_adjoint(site: Site) -> int:
    """The queries' gradient and a factor for each row in float32; keys and values that heads share, apart."""
    _, query, key, value, *_ = site.inputs
    batch, heads, rows, features = shape_of(query)
    rows = _up(rows, _FLASH_ROWS)
    sums = batch * heads * rows * (_up(features, _FLASH_FEATURES) + 1) * _FLOAT
    shared = heads // shape_of(key)[1]
    apart = shared * sum(t.nbytes or 0 for t in (key, value)) if shared > 1 else 0
    return sums + apart


@cuda_workspace_of.entry("aten._scaled_dot_product_efficient_attention_backward.default")
def efficient_attention_adjoint(site: Site) -> int:
    """A factor for each row in float32, and the queries' gradient if its own dtype is narrower."""
    query = site.inputs[1]
    rows = elements_of(query) // shape_of(query)[-1]
    is_narrow = query.dtype in (DType.FLOAT16, DType.BFLOAT16)
    return (rows + (elements_of(query) if is_narrow else 0)) * _FLOAT


@cuda_workspace_of.entry("aten.embedding_dense_backward.default")
def embedding_adjoint(site: Site) -> int:
    """Indices sorted with their places, and at most one partial sum in float32 for each of them."""
    gradient, indices = site.inputs[:2]
    partial = elements_of(indices) * _up(shape_of(gradient)[-1], _WARP) * _FLOAT
    return partial + 4 * elements_of(indices) * _INDEX


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
