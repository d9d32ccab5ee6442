"""Steps for meshes of thousands of workers, described and never allocated.

    stowplan simulate benchmarks.shards.large:unet --mesh space=64x64
    stowplan simulate benchmarks.shards.large:gpt --mesh data=64,sequence=64
    stowplan simulate benchmarks.shards.large:llama --mesh data=256,sequence=8,model=8 --parameters shard

All tell how long the projection itself took, and its memory.
"""

from typing import Any

from torch import Tensor, nn

from tests.support.nets import NETS

Target = tuple[nn.Module, tuple[Tensor, ...]]


def unet() -> Target:
    """A U-Net on one image of 4108x4108."""
    model, args = NETS["unet"].build("real", device="meta", resolution=4108)
    return model, args


def gpt() -> Target:
    """GPT-2 small on 64 texts of 1,024 tokens."""
    model, args = NETS["gpt"].build("real", device="meta", batch=64, sequence=1024)
    return model, args


def llama() -> Target:
    """A model of the size of Llama-3-8B on 256 texts of 8,192 tokens."""
    sizes: dict[str, Any] = {
        "vocabulary": 128256,
        "dim": 4096,
        "layers": 32,
        "heads": 32,
        "groups": 8,
        "hidden": 14336,
    }
    model, args = NETS["llama"].build("real", device="meta", batch=256, sequence=8192, **sizes)
    return model, args
