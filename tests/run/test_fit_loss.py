"""`fit(..., loss=)`: which output is differentiated, or what the loss is computed from."""

import copy
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.errors import BadUse, BudgetTooSmall, CaptureError

X = torch.linspace(-1, 1, 48).reshape(6, 8)


class Both(NamedTuple):
    near: Tensor
    far: Tensor
    hidden: Tensor


class Two(nn.Module):
    """Returns two scalars and what they are computed from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Both:
        hidden = self.net(x)
        return Both(hidden.square().mean(), hidden.exp().mean(), hidden)


class GivesBack(nn.Module):
    """Returns what it was given, or its own parameter, beside the loss."""

    def __init__(self, what: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.what = what

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.what(self, x), (x * self.weight).tanh().sum()


def fitted(model: nn.Module, *args: Tensor, **settings: Any) -> Any:
    return stowplan.fit(
        model, args or (X,), budget="1GiB", search=Search(moves=3), allow=("recompute",), **settings
    )


def gradients(model: Any, loss: Callable[[Any], Any], *args: Tensor) -> list[Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss(model(*(args or (X,)))).backward()
    return [parameter.grad for parameter in model.parameters()]


def equal(expected: list[Tensor | None], found: list[Tensor | None]) -> bool:
    pairs = zip(expected, found, strict=True)
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("loss", ["far", 1, "hidden"])
def test_the_named_output_is_the_one_that_is_differentiated(loss: str | int) -> None:
    model = fitted(Two(), loss=loss)

    def chosen(output: Both) -> Tensor:
        return output.hidden.sum() if loss == "hidden" else output.far

    assert isinstance(model(X), Both)
    assert equal(gradients(Two(), chosen), gradients(model, chosen))
    file = BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert equal(gradients(Two(), chosen), gradients(torch.load(file, weights_only=False), chosen))
    with pytest.raises(BadUse, match=r"for output 'near'.*outputs=\"all\".*loss='near'"):
        model(X).near.backward()
    with torch.no_grad():
        assert torch.equal(model(X).near, Two()(X).near)


def test_a_function_of_the_output_becomes_part_of_the_step() -> None:
    scale = 2.0
    model = fitted(Two(), loss=lambda output: output.near * scale + output.hidden.abs().mean())

    def eager(output: Both) -> Tensor:
        return output.near * scale + output.hidden.abs().mean()

    assert equal(gradients(Two(), eager), gradients(model, lambda loss: loss))
    assert "abs" in {op.type.split(".")[1] for op in stowplan.plans_of(model)[0].graph.ops}
    with torch.no_grad():
        assert torch.equal(model(X), eager(Two()(X)))
    scale = 3.0  # the function reads it, so the step is planned again
    assert equal(gradients(Two(), eager), gradients(model, lambda loss: loss))
    assert len(stowplan.plans_of(model)) == 2
    assert equal(gradients(Two(), eager), gradients(copy.deepcopy(model), lambda loss: loss))


def test_a_loss_that_is_not_there_is_refused_by_fit() -> None:
    with pytest.raises(CaptureError, match="loss names one of 0, 1, 2, 'near', 'far', 'hidden'"):
        fitted(Two(), loss="nearest")
    with pytest.raises(CaptureError, match="leave loss out"):
        fitted(nn.Linear(8, 1), loss="loss")
    with pytest.raises(BadUse, match="loss is of type MSELoss"):
        fitted(Two(), loss=nn.MSELoss())
    with pytest.raises(BadUse, match="give one"):
        fitted(Two(), loss="near", outputs="all")
    for settings in ({"loss": "near"}, {"outputs": "all"}):
        with pytest.raises(BadUse, match="not offered with a mesh"):
            fitted(Two(), mesh="data=1", **settings)


def test_an_output_without_a_gradient_is_no_loss() -> None:
    model = GivesBack(lambda _, x: x.detach())
    with pytest.raises(CaptureError, match="loss is 0, and no gradient can be computed"):
        fitted(model, loss=0)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (lambda model, _: model.weight, "parameter 'weight'"),
        (lambda _, x: x, "input 'x'"),
        (lambda _, x: x[1:], "input 'x'"),
    ],
)
def test_what_is_given_back_needs_a_word_about_its_gradient(
    what: Callable[[Any, Tensor], Tensor], name: str
) -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(BadUse, match=rf"output 0 is the {name}.*outputs=\"all\".*loss=1"):
        fitted(GivesBack(what), x)

    def both(output: tuple[Tensor, Tensor]) -> Tensor:
        return output[0].square().sum() + output[1]

    expected = gradients(GivesBack(what), both, x), x.grad
    x.grad = None
    found = gradients(fitted(GivesBack(what), x, outputs="all"), both, x), x.grad
    assert equal([*expected[0], expected[1]], [*found[0], found[1]])
    alone = fitted(GivesBack(what), x, loss=1)
    assert equal(gradients(GivesBack(what), lambda o: o[1], x), gradients(alone, lambda o: o[1], x))
    with pytest.raises(BadUse, match="a gradient came in for output 0"):
        gradients(alone, both, x)


class Images(nn.Module):
    """Two scalars of a convolutional net."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.net(x)
        return {"main": hidden.square().mean(), "extra": hidden.abs().mean()}


@pytest.mark.slow
def test_a_named_loss_is_the_one_that_tiles_are_differentiated_for() -> None:
    images = torch.linspace(-1, 1, 48 * 48).reshape(1, 1, 48, 48)
    with pytest.raises(BudgetTooSmall) as refused:
        stowplan.fit(
            Images(), (images,), budget=1, loss="extra", allow=("recompute",), search=Search(moves=5)
        )
    budget = refused.value.minimum_bytes * 7 // 10
    model = stowplan.fit(
        Images(), (images,), budget=budget, loss="extra", search=Search(moves=5, prefer="exactness")
    )
    assert stowplan.plans_of(model)[0].is_tiled
    expected = gradients(Images(), lambda output: output["extra"], images)
    found = gradients(model, lambda output: output["extra"], images)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(BadUse, match="a gradient came in for output 'main'"):
        model(images)["main"].backward()


class Features(nn.Module):
    """Returns what a loss is computed from outside."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.net, self.outputs = nn.Linear(8, 4), outputs

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        hidden = self.net(x)
        return hidden if self.outputs == 1 else tuple(hidden + n for n in range(self.outputs))


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_model_that_returns_no_loss_is_told_of_the_two_ways(
    outputs: int, caplog: pytest.LogCaptureFixture
) -> None:
    def said(model: nn.Module, **settings: Any) -> str:
        caplog.clear()
        fitted(model, **settings)
        return "".join(record.message for record in caplog.records if record.levelname == "WARNING")

    model = Features(outputs)
    assert "Features returns no loss" in said(model)
    assert "loss=" in said(model)
    assert 'outputs="all"' in said(model)
    assert said(model, outputs="all") == ""
    assert said(model, loss=lambda out: (out if outputs == 1 else out[0]).sum()) == ""
    assert said(Two(), loss="near") == ""


@pytest.mark.parametrize("loss", [lambda x: x.sum(), lambda x: x.sum().reshape(1, 1), lambda x: (x.sum(), x)])
def test_a_loss_is_one_number_alone_or_beside_others(
    loss: Callable[[Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Features):
        def forward(self, x: Tensor) -> Any:
            return loss(self.net(x))

    fitted(Own(1))
    assert "returns no loss" not in caplog.text
