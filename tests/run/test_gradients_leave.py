"""Gradients leave backward as they are made: in order, into `.grad`, to hooks and optimizers, as in eager."""

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from stowplan import Search
from stowplan.capture import capture
from stowplan.errors import BadUse, TensorChanged
from stowplan.run.fit import fit, plans_of
from stowplan.run.measure.measure import measure
from stowplan.run.step.straight import StraightStep
from tests.support.failing import Failing
from tests.support.models import Tied, images
from tests.support.nets import NETS
from tests.support.side_by_side import different, trained

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Tower(nn.Module):
    """Equal layers, far heavier than what is computed by them."""

    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def planned(model: nn.Module, *args: Tensor) -> Callable[..., Tensor]:
    """The model's plain step as generated code."""
    step: Any = StraightStep(capture(model, args), model)
    call: Callable[..., Tensor] = step
    return call


def two_towers() -> tuple[Tower, Tower, Callable[..., Tensor], Tensor]:
    """A model, its twin, the twin's step, and what both are called with."""
    model, x = Tower(), images(4, 64)
    twin = copy.deepcopy(model)
    return model, twin, planned(twin, x), x


def untyped(tensor: Tensor) -> Any:
    """The tensor, for methods that PyTorch leaves untyped."""
    return tensor


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def seen_by_hooks(model: nn.Module, run: Callable[..., Tensor], x: Tensor) -> list[str]:
    """The order in which weights get their gradients, and how many have one when each does."""
    seen: list[str] = []

    def note(name: str, _: Tensor) -> None:
        seen.append(f"{name} {sum(weight.grad is not None for weight in weights.values())}")

    weights = {name: p for name, p in model.named_parameters() if name.endswith("weight")}
    handles = [
        untyped(p).register_post_accumulate_grad_hook(partial(note, name)) for name, p in weights.items()
    ]
    torch.autograd.backward(run(x))
    for handle in handles:
        handle.remove()
    return seen


def test_hooks_see_gradients_in_eagers_order_and_one_by_one() -> None:
    model, twin, step, x = two_towers()
    seen = seen_by_hooks(twin, step, x)
    assert seen == seen_by_hooks(model, model, x)
    assert [line.split()[-1] for line in seen] == list("123456")
    assert equal(gradients(model), gradients(twin))


@pytest.mark.parametrize("name", ["resnet50", "hf_gpt2", "moe"])
@pytest.mark.slow
def test_hooks_of_all_parameters_run_in_eagers_order(name: str) -> None:
    """Small gradients, which leave in groups, and a bias that is final after its weight."""
    model, args = NETS[name].build("tiny")
    seen: list[str] = []
    for each, parameter in model.named_parameters():
        untyped(parameter).register_post_accumulate_grad_hook(lambda _, each=each: seen.append(each))
    torch.autograd.backward(model(*args))
    expected = seen.copy()
    seen.clear()
    torch.autograd.backward(planned(model, *args)(*args))
    assert seen == expected


def rise_of(run: Callable[..., Tensor], x: Tensor) -> int:
    def step() -> None:
        torch.autograd.backward(run(x))

    step()
    return measure(step, before=()).measured_rise_bytes


def test_accumulation_needs_no_second_set_of_gradients() -> None:
    model, _, step, x = two_towers()
    eager = rise_of(model, x)
    assert rise_of(step, x) <= eager < 3 * model.layers[0].get_parameter("weight").nbytes


