"""What forward changes is changed by every planned call, or refused by `fit` with its name and line.

Each program runs three times in eager and planned, the third time on other inputs. Outputs, parameters,
buffers, arguments, gradients, `requires_grad` and the generator are compared before and after each backward.
That `fit` itself changes nothing is seen by the comparison around every `fit` of the tests.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.errors import CaptureError
from tests.support.equality import copied, equal

Forward = Callable[..., Any]


class Net(nn.Module):
    """A network, a frozen twin of it, buffers, and a forward of a test's own."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(4, 3)
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("c", torch.ones(3))
        self.register_buffer("d", torch.zeros(3))
        self.register_buffer("square", torch.ones(2, 2))
        self.plain = torch.ones(3)
        self.own_forward = forward

    def forward(self, *args: Any) -> Any:
        return self.own_forward(self, *args)


def inputs() -> tuple[Any, ...]:
    torch.manual_seed(1)
    return (torch.randn(5, 4),)


def momentum(net: Any, x: Tensor) -> Any:
    """The published update of MoCo, ALBEF and BLIP."""
    with torch.no_grad():
        for p, k in zip(net.q.parameters(), net.k.parameters(), strict=True):
            k.data = k.data * 0.9 + p.data * 0.1
    return (net.q(x) - net.k(x.flip(0))).square().mean()


def momentum_if_nobody_trains_it(net: Any, x: Tensor) -> Any:
    """A buffer's `.grad` decides, as in EMA updates that also serve learned codebooks."""
    h = net.q(x)
    if net.c.grad is None:
        net.c.data.lerp_(h.detach().mean(0), 0.1)
    return (h * net.c).square().mean()


def momentum_after_use(net: Any, x: Tensor) -> Any:
    loss: Tensor = (net.q(x) * net.k.bias - net.k(x)).square().mean()
    for p, k in zip(net.q.parameters(), net.k.parameters(), strict=True):
        k.data = k.data * 0.9 + p.data * 0.1
    return loss


def buffer_by_data(net: Any, x: Tensor) -> Any:
    y = net.q(x)
    net.c.data = net.c.data * 0.9 + y.detach().mean(0) * 0.1
    return (y - net.c).square().mean()


def buffer_by_set(net: Any, x: Tensor) -> Any:
    y = net.q(x)
    with torch.no_grad():
        net.c.set_(net.c * 0.9 + y.mean(0) * 0.1)
    return (y - net.c).square().mean()


def buffer_rebound_after_use(net: Any, x: Tensor) -> Any:
    y = net.q(x) * net.c  # whose backward needs the buffer as it was
    net.c = net.c * 0.9 + y.detach().mean(0) * 0.1
    return y.square().mean()


def old_buffer_returned(net: Any, x: Tensor) -> Any:
    old, y = net.c, net.q(x)
    net.c = net.c * 0.9 + y.detach().mean(0) * 0.1
    return y.square().mean(), old


def new_buffer_returned(net: Any, x: Tensor) -> Any:
    y = net.q(x)
    net.c.data = y.detach().mean(0)
    return y.square().mean(), net.c


def swapped(net: Any, x: Tensor) -> Any:
    net.c.data, net.d.data = net.d.data, net.c.data
    return (net.q(x) * net.c + net.d).square().mean()


def swapped_by_torch(net: Any, x: Tensor) -> Any:
    torch.utils.swap_tensors(net.c, net.d)  # type: ignore[no-untyped-call]
    return (net.q(x) * net.c + net.d).square().mean()


def trained_weight(net: Any, x: Tensor) -> Any:
    net.q.weight.data = F.normalize(net.q.weight.data, dim=1)
    return net.q(x).square().mean()


def argument_by_data(net: Any, x: Tensor) -> Any:
    x.data = x.data.clamp(-1, 1)
    return net.q(x).square().mean()


def argument_gets_a_gradient(net: Any, x: Tensor) -> Any:
    x.requires_grad_()
    return net.q(x).square().mean()


def argument_gets_a_gradient_late(net: Any, x: Tensor) -> Any:
    before = net.q(x).square().mean()
    x.requires_grad = True
    return before + net.q(x).mean()


