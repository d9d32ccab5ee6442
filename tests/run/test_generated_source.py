"""Generated code holds nothing of the user's, leads back to the user's modules, and puts draws back."""

import gc
import linecache
import traceback
from enum import IntEnum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from stowplan.capture import Call, Ref, capture
from stowplan.plan.steps import RecomputeOp
from stowplan.run.fit import plans_of
from stowplan.run.step.literals import call_lines, literal
from stowplan.run.step.source import Source, source_of
from stowplan.run.step.straight import StraightStep, baseline_steps
from tests.support.failing import Failing
from tests.support.models import Normed, images
from tests.support.side_by_side import different, lowest, trained

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

NAMES = ("now", "draws_0", "draws0", "away_0", "away0", "tier", "_", "True", "print", "primals", "p0", "t_0")
ALIKE = (("fi", "\ufb01"), ("K", "\u212a"), ("\u210c", "H"), ("\u00b5", "\u03bc"), ("a\nb", "a_b"))


class Named(nn.Module):
    """Two matrices under any names, dropout, and a literal that is written with `float`."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__()
        self.used = one, other
        for name in self.used:
            self.register_parameter(name, nn.Parameter(images(8, 8) * (1 + len(self._parameters))))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.used:
            x = nn.functional.dropout(torch.tanh(x @ getattr(self, name)), 0.5)
        return x.masked_fill(x > 1.5, float("inf")).clamp(max=10).sum()


def source_for(model: nn.Module, *args: Tensor) -> Source:
    captured = capture(model, args)
    return source_of(captured.graph, captured.program, baseline_steps(captured.graph))


@pytest.mark.parametrize("names", [*((name, "b") for name in NAMES), *ALIKE])
def test_parameters_may_have_any_name(names: tuple[str, str]) -> None:
    model, args = Named(*names), (images(4, 8),)
    straight = StraightStep(capture(model, args), model)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = trained(model, model, args)
    model.load_state_dict(initial)
    assert different(expected, trained(straight, model, args)) == []


@pytest.mark.slow
def test_names_of_recomputed_draws_are_our_own() -> None:
    model, args = Named("now", "draws_0"), (images(4096, 8),)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fitted = lowest(model, args)
    assert any(isinstance(step, RecomputeOp) for step in plans_of(fitted)[0].steps)
    expected = trained(model, model, args)
    model.load_state_dict(initial)
    assert different(expected, trained(fitted, model, args)) == []


def test_a_module_name_is_never_run() -> None:
    key = "a\n    raise SystemExit('ran')\n    #"

    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({key: nn.Linear(4, 4)})

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.parts[key](x)).sum()

    keyed = Keyed()
    source = source_for(keyed, images(2, 4))
    assert "SystemExit" not in source.text
    assert any("SystemExit" in place for place in source.places.values())
    assert all(line.lstrip().startswith("#") for line in source.annotated().splitlines() if "Exit" in line)
    straight = StraightStep(capture(keyed, (images(2, 4),)), keyed)
    loss = straight(images(2, 4))
    assert isinstance(loss, Tensor)
    torch.autograd.backward(loss)


def test_the_table_beside_the_text_has_the_users_names() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"\u00e9t\u00e9": nn.Linear(4, 4)})

        def forward(self, saison: Tensor) -> Tensor:
            return self.inner["\u00e9t\u00e9"](saison).sum()  # type: ignore[no-any-return]

    source = source_for(Step(), images(2, 4))
    assert source.text.isascii()
    assert {"inner.\u00e9t\u00e9.weight", "inner.\u00e9t\u00e9.bias", "saison"} <= set(source.names.values())
    assert "saison" not in source.text
    assert source.annotated().isascii()


class Loud(IntEnum):
    """Prints itself as code."""

    TWO = 2

    def __repr__(self) -> str:
        return "print('ran')"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Loud.TWO, "2"),
        (True, "True"),
        (None, "None"),
        (float("-inf"), "float('-inf')"),
        (-0.0, "-0.0"),
        (complex(0.0, float("nan")), "complex(0.0, float('nan'))"),
        ("a'\n\u00e9", r'''"a'\n\xe9"'''),
        ((1, (2.5,)), "[1, [2.5]]"),
    ],
)
def test_values_are_written_by_their_types(value: Any, text: str) -> None:
    assert literal(value, {}) == text


def test_ops_and_arguments_whose_names_python_does_not_take() -> None:
    with torch.library._scoped_library("stowplan_test", "DEF") as library:
        library.define("lambda(Tensor x, *, float from) -> Tensor")
        library.impl("lambda", lambda x, **given: x * given["from"], "CompositeExplicitAutograd")
        target: OpOverload = getattr(torch.ops.stowplan_test, "lambda").default
        call = Call(target, (Ref("x"),), {"from": 3.0}, ("y",), single=True)
        scope: dict[str, Any] = {"ops": torch.ops, "x_0": torch.ones(2)}
        exec("\n".join(call_lines(call, {}, {"x": "x_0", "y": "y_0"})), scope)  # noqa: S102 -- as is tested
        assert torch.equal(scope["y_0"], torch.full((2,), 3.0))


def draws(op: OpOverload) -> bool:
    """Whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


@pytest.mark.parametrize("fault", [RuntimeError("no kernel"), KeyboardInterrupt()])
@pytest.mark.slow
def test_a_replayed_draw_that_fails_leaves_the_generator_where_it_was(fault: BaseException) -> None:
    fitted = lowest(Named("one", "other"), (images(4096, 8),))
    loss = fitted(images(4096, 8))
    before = torch.get_rng_state()
    with pytest.raises(type(fault)) as raised, Failing(fault, draws):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert any("recomputed" in note for note in raised.value.__notes__)


def test_a_traceback_shows_the_generated_line_and_the_module() -> None:
    model, x = Normed(), images(2, 3, 8, 8)
    straight = StraightStep(capture(model, (x,)), model)
    with pytest.raises(RuntimeError) as raised, Failing(RuntimeError("no kernel"), draws):
        straight(x)
    text = "".join(traceback.format_exception(raised.value))
    assert "aten.bernoulli" in text
    assert "In the planned step: drop  models.py:" in text


def test_the_text_of_a_step_goes_with_the_step() -> None:
    model, before = nn.Linear(2, 2), set(linecache.cache)
    straight = StraightStep(capture(model, (images(1, 2),)), model)
    (file,) = (name for name in linecache.cache.keys() - before if name.startswith("<stowplan step "))
    assert "aten.addmm.default(" in "".join(linecache.getlines(file))
    del straight
    gc.collect()
    assert file not in linecache.cache
