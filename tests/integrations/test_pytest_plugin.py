"""The pytest plugin: tests fail above their limit, and a table shows all peaks."""

import pytest

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.torch, pytest.mark.slow]

TESTS = """
import pytest
import torch

@pytest.fixture
def model():
    return torch.nn.Linear(512, 512)  # 1 MiB, which does not count

@pytest.mark.limit_peak("40KB")
def test_within(model):
    model(torch.ones(4, 512)).sum().backward(inputs=[model.bias])

@pytest.mark.limit_peak("40KB", device="cpu")
def test_above(model):
    model(torch.ones(64, 512))

def test_without_limit():
    torch.zeros(1000, dtype=torch.float64)

def test_without_tensors():
    pass
"""


def run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(source)
    options = ("-p", "stowplan.integrations.pytest_plugin", "-p", "no:cacheprovider", *options)
    return pytester.runpytest_subprocess(*options)  # PyTorch cannot be imported a second time


def test_a_test_above_its_limit_fails_and_says_by_how_much(pytester: pytest.Pytester) -> None:
    result = run(pytester, TESTS)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*take 256 KiB (262,144 B) at once, and the limit is 39.1 KiB (40,000 B)*"])
    assert "peaks of tests" not in result.stdout.str()


def test_a_table_shows_the_peaks_largest_first(pytester: pytest.Pytester) -> None:
    result = run(pytester, TESTS, "--stowplan-peaks")
    result.stdout.fnmatch_lines(
        ["*peaks of tests*", "*256 KiB*test_above", "*test_within", "*7.81 KiB*test_without_limit"]
    )
    assert "test_without_tensors" not in result.stdout.str().split("peaks of tests")[1].split("short test")[0]


def test_a_limit_that_is_no_size_is_refused_by_name(pytester: pytest.Pytester) -> None:
    source = "import pytest\n@pytest.mark.limit_peak('6 parsecs')\ndef test_it(): pass\n"
    result = run(pytester, source)
    assert "'6 parsecs' is not a size" in result.stdout.str() + result.stderr.str()
