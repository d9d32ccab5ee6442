"""A step in an arena: eager's bits, the memory that was projected, and nothing shared that others hold."""

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stowplan import Execution, Iteration, Search
from stowplan.capture import Ref, capture
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.plan.steps import RecomputeOp
from stowplan.run.fit import fit, plans_of
from stowplan.run.measure.measure import measure
from stowplan.techniques.arena.plan.layout import Placement
from stowplan.techniques.arena.run import code as arenas
from tests.support.models import Normed, NormFirst, Tied, images
from tests.support.side_by_side import different, trained

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Mixed(nn.Module):
    """Products, norms, dropout, a residual sum and two losses, one of which is only returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(48, 96), nn.Linear(96, 48)
        self.norm, self.drop = nn.LayerNorm(48), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.drop(self.second(torch.nn.functional.gelu(self.first(self.norm(x)))))
        return torch.relu(x).square().mean()


MODELS = {
    "mixed": (Mixed, (images(32, 48),)),
    "normed": (Normed, (images(2, 3, 16, 16),)),
    "norm first": (NormFirst, (images(2, 3, 16, 16),)),
    "tied": (Tied, (torch.arange(8).view(2, 4) % 5, torch.arange(8).view(2, 4) % 7)),
}


class TiedRows(Tied):
    """The head sees rows."""

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return super().forward(tokens.reshape(-1), target.reshape(-1))


MODELS["tied"] = (TiedRows, MODELS["tied"][1])


def peak_of(model: nn.Module, args: tuple[Tensor, ...]) -> int:
    return capture(model, args).eager.peak_bytes()


def in_arena(model: nn.Module, args: tuple[Tensor, ...], share: float = 1.3) -> nn.Module:
    budget = int(peak_of(model, args) * share)
    return fit(
        model,
        args,
        budget=budget,
        execution=Execution(arena=True),
        allow=["recompute"],
        search=Search(moves=3),
    )


@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_eager_and_memory_is_what_was_projected(name: str) -> None:
    made, args = MODELS[name]
    model = made()
    twin = copy.deepcopy(model)
    fitted = in_arena(twin, args)
    (plan,) = plans_of(fitted)
    assert plan.arena is not None
    assert plan.arena.nbytes > 0
    assert not different(trained(model, model, args), trained(fitted, twin, args))
    twin.zero_grad()
    there = [*twin.parameters(), *twin.buffers(), *args]
    seen = measure(lambda: fitted(*args).backward(), before=there)
    states = 2 * torch.get_rng_state().nbytes if "draws" in source_of(fitted) else 0
    assert 0 <= plan.projected_peak_bytes + states - seen.measured_peak_bytes <= states + 256


def source_of(fitted: nn.Module) -> str:
    text: str = fitted.__dict__["_fitting"].bound[0].step.source
    return text


def test_a_plan_that_recomputes_runs_in_an_arena() -> None:
    model, args = Mixed(), (images(512, 48),)
    twin = copy.deepcopy(model)
    fitted = in_arena(twin, args, share=0.85)
    (plan,) = plans_of(fitted)
    assert any(isinstance(step, RecomputeOp) for step in plan.steps)
    assert plan.projected_peak_bytes <= plan.allowed_bytes < plan.plain_peak_bytes
    assert not different(trained(model, model, args), trained(fitted, twin, args))


class UnderAutocast(nn.Module):
    """A norm of narrow numbers by wide weights."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.last(nn.functional.silu(self.norm(self.first(x))))
        return x.float().square().mean()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.LayerNorm(14)])
