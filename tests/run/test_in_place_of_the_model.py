"""A plan in place: the model stays the same object, and copies and files are of its own class."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.errors import BadUse
from tests.support.models import MOVES

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Net(nn.Module):
    """Refuses to be planned for calls with `twice`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        found: Tensor = self.second(self.first(x).relu()).square().mean()
        return found * found.item() if twice else found


def fitted(model: nn.Module, *args: object, **more: Any) -> nn.Module:
    return stowplan.fit(model, args, budget="1GiB", search=Search(moves=MOVES), **more)


def test_references_stay_valid() -> None:
    model, x = Net(), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    keys, around = list(model.state_dict()), nn.Sequential(model)
    seen = list[str]()
    model.register_forward_hook(lambda *_: seen.append("hook"))
    with stowplan.install(fitted(model, x), model):
        assert isinstance(model, Net)
        assert (type(model).__name__, repr(model), list(model.state_dict())) == ("Net", repr(twin), keys)
        assert around[0] is model
        assert len(stowplan.plans_of(model)) == 1
        around(x).backward()
        optimizer.step()
        assert seen == ["hook"]
    assert type(model) is Net
    assert vars(model).keys() == vars(twin).keys()
    other = torch.optim.AdamW(twin.parameters())
    twin(x).backward()
    other.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def is_planned(result: Tensor) -> bool:
    return result.grad_fn is not None and result.grad_fn.name() == "StepOutputBackward"


def test_the_plan_runs_and_ends() -> None:
    model, x = Net(), torch.randn(3, 4)
    installed = stowplan.install(fitted(model, x), model)
    assert is_planned(model(x))
    assert is_planned(model(x))
    with torch.no_grad():
        assert model(x).grad_fn is None
    installed.remove()
    installed.remove()
    assert not is_planned(model(x))


def pickled(model: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(model))  # noqa: S301 -- written by this test
    return found


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
def test_copies_are_of_the_models_own_class(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x = Net(), torch.randn(3, 4)
    keys = vars(model).keys()
    with stowplan.install(fitted(model, x), model):
        around = nn.ModuleDict({"model": model})
        other = copied(around)["model"]  # type: ignore[index]
    assert type(other) is Net or copied is copy.copy
    assert copied is copy.copy or vars(other).keys() == keys
    assert torch.equal(other(x), model(x))
    alone = copied(model)
    assert type(alone) is Net
    assert vars(alone).keys() == keys


def test_a_file_of_the_whole_module_loads_without_stowplan(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))
    x = torch.randn(3, 4)
    with stowplan.install(fitted(model, x, outputs="all"), model):
        torch.save(model, tmp_path / "model.pt")
        torch.save({"model": model, "again": model}, tmp_path / "twice.pt")
    code = (
        "import sys, torch\n"
        "sys.modules['stowplan'] = None\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        "both = torch.load('twice.pt', weights_only=False)\n"
        "assert both['model'] is both['again']\n"
        "assert type(model) is type(both['model']) is torch.nn.Sequential\n"
        "model(torch.ones(3, 4)).sum().backward()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_a_forward_that_was_set_on_the_model_is_planned_and_comes_back() -> None:
    """As Accelerate sets it for mixed precision."""
    model, x = Net(), torch.randn(3, 4)

    def doubled(self: Net, x: Tensor) -> Tensor:
        return 2 * Net.forward(self, x)

    model.forward = own = MethodType(doubled, model)  # type: ignore[method-assign]
    expected = model(x)
    with stowplan.install(fitted(model, x), model):
        assert "forward" not in vars(model)
        assert torch.equal(model(x), expected)
        assert "forward" in vars(copy.deepcopy(model))
    assert vars(model)["forward"] is own


def test_refusals_of_later_calls_can_be_taken() -> None:
    model, x = Net(), torch.randn(3, 4)
    with stowplan.install(fitted(model, x), model), pytest.raises(stowplan.CaptureError):
        model(x, twice=True)
    taken = list[Exception]()
    with stowplan.install(fitted(model, x), model, otherwise=taken.append):
        found = model(x, twice=True)
        assert [type(each) for each in taken] == [stowplan.CaptureError]
        model(x).backward()
        assert len(taken) == 1
    assert torch.equal(found, model(x, twice=True))


def test_another_plan_takes_the_place_of_the_first() -> None:
    model, x, y = Net(), torch.randn(3, 4), torch.randn(5, 4)
    first, second = fitted(model, x), fitted(model, y)
    stowplan.install(first, model)
    installed = stowplan.install(second, model)
    assert [plan.graph.tensors["x"].shape for plan in stowplan.plans_of(model)] == [(5, 4)]
    assert torch.equal(first(x), model(x))
    installed.remove()
    assert type(model) is Net


def test_misuse_is_refused() -> None:
    model, x = Net(), torch.randn(3, 4)
    planned = fitted(model, x)
    for one, other in ((model, planned), (planned, Net())):
        with pytest.raises(BadUse, match="install"):
            stowplan.install(one, other)
    installed = stowplan.install(planned, model)
    with pytest.raises(BadUse, match="has a plan in place"):
        fitted(model, x)
    installed.remove()


def test_a_class_that_was_changed_since_is_told() -> None:
    model, x = Net(), torch.randn(3, 4)
    installed = stowplan.install(fitted(model, x), model)
    model.__class__ = type("Wrapped", (type(model),), {})
    with pytest.raises(BadUse, match="was given another class"):
        installed.remove()
