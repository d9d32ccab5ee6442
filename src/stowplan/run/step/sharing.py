"""Sharing: which tensors of a call are in one storage, and how large their storages are.

A step captured for `model(x, x)` is not that of `model(x, y)`, and a slice holds all that it is a slice of.
"""

from collections.abc import Iterable

from torch import Tensor

from stowplan.torch_private import storage_id

Place = tuple[int, int, int]  # the first tensor in the same storage, bytes of it, bytes from that tensor on


def sharing_of(tensors: Iterable[Tensor]) -> tuple[Place, ...]:
    """The place of each tensor. Equal for calls whose tensors lie in storages in the same way."""
    first: dict[int, tuple[int, int]] = {}
    places = []
    for number, tensor in enumerate(tensors):
        storage, begin = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.element_size()
        owner, owner_begin = first.setdefault(storage_id(storage), (number, begin))
        places.append((owner, storage.nbytes(), begin - owner_begin))
    return tuple(places)
