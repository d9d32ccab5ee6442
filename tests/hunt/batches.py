"""Batches: what a drawn network is called with, in many layouts, and held in many kinds of object."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .networks import Network, Sizes

Arguments: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
LAYOUTS = ("contiguous", "channels_last", "transposed", "expanded", "sliced")
ALIASES = ("own", "same", "view")
WORDS = 7  # the ids that `idx` holds are below


class Fields(NamedTuple):
    """A batch as a named tuple."""

    x: Tensor
    z: Tensor
    idx: Tensor


@dataclass(slots=True)
class Record:
    """A batch as an object that is filled anew for each step."""

    x: Tensor
    z: Tensor
    idx: Tensor


@dataclass(frozen=True, slots=True)
class Feed:
    """How batches are laid out: `alias` says whether z has a storage of its own, or is x, or a view of it."""

    layout: str
    alias: str
    wants_gradient: bool

    def batch(self, network: Network, seed: int, rows: int) -> Fields:
        """A batch of so many rows, the same for the same seed."""
        source = torch.Generator().manual_seed(seed)
        x = _laid_out(self.layout, network.sizes, rows, source, network.dtype)
        x.requires_grad_(self.wants_gradient)
        z = x if self.alias != "own" else torch.randn(x.shape, generator=source, dtype=network.dtype)
        idx = torch.randint(0, WORDS, (rows,), generator=source) % network.sizes.height
        return Fields(x, z[:] if self.alias == "view" else z, idx)


def draw_feed(random: Random) -> Feed:
    return Feed(
        random.choice(("contiguous", "contiguous", "contiguous", *LAYOUTS)),
        random.choice(("own", "own", "own", *ALIASES)),
        random.random() < 0.3,
    )


def _laid_out(layout: str, sizes: Sizes, rows: int, source: torch.Generator, dtype: torch.dtype) -> Tensor:
    channels, height = sizes.channels, sizes.height

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=dtype)

    if layout == "channels_last":
        return drawn(rows, channels, height, height).to(memory_format=torch.channels_last)
    if layout == "transposed":
        return drawn(rows, height, channels, height).transpose(1, 2)
    if layout == "expanded":
        return drawn(1, channels, height, height).expand(rows, -1, -1, -1)
    if layout == "sliced":
        return drawn(rows, channels, height + 3, 2 * height)[:, :, 2 : 2 + height, ::2]
    return drawn(rows, channels, height, height)


class Caller:
    """Puts batches into a call. Objects that can be refilled are, as a loop with one batch object does."""

    def __init__(self, signature: str) -> None:
        self._signature = signature
        self._dict: dict[str, Tensor] = {}
        self._record: Record | None = None

    def arguments(self, batch: Fields, flag: object = 1) -> Arguments:
        if self._signature == "tensors":
            return (*batch, flag), {}
        if self._signature == "keywords":
            return (), {**batch._asdict(), "flag": flag}
        return (self._held(batch), flag), {}

    def contents(self) -> Iterator[tuple[str, object]]:
        """What the object of the last call holds now: forward may have written into it."""
        yield from self._dict.items()
        if self._record is not None:
            yield from ((name, getattr(self._record, name)) for name in Fields._fields)

    def _held(self, batch: Fields) -> object:
        if self._signature == "dict":
            self._dict.update(batch._asdict())
            return self._dict
        if self._signature == "record":
            self._record = self._record or Record(*batch)
            self._record.x, self._record.z, self._record.idx = batch
            return self._record
        return batch


def tensors_of(output: object) -> Iterator[Tensor]:
    """The tensors of an output, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from tensors_of(part)
    elif isinstance(output, tuple | list):
        for part in output:
            yield from tensors_of(part)


def loss_of(output: object, kind: str) -> Tensor:
    """The scalar that a loop differentiates."""
    parts = list(tensors_of(output))
    if kind in ("pair", "heads"):
        return parts[0] + 2 * parts[1]
    if kind == "complex":
        return parts[0].abs().square().sum()
    if kind == "tensor":
        weights = torch.linspace(-1, 1, parts[0].numel(), dtype=parts[0].dtype)
        return (parts[0] * weights.view(parts[0].shape)).sum()
    return parts[0]