def frozen(net: Any, x: Tensor) -> Any:
    net.q.bias.requires_grad_(False)
    return net.q(x).square().mean()


def frozen_after_use(net: Any, x: Tensor) -> Any:
    loss: Tensor = net.q(x).square().mean()
    net.q.bias.requires_grad_(False)
    return loss


def thawed(net: Any, x: Tensor) -> Any:
    net.k.requires_grad_(True)
    return (net.q(x) - net.k(x)).square().mean()


def gradient_dropped(net: Any, x: Tensor) -> Any:
    net.q.weight.grad = None
    return net.q(x).square().mean()


def mask_of_weights(net: Any, x: Tensor) -> Any:
    """The dropout of embeddings of AWD-LSTM."""
    w = net.q.weight
    mask = w.data.new().resize_((w.size(0), 1)).bernoulli_(0.9).expand_as(w) / 0.9
    return F.linear(x, mask * w).square().mean()


@torch.library.custom_op("stowplan_tests::count_mean", mutates_args=("seen",))
def count_mean(x: Tensor, seen: Tensor) -> None:
    seen.add_(x.mean())


def op_without_result(net: Any, x: Tensor) -> Any:
    y = net.q(x)
    torch.ops.stowplan_tests.count_mean(y.detach(), net.c)
    return (y * net.c.sum()).square().mean()


PLANNED: list[Forward] = [
    momentum,
    momentum_after_use,
    momentum_if_nobody_trains_it,
    buffer_by_data,
    buffer_by_set,
    buffer_rebound_after_use,
    old_buffer_returned,
    new_buffer_returned,
    swapped,
    swapped_by_torch,
    trained_weight,
    argument_by_data,
    argument_gets_a_gradient,
    argument_gets_a_gradient_late,
    frozen,
    frozen_after_use,
    thawed,
    gradient_dropped,
    mask_of_weights,
    op_without_result,
]


def state(net: nn.Module, args: object) -> dict[str, object]:
    """Everything that a step may change, copied."""
    found: dict[str, object] = {"generator": torch.get_rng_state(), "arguments": copied(args)}
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        found[name] = copied(tensor), tensor.stride()
    return found


def trained(run: Any, net: nn.Module, args: Any, make: Callable[[], Any]) -> list[object]:
    """Three steps, the third on fresh arguments."""
    found: list[object] = []
    for step in range(3):
        args = make() if step == 2 else args
        torch.manual_seed(10 + step)
        result = run(*args)
        found += [copied(result), state(net, args)]
        (result[0] if isinstance(result, tuple) else result).backward()
        found.append(state(net, args))
    return found


def fitted(net: nn.Module, args: Any, **settings: Any) -> Any:
    return stowplan.fit(net, args, budget="1MiB", search=Search(moves=3), allow=("recompute",), **settings)


def same_as_eager(forward: Forward, make: Callable[[], Any] = inputs) -> Any:
    """The fitted network, after it has done what eager does."""
    eager, net, args = Net(forward), Net(forward), make()
    planned = fitted(net, args)
    assert equal(trained(eager, eager, make(), make), trained(planned, net, args, make))
    return planned


@pytest.mark.parametrize("forward", PLANNED, ids=lambda forward: forward.__name__)
def test_what_forward_changes_is_changed_by_every_call(forward: Forward) -> None:
    assert stowplan.plans_of(same_as_eager(forward))[0].exactness == "bitwise"


def test_an_evaluation_between_forward_and_backward_sees_the_new_buffer() -> None:
    for forward in (buffer_rebound_after_use, momentum_after_use):
        eager, net = Net(forward), Net(forward)
        planned = fitted(net, inputs())
        losses = [run(*inputs()) for run in (eager, planned)]
        assert all(torch.equal(a, b) for a, b in zip(eager.buffers(), net.buffers(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), net.parameters(), strict=True))
        for loss in losses:
            loss.backward()
        assert torch.equal(eager.q.weight.grad, net.q.weight.grad)  # type: ignore[arg-type]


