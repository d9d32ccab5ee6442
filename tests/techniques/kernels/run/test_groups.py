"""Groups of ops: what may be one kernel, and that a step with groups computes what it did, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.capture import Captured, capture
from stowplan.errors import InvalidGraph
from stowplan.ir import Graph, Op, Phase
from stowplan.ops.effects import FUSED
from stowplan.plan.options import PlanOptions
from stowplan.run.planning.planner import planner_for_captured, replay_bytes
from stowplan.run.step.straight import StraightStep
from stowplan.techniques.kernels.plan import rewrite
from stowplan.techniques.kernels.plan.formation import Group, groups_of
from stowplan.techniques.kernels.plan.fusible import FUSIBLE, POINTWISE, is_view
from stowplan.techniques.kernels.plan.rewrite import Fused, borders_of, fused_graph, groups_in
from stowplan.techniques.kernels.run import kernel as kernels_module
from stowplan.techniques.kernels.run.adopt import adopt
from stowplan.techniques.kernels.run.candidates import fused_step, groups_in_step, kernels_of
from stowplan.techniques.kernels.run.decompositions import (
    mean_of_rows,
    nll_loss_backward,
    sum_of_rows,
    var_mean_of_rows,
)
from stowplan.techniques.kernels.run.kernel import Kernel
from stowplan.techniques.kernels.run.known import KernelVerdict, read_finding, write_finding
from tests.support.models import Chain
from tests.support.nets import NETS, Example

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

NETWORKS = ("gpt", "resnet50", "llama", "unet")
MOVES = 100


class Gated(nn.Module):
    """Products with pointwise ops, a norm and a draw between them; both halves read inner values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(16, 8)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.first(x).chunk(2, dim=1)
        mixed = self.drop(nn.functional.silu(one) * torch.tanh(other))
        loss: Tensor = self.second(self.norm(mixed) + one).square().mean()
        return loss


def gated() -> Example:
    torch.manual_seed(0)
    return Example(Gated(), (torch.randn(64, 16),))


@cache
def captured_of(name: str) -> tuple[Example, Captured]:
    example = gated() if name == "gated" else NETS[name].build("tiny")
    return example, capture(*example)


def fused_of(captured: Captured) -> Captured:
    return fused_step(captured, kernels_of(captured, groups_in_step(captured)))


def gradients_of(step: Callable[..., object], example: Example) -> list[Tensor]:
    torch.manual_seed(3)
    example.model.zero_grad(set_to_none=True)
    loss = step(*example.args)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    found = [p.grad for p in example.model.parameters() if p.grad is not None]
    return [loss.detach(), *found, *(buffer.clone() for buffer in example.model.buffers())]


def makers_behind(graph: Graph, op: Op) -> set[str]:
    """The ops, other than views, that made what an op reads."""
    makers = {name: other for other in graph.ops for name in other.writes()}
    found, waiting = set(), list(op.reads())
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is not None and is_view(graph, maker):
            waiting += maker.reads()
        elif maker is not None:
            found.add(maker.id)
    return found


@pytest.mark.parametrize("name", ["gated", *NETWORKS])
def test_groups_are_convex_and_have_only_ops_that_one_kernel_can_compute(name: str) -> None:
    graph = captured_of(name)[1].graph
    groups = groups_in_step(captured_of(name)[1])
    ops = {op.id: op for op in graph.ops}
    before = {op.id: makers_behind(graph, op) for op in graph.ops}
    assert groups
    assert len({op for group in groups for op in group.own}) == sum(len(group.own) for group in groups)
    for group in groups:
        own = [ops[op] for op in group.own]
        assert len({op.phase for op in own}) == 1
        assert all(op.type in FUSIBLE for op in own)
        copies = [ops[op] for op in group.copies]
        assert all(
            is_view(graph, op) or (op.type in POINTWISE and op.phase is Phase.FORWARD) for op in copies
        )
        # Whoever reads the group, outside of it, is never read by it, however long the way.
        after = set[str]()
        for op in graph.ops:
            if op.id not in group.own and not before[op.id].isdisjoint({*group.own, *after}):
                after.add(op.id)
        assert after.isdisjoint(before_all(before, group))


def before_all(before: dict[str, set[str]], group: Group) -> set[str]:
    return set[str]().union(*(before[op] for op in group.own)) - set(group.own)


@pytest.mark.parametrize("name", ["gated", "gpt", pytest.param("resnet50", marks=pytest.mark.slow), "llama"])
def test_a_step_with_groups_is_eagers_to_the_bit_when_eager_kernels_run_them(name: str) -> None:
    example, captured = captured_of(name)
    fused = fused_of(captured)
    assert len(fused.graph.ops) < len(captured.graph.ops)
    state = {key: value.clone() for key, value in example.model.state_dict().items()}
    expected = gradients_of(example.model, example)
    example.model.load_state_dict(state)
    found = gradients_of(StraightStep(fused, example.model), example)
    example.model.load_state_dict(state)
    assert all(map(torch.equal, expected, found))
    assert len(expected) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated", "llama"])
