"""The tests on the stand-in device, in processes of their own: such a process has an accelerator for good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_on_the_stand_in() -> None:
    pytest.importorskip("torch")
    from tests.support.device import why_not

    if reason := why_not():
        pytest.skip(reason)
    words = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/device"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(words, cwd=_ROOT, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
