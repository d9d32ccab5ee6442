"""A sample of the zoo, of packages that the tests have anyway."""

from pathlib import Path

import pytest
from torch import Tensor, nn

from benchmarks.zoo import language, others
from benchmarks.zoo.cases import Case, classified
from benchmarks.zoo.page import write_page
from benchmarks.zoo.run import Result, run_all, tried

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages' own making

CASES = {case.name: case for case in (*others.cases(), *language.cases())}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weight norm", "Llama, padded", "Mixtral"])
def test_a_model_of_the_zoo_equals_eager_within_its_budget(name: str) -> None:
    pytest.importorskip(CASES[name].package)
    result = tried(CASES[name])
    assert result.outcome == "fitted", result
    assert 0 < result.measured_bytes <= result.tight_bytes < result.eager_bytes


QUICK = (
    *("recommender", "spectrogram", "waves", "Bert, padded", "GPT2, padded", "Qwen3, padded", "Llama, LoRA"),
    *("Llama, DoRA", "Phi3", "T5", "Pegasus", "Whisper", "Wav2Vec2", "ViT", "CLIP", "Llava", "PatchTST"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_model_of_the_zoo_equals_eager(name: str) -> None:
    pytest.importorskip(CASES[name].package)
    result = tried(CASES[name], roomy_only=True)
    assert (result.outcome, result.tight_bytes) == ("fitted, roomy", 0), result


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_tried_again_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.zoo.run.compiled",
        lambda _, budget: f"equal at {budget}" if budget else "refused: needs 1000 bytes: too small",
    )
    case = Case("torch", "branching", Branching, CASES["weight norm"].batches, classified)
    results: list[Result] = []
    run_all([case], 60, results.append)
    assert [r.compiled for r in results] == ["equal at 1020"]


@pytest.mark.slow
def test_a_wrong_model_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.zoo.run._first_difference", lambda _expected, _found: "weight differs")
    assert tried(CASES["weight norm"]).outcome == "wrong"


class Branching(nn.Module):
    """Asks for a value that no argument determines."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.net(x)
        return h.sin() if h.sum() > 0 else h.cos()


@pytest.mark.slow
def test_a_model_that_fit_refuses_is_tried_under_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.zoo.run.compiled", lambda case, _budget: f"equal: {case.name}")
    case = Case("torch", "branching", Branching, CASES["weight norm"].batches, classified)
    results: list[Result] = []
    run_all([case], 60, results.append)
    assert [(r.outcome, r.compiled) for r in results] == [("refused", "equal: branching")]


def test_every_case_has_its_own_name() -> None:
    cases: list[Case] = [*others.cases(), *language.cases()]
    assert len({(case.package, case.name) for case in cases}) == len(cases) >= 200


def test_the_page_counts_outcomes_and_causes(tmp_path: Path) -> None:
    fitted = Result("timm", "a", "fitted", "", 4096, 2048, 1024, 3.0)
    why = "/x/site-packages/net.py:3: the step reads values; try this"
    refused = Result("timm", "b", "refused", why, compiled="equal, 2 plans")
    write_page([fitted, refused], tmp_path / "zoo.md")
    text = (tmp_path / "zoo.md").read_text()
    assert "| refused | the step reads values | b |" in text
    assert "| b | net.py:3: the step reads values; try this | equal, 2 plans |" in text
    assert "| timm | a | fitted | 4.00 KiB | 2.00 KiB | 1.00 KiB | 3 s |" in text
