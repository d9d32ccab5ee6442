"""What workers say to each other as ops of PyTorch, so that a worker's step is captured and planned like any.

A token goes through all of them, forward and backward: it puts every worker's messages in the same order, and
makes sure that a worker whose results nobody uses still takes part in what comes back. An op is given the key
of a collective, which the step that it belongs to holds.
"""

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from stowplan.capture import Handle
from stowplan.capture.program import handle_of
from stowplan.run.shards.bucket import Bucket
from stowplan.run.shards.exchange import Exchange
from stowplan.run.shards.norm import Norm
from stowplan.run.shards.workers import Workers


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over the workers along some axes; its gradient is summed over them as well."""

    workers: Workers
    axes: tuple[int, ...]
    differentiated: bool = True


Talk: TypeAlias = Exchange | Norm | Total | Bucket
AnyTalk = TypeVar("AnyTalk", Exchange, Norm, Total, Bucket)


class Collective(Handle):
    """What workers do together at one place of one step."""

    def __init__(self, name: str, talk: Talk) -> None:
        super().__init__(name, title=type(talk).__name__.lower())
        self.talk = talk

    def of_kind(self, kind: type[AnyTalk]) -> AnyTalk:
        """What is done, which is of this kind."""
        assert isinstance(self.talk, kind), f"{self.name} is no {kind.__name__}"
        return self.talk


def collective_of(key: str) -> Collective:
    """The collective that an op was given by its key."""
    found = handle_of(key)
    assert isinstance(found, Collective), f"{key} is no collective"
    return found


@torch.library.custom_op("stowplan::first_token", mutates_args=())
def first_token(parameter: Tensor) -> Tensor:
    """Marks where talks begin: the first token, which is differentiated as far as a parameter is."""
    return parameter.new_zeros((), dtype=torch.float32)


@torch.library.custom_op("stowplan::bring", mutates_args=())
def bring(token: Tensor, name: str) -> Tensor:
    """Marks where the parameters of a bucket come in."""
    del name
    return token.clone()


@torch.library.custom_op("stowplan::exchange", mutates_args=())
def exchange(share: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """A share becomes what is held."""
    return collective_of(name).of_kind(Exchange).forward(share), token.clone()


@torch.library.custom_op("stowplan::exchange_back", mutates_args=())
def _exchange_back(gradient: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return collective_of(name).of_kind(Exchange).backward(gradient), token.clone()


@torch.library.custom_op("stowplan::total", mutates_args=())
def total(part: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """A part of a sum becomes the sum."""
    talk = collective_of(name).of_kind(Total)
    return talk.workers.add_up(part, talk.axes), token.clone()


@torch.library.custom_op("stowplan::norm", mutates_args=())
def norm(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, token: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The normalised image, mean and variance."""
    return *collective_of(name).of_kind(Norm).forward(image, weight, bias), token.clone()


@torch.library.custom_op("stowplan::norm_back", mutates_args=())
def _norm_back(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    token: Tensor,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *collective_of(name).of_kind(Norm).backward(gradient, image, weight, mean, variance), token.clone()


# Schemas with lists are written out: PyTorch 2.6 does not read `list[Tensor]` in a signature.
@torch.library.custom_op(
    "stowplan::begin_sums",
    mutates_args=(),
    schema="(Tensor[] gradients, Tensor token, str name) -> (Tensor, Tensor)",
)
def _begin_sums(gradients: list[Tensor], token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return collective_of(name).of_kind(Bucket).begin(gradients), token.clone()


@torch.library.custom_op(
    "stowplan::end_sums", mutates_args=(), schema="(Tensor flat, Tensor token, str name) -> Tensor[]"
)
def _end_sums(flat: Tensor, token: Tensor, name: str) -> list[Tensor]:
    del token  # all sums have been begun
    return collective_of(name).of_kind(Bucket).end(flat)


@torch.library.custom_op("stowplan::quotient", mutates_args=())
def quotient(pair: Tensor) -> Tensor:
    """A sum over its weight, which has no gradient."""
    return pair[0] / pair[1]


@torch.library.custom_op("stowplan::fence", mutates_args=())
def fence(value: Tensor, token: Tensor, counts: bool) -> Tensor:
    """What the caller gets, once all has been said that others wait for."""
    del token, counts
    return value.clone()


@first_token.register_fake
def _(parameter: Tensor) -> Tensor:
    return parameter.new_empty((), dtype=torch.float32)


@bring.register_fake
def _(token: Tensor, name: str) -> Tensor:
    del name
    return torch.empty_like(token)


@exchange.register_fake
def _(share: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return share.new_empty(collective_of(name).of_kind(Exchange).held.shape), torch.empty_like(token)


@_exchange_back.register_fake
def _(gradient: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return gradient.new_empty(collective_of(name).of_kind(Exchange).share.shape), torch.empty_like(token)


@total.register_fake
def _(part: Tensor, token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    del name
    return part.new_empty(part.shape), torch.empty_like(token)


@norm.register_fake
def _(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, token: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del weight, bias, name
    channels = image.shape[1]
    return (
        torch.empty_like(image),
        image.new_empty(channels),
        image.new_empty(channels),
        torch.empty_like(token),
    )


@_norm_back.register_fake
def _(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    token: Tensor,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del gradient, weight, variance, name
    return torch.empty_like(image), torch.empty_like(mean), torch.empty_like(mean), torch.empty_like(token)


@_begin_sums.register_fake
def _(gradients: list[Tensor], token: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return gradients[0].new_empty(collective_of(name).of_kind(Bucket).size), torch.empty_like(token)


@_end_sums.register_fake
def _(flat: Tensor, token: Tensor, name: str) -> list[Tensor]:
    del token
    return [flat.new_empty(shape) for shape in collective_of(name).of_kind(Bucket).shapes]


@quotient.register_fake
def _(pair: Tensor) -> Tensor:
    return pair.new_empty(())


@fence.register_fake
def _(value: Tensor, token: Tensor, counts: bool) -> Tensor:
    del token, counts
    return torch.empty_like(value)
