"""The optimizer's share is what its state and its step really take, and asking for it changes nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stowplan.capture import capture
from stowplan.errors import BadUse
from stowplan.run.cost.probe import probe
from stowplan.run.measure.measure import measure
from stowplan.run.optimizers import OPTIMIZERS, optimizer_share, training_peak_bytes
from tests.support.nets import NETS, Example

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

SHAPES = ((64, 32), (32,), (128, 64), (10, 10, 3, 3))
SCALARS = 64  # bytes that numbers take on their way into an op

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "nesterov": ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": ("adam", {"weight_decay": 0.1}),
    "adamw": ("adamw", {}),
    "amsgrad": ("adam", {"amsgrad": True}),
    "adagrad": ("adagrad", {}),
    "rmsprop": ("rmsprop", {"momentum": 0.9, "centered": True}),
    "adadelta": ("adadelta", {}),
    "adafactor": ("adafactor", {}),
}
FUSED = ("sgd", "momentum", "nesterov", "adam", "adamw", "amsgrad", "adagrad")


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, device=device)) for shape in SHAPES]


def tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The state that an optimizer has."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def measured_share(name: str, options: dict[str, Any]) -> tuple[int, int]:
    """State and temporaries of the third step of a real optimizer."""
    trained = parameters()
    optimizer = OPTIMIZERS[name](trained, **options)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step()
    state = list(tensors_of(optimizer))
    before = (*trained, *(parameter.grad for parameter in trained if parameter.grad is not None), *state)
    measured = measure(lambda: optimizer.step(), before=before)
    return sum(tensor.nbytes for tensor in state), measured.measured_rise_bytes


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [(kind, each) for kind in KINDS for each in ("single-tensor", "foreach")] + [(k, "fused") for k in FUSED],
)
def test_shares_are_the_measured_ones(kind: str, implementation: str) -> None:
    name, options = KINDS[kind]
    chosen = {
        **options,
        ("fused" if implementation == "fused" else "foreach"): implementation != "single-tensor",
    }
    share = optimizer_share(name, parameters("meta"), **chosen)
    state, temporary = measured_share(name, chosen)
    assert share.implementation == implementation
    assert share.state_bytes == state
    assert temporary - SCALARS <= share.step_temporary_bytes <= temporary


@pytest.mark.parametrize("net", ["gpt", "resnet50", "vit", "unet"])
@pytest.mark.slow
def test_the_peak_of_training_is_known_beforehand(net: str) -> None:
    example = NETS[net].build("tiny")
    captured = capture(*example)
    workspaces = probe(captured, repeats=1, cache=None).workspace_bytes
    for name, options in (("sgd", {"momentum": 0.9}), ("adamw", {})):
        for foreach in (True, False):
            optimizer = OPTIMIZERS[name](example.model.parameters(), **options, foreach=foreach)
            projected = training_peak_bytes(captured, optimizer_share(optimizer), workspaces)
            assert projected == pytest.approx(measured_training_peak(example, optimizer), rel=0.02)


def measured_training_peak(example: Example, optimizer: Optimizer) -> int:
    """Bytes of a step once there is state, from forward to the optimizer's own step."""

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = example.model(*example.args)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    step()
    optimizer.zero_grad()
    before = (*example.model.parameters(), *example.model.buffers(), *example.args, *tensors_of(optimizer))
    return measure(step, before=before).measured_peak_bytes


def test_on_a_cpu_pytorch_goes_tensor_by_tensor_and_elsewhere_it_does_not() -> None:
    trained = parameters("meta")
    assert optimizer_share("adamw", trained) == optimizer_share("adamw", trained, foreach=False)
    assert optimizer_share("adamw", trained, device="cuda").implementation == "foreach"


@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_is_asked_without_taking_a_step(steps: int) -> None:
    trained = parameters()
    optimizer = torch.optim.Adagrad(trained)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(steps):
        optimizer.step()
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *given: calls.append(given))
    held = [tensor.clone() for tensor in (*trained, *tensors_of(optimizer))]
    share = optimizer_share(optimizer)
    assert share == optimizer_share("adagrad", parameters("meta"))
    assert not calls
    now = (*trained, *tensors_of(optimizer))
    assert all(torch.equal(tensor, before) for tensor, before in zip(now, held, strict=True))


def test_frozen_parameters_have_no_state() -> None:
    trained = parameters("meta")
    whole = optimizer_share("adamw", trained).state_bytes
    trained[2].requires_grad_(False)
    assert whole - optimizer_share("adamw", trained).state_bytes == 2 * trained[2].nbytes + 4


def test_groups_keep_their_own_options() -> None:
    first, *rest = parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "momentum": 0.0}, {"params": rest}]
    share = optimizer_share(torch.optim.SGD(groups, momentum=0.9))
    assert share.state_bytes == sum(parameter.nbytes for parameter in rest)


def test_what_cannot_be_answered_is_refused() -> None:
    with pytest.raises(BadUse, match=r"'lion' is no optimizer of torch.optim; it has .*adamw"):
        optimizer_share("lion", parameters())
    with pytest.raises(BadUse, match="depends on the parameters"):
        optimizer_share("adamw")
    with pytest.raises(BadUse, match=r"lbfgs took no step .*closure"):
        optimizer_share("lbfgs", parameters())
    with pytest.raises(BadUse, match="unexpected keyword argument 'momentum'"):
        optimizer_share("adamw", parameters(), momentum=0.9)
