"""A sample of the zoo, of packages that the tests have anyway."""

from pathlib import Path

import pytest

from benchmarks.zoo import language, others
from benchmarks.zoo.cases import Case
from benchmarks.zoo.page import write_page
from benchmarks.zoo.run import Result, tried

CASES = {case.name: case for case in (*others.cases(), *language.cases())}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weight norm", "Llama, padded", "Mixtral"])
def test_a_model_of_the_zoo_equals_eager_within_its_budget(name: str) -> None:
    pytest.importorskip(CASES[name].package)
    result = tried(CASES[name])
    assert result.outcome == "fitted", result
    assert 0 < result.measured_bytes <= result.tight_bytes < result.eager_bytes


@pytest.mark.slow
def test_a_wrong_model_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.zoo.run._first_difference", lambda _expected, _found: "weight differs")
    assert tried(CASES["weight norm"]).outcome == "wrong"


def test_every_case_has_its_own_name() -> None:
    cases: list[Case] = [*others.cases(), *language.cases()]
    assert len({(case.package, case.name) for case in cases}) == len(cases) >= 150


def test_the_page_counts_outcomes_and_causes(tmp_path: Path) -> None:
    fitted = Result("timm", "a", "fitted", "", 4096, 2048, 1024, 3.0)
    refused = Result("timm", "b", "refused", "/x/net.py:3: the step reads values; try this")
    write_page([fitted, refused], tmp_path / "zoo.md")
    text = (tmp_path / "zoo.md").read_text()
    assert "| refused | the step reads values | b |" in text
    assert "| timm | a | fitted | 4.00 KiB | 2.00 KiB | 1.00 KiB | 3 s |" in text
