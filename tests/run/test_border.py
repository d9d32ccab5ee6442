"""The border: a plan runs only while what was captured is still the user's program.

Each test changes something after `fit`, on an eager twin and on the fitted model alike, and expects the same
loss and gradients, or a refusal that names what cannot be replayed.
"""

import copy
import io
import logging
import pickle
import random
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import stowplan
from stowplan import Search
from stowplan.errors import BadUse, CaptureError, StowplanError

SCALE = 1.0
MASK = torch.ones(3)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, 3))


class Step(nn.Module):
    beta = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()
        self.weights = torch.ones(3)
        self.config = SimpleNamespace(scale=1.0, sizes=[1, 2])
        self.count = 0
        self.history: list[float] = []
        self.unread = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale: float = self.beta * self.config.scale * sum(self.config.sizes)
        return scale * F.cross_entropy(self.net(x), y, weight=self.weights)


X, Y = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3


def fitted(model: nn.Module, *args: object, **settings: Any) -> Any:
    return stowplan.fit(
        model, args or (X, Y), budget="1GiB", search=Search(moves=3), allow=("recompute",), **settings
    )


def outcome(model: Any, *args: object) -> list[Tensor]:
    """The loss, all gradients and buffers of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = model(*(args or (X, Y)))
    loss.backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def same(eager: nn.Module, planned: nn.Module, *args: object) -> bool:
    pairs = zip(outcome(eager, *args), outcome(planned, *args), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def head(model: Any) -> None:
    torch.manual_seed(7)
    model.net[4] = nn.Linear(16, 3)


def doubled(model: Any) -> None:
    model.double().weights = model.weights.double()


def untied(model: Any) -> None:
    model.net[4].weight = nn.Parameter(torch.full((3, 16), 0.1))


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute of the model": lambda m: setattr(m, "beta", 0.5),
    "the same value in another type": lambda m: setattr(m, "beta", 1),
    "a dropout's p": lambda m: setattr(m.net[2], "p", 0.5),
    "a head of the same shape": head,
    "a parameter of the same shape": untied,
    "another activation": lambda m: m.net.__setitem__(1, nn.ReLU()),
    "one module more": lambda m: m.net.append(nn.Tanh()),
    "a plain tensor": lambda m: setattr(m, "weights", torch.tensor([1.0, 5.0, 9.0])),
    "a plain tensor, in place": lambda m: m.weights.add_(1),
    "a plain tensor of another dtype": lambda m: setattr(m, "weights", m.weights.double().float() * 2),
    "inside a config": lambda m: setattr(m.config, "scale", 3.0),
    "a list inside a config": lambda m: m.config.sizes.append(4),
    "a frozen parameter": lambda m: m.net[3].weight.requires_grad_(False),
    "evaluation mode": lambda m: m.eval(),
    "double precision": doubled,
    "a forward of one module": lambda m: setattr(
        m.net[1], "forward", MethodType(lambda _, x: torch.tanh(x), m.net[1])
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.slow
def test_a_change_after_fit_is_seen(change: str) -> None:
    eager, planned = Step(), fitted(Step())
    assert same(eager, planned)
    for model in (eager, planned):
        CHANGES[change](model)
    args = (X.double(), Y) if change == "double precision" else (X, Y)
    assert same(eager, planned, *args)
    assert same(eager, planned, *args)


def test_an_attribute_that_forward_does_not_read_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    planned = fitted(Step())
    for step in range(3):
        planned.unread = step
        planned.new = step
        outcome(planned)
    assert len(stowplan.plans_of(planned)) == 1
    assert not caplog.records


def test_an_equal_value_in_a_new_object_plans_nothing() -> None:
    planned = fitted(Step())
    planned.beta = float("1.0")
    planned.config = copy.deepcopy(planned.config)
    outcome(planned)
    assert len(stowplan.plans_of(planned)) == 1


def test_plans_of_before_are_found_again() -> None:
    eager, planned = Step(), fitted(Step())
    for beta in (0.5, 1.0, 0.5, 1.0):
        eager.beta = planned.beta = beta
        assert same(eager, planned)
    assert len(stowplan.plans_of(planned)) == 2


def test_a_failed_guard_says_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    planned = fitted(Step())
    planned.net[2].p = 0.5
    with caplog.at_level(logging.WARNING, "stowplan"):
        outcome(planned)
        parameters = {name: each.detach().clone() for name, each in planned.named_parameters()}
        torch.func.functional_call(planned, parameters | {"net.4.bias": planned.net[4].bias}, (X, Y))
    assert [record.getMessage() for record in caplog.records] == [
        "planning Step again: net.2.p changed from 0.1 to 0.5",
        "planning Step again: net.0.weight changed: class from Parameter to Tensor,"
        " requires_grad from True to False",
    ]


class Reading(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return SCALE * F.cross_entropy(self.net(x), y, weight=MASK)


def test_globals_that_forward_names_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, planned = Reading(), fitted(Reading())
    assert same(eager, planned)
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    assert same(eager, planned)
    monkeypatch.setattr(f"{__name__}.MASK", torch.tensor([1.0, 2.0, 3.0]))
    assert same(eager, planned)


def test_attributes_of_classes_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, planned = Step(), fitted(Step())
    monkeypatch.setattr(Step, "beta", 0.25)
    assert same(eager, planned)


class Batch:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    scale: float = 1.0


class Encoded(UserDict[str, Tensor]):
    @property
    def x(self) -> Tensor:
        return self["x"]

    @property
    def y(self) -> Tensor:
        return self["y"]


class OfBatch(Step):
    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        scale: float = getattr(batch, "scale", 1.0)
        return F.cross_entropy(self.net(batch.x), batch.y) * scale


def encoded(x: Tensor, y: Tensor) -> Encoded:
    return Encoded({"x": x, "y": y})


@pytest.mark.parametrize("kind", [Batch, Sample, encoded])
def test_a_batch_object_is_opened_at_each_call(kind: Callable[..., Any]) -> None:
    batch = kind(X, Y)
    eager, planned = OfBatch(), fitted(OfBatch(), batch)
    assert same(eager, planned, batch)
    if kind is encoded:
        batch["x"] = X * 2
    else:
        batch.x = X * 2
    assert same(eager, planned, batch)
    assert same(eager, planned, kind(X * 3, Y.flip(0)))
    assert len(stowplan.plans_of(planned)) == 1


def test_a_number_in_a_batch_object_is_part_of_the_call() -> None:
    eager, planned = OfBatch(), fitted(OfBatch(), Sample(X, Y))
    assert same(eager, planned, Sample(X, Y, 2.0))


class Flagged(Step):
    def forward(self, x: Tensor, y: Tensor, flag: object) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.net(x), y) * (3 if flag is True else 2 if isinstance(flag, float) else 1)


@pytest.mark.slow
def test_true_one_and_one_point_zero_are_different_calls() -> None:
    eager, planned = Flagged(), fitted(Flagged(), X, Y, 1)
    for flag in (True, 1.0, 1):
        assert same(eager, planned, X, Y, flag)


class Products(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        product: Tensor = (self.net(x) * self.net(y)).sum()
        return product


@pytest.mark.slow
def test_one_tensor_twice_and_two_tensors_are_different_calls() -> None:
    eager, planned = Products().eval(), fitted(Products().eval(), X, X)
    assert same(eager, planned, X, X * 2)
    assert same(eager, planned, X, X)


def test_an_argument_that_hides_its_contents_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"argument 'y' is a numpy\.ndarray"):
        fitted(Step(), X, np.zeros(32))


class Counting(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        return F.cross_entropy(self.net(x), y) * min(1, self.count / 4)


class Remembering(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.history.append(1.0)
        return F.cross_entropy(self.net(x), y)


@pytest.mark.parametrize(("kind", "named"), [(Counting, "count"), (Remembering, "history")])
def test_state_that_forward_writes_is_refused_by_name(kind: type[Step], named: str) -> None:
    model = kind()
    with pytest.raises(CaptureError, match=f"forward changes the state of the program: {named}"):
        fitted(model)
    assert (model.count, model.history) == (0, [])


class Settling(Step):
    """Sets a value at its first call, as models of transformers set the kind of their problem."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if getattr(self.config, "kind", None) is None:
            self.config.kind = "classes" if y.dtype is torch.int64 else "values"
        self.shape = tuple(x.shape)
        output = self.net(x)
        return F.cross_entropy(output, y) if self.config.kind == "classes" else F.mse_loss(output, y)