def test_plans_of_the_fused_step_keep_the_bits(name: str) -> None:
    example, captured = captured_of(name)
    fused = fused_of(captured)
    state = {key: value.clone() for key, value in example.model.state_dict().items()}
    expected = gradients_of(example.model, example)
    planner = planner_for_captured(fused, PlanOptions(search=Search(moves=MOVES)))
    room = planner.minimum_bytes + replay_bytes(fused)
    plan = planner.plan(room)
    example.model.load_state_dict(state)
    found = gradients_of(StraightStep(fused, example.model, steps=plan.steps), example)
    example.model.load_state_dict(state)
    assert all(map(torch.equal, expected, found))


def test_inner_values_are_gone_and_copies_spare_what_forward_kept() -> None:
    _, captured = captured_of("gated")
    fused = fused_of(captured)
    types = {op.type for op in fused.graph.ops}
    assert "aten.silu.default" not in types
    silu = next(name for op in captured.graph.ops if op.type == "aten.silu.default" for name in op.writes())
    assert silu not in fused.graph.tensors
    copies = {
        op for group in groups_in(fused.graph) for op in group.copies if op.startswith(("silu", "tanh"))
    }
    assert copies  # backward computes silu and tanh again, from what it needs for their gradients anyway


def test_groups_come_back_from_the_graph_that_they_were_fused_in() -> None:
    _, captured = captured_of("gpt")
    assert set(groups_in(fused_of(captured).graph)) <= set(groups_in_step(captured))


def test_equal_groups_share_a_kernel() -> None:
    _, captured = captured_of("gpt")
    kernels = kernels_of(captured, groups_in_step(captured))
    assert len({kernel.name for kernel in kernels.values()}) < len(kernels)


def test_a_barred_op_is_in_no_group() -> None:
    _, captured = captured_of("gated")
    barred = groups_of(captured.graph)[0].own[0]
    assert all(barred not in group.own for group in groups_of(captured.graph, [barred]))


def test_statistics_of_a_norm_in_a_group_are_updated_once() -> None:
    """A fused op that reads running statistics can be recomputed: it only updates them."""
    example = Example(Chain(dropout=0.0), (torch.randn(8, 16),))
    fused = fused_of(capture(*example))
    reading = [op for op in fused.graph.ops if op.type == FUSED and len(op.outputs) > 3]
    assert reading
    assert all(op.attributes["statistics"] is True for op in reading)


# Planted faults.


def described(_: Fused) -> dict[str, bool]:
    return {"exact": True}


def test_a_group_that_a_path_leaves_and_returns_to_is_refused() -> None:
    _, captured = captured_of("gated")
    graph = captured.graph
    silu = next(op.id for op in graph.ops if op.type == "aten.silu.default")
    norm = next(op.id for op in graph.ops if "batch_norm_legit" in op.type)  # the draw is between them
    with pytest.raises(InvalidGraph, match="no order"):
        fused_graph(graph, [Group((silu, norm))], described)


def test_two_groups_that_need_each_other_are_refused() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            a, b = x.sin(), x.cos()
            c, d = self.one(a).exp(), self.one(b).tanh()
            loss: Tensor = (c + d).sum()
            return loss

    graph = capture(Crossed(), (torch.randn(2, 4, requires_grad=True),)).graph
    named = {op.type.split(".")[1]: op.id for op in reversed(graph.ops) if op.phase is Phase.FORWARD}
    crossed = [Group((named["sin"], named["tanh"])), Group((named["cos"], named["exp"]))]
    with pytest.raises(InvalidGraph, match="no order"):
        fused_graph(graph, crossed, described)


def test_an_op_in_two_groups_is_refused() -> None:
    _, captured = captured_of("gated")
    group = groups_in_step(captured)[0]
    with pytest.raises(InvalidGraph, match="two groups"):
        fused_graph(captured.graph, [group, group], described)


def test_an_inner_value_that_is_still_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, captured = captured_of("gated")
    groups = groups_in_step(captured)
    borders = borders_of(captured.graph, groups)
    faulty = [
        replace(fused, outputs=fused.outputs[1:]) if n == 0 else fused for n, fused in enumerate(borders)
    ]
    monkeypatch.setattr(rewrite, "borders_of", lambda *_: faulty)
    with pytest.raises(InvalidGraph, match="unknown"):
        fused_graph(captured.graph, groups, described)


def kernel_of_gated() -> Kernel:
    _, captured = captured_of("gated")
    return next(iter(kernels_of(captured, groups_in_step(captured)).values()))


def test_a_function_that_gives_the_same_is_adopted_as_exact() -> None:
    kernel = kernel_of_gated()
    assert adopt(kernel, kernel.by_ops) == ""
    assert kernel.compiled is not None
    assert kernel.is_exact


