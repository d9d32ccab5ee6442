"""Wrapper subclasses are planned with the tensors inside them, whose unpacked copies a plan frees."""

from collections.abc import Callable
from copy import deepcopy
from io import BytesIO
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.masked import MaskedTensor

import stowplan
from stowplan import Search
from stowplan.errors import BadUse, CaptureError
from stowplan.run.measure.measure import measure
from tests.support.packed import Adapted, AdaptedNet, Packed

pytestmark = pytest.mark.torch

SIZE = 64
X = torch.randn(32, SIZE, generator=torch.Generator().manual_seed(3))


def outcome(model: Any, *args: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(*args)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


def same(one: Any, other: Any, *args: Any) -> bool:
    return all(map(torch.equal, outcome(one, *args), outcome(other, *args)))


def fitted_of(model: nn.Module, *args: Any, budget: int | str = "1GiB", **options: Any) -> Any:
    how: dict[str, Any] = {"search": Search(moves=100), "allow": ("recompute",), **options}
    return stowplan.fit(model, args, budget=budget, **how)


def smallest_of(model: nn.Module, *args: Any, **options: Any) -> int:
    with pytest.raises(stowplan.BudgetTooSmall) as refusal:
        fitted_of(model, *args, budget=1, **options)
    return refusal.value.minimum_bytes


def test_packed_weights_have_eagers_bits_and_keep_their_class() -> None:
    model: Any = AdaptedNet()
    fitted = fitted_of(deepcopy(model), X)
    assert same(model, fitted, X)
    (plan,) = stowplan.plans_of(fitted)
    assert plan.exactness == "bitwise"
    kinds = {type(value) for name, value in fitted.state_dict().items() if "base" in name}
    assert kinds == {Packed}
    file = BytesIO()
    torch.save(fitted.state_dict(), file)
    file.seek(0)
    again = AdaptedNet()
    again.load_state_dict(torch.load(file, weights_only=False))
    assert same(model, again, X)


@pytest.mark.slow
def test_a_plan_frees_what_is_unpacked() -> None:
    packed, plain = AdaptedNet(layers=6), AdaptedNet(layers=6, kind=None)
    smallest = smallest_of(packed, X)
    fitted = fitted_of(packed, X, budget=smallest)
    assert same(AdaptedNet(layers=6), fitted, X)
    fitted.zero_grad(set_to_none=True)
    parts = [t for p in fitted.parameters() for t in (_inside(p) if isinstance(p, Packed) else [p])]
    measured = measure(lambda: fitted(X).backward(), before=[*parts, X]).measured_peak_bytes
    assert 0.8 * smallest < measured <= smallest
    weight = 4 * SIZE * SIZE
    saved = sum(p.nbytes for n, p in plain.named_parameters() if "base" in n) - sum(
        t.nbytes for p in packed.parameters() if isinstance(p, Packed) for t in _inside(p)
    )
    assert smallest <= smallest_of(plain, X) - saved + 2 * weight  # one copy, and what it is unpacked from


def _inside(packed: Packed) -> list[Tensor]:
    return [packed.numbers, packed.scales]


def test_it_is_read_anew() -> None:
    model: Any = AdaptedNet()
    fitted = fitted_of(deepcopy(model), X)
    for each in (model, fitted):
        each.layers[0].base.weight.scales.mul_(2)
    assert same(model, fitted, X)
    other = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(5))
    for each in (model, fitted):
        each.layers[1].base.weight = nn.Parameter(Packed.of(other), requires_grad=False)
    assert same(model, fitted, X)
    for each in (model, fitted):
        each.layers[2].base.weight.numbers = each.layers[1].base.weight.numbers.clone()
    assert same(model, fitted, X)
    assert len(stowplan.plans_of(fitted)) == 1


@pytest.mark.slow
def test_another_form_is_another_plan() -> None:
    model: Any = AdaptedNet()
    fitted = fitted_of(deepcopy(model), X)
    for each in (model, fitted):
        weight = torch.ones(SIZE, SIZE)
        each.layers[1].base.weight = nn.Parameter(Packed.of(weight, group=32), requires_grad=False)
    assert same(model, fitted, X)
    assert len(stowplan.plans_of(fitted)) == 2
    for each in (model, fitted):
        each.layers[1].base.weight = nn.Parameter(weight, requires_grad=False)
    assert same(model, fitted, X)
    assert len(stowplan.plans_of(fitted)) == 3


class Listed(Packed):
    """Keeps its group in a list, which may change while the object stays."""

    def unpacked(self) -> Tensor:
        size: Any = self.group
        found: Tensor = (self.numbers.view(-1, 16) * self.scales * size[0]).view(self.shape)
        return found