def test_a_value_that_forward_sets_once_and_for_all_is_set_by_fit() -> None:
    eager, planned = Settling(), fitted(Settling())
    assert same(eager, planned)
    assert (planned.config.kind, planned.shape) == ("classes", (32, 8)) == (eager.config.kind, eager.shape)
    for x, y in ((X[:16], Y[:16]), (X, Y)):
        for model in (eager, planned):
            torch.manual_seed(3)
            model(x, y)
        assert planned.shape == eager.shape == tuple(x.shape)
    planned.config.kind = eager.config.kind = None
    assert same(eager, planned)
    assert planned.config.kind == "classes"


class Switching(Step):
    """Does something else at its first call."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale, self.count = (0.5 if self.count == 0 else 1.0), 1
        return F.cross_entropy(self.net(x), y) * scale


def test_a_first_call_that_is_unlike_the_next_is_refused() -> None:
    model = Switching()
    with pytest.raises(CaptureError, match="count changed from 0 to 1"):
        fitted(model)
    assert model.count == 0


class Found:
    """What a library looks up once for each type, as einops does; `count` is state if someone changes it."""

    def __init__(self, kind: object) -> None:
        self.kind, self.module, self.count = kind, torch, 0


FOUND: dict[object, Any] = {}


SEEN = set(range(2000))
SEEN -= SEEN - {3, 1025}  # a copy, which is smaller, lists them in another order
assert list(SEEN) != list(SEEN.copy())


class LookingUp(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if type(x) not in FOUND and len(SEEN) == 2:
            FOUND[type(x)] = Found("tensor")
        return F.cross_entropy(self.net(x), y)


class LookingUpAndCounting(LookingUp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        FOUND[type(x)].count += 1
        return loss


class Listing(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        FOUND[len(FOUND)] = Found("call")
        return F.cross_entropy(self.net(x), y)


class KeepingAGenerator(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        FOUND.setdefault("draw", Found(random.Random(0)))
        return F.cross_entropy(self.net(x), y)


class KeepingAFunction(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        FOUND.setdefault("later", Found(lambda: x))
        return F.cross_entropy(self.net(x), y)


@pytest.fixture
def _nothing_found() -> Iterator[None]:
    FOUND.clear()
    yield
    FOUND.clear()


@pytest.mark.usefixtures("_nothing_found")
def test_a_table_that_forward_fills_once_is_filled_by_fit() -> None:
    planned = fitted(LookingUp())
    assert [found.count for found in FOUND.values()] == [0] * len(FOUND)
    assert FOUND
    assert same(LookingUp(), planned)


@pytest.mark.usefixtures("_nothing_found")
@pytest.mark.parametrize("kind", [LookingUpAndCounting, Listing, KeepingAGenerator, KeepingAFunction])
def test_a_table_that_is_state_is_refused(kind: type[Step]) -> None:
    """It changes again, or has something that may have a tensor or change without being seen."""
    with pytest.raises(CaptureError, match=r"global .FOUND. of .*(has other items|count changed)"):
        fitted(kind())
    assert not FOUND


class Drawing(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y) * (1 + random.random())


class DrawingNumpy(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y) * (1 + float(np.random.rand()))


class DrawingOwn(Step):
    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y) * (1 + self.dice.random())


@pytest.mark.parametrize(
    ("kind", "named"), [(Drawing, "random"), (DrawingNumpy, r"numpy\.random"), (DrawingOwn, "dice")]
)
def test_random_numbers_that_are_not_torchs_are_refused(kind: type[Step], named: str) -> None:
    before = random.getstate()
    with pytest.raises(CaptureError, match=named):
        fitted(kind())
    assert random.getstate() == before


def register_forward(model: Any) -> Any:
    seen: list[int] = []
    return model.net[3].register_forward_hook(lambda *_: seen.append(1))


def register_backward(model: Any) -> Any:
    return model.net[3].register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 0.1,))


@pytest.mark.parametrize("register", [register_forward, register_backward])
def test_a_hook_on_an_inner_module_is_refused_by_name(register: Callable[[Any], Any]) -> None:
    model = Step()
    handle = register(model)
    with pytest.raises(CaptureError, match=r"hook of net\.3\.seen|net\.3 has a backward hook"):
        fitted(model)
    handle.remove()
    eager, planned = Step(), fitted(model)
    assert same(eager, planned)
    handle = register(planned)
    with pytest.raises(CaptureError, match=r"hook of net\.3\.seen|net\.3 has a backward hook"):
        outcome(planned)
    handle.remove()
    assert same(eager, planned)


HIDDEN: ContextVar[list[Tensor] | None] = ContextVar("HIDDEN", default=None)


class Collecting(Step):
    """Installs hooks at its first call and reads what they collect, as models of transformers do."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not getattr(self, "_output_capturing_hooks_installed", False):

            def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
                if (hidden := HIDDEN.get()) is not None:
                    hidden.append(output)

            hook.__module__ = "transformers.utils.output_capturing"
            for layer in self.net:
                layer.register_forward_hook(hook)
            self._output_capturing_hooks_installed = True
        token = HIDDEN.set([])
        loss = F.cross_entropy(self.net(x), y)
        hidden = HIDDEN.get() or []
        HIDDEN.reset(token)
        return loss + len(hidden) * hidden[1].square().mean()


