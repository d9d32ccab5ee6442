"""`torch.compile` with this backend: eager's bits, and one budget for all graphs that Dynamo finds."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from stowplan.errors import BadUse, BudgetTooSmall, CaptureError
from stowplan.plan.options import PlanOptions
from stowplan.run.backend.captured_graph import CapturedGraph
from stowplan.run.backend.compile import backend, plans_for
from stowplan.run.measure.measure import measure
from tests.support.models import MOVES, Chain, Normed, images
from tests.support.nets import NETS
from tests.support.side_by_side import different, scalar, trained

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor"
    ),  # Dynamo looks at it, on graph breaks
]

Options: TypeAlias = dict[str, str | int | bool | Callable[..., Any]]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """On one thread, for threads may add up in another order; without the graphs of other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


def compiled(
    model: nn.Module, budget: int | str = "1GiB"
) -> tuple[Callable[..., object], nn.Module, Options]:
    """A compiled copy of the model, the copy, and the options it was compiled with."""
    twin, options = copy.deepcopy(model), Options(budget=budget, moves=MOVES)
    return torch.compile(twin, backend=backend, options=options), twin, options


class Broken(nn.Module):
    """Four blocks that are graphs of their own."""

    def __init__(self, *, dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*self._layers(dropout, width)) for _ in range(4))

    @staticmethod
    def _layers(dropout: float, width: int) -> Iterator[nn.Module]:
        for _ in range(2):
            yield from (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> object:
        first, second, third, fourth = self.blocks
        x = first(x)
        torch._dynamo.graph_break()
        x = second(x)
        torch._dynamo.graph_break()
        x = third(x)
        torch._dynamo.graph_break()
        return self.finish(fourth(x))

    def finish(self, hidden: Tensor) -> object:
        return hidden.square().mean()


class BrokenWithLogits(Broken):
    """Its results are held by the caller while the graphs before have their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 256)

    def finish(self, hidden: Tensor) -> object:
        logits = self.head(hidden)
        return logits.square().mean(), logits


class WithLogits(nn.Module):
    """Returns its loss and what it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1000)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return logits.square().mean(), logits


def peak_bytes(run: Callable[..., object], model: nn.Module, x: Tensor) -> int:
    """What is there at once during a step, parameters and all, and what is returned to its end."""

    def step() -> object:
        output = run(x)
        torch.autograd.backward(scalar(output[0] if isinstance(output, tuple) else output))
        return output

    model.zero_grad(set_to_none=True)
    return measure(step, before=[*model.parameters(), *model.buffers(), x]).measured_peak_bytes


@pytest.mark.parametrize("name", ["resnet50", "gpt", "moe", "hf_gpt2"])
@pytest.mark.slow
def test_networks_train_as_in_eager(name: str) -> None:
    model, args = NETS[name].build("tiny")
    run, twin, options = compiled(model)
    expected, found = trained(model, model, args, steps=3), trained(run, twin, args, steps=3)
    assert plans_for(options)
    assert different(expected, found) == []


@pytest.mark.parametrize("share", [0.9, 0.7, 0.55])
@pytest.mark.slow
def test_one_budget_across_graph_breaks(share: float) -> None:
    model, x = Broken(dropout=0.1), images(2048, 16)
    eager = copy.deepcopy(model)
    allowed = int(share * peak_bytes(eager, eager, x))
    run, twin, options = compiled(model, allowed)
    assert different(trained(model, model, (x,), steps=3), trained(run, twin, (x,), steps=3)) == []
    assert len(plans_for(options)) == 4
    assert 0.8 * allowed < peak_bytes(run, twin, x) <= allowed


@pytest.mark.slow
def test_the_first_step_is_within_the_budget_too() -> None:
    """Nobody knows then how many graphs there will be. What ops cost is known from another compilation."""
    model, x = Broken(), images(2048, 16)
    run, twin, _ = compiled(model)
    allowed = int(0.55 * peak_bytes(model, model, x))
    trained(run, twin, (x,))
    torch._dynamo.reset()
    run, twin, options = compiled(model, allowed)
    assert peak_bytes(run, twin, x) <= allowed
    smallest = [plan.projected_peak_bytes for plan in plans_for(options)]
    run(x)
    assert [plan.projected_peak_bytes for plan in plans_for(options)] > smallest


@pytest.mark.slow
def test_a_model_in_one_graph_is_planned_at_once() -> None:
    model, x = Chain(), images(2048, 16)
    run, _, options = compiled(model)
    torch.autograd.backward(scalar(run(x)))
    assert [plan.time_ratio for plan in plans_for(options)] == [1.0]


