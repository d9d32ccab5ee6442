"""Outputs of a plan are eager's: real gradients at hooks, None for what is not used, graphs that are kept."""

import copy
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import stowplan
from stowplan import Execution, Search
from stowplan.capture import capture
from stowplan.errors import BadUse
from stowplan.plan.steps import RecomputeOp
from stowplan.run.step.straight import StraightStep
from stowplan.techniques.offload.run.disk import DiskTier
from tests.support.models import images
from tests.support.side_by_side import lowest
from tests.support.spilling import SMALL, everything_moved

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

STEPS = 3


class Heads(nn.Module):
    """Results that share a body, two of them parts of one layer's, and one that nothing is made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        first, second = self.a(h).chunk(2, -1)
        return {"a": first, "b": self.b(second), "c": h.cumsum(0), "d": (h * h).mean(1)}


def fitted(model: nn.Module, *args: object, **options: Any) -> nn.Module:
    return stowplan.fit(model, args, budget="1MiB", outputs="all", search=Search(moves=10), **options)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def assert_same(eager: Sequence[Tensor | None], planned: Sequence[Tensor | None]) -> None:
    for one, other in zip(eager, planned, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def of_both(
    model: nn.Module, run: Callable[[nn.Module], Sequence[Tensor | None]], *args: object, **options: Any
) -> None:
    """Compare what `run` sees, in three iterations with an optimizer, on the model and on a fitted copy."""
    found = []
    for is_planned in (False, True):
        own = copy.deepcopy(model)
        used = fitted(own, *args, **options) if is_planned else own
        optimizer = torch.optim.AdamW(own.parameters(), 0.05, weight_decay=0.5)
        seen: list[Tensor | None] = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            seen += run(used)
            seen += [None if each is None else each.clone() for each in gradients(own)]
            optimizer.step()
            seen += [parameter.detach().clone() for parameter in own.parameters()]
            seen += [t for state in optimizer.state.values() for t in state.values()]
        found.append([None if each is None else each.clone() for each in seen])
    assert_same(*found)


X, TARGETS = torch.linspace(-3, 3, 128).reshape(16, 8), torch.arange(16) % 3


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def loss_of(output: Any) -> Any:
    return nn.functional.cross_entropy(output, TARGETS)


def hooked(model: nn.Module) -> list[Tensor | None]:
    seen: list[Tensor | None] = []
    output: Any = model(X)

    def clamped(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient.clamp(-1e-3, 1e-3)

    output.register_hook(clamped)
    loss_of(output).backward()
    return seen


def retained(model: nn.Module) -> list[Tensor | None]:
    output: Any = model(X)
    output.retain_grad()
    loss_of(output).backward()
    return [output.grad]


def asked_for(model: nn.Module) -> list[Tensor | None]:
    output: Any = model(X)
    (found,) = torch.autograd.grad(loss_of(output), output)
    loss_of(model(X)).backward()
    return [found]


def before_its_node(model: nn.Module) -> list[Tensor | None]:
    output: Any = model(X)
    output.grad_fn.register_prehook(lambda g: (g[0] * 5,))
    loss_of(output).backward()
    return []


def by_a_hook_of_the_model(model: nn.Module) -> list[Tensor | None]:
    seen: list[Tensor | None] = []

    def doubled(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient * 2

    def on_output(_module: nn.Module, _args: object, output: Any) -> None:
        output.register_hook(doubled)

    handle = model.register_forward_hook(on_output)
    loss_of(model(X)).backward()
    handle.remove()
    return seen


def backward_hooks_of_the_model(model: nn.Module) -> list[Tensor | None]:
    seen: list[Tensor | None] = []

    def note(_module: nn.Module, _into: object, out: Any) -> None:
        seen.append(out[0].clone())

    def tripled(_module: nn.Module, out: Any) -> Any:
        return (out[0] * 3,)

    handles = [model.register_full_backward_hook(note), model.register_full_backward_pre_hook(tripled)]
    loss_of(model(X)).backward()
    for handle in handles:
        handle.remove()
    return seen


def in_place(model: nn.Module) -> list[Tensor | None]:
    output: Any = model(X)
    output.mul_(2).tanh_()
    loss_of(output).backward()
    return [output]


USES = (
    hooked,
    retained,
    asked_for,
    before_its_node,
    by_a_hook_of_the_model,
    backward_hooks_of_the_model,
    in_place,
)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("use", USES)
def test_who_looks_at_an_output_sees_the_gradient_of_eager(
    use: Callable[[nn.Module], list[Tensor | None]],
) -> None:
    of_both(classifier(), use, X)


@pytest.mark.parametrize("budget", ["ample", "smallest"])
def test_parameters_of_outputs_that_are_not_used_have_no_gradient(
    budget: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Heads()
    own = copy.deepcopy(model)
    planned = fitted(own, X) if budget == "ample" else lowest(own, (X,), outputs="all")
    for count in range(1, 5):
        for used in combinations("abcd", count):
            for run in (model, planned):
                run.zero_grad()
                results = run(X)
                sum(results[name].square().sum() for name in used).backward()
            assert_same(gradients(model), gradients(own))
    assert "within rounding" not in caplog.text


def test_heads_in_turn() -> None:
    turns = iter("abcdab" * STEPS)

    def one(model: nn.Module) -> list[Tensor | None]:
        loss = model(X)[next(turns)].square().mean()
        loss.backward()
        return [loss.detach()]

    turns = iter("abc" * 2)
    of_both(Heads(), one, X)


def test_hooks_of_parameters_are_not_called_for_heads_that_rest() -> None:
    turns = "abdcbafa"  # after f, which fails, the hooks are there as before

    def one(model: nn.Module) -> list[Tensor | None]:
        seen: list[Tensor | None] = []
        handles = [
            cast("Any", p).register_hook(lambda gradient: seen.append(gradient.clone()))
            for p in model.parameters()
        ]
        for p in model.parameters():
            register = cast("Any", p).register_post_accumulate_grad_hook
            handles.append(register(lambda p: seen.append(None if p.grad is None else p.grad.clone())))
        for name in turns:
            results = model(X)
            broken = name == "f"
            if broken:
                cast("Any", results["a"]).register_hook(_raise)
            loss = results["a" if broken else name].square().mean()
            try:
                loss.backward()
            except ArithmeticError:
                assert broken
        for handle in handles:
            handle.remove()
        assert all(each is not None for each in seen)
        return [*seen, torch.tensor(len(seen))]

    of_both(Heads(), one, X)


def _raise(_: Tensor) -> Tensor:
    raise ArithmeticError


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_heads_in_turn_with_updates_in_backward(kind: str) -> None:
    found = []
    for is_planned in (False, True):
        model = Heads()
        optimizer = getattr(torch.optim, kind)(model.parameters(), 0.05, weight_decay=0.5)
        run = fitted(model, X, optimizer=optimizer) if is_planned else model
        losses = []
        for name in "aabbcab":
            loss = run(X)[name].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        state = [t for p in model.parameters() for t in optimizer.state[p].values()]
        found.append([*losses, *(p.detach() for p in model.parameters()), *state])
    assert_same(*found)


def test_an_output_whose_gradient_is_none_gives_none() -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, given: Tensor) -> Tensor:
            return given.clone()

        @staticmethod
        def backward(_ctx: Any, *_: Tensor) -> None:
            return None

    model = classifier()
    run = fitted(model, X)
    Stops.apply(run(X)).sum().backward()  # type: ignore[no-untyped-call]
    assert gradients(model) == [None] * 4


def adaptive(model: nn.Module) -> list[Tensor | None]:
    """The weight of a loss from its gradient and another's, as in VQGAN's training."""
    output, weight = model(X), list(model.parameters())[-2]
    one, other = output.abs().mean(), -output.square().mean()
    parts = [torch.autograd.grad(each, weight, retain_graph=True)[0] for each in (one, other)]
    (one + (parts[0].norm() / parts[1].norm()).detach() * other).backward()
    return list(parts)


def twice(model: nn.Module) -> list[Tensor | None]:
    output = model(X)
    output.sum().backward(retain_graph=True)
    first = [None if g is None else g.clone() for g in gradients(model)]
    loss_of(output).backward()
    return first


def one_output_after_another(model: nn.Module) -> list[Tensor | None]:
    results = model(X)
    results["a"].sum().backward(retain_graph=True)
    first = [None if g is None else g.clone() for g in gradients(model)]
    results["b"].square().sum().backward(retain_graph=True)
    results["c"].sum().backward()
    return first


@pytest.mark.parametrize(
    ("make", "use"),
    [(classifier, adaptive), (classifier, twice), (Heads, one_output_after_another)],
)
def test_several_gradients_of_one_forward(
    make: Callable[[], nn.Module],
    use: Callable[[nn.Module], list[Tensor | None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    of_both(make(), use, X)
    assert caplog.text.count("retain_graph=True keeps") == 1


class Deep(nn.Module):
    """Enough to recompute and to write over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.sigmoid(layer(x)).square()) + x
        return x


