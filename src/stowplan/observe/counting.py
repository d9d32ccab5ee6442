"""The bytes of all tensors of a process: exact while every op is followed, and by Python's objects later."""

import time

from torch import Tensor, UntypedStorage, nn

from stowplan.observe.blocks import BEFORE, BlockOrigin
from stowplan.observe.memory import ObservedMemory
from stowplan.run.instances import instances_of
from stowplan.torch_private import storage_id

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_SHARE_OF_TIME = 0.01  # for looking at all objects


class TensorBytes:
    """What is alive on one type of device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._memory = ObservedMemory(self)
        self._memory.blocks.keeps = False
        self._looked_at = self._look_seconds = 0.0
        self.is_followed = False

    def follow(self) -> None:
        """See every op of this thread from now on."""
        for tensor in instances_of(_PLAIN):
            self._memory.note(tensor)
        self._memory.start(self._device)
        self.is_followed = True
        self.most_since()

    def stop(self) -> None:
        """See no more ops."""
        if self.is_followed:
            self.is_followed = False
            self._memory.stop()
            self._memory.forget()

    @property
    def has_left(self) -> bool:
        """Whether ops pass no mode of ours; below another mode ours cannot be taken away."""
        self._memory.stop() if not self.is_followed else None
        return not self._memory.is_entered

    def most_since(self) -> int:
        """The most at once since the last call of this; zero if ops are not followed."""
        blocks = self._memory.blocks
        most, blocks.most_bytes = blocks.most_bytes, blocks.alive_bytes
        return most if self.is_followed else 0

    def is_time(self) -> bool:
        """Whether to ask what is alive: all objects are looked at then, unless ops are followed."""
        since = time.perf_counter() - self._looked_at
        return self.is_followed or since > self._look_seconds / _SHARE_OF_TIME

    def alive(self) -> int:
        """The bytes that are alive now."""
        if self.is_followed:
            return self._memory.blocks.alive_bytes
        begun = time.perf_counter()
        found = bytes_of(instances_of(_PLAIN), self._device)
        self._looked_at = time.perf_counter()
        self._look_seconds = self._looked_at - begun
        return found

    # What `ObservedMemory` asks and tells: nobody wants to know here.

    def origin(self) -> BlockOrigin:
        """Nowhere."""
        return BEFORE

    def node_origin(self, number: int) -> BlockOrigin | None:  # noqa: ARG002
        """Nowhere."""
        return None

    def note_nodes(self, since: int, until: int, origin: BlockOrigin) -> None:
        """Nothing to note."""

    def grows(self) -> None:
        """Nothing to write."""

    def fails(self, error: BaseException, op: str) -> None:
        """Nothing to write."""


def bytes_of(tensors: "list[Tensor] | tuple[Tensor, ...]", device: str) -> int:
    """Of their storages on a type of device, each once."""
    return sum(storage.nbytes() for storage in storages_of(tensors, device).values())


def storages_of(tensors: "list[Tensor] | tuple[Tensor, ...]", device: str) -> dict[int, UntypedStorage]:
    """Their storages by number, without those of subclasses, sparse tensors and the like."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        if type(tensor) in _PLAIN and tensor.device.type == device:
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            found[storage_id(storage)] = storage
    return found