def test_an_optimizer_in_backward_frees_each_gradient() -> None:
    model, twin, step, x = two_towers()
    rises = []
    for each, run in ((model, model), (twin, step)):
        for parameter in each.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def update(_: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            untyped(parameter).register_post_accumulate_grad_hook(update)
        rises.append(rise_of(run, x))
    assert rises[1] <= rises[0]
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_some_gradients_are_asked_for() -> None:
    model, twin, step, x = two_towers()
    for chosen in ([0], [11], [4, 7], [6]):
        expected = torch.autograd.grad(model(x), [list(model.parameters())[n] for n in chosen])
        found = torch.autograd.grad(step(x), [list(twin.parameters())[n] for n in chosen])
        assert all(map(torch.equal, expected, found))
    model(x).backward(inputs=[model.layers[2].get_parameter("weight")])
    torch.autograd.backward(step(x), inputs=[twin.layers[2].get_parameter("weight")])
    assert equal(gradients(model), gradients(twin))


def test_an_argument_that_others_computed() -> None:
    model, twin, _, _ = two_towers()
    found = []
    for each in (model, twin):
        source = images(4, 64).requires_grad_()
        made = source * 2
        run: Any = each if each is model else planned(each, made)
        run(made).backward()
        found.append(source.grad)
    assert equal(found[:1], found[1:])
    assert equal(gradients(model), gradients(twin))


class Product(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return (one.tanh() * other).sum()


def test_one_tensor_as_two_arguments() -> None:
    found = []
    for run in (Product(), planned(Product(), *[images(4, 4).requires_grad_()] * 2)):
        x = images(4, 4).requires_grad_()
        calls: list[Tensor] = []
        untyped(x).register_hook(calls.append)
        run(x, x).backward()
        assert len(calls) == 1
        found.append(x.grad)
    assert equal(found[:1], found[1:])


def test_tied_parameters() -> None:
    model, args = Tied(), (torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))
    twin = copy.deepcopy(model)
    assert different(trained(model, model, args), trained(planned(twin, *args), twin, args)) == []


class Shared(nn.Module):
    """The gradients of both vectors are one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(images(4, 4)), nn.Parameter(images(16))
        self.scale = nn.Parameter(images(16))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.one.view(-1) + self.other) * self.scale * x).sum()


def test_gradients_in_one_storage() -> None:
    model, x = Shared(), images(16)
    twin = copy.deepcopy(model)
    assert different(trained(model, model, (x,)), trained(planned(twin, x), twin, (x,))) == []


def test_hooks_of_tensors_change_gradients() -> None:
    model, twin, step, x = two_towers()
    for each in (model, twin):
        for factor, parameter in enumerate(each.parameters()):
            untyped(parameter).register_hook(partial(torch.mul, factor))
    model(x).backward()
    torch.autograd.backward(step(x))
    assert equal(gradients(model), gradients(twin))


def halve(parameter: Tensor, _: Tensor) -> None:
    """A hook that changes a parameter, whoever it is called for."""
    parameter.detach().mul_(0.5)


def test_a_hook_may_change_its_own_parameter_but_not_what_is_still_needed() -> None:
    model, twin, step, x = two_towers()
    for each, run in ((model, model), (twin, step)):
        first, last = each.layers[0].get_parameter("weight"), each.layers[5].get_parameter("weight")
        second = each.layers[1].get_parameter("weight")
        untyped(last).register_post_accumulate_grad_hook(partial(halve, last))
        torch.autograd.backward(run(x))
        untyped(first).register_post_accumulate_grad_hook(partial(halve, second))
        torch.autograd.backward(run(x))
        untyped(last).register_post_accumulate_grad_hook(partial(halve, second))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(run(x))
    assert equal(gradients(model), gradients(twin))


class Scales(nn.Module):
    """Each factor's gradient is made before the factor is read for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(images(8, 8) + number) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = torch.tanh(x * factor)
        return x


def test_a_gradient_does_not_leave_while_its_parameter_is_needed() -> None:
    model = Scales()
    twin, x = copy.deepcopy(model), images(8, 8)
    for each, run in ((model, model), (twin, planned(twin, x))):
        for factor in each.factors:
            untyped(factor).register_post_accumulate_grad_hook(partial(halve, factor))
        torch.autograd.backward(run(x).sum())
    assert equal(gradients(model), gradients(twin))


def test_a_graph_that_was_differentiated_in_part_is_let_go_of() -> None:
    """Also where backward needs the result, which belongs to the graph."""
    model, x = Scales(), images(8, 8)
    result = planned(model, x)(x)
    node = weakref.ref(result.grad_fn)
    torch.autograd.grad(result, [model.factors[3]], torch.ones_like(result))
    del result
    gc.collect()
    assert node() is None


def test_graphs_are_kept_only_if_asked_for_and_not_differentiated_again() -> None:
    _, twin, step, x = two_towers()
    loss = step(x)
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)
    with pytest.raises(BadUse, match="second time"):
        torch.autograd.backward(loss)
    with pytest.raises(BadUse, match="create_graph"):
        torch.autograd.grad(step(x), list(twin.parameters()), create_graph=True)