def assert_kept(model: nn.Module, run: Callable[[Tensor], Tensor], own: nn.Module, x: Tensor) -> None:
    for each in (model, run):
        torch.manual_seed(1)
        output: Any = each(x)
        torch.autograd.backward(output.square().sum(), retain_graph=True)
        torch.autograd.backward(output.sum())
    assert_same(gradients(model), gradients(own))


def test_a_graph_is_kept_by_a_plan_that_recomputes() -> None:
    model, x = Deep(), images(64, 8)
    planned = lowest(copy.deepcopy(model), (x,), outputs="all", search=Search(moves=10))
    assert any(isinstance(step, RecomputeOp) for step in stowplan.plans_of(planned)[0].steps)
    assert_kept(model, planned, planned, x)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    opened = DiskTier(tmp_path, chunk_bytes=SMALL)
    yield opened
    opened.close()


def moved(model: nn.Module, x: Tensor, tier: DiskTier) -> Callable[..., Any]:
    """Its step with everything on disk that waits, gradients too."""
    captured = capture(model, (x,), all_outputs=True)
    step: Any = StraightStep(captured, model, steps=everything_moved(captured), tier=tier)
    return cast(Callable[..., Any], step)


def test_a_graph_is_kept_on_disk(tier: DiskTier) -> None:
    model, x = Deep(), images(512, 8)
    own = copy.deepcopy(model)
    assert_kept(model, moved(own, x, tier), own, x)


