"""Eager and straight-line code side by side: what differs after the same steps from the same state."""

import copy
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from stowplan.capture import capture
from stowplan.run.straight import StraightStep

Loss: TypeAlias = Callable[[object], Tensor]


def scalar(output: object) -> Tensor:
    """The loss of a model that returns it."""
    assert isinstance(output, Tensor)
    return output


def differences(model: nn.Module, args: tuple[object, ...], loss: Loss = scalar, steps: int = 2) -> list[str]:
    """Which losses, gradients, parameters, buffers and generator states are not the same to the bit."""
    twin = copy.deepcopy(model)
    straight = StraightStep(capture(twin, args), twin)
    expected = list(
        _trained(model, model, args, loss, steps)
    )  # one after the other: they share the generator
    found = list(_trained(straight, twin, args, loss, steps))
    return [name for (name, one), (_, other) in zip(expected, found, strict=True) if not _same(one, other)]


def _trained(
    run: Callable[..., object], model: nn.Module, args: tuple[object, ...], loss: Loss, steps: int
) -> Iterator[tuple[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    for step in range(steps):
        optimizer.zero_grad()
        result = loss(run(*args))
        torch.autograd.backward(result)
        yield f"loss {step}", result.detach()
        yield f"generator {step}", torch.get_rng_state()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                yield f"gradient {step} {name}", parameter.grad.clone()
        optimizer.step()
        for name, tensor in model.state_dict().items():
            yield f"state {step} {name}", tensor.clone()


def _same(expected: Tensor, found: Tensor) -> bool:
    return torch.equal(expected, found) and expected.stride() == found.stride()