def test_hooks_that_collect_for_forward_itself_are_part_of_the_step() -> None:
    eager, model = Collecting(), Collecting()
    planned = fitted(model)
    assert same(eager, planned)
    assert not any(layer._forward_hooks for layer in planned.net)
    for model in (eager, planned):
        with torch.no_grad():
            model(X, Y)
    assert [len(layer._forward_hooks) for layer in planned.net] == [1] * 5
    assert same(eager, planned)
    assert len(stowplan.plans_of(planned)) == 1
    handle = register_forward(planned)
    with pytest.raises(CaptureError, match=r"hook 1 of net\.3\.seen"):
        outcome(planned)
    handle.remove()
    assert same(eager, planned)


class Instantiating(dict[str, Any]):
    """Makes an instance of the class that it holds, as the table of activations of transformers does."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


ACTIVATIONS = Instantiating(gelu=nn.GELU, tanh=nn.Tanh)


class Activated(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(ACTIVATIONS["tanh"](self.net(x)), y)


def test_a_dict_that_gives_something_else_than_it_holds_is_left_as_it_is() -> None:
    planned = fitted(Activated())
    assert dict.items(ACTIVATIONS) == {"gelu": nn.GELU, "tanh": nn.Tanh}.items()
    assert same(Activated(), planned)
    ACTIVATIONS["tanh"] = nn.Sigmoid
    assert same(Activated(), planned)
    assert len(stowplan.plans_of(planned)) == 2


class Watching(Step):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        return F.cross_entropy(hidden, y)


def test_a_tensor_hook_in_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match="register_hook"):
        fitted(Watching())


def test_a_forward_set_on_the_model_is_planned() -> None:
    models = [Step(), Step()]
    for model in models:
        model.forward = MethodType(lambda m, x, y: 2 * F.cross_entropy(m.net(x), y), model)  # type: ignore[method-assign]
    planned = fitted(models[1])
    assert same(models[0], planned)
    assert len(stowplan.plans_of(planned)) == 1
    assert "Step" in type(planned(X, Y).grad_fn).__name__


def test_a_forward_that_wraps_the_planned_one_is_no_part_of_the_step() -> None:
    eager: Any = Step()
    planned = fitted(Step())
    for model in (eager, planned):
        own = model.forward
        model.forward = lambda x, y, own=own: 2 * own(x, y)
    assert same(eager, planned)
    for model in (eager, planned):
        model.net[3].weight.requires_grad_(False)
    assert same(eager, planned)
    assert len(stowplan.plans_of(planned)) == 2


def test_a_forward_that_is_not_the_models_is_refused() -> None:
    model = Step()
    model.forward = Step().forward  # type: ignore[method-assign]
    with pytest.raises(BadUse, match="forward was set on the model itself"):
        fitted(model)


def test_a_frozen_model_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    eager, planned = Step(), fitted(Step())
    for model in (eager, planned):
        model.requires_grad_(False)
    for _ in range(2):
        torch.manual_seed(1)
        expected = eager(X, Y)
        torch.manual_seed(1)
        assert torch.equal(expected, planned(X, Y))
    assert sum("nothing wants a gradient" in record.getMessage() for record in caplog.records) == 1
    for model in (eager, planned):
        model.requires_grad_(True)
    assert same(eager, planned)


def test_tied_parameters_may_be_untied_later() -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        net[2].weight = net[0].weight
        return net

    def untie(net: nn.Sequential) -> None:
        net[2].weight = nn.Parameter(torch.eye(8))

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tied()

        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = self.net(x).square().sum()
            return total

    eager, planned = Sum(), fitted(Sum(), X)
    assert same(eager, planned, X)
    for model in (eager, planned):
        untie(model.net)
    assert same(eager, planned, X)


def test_a_copy_has_the_plans_and_its_own_parameters() -> None:
    eager, planned = Step(), fitted(Step())
    twin = copy.deepcopy(planned)
    with torch.no_grad():
        planned.net[0].weight.zero_()
    assert same(eager, twin)
    assert len(stowplan.plans_of(twin)) == 1


def test_a_fitted_model_is_pickled_and_saved() -> None:
    planned = fitted(Step())
    eager = Step()
    assert same(eager, pickle.loads(pickle.dumps(planned)))  # noqa: S301 -- our own bytes
    file = io.BytesIO()
    torch.save(planned, file)
    file.seek(0)
    assert same(eager, torch.load(file, weights_only=False))


def test_a_fitted_model_can_be_fitted_again() -> None:
    assert same(Step(), fitted(fitted(Step())))


@pytest.mark.slow
def test_threads_plan_and_run_side_by_side() -> None:
    eager, planned = Step(), fitted(Step())
    expected = {size: eager.eval()(X[:size], Y[:size]).detach() for size in (8, 16, 32)}
    planned.eval()
    found: dict[int, Tensor] = {}
    failed: list[BaseException] = []

    def run(size: int) -> None:
        try:
            for _ in range(3):
                found[size] = planned(X[:size], Y[:size]).detach()
        except BaseException as fault:
            failed.append(fault)

    threads = [threading.Thread(target=run, args=(size,)) for size in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(torch.equal(found[size], expected[size]) for size in expected)


class Hidden(Step):
    """Uses a module that is not registered, as people do with a frozen network for a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.others = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()).requires_grad_(False)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.others[0](self.net(x)), y)


