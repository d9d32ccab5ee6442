"""Before: the buffers that a step changes, as they were, to put back if the step fails."""

from collections.abc import Iterable
from types import TracebackType

from torch import Tensor

from stowplan.torch_private import version_of


class Before:
    """Entered for the forward half and again for the backward half of a step.

    What someone else has changed between the two is left as it is.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._kept = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._versions: list[int | None] | None = None  # of the buffers after the forward half

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = [version_of(buffer) for buffer, _ in self._kept]
        if fault is None:
            self._versions = now
            return
        for (buffer, kept), version, expected in zip(self._kept, now, self._versions or now, strict=True):
            if version == expected:
                buffer.copy_(kept)
