"""A plan claims the bits of eager only if eager dispatches what was captured, and looking leaves no trace."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from stowplan import Search
from stowplan.capture import capture
from stowplan.plan.draft import Exactness, Verdict
from stowplan.plan.files import plan_file
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.run.fit import fit, plans_of
from stowplan.run.measure import agreement
from stowplan.run.measure.agreement import against_eager, compared
from stowplan.run.measure.measure import measure
from stowplan.run.planning.planner import Subject, draft_step
from tests.support.models import Normed, Rewriting, images
from tests.support.side_by_side import AMPLE, different, trained

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Scores(nn.Module):
    """A linear layer, and something that is done otherwise where tensors have no data."""

    def __init__(self, otherwise: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.otherwise = otherwise

    def forward(self, x: Tensor) -> Tensor:
        return self.otherwise(self.fc(x), isinstance(x, FakeTensor)).sum()


def plan_of(model: nn.Module, *args: Tensor) -> Plan:
    fitted = fit(model, args, budget=AMPLE, allow=["recompute"], search=Search(moves=10))
    return plans_of(fitted)[0]


@pytest.mark.slow
def test_the_same_ops_are_bitwise() -> None:
    plan = plan_of(Normed(), images(2, 3, 8, 8))
    assert plan.against_eager is not None
    assert plan.against_eager.verdict is Verdict.SAME
    assert plan.exactness is Exactness.BITWISE


@pytest.mark.parametrize(
    ("otherwise", "words"),
    [
        (lambda h, fake: h + 0 if fake else h, r"eager runs aten.sum.default in place of aten.add.Tensor"),
        (lambda h, fake: h if fake else h + 0, r"eager runs aten.add.Tensor in place of aten.sum.default"),
        (lambda h, fake: h * (2.0 if fake else 3.0), r"eager has other operands for aten.mul.Tensor"),
        (lambda h, fake: h * (1 if fake else True), r"eager has other operands for aten.mul.Tensor"),
        (
            lambda h, fake: h.t().relu() if fake else h.relu(),
            r"eager runs aten.relu.default in place of aten.t",
        ),
        (lambda h, fake: h.mul(h.exp() if fake else h), r"eager runs aten.mul.Tensor in place of aten.exp"),
        (
            lambda h, fake: torch.cat([h, h.abs()][:: 1 if fake else -1]),
            r"other operands for aten.cat.default",
        ),
        (lambda h, fake: h.sum() if fake else h, r"eager ends before aten.sum.default"),
    ],
)
def test_other_ops_are_named_and_claimed_within_rounding(
    otherwise: Callable[[Tensor, bool], Tensor], words: str
) -> None:
    plan = plan_of(Scores(otherwise), images(4, 4))
    assert plan.exactness is Exactness.ROUNDING
    assert plan.against_eager is not None
    assert plan.against_eager.verdict is Verdict.DIFFERS
    assert words.replace("eager ", "") in plan.against_eager.note
    assert "test_agreement.py:" in plan.against_eager.note


READERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], bool]]] = {
    "a number": (torch.mean, lambda m: m.item() == 1.0),
    "a condition": (lambda h: (h == 1).all(), bool),
    "an array": (torch.detach, lambda h: float(h.numpy()[0, 0]) == 1.0),
    "a list": (torch.relu, lambda h: h.tolist()[0][0] == 1.0),
    "in place": (lambda h: torch.zeros(4, 4).add_(h).relu_().sum(), lambda m: m.item() == 16.0),
    "integers": (lambda h: (h.detach().long() + 1).sum(), lambda m: m.item() == 32),
}


@pytest.mark.parametrize(("makes", "reads"), READERS.values(), ids=READERS)
def test_what_eager_reads_after_a_product_has_its_true_numbers(
    makes: Callable[[Tensor], Tensor], reads: Callable[[Tensor], bool]
) -> None:
    def otherwise(h: Tensor, fake: bool) -> Tensor:
        made = makes(h)
        return h if not fake and reads(made) else h + 0

    model = Scores(otherwise)
    nn.init.zeros_(model.fc.weight)
    nn.init.ones_(model.fc.bias)  # all that the layer makes is 1
    plan = plan_of(model, images(4, 4))
    assert plan.against_eager is not None
    assert plan.against_eager.verdict is Verdict.DIFFERS


def test_a_product_is_compared_without_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, normalisation and dropout after products are compared on made-up numbers."""
    model, x = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), images(2, 4, 8)
    begun = list[agreement._Shortcut]()

    class Noted(agreement._Shortcut):
        def __init__(self) -> None:
            super().__init__()
            begun.append(self)

    monkeypatch.setattr(agreement, "_Shortcut", Noted)
    fitted = fit(model, (x,), budget=AMPLE, loss=torch.sum)
    plan = plans_of(fitted)[0]
    assert plan.against_eager is not None
    assert plan.against_eager.verdict is Verdict.SAME
    (shortcut,) = begun
    assert shortcut.made_up


