"""Halves: generated source as two functions, ready to be called, with the tier that they store tensors in.

A traceback shows the generated line that an error came from, and a note on the error the module.
"""

import linecache
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor

from stowplan.capture.schema import as_in_forward
from stowplan.plan.pricing import Tier
from stowplan.plan.technique import Socket
from stowplan.run.step.source import Source
from stowplan.torch_private import below_autograd


class Away(Protocol):
    """One storage that was given to a tier, under all the names it had."""

    def wait(self) -> None:
        """Return when the last transfer begun is done; raises TierFailed if it could not be."""

    def load(self) -> tuple[Tensor, ...]:
        """Begin to read it back; the tensors are there at once, their contents after `wait`."""


class LiveTier(Protocol):
    """A tier as generated code sees it."""

    def store(self, *tensors: Tensor) -> Away:
        """Begin to write the storage that all of `tensors` are in."""

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make room for storages of these bytes before a step needs it; raises TierFull."""

    def described(self) -> Tier:
        """The tier as a planner sees it, with rates that were measured."""


TIERS: Socket[Callable[[torch.device], LiveTier]] = Socket("run", "offload")
"""Which tier a device's tensors go to."""

DISKS: Socket[Callable[[], tuple[str, Tier]]] = Socket("run", "offload")
"""The folder of spill files and its disk as a tier."""


def tier_for(device: torch.device) -> LiveTier:
    """The tier for a device, one for all steps of the process."""
    return TIERS.of("offload")(device)


Forward: TypeAlias = Callable[[Sequence[Tensor]], tuple[tuple[Tensor, ...], list[Tensor]]]
Backward: TypeAlias = Callable[
    [Sequence[Tensor], list[Tensor], list[Tensor], list[Tensor]], Generator[None, None, None]
]

_numbers = count()  # of the steps compiled in this process


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Halves:
    """The functions that `source` defines."""

    source: Source
    forward: Forward
    backward: Backward


def compiled(
    source: Source, tier: LiveTier | None = None, new_arena: Callable[[], object] | None = None
) -> Halves:
    """Run the text that defines the two functions. It is generated here, from ops of PyTorch and a tier."""
    scope: dict[str, object] = {"torch": torch, "ops": torch.ops, "aten": torch.ops.aten, "tier": tier}
    scope |= {"as_in_forward": as_in_forward, "new_arena": new_arena}
    file = f"<stowplan step {next(_numbers)}>"
    code = compile(source.text, file, "exec")
    exec(code, scope)  # noqa: S102 -- the text is stowplan's own, made from op names, literals and its own counters
    forward, backward = cast(Forward, scope["forward"]), cast(Backward, scope["backward"])
    places = _Places(file, source)

    def run_forward(primals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """As kernels run in eager: some ask whether gradients are enabled, but none records anything."""
        with places.noted(), below_autograd(), torch.enable_grad():
            return forward(primals)

    def run_backward(
        primals: Sequence[Tensor], saved: list[Tensor], tangents: list[Tensor], handed: list[Tensor]
    ) -> Generator[None, None, None]:
        kinds = {each.device.type for each in (*primals, *tangents)}
        pieces = backward(primals, saved, tangents, handed)
        del primals, saved, tangents
        for _ in source.pieces:
            with places.noted(), _casting_nothing(kinds):
                next(pieces)
            yield

    halves = Halves(source, run_forward, run_backward)
    weakref.finalize(halves, linecache.cache.pop, file, None).atexit = False
    return halves


@contextmanager
def _casting_nothing(kinds: Iterable[str]) -> Iterator[None]:
    """The ops have the casts of forward in them: autocast around backward must add none."""
    with ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _Places:
    """Where the lines of a compiled text came from."""

    def __init__(self, file: str, source: Source) -> None:
        self._file, self._places = file, source.places
        linecache.cache[file] = len(source.text), None, source.text.splitlines(keepends=True), file

    @contextmanager
    def noted(self) -> Iterator[None]:
        """An error that comes from the text says which module's op was running."""
        try:
            yield
        except BaseException as fault:
            place = self._places.get(self._line(fault.__traceback__), "")
            if place:
                fault.add_note(f"In the planned step: {ascii(place)[1:-1]}")
            raise

    def _line(self, trace: TracebackType | None) -> int:
        found = 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file:
                found = trace.tb_lineno
            trace = trace.tb_next
        return found