@pytest.mark.slow
def test_a_module_outside_the_model_is_read_anew() -> None:
    eager: Any = Hidden()
    planned = fitted(Hidden())
    assert same(eager, planned)
    for model in (eager, planned):
        with torch.no_grad():
            model.others[0][0].weight.add_(1.0)
    assert same(eager, planned)
    for model in (eager, planned):
        torch.manual_seed(5)
        model.others[0][0] = nn.Linear(3, 3).requires_grad_(False)
    assert same(eager, planned)
    for model in (eager, planned):
        model.others[0] = nn.Sequential(nn.Identity(), nn.Tanh())
    assert same(eager, planned)


def test_refusals_are_typed_and_say_what_to_do() -> None:
    for kind in (Counting, Drawing):
        with pytest.raises(StowplanError, match=";"):
            fitted(kind())


class Scoring(Step):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = self.net(x)
        return F.cross_entropy(scores, y), scores


@pytest.mark.slow
def test_a_gradient_that_was_not_planned_for_is_refused_with_the_remedy() -> None:
    def both(model: Any) -> list[Tensor | None]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss, scores = model(X, Y)
        (loss + scores.logsumexp(-1).pow(2).mean()).backward()
        return [parameter.grad for parameter in model.parameters()]

    planned = fitted(Scoring())
    with pytest.raises(BadUse, match='outputs="all"'):
        both(planned)
    assert all(parameter.grad is None for parameter in planned.parameters())
    expected = both(Scoring())
    found = both(fitted(Scoring(), outputs="all"))
    assert all(
        a is not None and b is not None and torch.equal(a, b) for a, b in zip(expected, found, strict=True)
    )
    with pytest.raises(BadUse, match="outputs is"):
        fitted(Scoring(), outputs="some")


