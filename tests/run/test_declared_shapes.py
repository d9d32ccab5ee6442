"""Declared shapes: the largest is refused before training, and the others are priced; loaders are scanned."""

import copy

import pytest
import torch
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.run.shapes import Shapes

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


class Texts(nn.Module):
    """A loss over texts and labels of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.Sequential(
            nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 20)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.layers(self.embedding(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def texts(batch: int, length: int) -> dict[str, Tensor]:
    """Texts and labels."""
    drawn = torch.Generator().manual_seed(length)
    return {name: torch.randint(0, 20, (batch, length), generator=drawn) for name in ("input_ids", "labels")}


LENGTHS = {"input_ids": {1: (4, 32)}, "labels": {1: (4, 32)}}


def fitted_texts(budget: int | str, shapes: Shapes = LENGTHS) -> Texts:
    return stowplan.fit(
        Texts(), (), texts(4, 8), budget=budget, shapes=shapes, allow=("recompute",), search=Search(moves=50)
    )


@pytest.fixture(scope="module")
def peak_bytes() -> int:
    """The peak of the largest shapes in eager."""
    (plan, *_) = stowplan.plans_of(fitted_texts("1GiB"))
    return plan.plain_peak_bytes


def test_the_largest_shapes_are_planned_first_and_refused_if_they_do_not_fit(peak_bytes: int) -> None:
    fitted = fitted_texts(peak_bytes)
    (plan,) = stowplan.plans_of(fitted)  # the call that fit was given is smaller, and runs as it is
    assert plan.graph.tensors["input_ids"].shape == (4, 32)
    with pytest.raises(BudgetTooSmall) as refused:
        fitted_texts(peak_bytes // 2)
    assert any("largest of the declared shapes" in note for note in refused.value.__notes__)
    small = stowplan.fit(
        Texts(), (), texts(4, 8), budget=peak_bytes // 2, allow=()
    )  # what was given does fit
    assert stowplan.plans_of(small)


def test_the_table_has_every_bucket_and_the_budget_holds_over_all(peak_bytes: int) -> None:
    fitted = fitted_texts(peak_bytes - 4_000)
    costs = stowplan.shape_costs(fitted)
    assert [row.shapes[0] for row in costs.rows] == [(4, 32), (4, 16), (4, 8), (4, 4)]
    assert not costs.refused
    assert all(row.peak_bytes is not None and row.peak_bytes <= costs.allowed_bytes for row in costs.rows)
    lines = str(costs).splitlines()
    assert len(lines) == 2 + len(costs.rows)
    assert lines[2].startswith("4x32, 4x32 ")
    assert "runs as it is" in lines[-1]


def test_calls_that_fit_as_they_are_need_only_the_plan_of_the_largest(peak_bytes: int) -> None:
    fitted, plain = fitted_texts(peak_bytes - 4_000), Texts()
    plain.load_state_dict(fitted.state_dict())
    for shorter in (8, 12, 20, 12):
        ours, theirs = (model(**texts(4, shorter)) for model in (fitted, plain))
        assert torch.equal(ours, theirs)
        gradients = [
            torch.autograd.grad(loss, list(m.parameters())) for loss, m in ((ours, fitted), (theirs, plain))
        ]
        assert all(map(torch.equal, *gradients))
    (largest,) = stowplan.plans_of(fitted)
    assert largest.plain_peak_bytes > largest.allowed_bytes
    assert "runs as it is" in str(stowplan.scan([texts(4, 20)], fitted))
    assert all(row.fits for row in stowplan.scan([texts(4, 20)], fitted).rows)


def test_scan_names_the_batches_that_do_not_fit(peak_bytes: int) -> None:
    fitted = fitted_texts(peak_bytes)
    before = copy.deepcopy(fitted.state_dict())
    loader = [texts(4, 8), texts(4, 32), texts(64, 32), texts(4, 8), texts(64, 32)]
    costs = stowplan.scan(loader, fitted)
    (refused,) = costs.refused
    assert refused.batches == (2, 4)
    assert {row.batches for row in costs.rows if row.fits} == {(0, 3), (1,)}
    assert "does not fit" in str(costs)
    assert all(map(torch.equal, before.values(), fitted.state_dict().values()))
    pairs = [(b["input_ids"], b["labels"]) for b in loader[:2]]
    assert not stowplan.scan(pairs, fitted, lambda pair: (pair, {})).refused


def test_a_dim_of_torch_export_is_a_range() -> None:
    length = torch.export.Dim("length", min=4, max=16)
    fitted = fitted_texts("1GiB", {"input_ids": {1: length}, "labels": {1: length}})
    assert stowplan.plans_of(fitted)[0].graph.tensors["labels"].shape == (4, 16)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"tokens": {1: (4, 32)}}, "there is input_ids, labels"),
        ({"input_ids": {2: (4, 32)}}, "which has 2 dims"),
        ({"input_ids": {1: (32, 4)}}, "give \\(smallest, largest\\)"),
        ({"input_ids": {1: 32}}, "it is \\(smallest, largest\\)"),
        ({"input_ids": {1: (16, 32)}}, "is 8, outside of 16 to 32"),
        ({}, "shapes is empty"),
    ],
)
def test_wrong_declarations_are_refused_by_name(shapes: Shapes, message: str) -> None:
    with pytest.raises(BadUse, match=message):
        fitted_texts("1GiB", shapes)


def test_a_table_needs_declared_shapes() -> None:
    with pytest.raises(BadUse, match="no shapes were declared"):
        stowplan.shape_costs(stowplan.fit(Texts(), (), texts(4, 8), budget="1GiB"))
    with pytest.raises(BadUse, match="does not come from fit"):
        stowplan.scan([], Texts())