def test_gradients_that_are_not_there_are_not_moved(tier: DiskTier) -> None:
    model, x = Heads(), images(256, 8)
    own = copy.deepcopy(model)
    step = moved(own, x, tier)
    for name in "abcd":
        for run, of in ((model, model), (step, own)):
            of.zero_grad()
            run(x)[name].square().sum().backward()
        assert_same(gradients(model), gradients(own))


def test_a_graph_that_was_not_kept_is_refused_with_the_ways_out() -> None:
    run = fitted(classifier(), X)
    output = run(X)
    torch.autograd.backward(output.sum())
    with pytest.raises(BadUse, match="retain_graph=True"):
        torch.autograd.backward(output.sum())


def test_second_derivatives_of_an_arena_are_refused() -> None:
    run = fitted(classifier(), X, execution=Execution(arena=True))
    with pytest.raises(BadUse, match="no second derivatives"):
        torch.autograd.grad(run(X).sum(), list(run.parameters()), create_graph=True)


def test_no_graph_is_kept_in_an_arena() -> None:
    run = fitted(classifier(), X, execution=Execution(arena=True))
    with pytest.raises(BadUse, match="leave out arena=True"):
        torch.autograd.backward(run(X).sum(), retain_graph=True)


def test_zeros_that_stand_for_missing_gradients_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """Two sums whose gradients are expanded: autograd would go on with the one that is there."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x)
            return h.sum(0), h.mean(1)

    def first_of(model: nn.Module) -> Tensor:
        return torch.autograd.grad(model(X)[0].sum(), next(model.parameters()))[0]

    model = Sums()
    run = fitted(copy.deepcopy(model), X)
    with caplog.at_level(logging.WARNING, "stowplan"):
        for _ in range(2):
            found = [first_of(each) for each in (model, run)]
    torch.testing.assert_close(*found)
    assert caplog.text.count("within rounding") == 1


class Normed(nn.Module):
    """Statistics that each forward updates, and draws."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.3)
        result: Tensor = self.last(hidden).square().sum(1)
        return result


def checkpointed(run: nn.Module) -> Any:
    return checkpoint(run, X, use_reentrant=False)


def checkpointed_to_the_end(run: nn.Module) -> Any:
    with set_checkpoint_early_stop(False):
        return checkpoint(run, X, use_reentrant=False)


def on_the_host(run: nn.Module) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return run(X)


def quantised(run: nn.Module) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return run(X)


@pytest.mark.parametrize("call", [checkpointed, checkpointed_to_the_end, on_the_host, quantised])
def test_hooks_take_what_a_step_saves(call: Callable[[nn.Module], Any]) -> None:
    """A checkpoint around a fitted module runs its forward again, which counts in a batch norm."""
    found = []
    for is_planned in (False, True):
        model = Normed()
        run = fitted(model, X) if is_planned else model
        torch.manual_seed(1)
        seen: list[Tensor | None] = []
        for _ in range(STEPS):
            model.zero_grad()
            output = call(run)
            output.mean().backward()
            seen += [output.detach(), *(None if g is None else g.clone() for g in gradients(model))]
            seen += [buffer.clone() for buffer in model.buffers()]
            seen.append(torch.get_rng_state())
        found.append(seen)
    assert_same(*found)