def test_statistics_under_autocast_are_not_narrowed(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model, args = UnderAutocast(norm), (images(2, 3, 16, 16),)
    twin = copy.deepcopy(model)
    fitted = in_arena(twin, args, share=3.0)
    assert plans_of(fitted)[0].exactness == "bitwise"
    assert not different(trained(model, model, args), trained(fitted, twin, args))


def test_calls_of_other_shapes_have_arenas_of_their_size() -> None:
    model, larger = Mixed(), (images(64, 48),)
    twin = copy.deepcopy(model)
    fitted = in_arena(twin, MODELS["mixed"][1], share=3.0)
    assert not different(trained(model, model, larger), trained(fitted, twin, larger))
    small, large = (plan.arena for plan in plans_of(fitted))
    assert small is not None
    assert large is not None
    assert small.nbytes < large.nbytes


def test_the_code_says_where_each_tensor_lies() -> None:
    fitted = in_arena(Mixed(), MODELS["mixed"][1])
    source = source_of(fitted)
    assert "arena = placing.new()" in source
    assert "aten.addmm.out(" in source
    assert "out=arena.at(" in source
    assert "new_arena" not in source_of(fit(Mixed(), MODELS["mixed"][1], budget="1GiB"))


def test_two_forwards_and_two_threads_have_arenas_of_their_own() -> None:
    args = MODELS["normed"][1]
    model = Normed().eval()
    fitted = in_arena(copy.deepcopy(model), args)
    outcomes = []
    for run in (model, fitted):
        run.zero_grad()
        (run(*args) * run(args[0] * 2)).backward()
        outcomes.append([p.grad for p in run.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True) if a is not None and b is not None)

    def gradient(scale: float) -> Tensor:
        x = (args[0] * scale).requires_grad_()
        (found,) = torch.autograd.grad(fitted(x), [fitted.get_parameter("conv.weight")])
        return found

    expected = [gradient(scale) for scale in (1.0, 3.0)]
    with ThreadPoolExecutor(2) as threads:
        for found, wanted in zip(threads.map(gradient, [1.0, 3.0] * 8), expected * 8, strict=True):
            assert torch.equal(found, wanted)


def arenas_of(fitted: nn.Module) -> list["weakref.ref[torch.UntypedStorage]"]:
    return [past.storage for past in fitted.__dict__["_fitting"].bound[0].step._placing._past]


def test_an_arena_ends_with_its_gradients() -> None:
    fitted = in_arena(Mixed(), MODELS["mixed"][1])
    fitted(*MODELS["mixed"][1]).backward()
    (there,) = arenas_of(fitted)
    assert there() is not None
    fitted.zero_grad()
    gc.collect()
    assert there() is None


def test_gradients_that_are_accumulated_move_out_of_the_arena(caplog: pytest.LogCaptureFixture) -> None:
    args = MODELS["mixed"][1]
    model = Mixed().eval()
    fitted = in_arena(copy.deepcopy(model), args)
    for run in (model, fitted):
        for scale in (1, 2, 3):
            run(args[0] * scale).backward()
    pairs = zip(model.parameters(), fitted.parameters(), strict=True)
    assert all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)
    assert "keep its arena" not in caplog.text
    assert all(ref() is None for ref in arenas_of(fitted))


def test_someone_who_keeps_a_view_of_a_gradient_is_told(caplog: pytest.LogCaptureFixture) -> None:
    args = MODELS["mixed"][1]
    fitted = in_arena(Mixed(), args)
    fitted(*args).backward()
    gradient = fitted.get_parameter("first.weight").grad
    assert gradient is not None
    kept, expected = gradient.view(-1), gradient.clone().view(-1)
    fitted.zero_grad()
    with caplog.at_level(logging.WARNING, "stowplan"):
        fitted(*args).backward()
    assert "keep its arena" in caplog.text
    assert torch.equal(kept, expected)


@pytest.fixture
def keeping() -> Iterator[list[Tensor]]:
    """An op of someone else's, which keeps what it is given."""
    kept: list[Tensor] = []
    with torch.library._scoped_library("arena_tests", "FRAGMENT") as library:
        library.define("keep(Tensor x) -> Tensor")

        def keep(x: Tensor) -> Tensor:
            kept.append(x)
            return x.clone()

        library.impl("keep", keep, "CPU")
        library.impl("keep", lambda x: torch.empty_like(x), "Meta")
        yield kept


def test_what_another_op_sees_lies_beside(keeping: list[Tensor]) -> None:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layers[0](x))
            shown = torch.ops.arena_tests.keep(x.detach())
            for layer in self.layers[1:]:
                x = torch.tanh(layer(x))
            loss: Tensor = (x * shown).mean()
            return loss

    args = (images(16, 8),)
    model = Shown()
    model(*args)
    expected = keeping[-1].clone()
    fitted = in_arena(model, args)
    fitted(*args).backward()
    assert torch.equal(keeping[-1], expected)


def test_what_is_read_by_its_place_in_a_storage_lies_beside() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            seen = torch.as_strided(torch.tanh(self.layer(x)), (4, 8), (16, 1), 8)
            return (seen * 2).square().mean()

    args = (images(8, 8),)
    model = Strided()
    twin = copy.deepcopy(model)
    assert not different(trained(model, model, args), trained(in_arena(twin, args), twin, args))


def test_a_kernel_that_writes_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(Mixed(), MODELS["mixed"][1])
    right = arenas.into
    (name,) = [op.outputs[0].tensor for op in captured.graph.ops if op.type == "aten.relu.default"]
    device = torch.device("cpu")
    monkeypatch.setattr(arenas, "_writing", {})
    assert arenas.placements_of(captured, (), {}, device)[name] is Placement.WRITTEN
    monkeypatch.setattr(arenas, "_writing", {})
    monkeypatch.setattr(arenas, "into", lambda call: _wronged(right(call)))
    assert arenas.placements_of(captured, (), {}, device)[name] is Placement.COPIED