def test_the_memory_of_a_slice_that_is_given_stays_the_datasets() -> None:
    data = torch.randn(20, 4)
    before, net = data.clone(), Net(argument_by_data)
    planned = fitted(net, (data[:5],))
    batch = data[5:10]
    planned(batch).backward()
    assert torch.equal(data, before)
    assert torch.equal(batch, before[5:10].clamp(-1, 1))


def replaced(net: Any, x: Tensor) -> Any:
    net.q.weight = nn.Parameter(net.q.weight.data.clamp(-0.1, 0.1))
    return net.q(x).square().mean()


def tied(net: Any, x: Tensor) -> Any:
    net.k.weight.data = net.q.weight.data
    return (net.q(x) - net.k(x)).square().mean()


def shared(net: Any, x: Tensor) -> Any:
    y = net.q(x)
    net.c = net.d = y.detach().mean(0)
    return (y * net.c).mean()


def kept_argument(net: Any, x: Tensor) -> Any:
    net.c = x[0, :3]
    return net.q(x).mean()


def grown(net: Any, x: Tensor) -> Any:
    y = net.q(x)
    net.c = torch.cat([net.c, y.detach().mean(0)])
    return y.mean() * net.c.sum()


def doubled(net: Any, x: Tensor) -> Any:
    net.c.data = net.c.data.double()
    return net.q(x).mean() * net.c.sum()


def transposed(net: Any, x: Tensor) -> Any:
    net.square.t_()
    return net.q(x).mean() * net.square.sum()


def resized(net: Any, x: Tensor) -> Any:
    net.c.resize_(5)
    return net.q(x).mean()


def resized_result(net: Any, x: Tensor) -> Any:
    y = net.q(x).detach().resize_(8, 8)
    return net.q(x).mean() + y[0, 0]


def removed(net: Any, x: Tensor) -> Any:
    net.c = None
    return net.q(x).mean()


def added(net: Any, x: Tensor) -> Any:
    net.register_buffer("seen", x.mean(0))
    return net.q(x).mean()


def plain_by_data(net: Any, x: Tensor) -> Any:
    net.plain.data = net.plain.data * 2
    return (net.q(x) * net.plain).mean()


def plain_requires_grad(net: Any, x: Tensor) -> Any:
    net.plain.requires_grad_()
    return (net.q(x) * net.plain).mean()


def gradient_read(net: Any, x: Tensor) -> Any:
    y = net.q(x).mean()
    return y if net.q.weight.grad is None else y * 2


def gradient_set(net: Any, x: Tensor) -> Any:
    net.q.weight.grad = torch.ones(3, 4)
    return net.q(x).mean()