def test_metadata_that_changes_in_place_is_seen() -> None:
    def made() -> Any:
        model: Any = AdaptedNet(layers=1)
        old = model.layers[0].base.weight
        how: Any = [2]
        model.layers[0].base.weight = nn.Parameter(Listed(old.numbers, old.scales, how), requires_grad=False)
        return model

    model, fitted = made(), fitted_of(made(), X)
    for _ in range(2):
        assert same(model, fitted, X)
    for each in (model, fitted):
        each.layers[0].base.weight.group[0] = 3
    assert same(model, fitted, X)
    assert len(stowplan.plans_of(fitted)) == 2


class Twice(Packed):
    """A wrapper around a wrapper."""

    @classmethod
    def of(cls, weight: Tensor, group: int = 16) -> "Twice":
        return cls(Packed.of(weight, group), torch.full((), 0.5), group)

    def unpacked(self) -> Tensor:
        return self.numbers * self.scales

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, group: int) -> "Twice":
        made: Any = Packed.__new__(cls, numbers, scales, group)
        return made  # type: ignore[no-any-return]


def test_a_wrapper_in_a_wrapper() -> None:
    model: Any = AdaptedNet(kind=Twice)
    fitted = fitted_of(deepcopy(model), X)
    assert same(model, fitted, X)
    for each in (model, fitted):
        each.layers[0].base.weight.numbers.scales.mul_(2)
    assert same(model, fitted, X)


SHARED = Packed.of(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(9)))


class Elsewhere(Adapted):
    """Reads packed weights that are a buffer, an attribute, a global and an argument."""

    table: Tensor

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(SIZE)
        self.register_buffer("table", Packed.of(torch.randn(SIZE, SIZE)))
        self.own = [Packed.of(torch.randn(SIZE, SIZE))]

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        h = super().forward(x) @ self.table @ self.own[0] @ SHARED
        return (h if given is None else h @ given).square().mean()


def test_buffers_attributes_globals_and_arguments() -> None:
    one, other = (Packed.of(torch.randn(SIZE, SIZE)) for _ in range(2))
    model = Elsewhere()
    fitted: Any = fitted_of(deepcopy(model), X, one)
    assert same(model, fitted, X, one)
    assert same(model, fitted, X, other)
    SHARED.scales.mul_(1.5)
    for each in (model, fitted):
        each.own[0].scales.mul_(2)
    assert same(model, fitted, X, other)
    for each in (model, fitted):
        each.own[0] = one
    assert same(model, fitted, X, other)
    assert len(stowplan.plans_of(fitted)) == 1
    assert same(model, fitted, X, other.unpacked())
    assert len(stowplan.plans_of(fitted)) == 2


def test_forward_may_write_into_it() -> None:
    class Swapping(AdaptedNet):
        def forward(self, x: Tensor) -> Tensor:
            loss, layers = super().forward(x), cast(Any, self.layers)
            with torch.no_grad():
                layers[0].base.weight.copy_(layers[1].base.weight)
            return loss

    model = Swapping()
    fitted = fitted_of(deepcopy(model), X)
    for _ in range(3):
        assert same(model, fitted, X)
        for one, other in zip(model.parameters(), fitted.parameters(), strict=True):
            if isinstance(one, Packed):
                assert torch.equal(one.numbers, other.numbers)


@pytest.mark.slow
def test_tiles_read_it_whole() -> None:
    x = torch.randn(2048, SIZE)
    smallest = smallest_of(AdaptedNet(layers=2), x)
    fitted = fitted_of(AdaptedNet(layers=2), x, budget=int(0.7 * smallest), allow=("recompute", "tile"))
    assert stowplan.plans_of(fitted)[0].tile_maps
    torch.testing.assert_close(outcome(fitted, x), outcome(AdaptedNet(layers=2), x))


@pytest.mark.slow
def test_adapters_are_updated_in_backward() -> None:
    model, planned = AdaptedNet(), AdaptedNet()
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad]) for m in (model, planned)]
    fitted = fitted_of(planned, X, optimizer=optimizers[1])
    for _ in range(3):
        for each, optimizer in zip((model, fitted), optimizers, strict=True):
            each(X).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(*(p.unpacked() if isinstance(p, Packed) else p for p in (one, other)))


def test_it_is_not_divided_over_a_mesh() -> None:
    with pytest.raises(BadUse, match=r"layers.0.base.weight is a Packed, and workers"):
        stowplan.fit(AdaptedNet(), (X,), budget="1GiB", mesh="data=1")


class Scales:
    """What a package keeps beside the numbers of a weight."""

    def __init__(self, scales: Tensor, group: int, more: object = None) -> None:
        self.scales, self.group, self.more = scales, group, more