def _wronged(writing: arenas.WritingCall | None) -> arenas.WritingCall | None:
    """A ReLU that begins at a quarter."""
    if writing is None or "clamp_min" not in str(writing.call.target):
        return writing
    return writing._replace(call=replace(writing.call, args=(*writing.call.args[:-1], 0.25)))


def test_a_kernel_that_allocates_its_result_all_the_same_is_not_used() -> None:
    """A generated variant of an op: it computes aside and copies."""
    captured = capture(Mixed(), (images(512, 48),))
    graph, calls = captured.graph, captured.program.calls
    (op,) = [op for op in graph.ops if op.type == "aten.relu.default"]
    call, tensor = calls[op.id], graph.tensors[op.outputs[0].tensor]
    aside = replace(call, target=torch.ops.aten.relu.out, kwargs={"out": Ref(arenas._OUT)})
    device = torch.device("cpu")
    assert not arenas._gives_the_same(graph, call, arenas.WritingCall(aside), tensor, 0, device)
    assert arenas._gives_the_same(graph, call, arenas.WritingCall(aside), tensor, tensor.nbytes or 0, device)


def test_a_result_that_is_a_view_into_the_arena_is_refused() -> None:
    arena = arenas.Arena((arenas._Look(torch.float32, 16, (4, 4), (4, 1)),), 128, torch.device("cpu"))
    arena.beside(torch.empty(4))
    with pytest.raises(BadUse, match="an op returned a view of its operand"):
        arena.beside(arena.at(0)[1:])


def test_a_budget_that_no_arena_fits_names_one_that_does() -> None:
    model, args = TiedRows(), MODELS["tied"][1]
    with pytest.raises(BudgetTooSmall) as refusal:
        in_arena(model, args, share=0.5)
    budget = refusal.value.minimum_bytes
    (plan,) = plans_of(
        fit(
            model,
            args,
            budget=budget,
            execution=Execution(arena=True),
            allow=["recompute"],
            search=Search(moves=3),
        )
    )
    assert plan.projected_peak_bytes <= budget


class Keeping(Optimizer):
    """Keeps each gradient itself until the next step, which it takes a part of."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                before = self.state[p].get("before", torch.zeros_like(p))
                p.add_(p.grad + before, alpha=-0.05)
                self.state[p]["before"] = p.grad


def iterated(
    forward: nn.Module, model: nn.Module, optimizer: Optimizer, x: Tensor, clip_norm: float | None, each: int
) -> dict[str, Tensor]:
    """The parameters after four iterations of the user's loop; `fit` clips in a plan's."""
    torch.manual_seed(1)
    for _ in range(4):
        for _ in range(each):
            forward(x).backward()
        if clip_norm is not None and forward is model:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


LOOPS: dict[str, tuple[Callable[[Iterable[Tensor]], Optimizer], float | None, int]] = {
    "adamw": (torch.optim.AdamW, None, 1),
    "keeping": (Keeping, None, 1),
    "accumulated": (torch.optim.AdamW, None, 2),
    "clipped": (torch.optim.AdamW, 0.05, 1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_an_iteration_runs_in_an_arena(name: str) -> None:
    made, clip_norm, each = LOOPS[name]
    model, x = Mixed(), images(64, 48)
    twin = copy.deepcopy(model)
    own, optimizer = made(model.parameters()), made(twin.parameters())
    fitted = fit(
        twin,
        (x,),
        budget="1MiB" if name == "accumulated" else "310KiB",
        execution=Execution(arena=True),
        optimizer=Iteration(optimizer, clip_norm=clip_norm, accumulate=each),
        search=Search(moves=3),
    )
    (plan,) = plans_of(fitted)
    assert plan.arena is not None
    assert plan.arena.nbytes > 0
    assert name in ("accumulated", "keeping") or plan.allowed_bytes < plan.plain_peak_bytes
    expected = iterated(model, model, own, x, clip_norm, each)
    assert not different(expected, iterated(fitted, twin, optimizer, x, clip_norm, each))
    if name != "adamw":
        return
    state = [value for of in optimizer.state.values() for value in of.values()]

    def iteration() -> None:
        fitted(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    measured = measure(iteration, before=[*twin.parameters(), x, *state]).measured_peak_bytes
    assert (
        0.98 * plan.projected_peak_bytes <= measured <= plan.projected_peak_bytes + 2**14
    )  # states of draws


def test_an_arena_is_for_the_step_of_one_process() -> None:
    model, args = Mixed(), MODELS["mixed"][1]
    with pytest.raises(BadUse, match="leave it out with mesh="):
        fit(model, args, budget="1GiB", execution=Execution(arena=True), mesh="data=2")
    for arena, mesh in ((True, None), (False, "data=2"), (False, None)):
        with pytest.raises(BadUse, match="held_blocks=True is for"):
            fit(model, args, budget="1GiB", execution=Execution(arena=arena, held_blocks=True), mesh=mesh)