@pytest.mark.parametrize("fault", [RuntimeError("no kernel"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_what_had_left_and_tells_it(fault: BaseException) -> None:
    model, twin, step, x = two_towers()
    model(x).backward()
    expected = gradients(model)
    products = 0

    def sixth_product(op: OpOverload) -> bool:
        nonlocal products
        products += op is torch.ops.aten.mm.default
        return products == 6

    loss = step(x)
    with pytest.raises(type(fault)) as raised, Failing(fault, sixth_product):
        torch.autograd.backward(loss)
    left = [number for number, gradient in enumerate(gradients(twin)) if gradient is not None]
    assert 0 < len(left) < len(expected)
    assert equal([expected[number] for number in left], [gradients(twin)[number] for number in left])
    assert any(note.startswith(f"{len(left)} of 12 gradients") for note in raised.value.__notes__)
    with pytest.raises(BadUse, match="second time"):
        torch.autograd.backward(loss)
    twin.zero_grad()
    torch.autograd.backward(step(x))
    assert equal(expected, gradients(twin))


def test_threads_differentiate_at_once() -> None:
    model, twin, step, _ = two_towers()
    inputs = [images(4, 64) * (1 + number) for number in range(4)]

    def found(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(step(x), list(twin.parameters()))

    with ThreadPoolExecutor(2) as threads:
        for x, got in zip(inputs, threads.map(found, inputs), strict=True):
            assert all(map(torch.equal, torch.autograd.grad(model(x), list(model.parameters())), got))


@pytest.mark.parametrize("name", ["layers.2.weight", "layers.0.weight"])
@pytest.mark.slow
def test_a_weight_that_changes_before_backward_is_noticed(name: str) -> None:
    model, twin, _, x = two_towers()
    x.requires_grad_()
    for each, run in ((model, model), (twin, planned(twin, x))):
        loss = run(x)
        with torch.no_grad():
            each.get_parameter(name).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(loss)
    loss = planned(twin, x)(x)
    twin.get_parameter(name).detach().zero_()
    with pytest.raises(TensorChanged, match=f"'{name}', torch.float32 of shape"):
        torch.autograd.backward(loss)


@pytest.mark.parametrize("which", ["argument", "result"])
def test_arguments_and_results_that_change_before_backward_are_noticed(which: str) -> None:
    class Curve(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(super().forward(x))

    model = Curve(4, 4)
    for run in (model, planned(model, images(2, 4))):
        x = images(2, 4)
        made = run(x)
        (x if which == "argument" else made.detach()).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()


@pytest.mark.slow
def test_a_plan_says_that_it_recomputes_from_what_has_changed() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.scale = nn.Parameter(images(8)), nn.Parameter(images(8))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = torch.tanh(x + self.shift)
            return (x * self.scale).sum()

    model, x = Chain(), images(512, 8)
    plain_bytes = plans_of(fit(model, (x,), budget="1GiB", search=Search(moves=20)))[0].plain_peak_bytes
    fitted = fit(model, (x,), budget=int(0.8 * plain_bytes), allow=("recompute",), search=Search(moves=50))
    loss = fitted(x)
    model.shift.detach().add_(1)
    with pytest.raises(TensorChanged, match=r"'shift'.*the plan recomputes from it"):
        loss.backward()


def test_complex_results_have_gradients() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(images(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.fft.fft(x * self.scale), x * self.scale

    model, x = Spectrum(), images(4, 8)
    twin = copy.deepcopy(model)

    def loss(output: object) -> Tensor:
        assert isinstance(output, tuple)
        assert all(part.requires_grad for part in output)
        total: Tensor = output[0].abs().sum() + output[1].sum()
        return total

    assert different(trained(model, model, (x,), loss), trained(planned(twin, x), twin, (x,), loss)) == []