class Attached(nn.Parameter):
    """A parameter with numbers of eight bits, whose scales are in an attribute."""

    state: Scales

    @staticmethod
    def of(weight: Tensor, more: object = None) -> "Attached":
        packed = Packed.of(weight)
        made: Any = torch.Tensor._make_subclass(Attached, packed.numbers, False)
        made.state = Scales(packed.scales, 16, more)
        return made  # type: ignore[no-any-return]


class AttachedNet(AdaptedNet):
    def __init__(self, more: object = None) -> None:
        super().__init__(kind=None)
        for layer in self.layers:
            base: Any = layer.base
            base.weight = Attached.of(base.weight, more)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            part: Any = layer
            assert isinstance(part.base.weight, Attached)
            state = part.base.weight.state
            weight = (part.base.weight.view(-1, state.group) * state.scales).view(SIZE, SIZE)
            x = nn.functional.gelu(x @ weight.t() + part.up(part.down(x)))
        return x.square().mean()


def test_a_parameter_with_tensors_in_attributes() -> None:
    model: Any = AttachedNet()
    smallest = smallest_of(AttachedNet(), X)
    fitted: Any = fitted_of(AttachedNet(), X, budget=2 * smallest)
    assert same(model, fitted, X)
    assert stowplan.plans_of(fitted)[0].exactness == "bitwise"
    for each in (model, fitted):
        each.layers[0].base.weight.state.scales.mul_(2)
        each.layers[1].base.weight.state.scales = each.layers[0].base.weight.state.scales * 3
        each.layers[2].base.weight = Attached.of(torch.eye(SIZE))
    assert same(model, fitted, X)
    assert len(stowplan.plans_of(fitted)) == 1
    for each in (model, fitted):
        state = each.layers[1].base.weight.state
        state.group, state.scales = 32, state.scales[::2].clone()
    assert same(model, fitted, X)
    assert len(stowplan.plans_of(fitted)) == 2


@pytest.mark.parametrize(("more", "words"), [([torch.ones(1)], "in lists or dicts"), (iter(()), "compared")])
def test_attributes_that_cannot_be_opened_are_refused_by_name(more: object, words: str) -> None:
    with pytest.raises(BadUse, match=rf"layers.0.base.weight is a Attached .*{words}"):
        fitted_of(AttachedNet(more), X)


class CountsInClass(Packed):
    seen = 0

    def unpacked(self) -> Tensor:
        type(self).seen += 1
        return super().unpacked()


class CountsInObject(Packed):
    def unpacked(self) -> Tensor:
        self.seen = getattr(self, "seen", 0) + 1
        return super().unpacked()


COUNTING = CountsInObject.of(torch.ones(SIZE, SIZE))
CALLS: list[str] = []


class CountsInGlobal(Packed):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        CALLS.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("kind", [CountsInClass, CountsInObject, CountsInGlobal])
def test_a_class_that_counts_is_refused(kind: type[Packed]) -> None:
    model: Any = AdaptedNet(kind=kind)
    before = len(CALLS)
    with pytest.raises(CaptureError, match="changes"):
        fitted_of(model, X)
    assert len(CALLS) == before
    assert "seen" not in vars(model.layers[0].base.weight)


def test_a_global_object_that_counts_is_refused() -> None:
    class Reading(AdaptedNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x @ COUNTING)

    with pytest.raises(CaptureError, match="COUNTING"):
        fitted_of(Reading(), X)
    assert "seen" not in vars(COUNTING)


class Plain(Tensor):
    """A subclass that says nothing of what is inside."""


def _masked() -> Tensor:
    return MaskedTensor(torch.ones(2, SIZE), torch.ones(2, SIZE, dtype=torch.bool))  # type: ignore[no-untyped-call]


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, SIZE), torch.ones(3, SIZE)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_masked, "MaskedTensor"),
        (_nested, "nested tensor"),
        (lambda: torch.ones(2, SIZE).as_subclass(Plain), "Plain"),
        (lambda: Packed.of(torch.ones(2, SIZE)).requires_grad_(), "Packed that requires a gradient"),
        (lambda: Packed(torch.ones(2, SIZE), torch.ones(2, 1).as_subclass(Plain), SIZE), "around a Plain"),
        (lambda: Packed(torch.ones(2, SIZE), torch.ones(8, 1), object()), "keeps a object"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_opened_is_refused_by_name(make: Callable[[], Tensor], words: str) -> None:
    with pytest.raises((BadUse, CaptureError), match=words):
        fitted_of(AdaptedNet(), make())


def test_results_of_a_class_are_refused_by_name() -> None:
    class Returning(AdaptedNet):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.layers[0].base.weight.clone()  # type: ignore[operator, union-attr]

    with pytest.raises(CaptureError, match="returns or stores a Packed"):
        fitted_of(Returning(), X)
