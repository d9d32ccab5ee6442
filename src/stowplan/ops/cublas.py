"""cuBLAS workspaces: memory that a CUDA device keeps from its first product of matrices on.

PyTorch gives each cuBLAS handle a workspace of its own allocator, once, and keeps it to the end of the
process. A thread has a handle for each device, and forward and backward run in two threads: so a training
step comes with two workspaces, beside all of its tensors. cublasLt works in the same two. No probe of an op
shows them, because they are there from the first probe on.
"""

import os
import re
from collections.abc import Iterable, Mapping

from stowplan.ir import Op

_THREADS = 2  # that of forward and that of backward
_KIB = 1024
_DEFAULT = ":4096:2:16:8"  # of PyTorch: SIZE:COUNT of buffers, in KiB
_SINCE_HOPPER = ":4096:8"
_HOPPER = 9.0
_NAMES = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_scaled_mm", "_int_mm")
_PRODUCTS = tuple(f"aten.{name}." for name in _NAMES)


def cublas_workspaces(
    ops: Iterable[Op], capability: float, environment: Mapping[str, str] = os.environ
) -> tuple[int, ...]:
    """Bytes of the workspaces on the device of these ops; none if they multiply no matrices."""
    multiplies = any(map(is_product, ops))
    return (workspace_bytes(capability, environment),) * _THREADS if multiplies else ()


def is_product(op: Op) -> bool:
    """Whether cuBLAS computes the op."""
    return op.type.startswith(_PRODUCTS)


def workspace_bytes(capability: float, environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of one workspace: as CUBLAS_WORKSPACE_CONFIG says, or what PyTorch takes for the capability."""
    default = _SINCE_HOPPER if capability >= _HOPPER else _DEFAULT
    return _read(environment.get("CUBLAS_WORKSPACE_CONFIG", ""), _read(default, 0))


def _read(config: str, otherwise: int) -> int:
    """Bytes of `:SIZE:COUNT...` in KiB; PyTorch ignores a text without such a pair."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    return sum(int(size) * int(count) for size, count in pairs) * _KIB if pairs else otherwise