@pytest.mark.slow
def test_larger_budgets_cost_less_time() -> None:
    model, x = Broken(), images(2048, 16)
    plain = peak_bytes(model, model, x)
    seconds = []
    for share in (0.55, 0.7, 0.85, 1.0):
        torch._dynamo.reset()
        run, twin, options = compiled(model, int(share * plain))
        trained(run, twin, (x,))
        seconds.append([plan.projected_seconds for plan in plans_for(options)])
    assert all(
        one >= other
        for smaller, larger in pairwise(seconds)
        for one, other in zip(smaller, larger, strict=True)
    )
    assert seconds[0] > seconds[-1]


@pytest.mark.slow
def test_too_small_a_budget_says_what_others_hold() -> None:
    model, x = Broken(), images(2048, 16)
    run, _, _ = compiled(model, peak_bytes(model, model, x) // 3)
    with pytest.raises(
        BudgetTooSmall, match=r"for all graphs of the step.* binds through .*gelu of \w+\.1 .* held by others"
    ) as caught:
        run(x)
    assert caught.value.minimum_bytes > caught.value.allowed_bytes


@pytest.mark.slow
def test_gradients_of_later_graphs_are_there_when_earlier_ones_run_backward() -> None:
    """With parameters larger than activations, graphs that fit forward may not fit backward."""
    model, x = Broken(width=128), images(16, 128)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    allowed = int(1.5 * parameter_bytes)
    while smallest := smallest_budget(model, x, allowed):
        assert smallest > allowed
        allowed = smallest
    assert allowed > 2 * parameter_bytes
    torch._dynamo.reset()
    run, twin, _ = compiled(model, allowed)
    trained(run, twin, (x,))
    assert peak_bytes(run, twin, x) <= allowed


def smallest_budget(model: nn.Module, x: Tensor, allowed: int) -> int | None:
    """What a refusal of this one says it must at least be; none if it is enough."""
    torch._dynamo.reset()
    run, twin, _ = compiled(model, allowed)
    try:
        trained(run, twin, (x,))
    except BudgetTooSmall as refusal:
        return refusal.minimum_bytes
    return None


@pytest.mark.parametrize("share", [0.95, 0.8])
@pytest.mark.slow
def test_results_that_the_caller_holds_count(share: float) -> None:
    model, x = BrokenWithLogits(), images(1024, 16)
    allowed = int(share * peak_bytes(model, model, x))
    run, twin, _ = compiled(model, allowed)
    for _ in range(2):
        peak_bytes(run, twin, x)
    assert peak_bytes(run, twin, x) <= allowed


@pytest.mark.slow
def test_modules_compiled_with_the_same_options_share_the_budget() -> None:
    """What is computed between and after them is the caller's, who reserves for it."""
    model, x = Broken(), images(2048, 16)
    allowed = int(0.7 * peak_bytes(model, model, x))
    options = Options(budget=allowed, reserve=2 * x.nbytes, moves=MOVES)
    twin = copy.deepcopy(model)
    blocks = [torch.compile(block, backend=backend, options=options) for block in twin.blocks]

    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x.square().mean()

    assert different(trained(model, model, (x,)), trained(run, twin, (x,))) == []
    assert len(plans_for(options)) == 4
    assert peak_bytes(run, twin, x) <= allowed


@pytest.mark.slow
def test_two_forwards_before_their_backwards() -> None:
    model, x = Broken(), images(512, 16)
    run, twin, _ = compiled(model)

    def of_two(each: Callable[..., object]) -> Callable[..., object]:
        return lambda x: scalar(each(x)) + scalar(each(x * 2))

    assert different(trained(of_two(model), model, (x,)), trained(of_two(run), twin, (x,))) == []


@pytest.mark.slow
def test_a_new_shape_is_another_step() -> None:
    model = Broken(dropout=0.1)
    run, twin, _ = compiled(model)
    for rows in (64, 32, 16, 64, 32):
        args = (images(rows, 16),)
        assert different(trained(model, model, args), trained(run, twin, args)) == []


@pytest.mark.slow
def test_without_gradients_the_graph_itself_runs() -> None:
    model, x = Normed(), images(2, 3, 8, 8)
    run, twin, options = compiled(model)
    for mode in (True, False):
        results = []
        for each, owner in ((model, model), (run, twin)):
            owner.train(mode)
            torch.manual_seed(0)
            with torch.no_grad():
                results.append(scalar(each(x)))
        assert torch.equal(*results)
    assert different(model.state_dict(), twin.state_dict()) == []
    assert plans_for(options) == ()


@pytest.mark.slow
def test_results_that_the_loss_does_not_depend_on_are_found_out() -> None:
    """At first the logits might be differentiated. Their gradient is the largest tensor, then not there."""
    model, x = WithLogits(), images(64, 8)
    run, twin, options = compiled(model)

    def loss(output: object) -> Tensor:
        assert isinstance(output, (tuple, list))
        return scalar(output[0])

    expected = trained(model, model, (x,), loss, steps=1)
    assert different(expected, trained(run, twin, (x,), loss, steps=1)) == []
    (first,) = plans_for(options)
    assert different(trained(model, model, (x,), loss), trained(run, twin, (x,), loss)) == []
    (later,) = plans_for(options)
    assert len(later.graph.ops) < len(first.graph.ops)

    def of_both(output: object) -> Tensor:
        assert isinstance(output, (tuple, list))
        total: Tensor = output[0] + output[1].sum()
        return total

    with pytest.raises(BadUse, match="from the next step on"):
        trained(run, twin, (x,), of_both, steps=1)
    assert different(trained(model, model, (x,), of_both), trained(run, twin, (x,), of_both)) == []


def test_writing_into_what_wants_a_gradient_is_refused() -> None:
    class Overwriting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x.mul_(2).sum()

    run, _, _ = compiled(Overwriting(4, 4))
    with pytest.raises(CaptureError, match=r"test_compile_backend.py:\d+: .*writes into x, .*clone.*disable"):
        run(images(2, 4))


class Turned(nn.Module):
    """The second graph's gradient for h does not lie as h does, and the bias of the first is summed by it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(8, 32, 1), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).flatten(2).permute(0, 2, 1)
        torch._dynamo.graph_break()
        loss: Tensor = self.last(h).tanh().sum()
        return loss


def test_a_gradient_goes_from_graph_to_graph_with_the_strides_of_eager() -> None:
    model, x = Turned(), images(2, 8, 16, 16)
    run, twin, options = compiled(model)
    assert different(trained(model, model, (x,), scalar), trained(run, twin, (x,), scalar)) == []
    assert len(plans_for(options)) == 2


class Passing(nn.Linear):
    """Its second graph hands the gradient on as it comes, its third as a view: neither has an op for it."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        torch._dynamo.graph_break()
        h = h + 1.0
        torch._dynamo.graph_break()
        h = h.flatten()
        torch._dynamo.graph_break()
        return h.square().sum()


def test_a_graph_without_ops_gives_back_what_it_was_given() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x,)

    options, x = Options(budget="1GiB"), images(2, 4).requires_grad_()
    graph = torch.fx.symbolic_trace(Same())
    for node in graph.graph.nodes:
        node.meta["example_value"] = x
    run: Callable[..., Any] = backend(graph, (x,), options=options)
    (found,) = run(x * 1)
    found.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2, 4))


