"""A Python number that changes from call to call: one sentence says that each value is planned anew."""

import pytest
import torch
from torch import Tensor, nn

from stowplan import Search
from stowplan.run.fit import fit, plans_of

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

X = torch.linspace(-1, 1, 32).reshape(4, 8)
ANEW = "is planned anew"


class Mixed(nn.Module):
    """Mixes its input with itself, as mixup does, and may scale it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x: Tensor, lam: object, extra: dict[str, object] | None = None) -> Tensor:
        mixed = lam * x + (1 - lam) * x.flip(0)  # type: ignore[operator]
        times = extra["times"] if extra else 1.0
        loss: Tensor = (self.net(mixed) * times).square().mean()
        return loss


def test_the_second_new_plan_for_a_number_names_it_once(caplog: pytest.LogCaptureFixture) -> None:
    fitted = fit(Mixed(), (X, 0.5), budget="1MiB", search=Search(moves=3))
    said = list[int]()
    for lam in (0.5, 0.25, 0.125, 0.7, 0.5):
        fitted(X, lam)
        said.append(sum(ANEW in record.message for record in caplog.records))
    assert said == [0, 0, 1, 1, 1]
    (sentence,) = (record for record in caplog.records if ANEW in record.message)
    assert sentence.levelname == "WARNING"
    assert "'lam' is a Python float that changes from call to call" in sentence.message
    assert "pass torch.tensor(lam) to Mixed" in sentence.message


def test_a_number_inside_of_an_argument_has_its_path(caplog: pytest.LogCaptureFixture) -> None:
    fitted = fit(Mixed(), (X, 0.5), {"extra": {"times": 1}}, budget="1MiB", search=Search(moves=3))
    for times in (2, 3):
        fitted(X, 0.5, extra={"times": times})
    assert "'extra.times' is a Python int" in "".join(r.message for r in caplog.records if ANEW in r.message)


def test_the_mend_that_the_sentence_names_needs_one_plan(caplog: pytest.LogCaptureFixture) -> None:
    fitted = fit(Mixed(), (X, torch.tensor(0.5)), budget="1MiB", search=Search(moves=3))
    for lam in (0.25, 0.125, 0.7):
        fitted(X, torch.tensor(lam))
    assert len(plans_of(fitted)) == 1
    assert ANEW not in caplog.text


def test_shapes_and_flags_that_change_say_nothing_of_numbers(caplog: pytest.LogCaptureFixture) -> None:
    fitted = fit(Mixed(), (X, 0.5), budget="1MiB", search=Search(moves=3))
    for rows, lam in ((5, 0.5), (6, 0.25), (7, 0.5)):
        fitted(torch.ones(rows, 8), lam)
    fitted(X, True)
    assert ANEW not in caplog.text
