"""The budget "auto": the device's free bytes less a margin, plus the bytes of the step that exist already."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stowplan.run.cost.machine import free_bytes
from stowplan.torch_private import pytree

MARGIN = 0.1
"""The share of free memory that is left alone: for fragmentation, and for whoever else comes."""


def automatic_budget(model: nn.Module, args: object) -> int:
    """Bytes on the model's device. Parameters and inputs count towards a budget, and are there already."""
    inputs = (leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))
    tensors = [*model.parameters(), *model.buffers(), *inputs]
    device = tensors[0].device if tensors else torch.device("cpu")
    there = _bytes_of(tensor for tensor in tensors if tensor.device == device)
    return int(free_bytes(device) * (1 - MARGIN)) + there


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