def test_a_function_that_rounds_otherwise_is_adopted_as_such() -> None:
    kernel = kernel_of_gated()

    def rounded(given: list[Tensor]) -> list[Tensor]:
        return [made * (1 + 2e-7) if made.is_floating_point() else made for made in kernel.by_ops(given)]

    assert adopt(kernel, rounded) == ""
    assert not kernel.is_exact


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda made: made * 1.01, "far from"),
        (lambda made: made.to(torch.float64), "is not"),
        (lambda made: made.t().contiguous().t(), "is not"),
        (lambda made: torch.stack([made, made])[0], "larger storage"),
    ],
)
def test_a_wrong_function_is_not_adopted(change: Callable[[Tensor], Tensor], told: str) -> None:
    kernel = kernel_of_gated()

    def wrong(given: list[Tensor]) -> list[Tensor]:
        return [change(made) if made.dim() == 2 else made for made in kernel.by_ops(given)]

    assert told in adopt(kernel, wrong)
    assert kernel.compiled is None


def test_a_function_that_returns_its_operand_is_not_adopted() -> None:
    kernel = kernel_of_gated()
    assert "shares memory" in adopt(kernel, lambda given: [given[0] for _ in kernel.results])


def test_a_price_is_of_one_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices are known by the kernel's name: with another compiler they are measured again."""
    before = kernel_of_gated()
    monkeypatch.setattr(kernels_module, "cpp_compiler", lambda: "g++ 99")
    assert kernel_of_gated().name != before.name


@pytest.mark.parametrize("dims", [(), (3, 5)])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_are_decomposed_to_the_same_gradient(dims: tuple[int, ...], reduction: int) -> None:
    ops = torch.ops.aten
    forward, backward = (
        (ops.nll_loss2d_forward, ops.nll_loss2d_backward)
        if dims
        else (ops.nll_loss_forward, ops.nll_loss_backward)
    )
    for weight in (None, torch.rand(7)):
        scores, target = torch.randn(4, 7, *dims), torch.randint(0, 7, (4, *dims))
        target.view(-1)[0] = -100
        loss, total = forward(scores, target, weight, reduction, -100)
        given = (torch.randn_like(loss), scores, target, weight, reduction, -100, total)
        assert torch.equal(backward(*given), nll_loss_backward(*given))


@pytest.mark.parametrize("rows", [67, 96, 1576, 2048])
@pytest.mark.parametrize("keep", [False, True])
def test_sums_of_rows_are_decomposed_to_the_same_sum(rows: int, keep: bool) -> None:
    for values, dims in ((torch.randn(rows, 5).double(), [0]), (torch.randn(3, rows, 5).double(), [0, -2])):
        torch.testing.assert_close(sum_of_rows(values, dims, keep), values.sum(dims, keep))
        torch.testing.assert_close(mean_of_rows(values, dims, keep), values.mean(dims, keep))
    images = torch.randn(rows, 4, 3, 2).double().contiguous(memory_format=torch.channels_last)
    for correction in (0, 1):
        found = var_mean_of_rows(images, [0, 2, 3], correction=correction, keepdim=keep)
        expected = torch.var_mean(images, [0, 2, 3], correction=correction, keepdim=keep)
        torch.testing.assert_close(found, expected)


def test_short_sums_and_sums_along_rows_stay_as_they_are() -> None:
    assert sum_of_rows(torch.randn(16, 5), [0]) is NotImplemented
    assert var_mean_of_rows(torch.randn(64, 4, 3, 2), [2, 3]) is NotImplemented
    assert sum_of_rows(torch.randn(5, 1000), [1]) is NotImplemented
    assert sum_of_rows(torch.randn(5, 1000), None) is NotImplemented


def test_a_norm_alone_is_a_group_and_a_sum_of_gradients_joins_what_it_adds() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = torch.tanh(self.inner(self.norm(x))).sum()
            return loss

    captured = capture(Normed(), (torch.randn(96, 8, requires_grad=True),))
    types = {op.id: op.type for op in captured.graph.ops}
    found = [{types[op] for op in group.own} for group in groups_in_step(captured)]
    assert {"aten.native_layer_norm.default"} in found
    assert any({"aten.tanh_backward.default", "aten.sum.dim_IntList"} <= group for group in found)


def test_what_is_known_of_a_kernel_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_finding("one") is None
    write_finding("one", KernelVerdict("", is_exact=True))
    assert read_finding("one") == KernelVerdict("", is_exact=True)
    assert read_finding("other") is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")  # inductor has compiled nothing there
    assert read_finding("one") is None


def test_a_damaged_finding_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_finding("one", KernelVerdict("", is_exact=True))
    for path in tmp_path.rglob("*.json"):
        path.write_text('{"fault": 3}')
    assert read_finding("one") is None
