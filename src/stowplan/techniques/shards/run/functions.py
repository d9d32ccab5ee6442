"""Collectives as differentiable functions: the gradient of a collective is another collective."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stowplan.capture import Call, Ref
from stowplan.capture.program import filled, outputs_by_name
from stowplan.run.planning.recapture import DIFFERENTIABLE
from stowplan.techniques.shards.run.bucket import Bucket
from stowplan.techniques.shards.run.exchange import Exchange
from stowplan.techniques.shards.run.gather import Gather
from stowplan.techniques.shards.run.operator import (
    Collective,
    Total,
    after_collectives,
    bucket_placeholder,
    collective_of,
    exchange,
    first_token,
    norm,
    quotient,
    softmax,
    total,
)
from stowplan.techniques.shards.run.softmax import Softmax


def _keep_exchange(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: tuple[Tensor, Tensor]) -> None:
    share, _, name = inputs
    ctx.collective = collective_of(name)  # held until backward
    ctx.options = {"dtype": share.dtype, "device": share.device}
    ctx.set_materialize_grads(False)
    if not ctx.collective.of_kind(Exchange).differentiated:
        ctx.mark_non_differentiable(output[0])


def _send_back(ctx: Any, gradient: Tensor | None, token: Tensor) -> tuple[Tensor | None, Tensor, None]:
    operation = ctx.collective.of_kind(Exchange)
    if not operation.differentiated:
        return None, token, None
    if gradient is None:
        gradient = torch.zeros(operation.held.shape, **ctx.options)
    return *torch.ops.stowplan.exchange_back(gradient, token, ctx.collective.key), None


def _keep_total(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: tuple[Tensor, Tensor]) -> None:
    ctx.collective = collective_of(inputs[2])
    if not ctx.collective.of_kind(Total).differentiated:
        ctx.mark_non_differentiable(output[0])


def _total_back(ctx: Any, gradient: Tensor, token: Tensor) -> tuple[Tensor | None, Tensor, None]:
    if not ctx.collective.of_kind(Total).differentiated:
        return None, token, None
    return *torch.ops.stowplan.total(gradient, token, ctx.collective.key), None


def _keep_norm(
    ctx: Any,
    inputs: tuple[Tensor, Tensor | None, Tensor | None, Tensor, str],
    output: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    image, weight, bias, _, name = inputs
    ctx.collective = collective_of(name)
    ctx.has_bias = bias is not None
    ctx.save_for_backward(image, weight, *output[1:3])
    ctx.mark_non_differentiable(*output[1:3])


def _norm_back(ctx: Any, gradient: Tensor, _: Tensor, __: Tensor, token: Tensor) -> tuple[Tensor | None, ...]:
    image, weight, mean, variance = ctx.saved_tensors
    found, by_weight, by_bias, token = torch.ops.stowplan.norm_back(
        gradient, image, weight, mean, variance, token, ctx.collective.key
    )
    return found, None if weight is None else by_weight, by_bias if ctx.has_bias else None, token, None


def _keep_softmax(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: tuple[Tensor, Tensor]) -> None:
    ctx.collective, ctx.dtype = collective_of(inputs[2]), inputs[0].dtype
    if ctx.collective.of_kind(Softmax).differentiated:
        ctx.save_for_backward(output[0])
    else:
        ctx.mark_non_differentiable(output[0])


def _softmax_back(ctx: Any, gradient: Tensor, token: Tensor) -> tuple[Tensor | None, Tensor, None]:
    if not ctx.collective.of_kind(Softmax).differentiated:
        return None, token, None
    (made,) = ctx.saved_tensors
    found, token = torch.ops.stowplan.softmax_back(gradient, made, token, ctx.collective.key)
    return found.to(ctx.dtype), token, None


def _keep_pair(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[0])


def _by_the_sum_alone(ctx: Any, gradient: Tensor) -> Tensor:
    (pair,) = ctx.saved_tensors
    share = gradient / pair[1]
    return torch.stack((share, torch.zeros_like(share)))


def _keep_device(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    del output
    _, token, ctx.counts = inputs
    ctx.device = token.device


def _first_token_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    """If several workers have the same result, only one of their gradients counts.

    All workers multiply the gradient of a scalar, so that their steps have the same ops.
    """
    if gradient.dim() == 0:
        found = gradient * float(ctx.counts)
    else:
        found = gradient if ctx.counts else torch.zeros_like(gradient)
    return found, torch.zeros((), dtype=torch.float32, device=ctx.device), None


first_token.register_autograd(lambda _, __: None)
bucket_placeholder.register_autograd(lambda _, token: (token, None))
exchange.register_autograd(_send_back, setup_context=_keep_exchange)
total.register_autograd(_total_back, setup_context=_keep_total)
norm.register_autograd(_norm_back, setup_context=_keep_norm)
softmax.register_autograd(_softmax_back, setup_context=_keep_softmax)
quotient.register_autograd(_by_the_sum_alone, setup_context=_keep_pair)
after_collectives.register_autograd(_first_token_back, setup_context=_keep_device)


class EndOfSums(torch.autograd.Function):
    """Turns bucketed parameters into the first token and a flat tensor per bucket; backward ends the sums."""

    @staticmethod
    def forward(ctx: Any, collectives: Sequence[Collective], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.collectives = collectives
        ctx.set_materialize_grads(False)
        buckets = [collective.of_kind(Bucket) for collective in collectives]
        firsts = accumulate((len(bucket.shapes) for bucket in buckets[:-1]), initial=0)
        pairs = zip(buckets, firsts, strict=True)
        flats = (parameters[at].new_empty(()).expand(bucket.size) for bucket, at in pairs)
        return parameters[0].new_zeros((), dtype=torch.float32), *flats

    @staticmethod
    def backward(ctx: Any, token: Tensor, *flats: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor] = []
        for collective, flat in reversed(
            list(zip(ctx.collectives, flats, strict=True))
        ):  # as they were begun
            found = [*torch.ops.stowplan.end_sums(flat, token, collective.key), *found]
        return None, *found


class Bucketed(torch.autograd.Function):
    """Turns a bucket's flat tensor into its parameters, which all workers have; backward begins the sum."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, token: Tensor, collective: Collective, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        del flat
        ctx.collective = collective
        return token.view_as(token), *(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat, token = torch.ops.stowplan.begin_sums(gradients, token, ctx.collective.key)
        return flat, token, None, *(None for _ in gradients)


class Gathered(torch.autograd.Function):
    """Turns shards into whole parameters; backward sums their gradients and leaves each worker its shards."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.collective = collective
        buffer = torch.ops.stowplan.begin_gather(shards, collective.key)
        return tuple(torch.ops.stowplan.end_gather(buffer, collective.key))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch.ops.stowplan.scatter_sum(gradients, ctx.collective.key)


class GatheredInOrder(torch.autograd.Function):
    """The same with the token, which comes last."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, token: Tensor, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.collective = collective
        ctx.is_trained = any(shard.requires_grad for shard in shards)
        if collective.of_kind(Gather).has_parts:
            *wholes, token = torch.ops.stowplan.gather_in_order(shards, token, collective.key)
        else:
            buffer, token = torch.ops.stowplan.begin_gather_in_order(shards, token, collective.key)
            wholes = torch.ops.stowplan.end_gather(buffer, collective.key)
        if not ctx.is_trained:
            ctx.mark_non_differentiable(*wholes)
        return *wholes, token

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *wholes, token = gradients
        if not ctx.is_trained:
            return None, token, *(None for _ in wholes)
        *shards, token = torch.ops.stowplan.scatter_sum_in_order(wholes, token, ctx.collective.key)
        return None, token, *shards


_gathered: Any = Gathered.apply
_gathered_in_order: Any = GatheredInOrder.apply


def _gather_again(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both ops of a gather, in the place of the first; the second finds its results by name."""
    shards, collective = call.args
    (buffer,) = call.outputs
    assert isinstance(shards, tuple)
    wholes = _gathered(collective, *(filled(shard, values) for shard in shards))
    return {_whole_in(buffer, number): whole for number, whole in enumerate(wholes)}


def _end_again(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    buffer, _ = call.args
    assert isinstance(buffer, Ref)
    wholes = [values[_whole_in(buffer.tensor, number)] for number in range(len(call.outputs))]
    return outputs_by_name(call, wholes, ())


def _whole_in(buffer: str | None, number: int) -> str:
    return f"{buffer}, parameter {number}"


def _begin_in_order_again(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shards, token, collective = call.args
    buffer, following = call.outputs
    assert isinstance(shards, tuple)
    given = (filled(shard, values) for shard in shards)
    *wholes, made = _gathered_in_order(collective, filled(token, values), *given)
    named = {_whole_in(buffer, number): whole for number, whole in enumerate(wholes)}
    return {**named, str(following): made}


def _gather_in_order_again(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shards, token, collective = call.args
    assert isinstance(shards, tuple)
    made = _gathered_in_order(collective, filled(token, values), *(filled(s, values) for s in shards))
    return outputs_by_name(call, made, ())


DIFFERENTIABLE.update(
    {
        torch.ops.stowplan.begin_gather.default: _gather_again,
        torch.ops.stowplan.end_gather.default: _end_again,
        torch.ops.stowplan.begin_gather_in_order.default: _begin_in_order_again,
        torch.ops.stowplan.gather_in_order.default: _gather_in_order_again,
    }
)