def test_other_derivatives_than_backward_are_refused() -> None:
    model, dual = fitted(Step()), cast("Any", forward_ad.make_dual)
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    with pytest.raises(BadUse, match=r"torch\.func"):
        torch.func.grad(lambda given: torch.func.functional_call(model, given, (X, Y)))(parameters)
    with pytest.raises(BadUse, match=r"torch\.func"):
        torch.func.vmap(model, randomness="same")(torch.stack([X, X]), torch.stack([Y, Y]))
    with forward_ad.dual_level():
        with pytest.raises(BadUse, match="forward-mode"):
            model(dual(X, torch.ones_like(X)), Y)
        model(X, Y).backward()  # nothing has a tangent


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.trace(_method)?` is deprecated")
def test_a_traced_model_is_its_own_forward() -> None:
    plain = Step().eval()
    traced = cast("Any", torch.jit.trace)(fitted(plain).eval(), (X, Y), check_trace=False)
    assert torch.equal(traced(X, Y), plain(X, Y))


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shifts = (torch.ones(4), torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        shift, scale = self.shifts
        return torch.mean((self.linear(x) * scale + shift).square())


def test_tensors_in_a_tuple_are_read_anew() -> None:
    x = torch.randn(2, 4)
    eager = _Shifted()
    fitted = stowplan.fit(copy.deepcopy(eager), (x,), budget="1MiB")
    for shift in (None, torch.zeros(4)):
        if shift is not None:
            fitted.shifts = eager.shifts = (shift, torch.ones(4))
        for _ in range(2):
            assert torch.equal(fitted(x), eager(x))
            eager.shifts[0].add_(1.0)
            fitted.shifts[0].copy_(eager.shifts[0])
