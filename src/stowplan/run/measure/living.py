"""Living storages: a set of storages that forgets each as soon as it is freed."""

import weakref
from collections.abc import Iterable

from torch import Tensor, UntypedStorage

from stowplan.capture.stand_ins import bytes_read
from stowplan.torch_private import storage_id


class LivingStorages:
    """Keeps none of its members alive."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}  # by address
        self._watched: dict[int, weakref.ref[UntypedStorage]] = {}
        self.nbytes = 0  # of all members

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Add the storages of these tensors."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._enter(storage, storage.nbytes())

    def add_read(self, tensors: Iterable[Tensor]) -> None:
        """Add the storages of tensors that are there before a step, with the bytes that these read."""
        standing = list(tensors)
        read = bytes_read(standing)
        for storage in (tensor.untyped_storage() for tensor in standing):
            self._enter(storage, read[storage_id(storage)])

    def _enter(self, storage: UntypedStorage, nbytes: int) -> None:
        address = storage_id(storage)
        if address in self._bytes:
            return
        self._bytes[address] = nbytes
        self.nbytes += nbytes
        self._watched[address] = weakref.ref(storage, lambda _: self._forget(address))

    def _forget(self, address: int) -> None:
        self.nbytes -= self._bytes.pop(address)
        del self._watched[address]

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_id(tensor.untyped_storage()) in self._bytes

    def bytes_among(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the members that these tensors are in."""
        return sum(
            self._bytes.get(address, 0) for address in {storage_id(t.untyped_storage()) for t in tensors}
        )
