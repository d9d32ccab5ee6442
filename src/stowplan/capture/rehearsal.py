"""A rehearsal: ops run on stand-ins, which have no data, or for real where the data is known anyway."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from stowplan.capture.layouts import as_made
from stowplan.capture.schema import leaves, returns_tensors, written_arguments
from stowplan.errors import CaptureError

_KNOWN_ELEMENTS = 1 << 16


class KnownOverwritten(Exception):
    """A tensor whose values were known took values that are not: rehearse again, knowing nothing."""


class Rehearsal:
    """Runs ops. With `knowing`, small integer tensors that depend on no stand-in are computed for real.

    Those are positions and masks of positions, and models that look at them decide as they do in eager.
    """

    def __init__(self, fakes: FakeTensorMode, *, knowing: bool) -> None:
        self._fakes, self._knowing = fakes, knowing

    def run(self, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """The result of an op, without data unless it is known."""
        if self._is_known(target, args, kwargs):
            return target(*args, **kwargs)
        self._refuse_writing_data(target, args, kwargs)
        with self._fakes:
            return as_made(target, args, kwargs, target(*args, **kwargs))

    def _is_known(self, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        if not self._knowing or torch.Tag.nondeterministic_seeded in target.tags:
            return False
        if not all(map(_is_small_integer, _tensors_in((args, tuple(kwargs.values()))))):
            return False
        if not returns_tensors(target):
            return True
        with self._fakes:
            foreseen = target(*args, **kwargs)
        return all(map(_is_integer_of_size, _tensors_in(foreseen)))

    def _refuse_writing_data(
        self, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        for tensor in _tensors_in(tuple(written_arguments(target, args, kwargs).values())):
            if isinstance(tensor, FakeTensor):
                continue
            if self._knowing:
                raise KnownOverwritten
            raise CaptureError(
                f"{target} writes into a tensor of shape {tuple(tensor.shape)} that is no buffer",
                advice="make it one with register_buffer",
            )


def _tensors_in(value: object) -> Iterable[Tensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def _is_small_integer(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and _is_integer_of_size(tensor)


def _is_integer_of_size(tensor: Tensor) -> bool:
    inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return not inexact and tensor.numel() <= _KNOWN_ELEMENTS