def test_graphs_without_an_op_in_backward() -> None:
    model, x = Passing(4, 4), images(2, 4)
    run, twin, options = compiled(model)
    assert different(trained(model, model, (x,), scalar), trained(run, twin, (x,), scalar)) == []
    assert len(plans_for(options)) == 4


def test_options_are_checked() -> None:
    model, x = nn.Linear(4, 4), images(2, 4)
    wrong = Options(budget="1GiB", allow="tile")
    unlimited = Options(budget="1GiB", time_limit=0)
    misread = Options(budgets=1), Options(budget=len), Options(budget="much"), Options()
    for options in (*misread, wrong, unlimited):
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend, options=options)
        for _ in range(2):
            with pytest.raises(BadUse, match=r"budget|6GiB|stowplan.fit|time_limit is 0"):
                run(x)


def test_a_time_limit_ends_the_search_of_each_graph() -> None:
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(40))
    model, x = nn.Sequential(*layers), images(64, 16)
    options: Any = {"budget": "1GiB", "time_limit": 0.2}
    torch.compile(model, backend=backend, options=options)(x).square().sum().backward()
    (plan,) = plans_for(options)
    assert plan.cut_short == "the time limit of 0.2 s"


FRESH = """
import copy, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
twin, x = copy.deepcopy(model), torch.randn(32, 16)
assert not any(name.startswith("stowplan") for name in sys.modules)
run = torch.compile(twin, backend="stowplan", options={"budget": "6GiB", "moves": 300})
for each in (model, run):
    each(x).square().sum().backward()
pairs = zip(model.parameters(), twin.parameters(), strict=True)
assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
assert "stowplan" in sys.modules
"""


