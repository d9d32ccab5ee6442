"""HostTier: an accelerator's storages wait in pinned memory of the host, copied by streams of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stowplan.errors import BadUse
from stowplan.plan.pricing import Tier
from stowplan.run.cost.machine import free_bytes, least_seconds, release_free_memory, room_for
from stowplan.techniques.offload.run.live import Look, bytes_of

_MOVED_BYTES = 2**26
_SHARE = 0.5  # of the host's free memory: pinned pages cannot be swapped out


class HostTier:
    """Transfers wait for the ops before them, and ops only for the transfers that the plan names."""

    def __init__(self, device: torch.device | None = None) -> None:
        usable = torch.accelerator.is_available()  # a backend may be registered whose device is not here
        found = device or (torch.accelerator.current_accelerator() if usable else None)
        if found is None or found.type == "cpu":
            raise BadUse(
                "the host tier moves an accelerator's tensors to the host's memory, and here is none:"
                " on a CPU both are the same memory; use the disk tier"
            )
        self.device = found
        self.out, self.back = torch.Stream(device=found), torch.Stream(device=found)
        self._pinned: dict[int, list[Tensor]] = {}  # free buffers by size
        self._beside: dict[torch.device, HostTier] = {}  # of the other devices of a step

    def described(self) -> Tier:
        """Rates are measured anew, for it takes milliseconds."""
        nbytes = room_for(_MOVED_BYTES, self.device)
        out, back = self._seconds(nbytes)
        release_free_memory(self.device)
        capacity = int(_SHARE * free_bytes(torch.device("cpu")))
        return Tier("host", capacity, nbytes / out, nbytes / back)

    def _seconds(self, nbytes: int) -> tuple[float, float]:
        """Of a copy out and of one back."""
        data = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        pinned = self.take(nbytes)
        out = least_seconds(lambda: pinned.copy_(data, non_blocking=True), self.device, repeats=5)
        back = least_seconds(lambda: data.copy_(pinned, non_blocking=True), self.device, repeats=5)
        self.give_back(pinned)
        return out, back

    def reserve(self, sizes: Sequence[int]) -> None:
        """Pin the memory that a step will need."""
        for buffer in [self.take(nbytes) for nbytes in sizes]:
            self.give_back(buffer)

    def take(self, nbytes: int) -> Tensor:
        """A pinned buffer, if possible one that was used before."""
        free = self._pinned.get(nbytes)
        return free.pop() if free else torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def give_back(self, buffer: Tensor) -> None:
        """Keep a buffer for the next storage of its size."""
        self._pinned.setdefault(buffer.nbytes, []).append(buffer)

    def store(self, *tensors: Tensor) -> "HostAway":
        """Begin to copy the storage of `tensors` out, by streams of the device that they are on."""
        there = tensors[0].device
        if there.index == (self.device.index or 0):
            return HostAway(self, tensors)
        if there not in self._beside:
            self._beside[there] = HostTier(there)
        return HostAway(self._beside[there], tensors)


class HostAway:
    """One storage in pinned memory, or on its way there or back."""

    def __init__(self, tier: HostTier, tensors: tuple[Tensor, ...]) -> None:
        storage = tensors[0].untyped_storage()
        self._tier, self._looks = tier, tuple(map(Look.of, tensors))
        self._buffer = tier.take(storage.nbytes())
        self._begin(self._tier.out, self._buffer, bytes_of(storage))

    def __del__(self) -> None:
        """If the step ended early, nobody waited: what comes next must not use memory in transfer."""
        if not self._is_waited_for:
            self.wait()
        self._tier.give_back(self._buffer)

    def wait(self) -> None:
        """Let the ops that follow wait; the host goes on."""
        torch.accelerator.current_stream(self._tier.device).wait_event(self._done)
        self._is_waited_for = True

    def load(self) -> tuple[Tensor, ...]:
        """Begin to copy it back into memory of its own."""
        self._tier.back.wait_event(self._done)
        target = torch.empty(self._buffer.nbytes, dtype=torch.uint8, device=self._tier.device)
        self._begin(self._tier.back, target, self._buffer)
        return tuple(look.on(target.untyped_storage()) for look in self._looks)

    def _begin(self, stream: torch.Stream, target: Tensor, source: Tensor) -> None:
        """Copy on `stream`, after all ops that were launched before."""
        self._done = self._copy(stream, target, source)
        self._is_waited_for = False

    def _copy(self, stream: torch.Stream, target: Tensor, source: Tensor) -> torch.Event:
        stream.wait_event(torch.accelerator.current_stream(self._tier.device).record_event())
        with stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()
