"""Tensors that forward stores in attributes of modules: after each call they are those of eager."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import stowplan
from stowplan.errors import BadUse, CaptureError
from stowplan.torch_private import pytree
from tests.support.equality import equal

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Maps(nn.Module):
    """Stores a map in a layer, and containers in itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.a
        layer.map = torch.softmax(self.a(x), -1)
        self.maps = [layer.map, self.b(layer.map)]
        self.last = {"h": self.maps[1].detach(), "x": x, "count": 3}
        loss: Tensor = self.maps[1].square().mean()
        return loss


class Auxiliary(Maps):
    """Stores a term of the loss, which the loop adds."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x).relu())
        self.term = h.abs().mean()
        loss: Tensor = h.square().mean()
        return loss


class Recurrent(Maps):
    """Reads what the call before has stored."""

    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if self.state is None else self.a(x) + self.b(self.state)
        self.state = self.kept(torch.tanh(h))
        loss: Tensor = self.state.square().mean() + h.mean()
        return loss

    def kept(self, h: Tensor) -> Tensor:
        return h.detach()


class Carrying(Recurrent):
    """Carries its state on with its history, through which eager differentiates a second time."""

    def kept(self, h: Tensor) -> Tensor:
        return h


def stored(model: nn.Module) -> list[Tensor]:
    """All tensors in plain attributes."""
    own = [{k: v for k, v in vars(m).items() if k[0] != "_"} for m in model.modules()]
    return [leaf.detach().clone() for leaf in pytree.tree_leaves(own) if isinstance(leaf, Tensor)]


def trained(
    model: nn.Module, loss_of: Callable[[Any, Tensor], Tensor] = lambda _, loss: loss
) -> list[Tensor]:
    """Losses, parameters and what is stored, of three iterations."""
    seen, optimizer = list[Tensor](), torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        optimizer.zero_grad()
        loss = model(X + number)
        total: Any = loss_of(model, loss)
        total.backward()
        optimizer.step()
        seen += [loss.detach().clone(), *(p.detach().clone() for p in model.parameters()), *stored(model)]
    return seen


def fitted(model: nn.Module, **options: Any) -> nn.Module:
    return stowplan.fit(model, (X,), budget="1MiB", moves=10, **options)


@pytest.mark.parametrize(("kind", "plans"), [(Maps, 1), (Auxiliary, 1), (Recurrent, 2)])
def test_what_is_stored_is_what_eager_stores(kind: type[nn.Module], plans: int) -> None:
    model = kind()
    planned = fitted(copy.deepcopy(model))
    assert stored(planned) == []  # fit itself stores nothing
    assert equal(trained(model), trained(planned))
    assert len(stowplan.plans_of(planned)) == plans


def test_a_stored_term_of_the_loss_has_its_gradient() -> None:
    def loss_of(model: Any, loss: Tensor) -> Tensor:
        total: Tensor = loss + 0.1 * model.term
        return total

    model = Auxiliary()
    expected = trained(copy.deepcopy(model), loss_of)
    assert equal(expected, trained(fitted(copy.deepcopy(model), outputs="all"), loss_of))
    with pytest.raises(
        BadUse, match=r"for output 'term', but .* gradient of the output alone; use .*\"all\""
    ):
        trained(fitted(model), loss_of)


def test_what_is_carried_on_with_its_history_is_refused() -> None:
    planned = fitted(Carrying())
    planned(X).backward()
    with pytest.raises(CaptureError, match="requires a gradient but is no parameter or input"):
        planned(X)


def test_what_stays_counts() -> None:
    """The tensors of the call before are there until others take their place."""
    plain = stowplan.plans_of(fitted(nn.Sequential(Maps().a, nn.Tanh()), loss=torch.sum))[0]
    with_map = stowplan.plans_of(fitted(Maps()))[0]
    assert plain.allowed_bytes - with_map.allowed_bytes >= 2 * X.nbytes


WEIGHTS: dict[str, Callable[[Any], object]] = {
    "weight norm": nn.utils.weight_norm,
    "spectral norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),  # type: ignore[no-untyped-call]
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("hook", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_hooks_that_make_weights_are_a_part_of_forward(hook: Callable[[Any], object]) -> None:
    sides = list[list[Tensor]]()
    for is_planned in (False, True):
        model = Auxiliary()
        hook(model.a)
        run = fitted(model) if is_planned else model
        sides.append([*trained(run), *trained(run.eval()), *model.state_dict().values()])
    assert equal(*sides)