class Features(nn.Module):
    """Feature maps, and scores that are made of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x).relu()
        return features, self.head(features.mean((2, 3)))


def maps_of(run: nn.Module, x: Tensor, *, hooked: bool) -> list[Tensor | None]:
    """What Grad-CAM looks at."""
    seen: list[Tensor | None] = []
    run.zero_grad()
    features, scores = run(x)
    if hooked:
        features.register_hook(seen.append)
    else:
        features.retain_grad()
    scores[:, 1].sum().backward()
    return [*(seen if hooked else [features.grad]), *gradients(run)]


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("options", [{"outputs": "all"}, {"loss": 1}], ids=str)
def test_features_that_are_returned_have_the_gradient_of_eager(hooked: bool, options: dict[str, Any]) -> None:
    model, x = Features(), images(2, 3, 8, 8)
    run = stowplan.fit(copy.deepcopy(model), (x,), budget="1MiB", search=Search(moves=10), **options)
    for _ in range(STEPS):
        assert_same(maps_of(model, x, hooked=hooked), maps_of(run, x, hooked=hooked))


def test_a_gradient_of_features_that_is_not_in_one_place_is_refused() -> None:
    x = images(2, 3, 8, 8)
    run = fitted(Features(), x)
    features, scores = run(x)
    features.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(BadUse, match="returns another gradient"):
        scores.sum().backward()
    features, scores = run(x)
    features.retain_grad()
    with pytest.raises(BadUse, match="comes from outside"):
        (scores.sum() + features.sum()).backward()


def test_grad_does_not_find_what_is_inside_of_a_plan() -> None:
    run, x = fitted(Features(), images(2, 3, 8, 8)), images(2, 3, 8, 8)
    features, scores = run(x)
    with pytest.raises(RuntimeError, match="to not have been used in the graph"):
        torch.autograd.grad(scores.sum(), features)


PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
CLASSES = ("as in eager", "refused in backward", "refused with `optimizer=`")
ROW = re.compile(rf"^\| (?P<what>[^|]+) \| (?P<kind>{'|'.join(CLASSES)}) \| `(?P<example>[^|]+)` \|$")
ROWS = [found.groupdict() for line in PAGE.read_text().splitlines() if (found := ROW.match(line))]


class Returning(nn.Module):
    """The model of the page."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.norm(self.body(x)))
        return {"a": self.a(x), "b": self.b(h), "h": h}


def done(run: nn.Module, example: str) -> list[Tensor | None]:
    """Forward, the page's own lines, and backward; gradients that were seen and that results keep."""
    seen: list[Tensor | None] = []
    names: dict[str, Any] = {"torch": torch, "checkpoint": checkpoint, "model": run, "x": X, "seen": seen}
    names |= {"weight": list(run.parameters())[-2], "out": run(X)}
    results = dict(names["out"])
    exec(example, names)  # noqa: S102 -- the page's own lines
    losses = [each.square().sum() for each in names["out"].values() if each.requires_grad]
    torch.autograd.backward(torch.stack(losses).sum())
    return [*seen, *(each.grad for each in results.values() if each.retains_grad)]


def test_the_page_has_all_classes() -> None:
    assert {row["kind"] for row in ROWS} == set(CLASSES)
    assert len(ROWS) >= 15


@pytest.mark.parametrize("row", ROWS, ids=[row["what"] for row in ROWS])
def test_an_example_of_the_page_is_dealt_with_as_its_row_says(row: dict[str, str]) -> None:
    if row["kind"] == "as in eager":
        of_both(Returning(), lambda run: done(run, row["example"]), X)
    elif row["kind"] == "refused in backward":
        run = fitted(Returning(), X)
        with pytest.raises(BadUse):
            done(run, row["example"])
    else:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = stowplan.fit(
            model, (X,), budget="1MiB", loss=loss_of, optimizer=optimizer, search=Search(moves=10)
        )
        run(X).backward()
        optimizer.step()
        optimizer.zero_grad()
        run(X).backward()
        with pytest.raises(BadUse, match="between backward and"):
            edited(row["example"], model, optimizer)


def edited(example: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {"torch": torch, "model": model, "weight": list(model.parameters())[-2]}
    exec(example, names)  # noqa: S102 -- the page's own lines
    optimizer.step()
