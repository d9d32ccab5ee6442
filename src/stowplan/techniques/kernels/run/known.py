"""What is known on this machine of kernels that were compiled before: whether each may run, and its bits.

There is a small file for each kernel, build of PyTorch, number of threads and place of inductor's cache. A
kernel that is known is neither compiled by a child nor compared a second time. Without the files all is done
again.
"""

import os
from hashlib import sha256
from pathlib import Path

import msgspec
import torch

from stowplan.run.cost.machine import platform_of, replace_file, user_folder


class KernelVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a compiled kernel may not run, or, if it may, whether it gives the bits of its ops."""

    fault: str
    is_exact: bool


def read_finding(kernel: str) -> KernelVerdict | None:
    """What is known of the kernel by this name."""
    try:
        return msgspec.json.decode(_path(kernel).read_bytes(), type=KernelVerdict)
    except (OSError, msgspec.MsgspecError):
        return None


def write_finding(kernel: str, finding: KernelVerdict) -> None:
    """Keep it. Where nothing can be written, nothing is."""
    try:
        replace_file(_path(kernel), msgspec.json.encode(finding))
    except OSError:
        return


def _path(kernel: str) -> Path:
    place = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    parts = (kernel, repr(platform_of(torch.device("cpu"))), place)
    return user_folder("kernels") / f"{sha256(repr(parts).encode()).hexdigest()[:24]}.json"