def test_what_the_plan_says_is_in_its_file() -> None:
    plan = plan_of(Scores(lambda h, fake: h + 0 if fake else h), images(4, 4))
    read = plan_file.read(plan_file.write(plan))
    assert read.against_eager == plan.against_eager
    assert read.exactness is Exactness.ROUNDING


def test_a_model_on_meta_is_not_checked() -> None:
    with torch.device("meta"):
        model, x = Scores(lambda h, _: h), torch.empty(4, 4)
    subject = Subject(capture(model, (x,)), model, (x,), {})
    plan = compared(
        draft_step(subject, AMPLE, options=PlanOptions(allow=["recompute"], search=Search(moves=10))).draft,
        subject,
    )
    assert plan.exactness is Exactness.UNCHECKED
    assert plan.against_eager is not None
    assert "meta" in plan.against_eager.note


def test_a_forward_that_raises_in_eager_is_not_checked() -> None:
    def careful(h: Tensor, fake: bool) -> Tensor:
        if not fake:
            raise ValueError("no such data")
        return h

    plan = plan_of(Scores(careful), images(4, 4))
    assert plan.exactness is Exactness.UNCHECKED
    assert plan.against_eager is not None
    assert "ValueError: no such data" in plan.against_eager.note


@pytest.mark.parametrize("model", [Normed(), Rewriting()], ids=["batch norm and dropout", "buffers"])
def test_looking_leaves_no_trace(model: nn.Module) -> None:
    x = images(2, 3, 8, 8) if isinstance(model, Normed) else images(3, 4)
    held = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    versions = {name: tensor._version for name, (tensor, _) in held.items()}
    state, python = torch.get_rng_state(), random.getstate()
    plan_of(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is held[name][0]
        assert torch.equal(tensor, held[name][1])
        assert tensor._version == versions[name]
        assert tensor.grad is None


def test_an_argument_that_is_written_to_is_left_alone() -> None:
    class Doubling(Scores):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    x = images(8, 4)[2:6]
    before = x.clone()
    plan = plan_of(Doubling(lambda h, _: h), x)
    assert plan.exactness is Exactness.BITWISE
    assert torch.equal(x, before)
    assert x._version == 0


class Deep(nn.Module):
    """Activations that backward keeps, each as large as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.w
        for _ in range(8):
            x = x.sigmoid()
        return x.sum()


def test_looking_keeps_no_activations_and_stays_within_the_budget() -> None:
    model, x = Deep(), images(1024, 4)
    subject = Subject(capture(model, (x,)), model, (x,), {})
    plan = draft_step(subject, AMPLE, options=PlanOptions(allow=["recompute"], search=Search(moves=10))).draft
    measured = measure(lambda: against_eager(plan, subject), before=[x, model.w])
    assert measured.result.verdict is Verdict.SAME
    assert 2 * x.nbytes <= measured.measured_rise_bytes < 3 * x.nbytes
    tight = replace(plan, allowed_bytes=measured.measured_peak_bytes - x.nbytes // 2)
    refused = measure(lambda: against_eager(tight, subject), before=[x, model.w])
    assert refused.result.verdict is Verdict.UNCHECKED
    assert "above the budget" in refused.result.note
    assert refused.measured_peak_bytes <= tight.allowed_bytes


@pytest.mark.slow
def test_attention_masks_of_transformers_are_read_as_in_eager() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **heads))
    ids = torch.arange(8).reshape(2, 4)
    plain = {"input_ids": ids, "labels": ids, "use_cache": False}
    for call in (plain, {**plain, "attention_mask": torch.ones_like(ids)}):
        fitted = fit(
            copy.deepcopy(model), (), call, budget=AMPLE, allow=["recompute"], search=Search(moves=10)
        )
        (plan,) = plans_of(fitted)
        assert plan.exactness is Exactness.BITWISE


class Overwriting(nn.Module):
    """Activations in place on results that are views: of a norm's, and of a product's."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU(inplace=True)
        )
        self.after = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.after(self.before(x)).square().mean()
        return loss


def test_views_that_autograd_makes_again_after_a_write_are_eagers() -> None:
    model, x = Overwriting(), images(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    fitted = fit(twin, (x,), budget=AMPLE, allow=["recompute"], search=Search(moves=10))
    assert plans_of(fitted)[0].exactness is Exactness.BITWISE
    assert different(trained(model, model, (x,)), trained(fitted, twin, (x,))) == []


def test_a_view_that_only_capture_makes_is_another_op() -> None:
    plan = plan_of(Scores(lambda h, fake: h.relu_().t() if fake else h.relu_()), images(4, 4))
    assert plan.exactness is Exactness.ROUNDING
    plan = plan_of(Scores(lambda h, fake: h.relu_() if fake else h.relu_().t()), images(4, 4))
    assert plan.exactness is Exactness.ROUNDING
