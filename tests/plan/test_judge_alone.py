"""The judges of plans share nothing with the search: neither its code nor its rules."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import stowplan
from tests.test_layers import imports_of

SOURCE = Path(stowplan.__file__).parent
JUDGE = SOURCE / "plan" / "judge"
OF_PLANS = ("plan.pricing", "plan.steps", "plan.draft", "plan.plan")
FROM_STOWPLAN = ("errors", "units", "geometry", "ir", "ops", *OF_PLANS, "plan.judge")
"""What the judges may stand on: a graph, what is known about op types, and what a plan is made of."""
FOLDERS = ("plan", "")  # packages without content, which Python imports on the way


def _is_foreign(module: str) -> bool:
    """Whether a module of stowplan is none of these."""
    inner = module.removeprefix("stowplan").removeprefix(".")
    return inner not in FOLDERS and not any(f"{inner}.".startswith(f"{part}.") for part in FROM_STOWPLAN)


def _foreign_imports(path: Path, text: str) -> list[str]:
    """What a module of the judges imports that is not theirs, at its top or inside its functions."""
    names = imports_of(path.stem, ast.parse(text))
    return [name for name in names if name.split(".")[0] == "stowplan" and _is_foreign(name)]


def test_the_judges_import_no_rule_of_the_search() -> None:
    modules = sorted(JUDGE.glob("*.py"))
    assert {"meaning", "memory", "simulate", "verify"} <= {path.stem for path in modules}
    found = {path.name: _foreign_imports(path, path.read_text(encoding="utf-8")) for path in modules}
    assert not any(found.values()), found


def test_what_the_judges_import_imports_no_rule_of_the_search() -> None:
    code = (
        "import json, sys; import stowplan.plan.judge.verify;"
        " print(json.dumps([name for name in sys.modules if name.split('.')[0] == 'stowplan']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(run.stdout)
    assert "stowplan.plan.judge.memory" in loaded
    assert [name for name in loaded if _is_foreign(name)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from stowplan.plan.problem import can_recompute",
        "from stowplan.analyse.facts import is_resident",
        "import stowplan.plan.ledger",
        "def inside() -> None:\n    from stowplan.plan.frontier import frontier_of",
    ],
)
def test_the_check_itself_sees_an_import_of_the_search(line: str) -> None:
    path = JUDGE / "verify.py"
    assert _foreign_imports(path, f"{path.read_text(encoding='utf-8')}\n{line}\n")
