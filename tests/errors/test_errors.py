"""Each provoked error ends in the sentence that was read: typed, exit code 1 or 2, never 3."""

import re
import subprocess
import sys

import pytest

from stowplan import errors
from tests.errors.catalogue import GOLDEN, ROOT, versions
from tests.errors.provoking import INTERNAL

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def provoked() -> str:
    """In a process of its own: what tests put around `fit` is no part of what users meet."""
    code = "from tests.errors.catalogue import catalogue; print(catalogue(), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_error_is_a_refusal(provoked: str) -> None:
    entries = [entry for entry in re.split(r"\n\n(?=\$ |>>> )", provoked) if entry.startswith(("$ ", ">>> "))]
    assert len(entries) >= 300
    wrong = [entry for entry in entries if INTERNAL in entry]
    assert not wrong, "\n".join(wrong)
    types = set(re.findall(r"^    (\w+): ", provoked, flags=re.MULTILINE)) - {"1", "2"}
    assert types <= vars(errors).keys()


def test_the_sentences_are_those_that_were_read(provoked: str) -> None:
    """`python -m tests.errors` writes them anew."""
    golden = GOLDEN.read_text(encoding="utf-8")
    if golden.splitlines()[1] != provoked.splitlines()[1]:
        pytest.skip(f"the golden text quotes another PyTorch or Python than {versions()}")
    assert provoked == golden