REFUSED: dict[Forward, str] = {
    replaced: r"replaces the parameter q\.weight",
    tied: r"binds k\.weight to other memory, and it then shares its memory with q\.weight",
    shared: "binds c to other memory, and it then shares its memory with d",
    kept_argument: "binds c to other memory, and it then shares its memory with",
    grown: "changes the shape of c",
    doubled: "changes the dtype of c",
    transposed: "changes the strides of square",
    resized: "changes the shape of c",
    resized_result: r"resizes a tensor of shape \(5, 3\) to \(8, 8\)",
    removed: "removes the buffer c",
    added: "adds the buffer seen",
    plain_by_data: r"sets the \.data of a tensor of shape \(3,\) that is no argument",
    plain_requires_grad: r"sets requires_grad of a tensor of shape \(3,\) that is no argument",
    gradient_read: r"reads the gradient of q\.weight",
    gradient_set: r"sets the gradient of q\.weight",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_what_a_call_cannot_change_is_refused_by_name(forward: Forward) -> None:
    with pytest.raises(CaptureError, match=REFUSED[forward]):
        fitted(Net(forward), inputs())


def test_a_refusal_names_the_line() -> None:
    for forward in (tied, doubled, transposed, plain_by_data, gradient_read, replaced):
        with pytest.raises(CaptureError) as refusal:
            fitted(Net(forward), inputs())
        first = forward.__code__.co_firstlineno
        assert refusal.value.where.startswith(f"{__file__}:")
        assert first < int(refusal.value.where.rpartition(":")[2]) < first + 4


@dataclass
class Sample:
    x: Tensor
    hidden: Tensor | None = None
    count: int = 0


def batch() -> tuple[Any, ...]:
    return ({"x": inputs()[0], "sizes": [1, 2], "inner": {"y": torch.ones(3)}},)


def key_replaced(net: Any, batch: Any) -> Any:
    batch["x"] = batch["x"] * 2
    return net.q(batch["x"]).square().mean()


def key_added(net: Any, batch: Any) -> Any:
    h = net.q(batch["x"])
    batch["h"], batch["kept"] = h, [h.detach() * 2, (batch["x"], 3)]
    return h.square().mean()


def key_popped(net: Any, batch: Any) -> Any:
    x = batch.pop("x") if "x" in batch else batch["again"]
    batch["again"] = x
    return net.q(x).square().mean()


def inner_changed(net: Any, batch: Any) -> Any:
    batch["inner"]["y"] = batch["inner"]["y"] + 1
    batch["sizes"].append(len(batch["sizes"]))
    return (net.q(batch["x"]) * batch["inner"]["y"]).mean() * sum(batch["sizes"])


def states() -> tuple[Any, ...]:
    return inputs()[0], [torch.zeros(3)]


def list_appended(net: Any, x: Tensor, hidden: list[Tensor]) -> Any:
    h = net.q(x)
    hidden.append(h.detach().mean(0))
    return (h + hidden[0]).square().mean()


def list_assigned(net: Any, x: Tensor, hidden: list[Tensor]) -> Any:
    h = torch.tanh(net.q(x) + hidden[0])
    hidden[0] = h.detach().mean(0)
    return h.square().mean()


def sample() -> tuple[Any, ...]:
    return (Sample(inputs()[0]),)


def namespace() -> tuple[Any, ...]:
    return (SimpleNamespace(x=inputs()[0], hidden=None, count=0),)


def attributes_set(net: Any, given: Any) -> Any:
    given.hidden, given.count = net.q(given.x), 1
    return given.hidden.square().mean()


WRITTEN: dict[str, tuple[Forward, Callable[[], Any]]] = {
    "a key replaced": (key_replaced, batch),
    "keys added": (key_added, batch),
    "a key popped": (key_popped, batch),
    "containers inside": (inner_changed, batch),
    "a list appended to": (list_appended, states),
    "an item of a list": (list_assigned, states),
    "attributes of a dataclass": (attributes_set, sample),
    "attributes of an object": (attributes_set, namespace),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_containers_of_arguments_are_changed_by_every_call(case: str) -> None:
    forward, make = WRITTEN[case]
    same_as_eager(forward, make)


def test_an_object_put_into_an_argument_is_refused_by_name() -> None:
    def forward(net: Any, batch: Any) -> Any:
        batch["dice"] = random.Random(0)
        return net.q(batch["x"]).mean()

    with pytest.raises(CaptureError, match=r"puts a Random into the argument at args\.0\['dice'\]"):
        fitted(Net(forward), batch())


def test_with_an_optimizer_in_the_plan_forward_may_write_too() -> None:
    for forward in (momentum, trained_weight, key_added):
        make = batch if forward is key_added else inputs
        found = []
        for plans in (False, True):
            net = Net(forward)
            optimizer = torch.optim.SGD(net.q.parameters(), lr=0.1, momentum=0.9)
            run: Any = fitted(net, make(), optimizer=optimizer) if plans else net
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                losses.append(run(*make()))
                losses[-1].backward()
                optimizer.step()
            found.append(
                [*map(copied, losses), *(tensor.detach().clone() for tensor in net.state_dict().values())]
            )
        assert equal(*found), forward.__name__


class _Twins(nn.Module):
    """Lets its first argument have a gradient, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        before = x * x * self.weight
        x.requires_grad_()
        return (before + 0.1 * x).sum() + z.mean()


def test_an_argument_that_gets_a_gradient_beside_a_twin_is_refused() -> None:
    x = torch.rand(3, 4)
    with pytest.raises(CaptureError, match="x and z are two tensors at the same memory"):
        stowplan.fit(_Twins(), (x, x[:]), budget="1MiB")
    assert not x.requires_grad
