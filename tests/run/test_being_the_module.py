"""A fitted module passes for the model it was made of: its name, signature and class, in any process."""

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stowplan
from stowplan import Search, torch_private
from stowplan.capture.origins import line_of
from tests.support.models import MOVES, Chain, images
from tests.support.side_by_side import different, trained

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


def fitted(model: nn.Module, *args: object, budget: int | str = "1GiB") -> nn.Module:
    return stowplan.fit(model, args, budget=budget, search=Search(moves=MOVES))


class Documented(nn.Module):
    """A model with a signature that callers read."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 4}
        self.net = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None, *, scale: float = 1.0, **_: Any) -> Tensor:
        """The loss."""
        found: Tensor = self.net(x).sub(0 if labels is None else labels).square().mean() * scale
        return found


def test_it_looks_like_the_model() -> None:
    model = Documented()
    planned = fitted(model, images(3, 4))
    kind = type(planned)
    assert (kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__) == (
        "Documented",
        "Documented",
        __name__,
        Documented.__doc__,
    )
    assert isinstance(planned, Documented)
    assert repr(planned) == repr(model)
    assert inspect.signature(planned.forward) == inspect.signature(model.forward)
    assert inspect.getdoc(planned.forward) == "The loss."
    assert planned.config is model.config
    assert planned.state_dict().keys() == model.state_dict().keys()
    assert all(map(torch.equal, planned.state_dict().values(), model.state_dict().values()))


@pytest.mark.slow
def test_it_is_exported_as_the_model_itself() -> None:
    if not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("this PyTorch does not tell that it exports")
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), images(3, 4)
    exported = torch.export.export(fitted(model, x), (x,), strict=False)
    assert torch.equal(exported.module()(x), model(x))
    assert sorted(exported.state_dict) == sorted(model.state_dict())


def test_it_can_be_fitted_again_with_another_budget() -> None:
    x = images(64, 16)
    model = Chain()
    eager = copy.deepcopy(model)
    once = fitted(model, x)
    (plan,) = stowplan.plans_of(once)
    budget = int(0.9 * plan.projected_peak_bytes)
    again = stowplan.fit(once, (x,), budget=budget, search=Search(moves=MOVES))
    (tight,) = stowplan.plans_of(again)
    assert tight.projected_peak_bytes <= budget < plan.projected_peak_bytes
    assert type(again).__mro__ == type(once).__mro__
    assert not different(trained(eager, eager, (x,)), trained(again, again, (x,)))


def _gradients_there(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.set_num_threads(1)
    torch.autograd.backward(model(x))
    assert isinstance(model, Chain)
    assert len(stowplan.plans_of(model)) == 1
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
def test_it_goes_to_a_process_that_is_started_anew() -> None:
    model, x = Chain(), images(64, 16)
    planned = fitted(model, x)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = pool.submit(_gradients_there, planned, x).result()
    torch.autograd.backward(model(x))
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(expected) == len(found) > 1
    assert all(map(torch.equal, expected, found))


class Checkpointed(nn.Module):
    """Blocks with dropout, each under a checkpoint."""

    def __init__(self, *, reentrant: bool, held: Callable[..., Any] = checkpoint) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.held(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.fixture
def _told_anew() -> Iterator[None]:
    torch_private.tell_of_checkpoints.cache_clear()
    yield
    torch_private.tell_of_checkpoints.cache_clear()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("_told_anew")
@pytest.mark.slow
def test_a_checkpoint_is_captured_as_what_it_computes(
    reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = Checkpointed(reentrant=reentrant), Checkpointed(reentrant=reentrant)
    x = images(32, 8).requires_grad_()
    with caplog.at_level(logging.WARNING, "stowplan"):
        planned = fitted(twin, x)
    assert [r.getMessage() for r in caplog.records if "checkpoint" in r.getMessage()] == [
        "torch.utils.checkpoint (gradient_checkpointing) is switched off in a planned step: the plan decides"
        " what to recompute"
    ]
    (plan,) = stowplan.plans_of(planned)
    assert plan.exactness == "bitwise"
    without = stowplan.plans_of(fitted(Checkpointed(reentrant=reentrant, held=_call), x))[0]
    assert [op.type for op in plan.graph.ops] == [op.type for op in without.graph.ops]
    assert not different(trained(model, model, (x,)), trained(planned, planned, (x,)))
    smaller = fitted(planned, images(16, 8).requires_grad_())  # another shape in the middle of training
    assert not different(trained(model, model, (x[:16],)), trained(smaller, smaller, (x[:16],)))


def _call(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
    del use_reentrant
    return function(*args)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_without_gradients_gives_none_as_in_eager() -> None:
    class Mixed(Checkpointed):
        def __init__(self) -> None:
            super().__init__(reentrant=True)
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.held(self.blocks[0], x, use_reentrant=True)
            found: Tensor = self.head(hidden).mean()
            return found

    model, x = Mixed(), images(32, 8)
    planned = fitted(Mixed(), x)
    for each in (model, planned):
        torch.manual_seed(1)
        torch.autograd.backward(each(x))
    expected = [p.grad is None for p in model.parameters()]
    assert any(expected)
    assert not all(expected)
    assert [p.grad is None for p in planned.parameters()] == expected


@pytest.mark.parametrize(("folder", "is_told"), [("torchvision", True), ("torch", False)])
def test_lines_of_packages_whose_names_begin_with_torch_are_told(folder: str, is_told: bool) -> None:
    file = Path(torch.__file__).parents[1] / folder / "ops" / "boxes.py"
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", str(file), "exec"))  # noqa: S102 -- a line in a file of that name
    assert (f"{file}:1" == line_of(caught.value)) is is_told
