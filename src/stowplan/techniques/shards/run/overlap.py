"""Overlap: gradients of halos travel while the gradient of a convolution's weight is computed.

Backward, a worker that waits for the gradient of a halo has nothing else to do: all that comes next needs it.
The gradient of the weight before it needs nothing of others, and nothing on the way needs it. It is therefore
computed after the messages have begun and before they are waited for:

    gradient of the convolution's input; ops between it and the exchange; messages begin;
    gradients of weight and bias; wait; the rest of backward

Autograd runs what is ready in the reverse order of forward. In forward the exchange therefore stands after
the place of the weight's gradient, and that after the place where the messages are waited for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stowplan.capture import Call, Ref
from stowplan.capture.program import filled, outputs_by_name
from stowplan.run.planning.recapture import Replacement
from stowplan.techniques.shards.run.exchange import Exchange
from stowplan.techniques.shards.run.operator import Collective, exchange
from stowplan.torch_private import OpOverload

aten = torch.ops.aten
_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


@dataclass(slots=True)
class Overlap:
    """What the parts of one exchange hand to each other in backward; empty before and after."""

    collective: Collective
    under_way: list[Tensor] = field(default_factory=list)  # the gradient of what is held, and the messages
    convolution: list[Any] = field(default_factory=list)  # what the gradient of the weight is made of


def begin_overlap(
    overlap: Overlap, share: Tensor, token: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The held part, the next token, and the place of the weight's gradient for `convolved`."""
    waited = _awaited(overlap, share)
    weighed = _weighed(overlap, weight, bias)
    held, token = _exchanged(overlap, share, waited, token)
    return held, token, weighed


class OverlapsAgain:
    """Replaces exchanges and convolutions, when the forward half is captured a second time.

    `parameters` are the weight and bias ahead of an exchange.
    """

    def __init__(self, parameters: Mapping[Collective, tuple[str, str | None]]) -> None:
        self._parameters = parameters
        self._weighed: dict[str, tuple[Overlap, Tensor]] = {}  # by weight
        self.replacements: dict[OpOverload, Replacement] = {
            torch.ops.stowplan.exchange.default: self._exchanged,
            aten.convolution.default: self._convolved,
        }

    def _exchanged(self, call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        share, token, key = (filled(value, values) for value in call.args)
        collective = call.args[2]
        assert isinstance(collective, Collective)
        assert isinstance(share, Tensor)
        assert isinstance(token, Tensor)
        weight, bias = self._parameters.get(collective, ("", None))
        if not weight or not share.requires_grad:
            return outputs_by_name(call, call.target(share, token, key), ())
        overlap, own = Overlap(collective), None if bias is None else values[bias]
        held, token, weighed = begin_overlap(overlap, share, token, values[weight], own)
        self._weighed[weight] = overlap, weighed
        return outputs_by_name(call, (held, token), ())

    def _convolved(self, call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        args = [filled(value, values) for value in call.args]
        weight = call.args[1]
        overlap, weighed = self._weighed.pop(weight.tensor if isinstance(weight, Ref) else "", (None, None))
        if overlap is None:
            return outputs_by_name(call, call.target(*args), ())
        return outputs_by_name(call, _convolved(overlap, weighed, *args[:3], args[3:]), ())


def convolved(overlap: Overlap, weighed: Tensor, given: Mapping[str, Any]) -> Tensor:
    """A convolution whose weight and bias get their gradients later; arguments are by name."""
    settings = [given[name] for name in _SETTINGS]
    made: Tensor = _convolved(overlap, weighed, given["input"], given["weight"], given["bias"], settings)
    return made


def _place(tensor: Tensor) -> Tensor:
    """A number without meaning: where it stands in forward, something is done in backward."""
    return tensor.new_zeros((), dtype=torch.float32)


class Awaited(torch.autograd.Function):
    """The place where backward waits for the messages, and has the gradient of the share."""

    @staticmethod
    def forward(ctx: Any, overlap: Overlap, share: Tensor) -> Tensor:
        ctx.overlap = overlap
        return _place(share)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        gradient, flight = ctx.overlap.under_way
        ctx.overlap.under_way = []
        return None, torch.ops.stowplan.end_exchange_back(gradient, flight, ctx.overlap.collective.key)


class Weighed(torch.autograd.Function):
    """The place where backward computes the gradients of weight and bias."""

    @staticmethod
    def forward(ctx: Any, overlap: Overlap, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.overlap = overlap
        del bias
        return _place(weight)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradient, image, weight, sizes, settings = ctx.overlap.convolution
        ctx.overlap.convolution = []
        _, by_weight, by_bias = ctx.needs_input_grad
        wanted = [False, by_weight, by_bias]
        found = aten.convolution_backward(gradient, image, weight, sizes, *settings, wanted)
        return None, *(each if wants else None for each, wants in zip(found[1:], wanted[1:], strict=True))


class Exchanged(torch.autograd.Function):
    """An exchange whose backward begins the messages and returns without waiting."""

    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, share: Tensor, waited: Tensor, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.overlap, ctx.waited = overlap, waited
        ctx.options = {"dtype": share.dtype, "device": share.device}
        ctx.set_materialize_grads(False)
        held, token = exchange(share, token, overlap.collective.key)
        return held, token

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, token: Tensor) -> tuple[Tensor | None, ...]:
        collective = ctx.overlap.collective
        if gradient is None:
            gradient = torch.zeros(collective.of_kind(Exchange).held.shape, **ctx.options)
        flight, token = torch.ops.stowplan.begin_exchange_back(gradient, token, collective.key)
        ctx.overlap.under_way = [gradient, flight]
        return None, None, ctx.waited, token


class Convolved(torch.autograd.Function):
    """A convolution whose backward computes the gradient of its input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        overlap: Overlap,
        weighed: Tensor,
        image: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: list[Any],
    ) -> Tensor:
        ctx.overlap, ctx.weighed, ctx.settings = overlap, weighed, settings
        ctx.sizes = None if bias is None else list(bias.shape)
        ctx.save_for_backward(image, weight)
        made: Tensor = aten.convolution(image, weight, bias, *settings)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        image, weight = ctx.saved_tensors
        ctx.overlap.convolution = [gradient, image, weight, ctx.sizes, ctx.settings]
        found = None
        if ctx.needs_input_grad[2]:
            given = gradient, image, weight, ctx.sizes, *ctx.settings
            found, _, _ = aten.convolution_backward(*given, [True, False, False])
        return None, ctx.weighed, found, None, None, None


_awaited: Any = Awaited.apply
_weighed: Any = Weighed.apply
_exchanged: Any = Exchanged.apply
_convolved: Any = Convolved.apply
