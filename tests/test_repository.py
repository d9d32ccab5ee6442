"""What the repository's host reads: workflows, forms, the citation; they name what is there."""

import re
from pathlib import Path
from typing import Any

import pytest

import stowplan

yaml = pytest.importorskip("yaml")  # which myst-parser brings

ROOT = Path(__file__).parents[1]
HOST = ROOT / ".github"
WORKFLOWS = sorted((HOST / "workflows").glob("*.yml"))
FORMS = sorted(form for form in (HOST / "ISSUE_TEMPLATE").glob("*.yml") if form.stem != "config")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _commands(path: Path) -> list[str]:
    return [
        step["run"] for job in _read(path)["jobs"].values() for step in job.get("steps", ()) if "run" in step
    ]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_there_is(workflow: Path) -> None:
    commands = "\n".join(_commands(workflow))
    assert set(re.findall(r"\bmake ([\w-]+)", commands)) <= TARGETS
    for module in re.findall(r"python -m (tools[\w.]*)", commands):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    text = workflow.read_text(encoding="utf-8")
    assert all(
        re.fullmatch(r"\./\.github/\S+|\S+@[0-9a-f]{40}", used) for used in re.findall(r"uses: (\S+)", text)
    )
    assert _read(workflow)["permissions"] == {"contents": "read"}


def test_workflows_run_all_that_ci_runs() -> None:
    """`.ci/run` itself is a step; its targets are those of the Makefile."""
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert ".ci/run" in _commands(HOST / "workflows" / "tests.yml")
    named = {
        word for line in re.findall(r"\bmake (.*)", run) for word in re.findall(r"(?<!\S)[a-z][\w-]+", line)
    }
    assert named >= {"lint", "types", "docs", "wheel-test", "test-timing", "test-untimed"}
    assert named - TARGETS <= {"a", "-j"}


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_in_fields_of_its_own(form: Path) -> None:
    content = _read(form)
    assert {"name", "description", "body"} <= content.keys()
    fields = [field["id"] for field in content["body"] if field["type"] != "markdown"]
    assert fields
    assert len(set(fields)) == len(fields)


def test_the_form_for_faults_asks_for_what_support_lists() -> None:
    form = (HOST / "ISSUE_TEMPLATE" / "fault.yml").read_text(encoding="utf-8")
    support = (ROOT / "SUPPORT.md").read_text(encoding="utf-8")
    for asked in ("(model, args)", "STOWPLAN_TRACEBACK=1", "stowplan doctor --json", "gpu-check.json"):
        assert asked in form
        assert asked in support


def test_the_citation_is_of_this_version() -> None:
    citation = _read(ROOT / "CITATION.cff")
    assert citation["version"] == stowplan.__version__
    released = re.search(
        rf"^## {re.escape(stowplan.__version__)} - (\S+)$", _text("CHANGELOG.md"), re.MULTILINE
    )
    assert released is not None
    assert citation["date-released"] == released[1]


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