@pytest.mark.slow
def test_torch_finds_the_backend_by_its_name() -> None:
    """In a process that has never heard of stowplan, by the entry point that installing it leaves."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


def test_a_graph_that_reads_values_is_not_sent_back_to_compile() -> None:
    graph, x = torch.fx.symbolic_trace(Reading()), torch.ones(3, requires_grad=True)
    for node in graph.graph.nodes:
        node.stack_trace = (
            f'  File "/home/user/train.py", line 12, in forward\n  File "{nn.__file__}", line 1, in pad'
        )
    with pytest.raises(CaptureError, match=r"reads the values.*torch\.compiler\.disable") as refusal:
        CapturedGraph.of(graph, (x,), options=PlanOptions(), as_vector=None)
    assert "torch.compile(" not in str(refusal.value)
    assert str(refusal.value).startswith("/home/user/train.py:12: ")


class Queue(nn.Module):
    """MoCo's queue: Dynamo breaks the graph at the pointer, and the second graph writes into the queue."""

    queue: Tensor
    ptr: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(4, 5)
        self.register_buffer("queue", torch.randn(5, 16))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        q = nn.functional.normalize(self.q(x), dim=1)
        k = q.detach().flip(0)
        negatives = q @ self.queue.clone().detach()
        logits = torch.cat([(q * k).sum(1, keepdim=True), negatives], 1) / 0.07
        place = int(self.ptr)
        self.queue[:, place : place + 4] = k.T
        self.ptr[0] = (place + 4) % 16
        return nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long))


@pytest.mark.filterwarnings("ignore:Graph break")
def test_a_copy_of_a_buffer_that_a_later_graph_writes_into() -> None:
    model = Queue()
    run, twin, _ = compiled(model)
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(4, 4)
        losses: list[Any] = [model(x), run(x)]
        for each, loss in zip((model, twin), losses, strict=True):
            each.zero_grad()
            loss.backward()
        assert torch.equal(*losses)
        assert all(
            torch.equal(one.grad, other.grad)
            for one, other in zip(model.parameters(), twin.parameters(), strict=True)
            if one.grad is not None and other.grad is not None
        )
        assert all(map(torch.equal, model.buffers(), twin.buffers()))


class Counting(nn.Module):
    """A batch norm in training: its statistics are inputs of the graph, changed in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


@pytest.mark.parametrize("is_tight", [False, True])
def test_a_batch_norm_is_computed_again_after_its_statistics_have_changed(*, is_tight: bool) -> None:
    model, x = Counting(), images(16, 8)
    run, twin, options = compiled(model, 1 if is_tight else "1MiB")
    if is_tight:
        with pytest.raises(BudgetTooSmall) as refusal:
            run(x)
        torch._dynamo.reset()
        run, twin, options = compiled(model, refusal.value.minimum_bytes)
    assert not different(trained(model, model, (x,)), trained(run, twin, (x,)))
    assert all(map(torch.equal, model.buffers(), twin.buffers()))
    assert plans_for(options)


@torch.library.custom_op("stowplan_tests::halves", mutates_args=())
def halves(x: Tensor) -> list[Tensor]:
    return [half.clone() for half in x.chunk(2)]


@halves.register_fake
def _halves(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(half) for half in x.chunk(2)]


class Halved(nn.Module):
    """Reads what a registered op returns in a list, with a gradient or without."""

    def __init__(self, *, with_gradient: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.with_gradient = with_gradient

    def forward(self) -> Tensor:
        read = self.weight if self.with_gradient else self.weight.detach()
        first, second = halves(read)
        loss: Tensor = (self.weight.sum() * (first + second)).sum()
        return loss


@pytest.mark.parametrize("with_gradient", [False, True])
def test_what_no_op_was_seen_to_make_is_no_part_of_a_plan(*, with_gradient: bool) -> None:
    """It is eager's, or it is refused: a stand-in never leaves the graph."""
    model = Halved(with_gradient=with_gradient)
    run, twin, _ = compiled(model)
    try:
        loss = run()
    except (CaptureError, RuntimeError):
        return
    assert type(loss) is Tensor
    torch.autograd.backward(loss)
    model().backward()
    assert torch.equal(loss, model())
    (expected,), (found,) = ([p.grad for p in each.parameters()] for each in (model, twin))
    assert expected is not None
    assert found is not None
    assert torch.equal(expected, found)
