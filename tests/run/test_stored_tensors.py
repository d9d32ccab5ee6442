"""Tensors that forward and its hooks store: after each call they are those of eager."""

import copy
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.utils import prune

import stowplan
from stowplan import Search
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
    return stowplan.fit(model, (X,), budget="1MiB", search=Search(moves=10), **options)


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


class Opaque(Maps):
    """Stores a tensor beside an object that no call could make again."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = {"h": self.a(x).detach(), "lock": threading.Lock()}
        loss: Tensor = self.b(x).square().mean()
        return loss


def test_a_tensor_beside_what_no_call_could_make_is_refused() -> None:
    with pytest.raises(
        CaptureError, match="forward puts a lock into last; put tensors and plain values there"
    ):
        fitted(Opaque())


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


class Recorder:
    """Keeps what a layer returns, as a function, a method and an object do."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.seen: list[Tensor] = []

    def __call__(self, _layer: nn.Module, _args: object, out: Tensor) -> None:
        self.seen.append(out.detach())

    def keep(self, _layer: nn.Module, _args: object, out: Tensor) -> None:
        self.last = out


def into_a_dict(layer: nn.Module) -> Callable[[], list[Tensor]]:
    features: dict[str, Any] = {}

    def hook(name: str, _layer: nn.Module, args: Any, out: Tensor) -> None:
        features[name] = out, [args[0], out.mean()]

    layer.register_forward_hook(partial(hook, "a"))
    return lambda: pytree.tree_leaves(features)


def into_a_list_that_grows(layer: nn.Module) -> Callable[[], list[Tensor]]:
    recorder = Recorder()
    layer.register_forward_hook(recorder)
    return lambda: list(recorder.seen)


def into_a_new_list(layer: nn.Module) -> Callable[[], list[Tensor]]:
    recorder = Recorder()
    layer.register_forward_hook(recorder)

    def taken() -> list[Tensor]:
        seen, recorder.seen = recorder.seen, []
        return seen

    return taken


def into_a_list_cleared_before(layer: nn.Module) -> Callable[[], list[Tensor]]:
    kept: deque[Tensor] = deque(maxlen=2)

    def clear(*_: object) -> None:
        kept.clear()

    layer.register_forward_pre_hook(clear)
    layer.register_forward_hook(lambda _, __, out: kept.extend((out.detach(), out.exp())))
    return lambda: list(kept)


def into_a_list_with_names(layer: nn.Module) -> Callable[[], list[Tensor]]:
    rows: list[Any] = []
    layer.register_forward_hook(lambda _, __, out: rows.extend(("out", out.detach(), ("mean", out.mean()))))
    return lambda: [torch.tensor(len(rows)), *(r for r in pytree.tree_leaves(rows) if isinstance(r, Tensor))]


def into_the_last_two(layer: nn.Module) -> Callable[[], list[Tensor]]:
    kept = deque([torch.zeros(4, 8), torch.ones(4, 8)], maxlen=2)
    layer.register_forward_hook(lambda _, __, out: kept.append(out.detach()))
    return lambda: list(kept)


def into_an_object(layer: nn.Module) -> Callable[[], list[Tensor]]:
    recorder = Recorder()
    layer.register_forward_hook(recorder.keep)
    return lambda: [] if recorder.last is None else [recorder.last]


def into_a_variable(layer: nn.Module) -> Callable[[], list[Tensor]]:
    last = torch.zeros(0)

    def hook(_layer: nn.Module, _args: object, out: Tensor) -> None:
        nonlocal last
        last = out

    layer.register_forward_hook(hook)
    return lambda: [last]


def into_the_layer(layer: Any) -> Callable[[], list[Tensor]]:
    layer.register_forward_hook(lambda own, _, out: setattr(own, "features", out.detach()))
    return lambda: [layer.features] if hasattr(layer, "features") else []


def changing(layer: nn.Module) -> Callable[[], list[Tensor]]:
    layer.register_forward_hook(lambda _, __, out: out * 2)
    layer.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    return list


HOOKS = [
    (into_a_dict, 2),
    (into_a_list_that_grows, 3),
    (into_a_new_list, 1),
    (into_a_list_cleared_before, 2),
    (into_a_list_with_names, 3),
    (into_the_last_two, 1),
    (into_an_object, 2),
    (into_a_variable, 2),
    (into_the_layer, 1),
    (changing, 1),
]


@pytest.mark.parametrize(("hooked", "plans"), HOOKS, ids=[hooked.__name__ for hooked, _ in HOOKS])
def test_hooks_store_and_change_what_they_do_in_eager(
    hooked: Callable[[nn.Module], Callable[[], list[Tensor]]], plans: int
) -> None:
    """A call that finds what the first one has stored may have a plan of its own."""
    sides = list[list[Tensor]]()
    for is_planned in (False, True):
        model = Auxiliary()
        see = hooked(model.a)
        before = see()
        run: Any = fitted(model) if is_planned else model
        assert equal(before, see())  # fit itself stores nothing
        seen = list[Tensor]()
        for number in range(3):
            run(X + number).backward()
            seen += [tensor.detach().clone() for tensor in see()]
        sides.append([*seen, *(p.grad for p in run.parameters() if p.grad is not None)])
    assert equal(*sides)
    assert len(stowplan.plans_of(run)) == plans


def test_a_hook_that_counts_or_keeps_a_weight_is_refused_by_its_name() -> None:
    counts, kept = [0], dict[str, Tensor]()
    hooks: dict[str, Callable[..., None]] = {
        r"changes .*: forward hook of a\.counts": lambda *_: counts.__setitem__(0, counts[0] + 1),
        r"puts a\.weight itself into 'w' of forward hook of a\.kept": lambda m, *_: kept.update(w=m.weight),
    }
    for said, hook in hooks.items():
        model = Auxiliary()
        model.a.register_forward_hook(hook)
        with pytest.raises(CaptureError, match=said):
            fitted(model)
    assert (counts, kept) == ([0], {})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_observers_of_quantisation_observe() -> None:
    """Those that observe each channel give their buffers sizes in the first call, which cannot be planned."""
    sides = list[list[Tensor]]()
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(quantization.QuantStub(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).train()
        tools: Any = quantization
        net.qconfig = tools.get_default_qat_qconfig("fbgemm")
        tools.prepare_qat(net, inplace=True)
        how: dict[str, Any] = {"budget": "1MiB", "search": Search(moves=10), "loss": torch.sum}
        if is_planned:
            with pytest.raises(CaptureError, match="has no elements yet; call the model once before fit"):
                stowplan.fit(net, (X,), **how)
        net(X)
        run: Any = stowplan.fit(net, (X,), **how) if is_planned else (lambda x, net=net: net(x).sum())
        for number in range(3):
            run(X + number).backward()
        sides.append([*net.state_dict().values(), *(p.grad for p in net.parameters() if p.grad is not None)])
    assert equal(*sides)
