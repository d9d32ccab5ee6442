"""`python -m tools.compatibility 2.6 2.15`: try the features on each version of PyTorch and write the page.

Each version gets an environment of its own, which is removed afterwards. The results are kept in
docs/compatibility.jsonl, a line for each PyTorch and Python, and docs/compatibility.md shows them all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from tools.compatibility.cuda_stubs import make_stubs

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs" / "compatibility.jsonl", ROOT / "docs" / "compatibility.md"
_TEXT = Path(__file__).with_name("page.md")  # with braces for the table and for what is missing
COLUMNS = ("private names", "capture", "recompute", "tiles", "offload", "shards", "compile backend", "report")
_PATIENCE_SECONDS = 3600
_NOT_FOR_CPUS = ("nvidia", "triton", "cuda")  # what torch asks for and the CPU's kernels do not need
_REQUIREMENTS = """
from importlib.metadata import requires
print("\\n".join(line.partition(";")[0] for line in requires("torch") or () if "extra ==" not in line))
"""
_VERSIONS = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"


_WORDS: dict[str | None, str] = {"": "yes", None: "not tried"}


class Row(TypedDict):
    """What one version showed: for each feature that was tried "", or what failed."""

    torch: str
    python: str
    date: str
    faults: dict[str, str]


def main() -> None:
    """Try each version, and write the page after each."""
    parser = argparse.ArgumentParser(prog="python -m tools.compatibility")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="of PyTorch, such as 2.6")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to make environments with")
    arguments = parser.parse_args()
    rows = read_rows()
    for version in arguments.versions:
        with tempfile.TemporaryDirectory(prefix="compatibility") as folder:
            row = _tried(Path(folder), version, arguments.python)
        print(json.dumps(row), flush=True)
        rows = [*(r for r in rows if (r["torch"], r["python"]) != (row["torch"], row["python"])), row]
        RESULTS.write_text("".join(json.dumps(r) + "\n" for r in sorted(rows, key=_order)), encoding="utf-8")
    PAGE.write_text(page_of(read_rows()), encoding="utf-8")


def read_rows() -> list[Row]:
    """The results so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def _order(row: Row) -> tuple[list[int], list[int]]:
    release = row["torch"].partition("+")[0]
    return [*map(int, release.split("."))], [*map(int, row["python"].split("."))]


def _tried(folder: Path, version: str, interpreter: str) -> Row:
    """Make the environment, then try what there is to try."""
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    _install(python, "--no-deps", f"torch=={version}.*")
    (torch_folder,) = folder.glob("lib/python*/site-packages/torch")
    make_stubs(torch_folder)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [line for line in _lines(python, "-c", _REQUIREMENTS) if not line.startswith(_NOT_FOR_CPUS)]
    _install(python, *required, *project["dependencies"], "pytest", "setuptools")
    _install(python, "--no-deps", str(ROOT))
    found, running = json.loads(_lines(python, "-c", _VERSIONS)[-1])
    faults = {"private names": _private_names(python), **dict(_features(python))}
    return Row(torch=found, python=running, date=f"{datetime.now(UTC):%Y-%m-%d}", faults=faults)


def _install(python: Path, *what: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True)


def _lines(python: Path, *arguments: str) -> list[str]:
    done = subprocess.run([python, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _private_names(python: Path) -> str:
    alone = ["-q", "-c", os.devnull, f"--rootdir={ROOT}", "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [python, "-m", "pytest", *alone, "tests/test_torch_private.py"],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 0 and " passed" in done.stdout:
        return ""
    return "; ".join(failed) or f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}"


def _features(python: Path) -> Iterator[tuple[str, str]]:
    done = subprocess.run(
        [python, "-m", "tools.compatibility.features"],
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=_PATIENCE_SECONDS,
    )
    found: dict[str, str] = dict(map(json.loads, filter(_is_answer, done.stdout.splitlines())))
    for name in COLUMNS[1:]:
        yield name, found.get(name, f"the process ended with {done.returncode}")


def _is_answer(line: str) -> bool:
    return line.startswith('["')


def _environment() -> dict[str, str]:
    """Without a path to other copies of stowplan and torch."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def page_of(rows: Iterable[Row]) -> str:
    """The page: a table, and below it what failed."""
    rows = list(rows)
    head = " | ".join(("PyTorch", "Python", *COLUMNS, "tried on"))
    lines = [f"| {head} |", "|" + "---|" * (len(COLUMNS) + 3)]
    failed: list[str] = []
    for row in rows:
        cells = [_WORDS.get(row["faults"].get(name), "no") for name in COLUMNS]
        lines.append(f"| {' | '.join((row['torch'], row['python'], *cells, row['date']))} |")
        failed += (
            f"- {name} on PyTorch {row['torch']} with Python {row['python']}: `{fault}`"
            for name, fault in row["faults"].items()
            if fault
        )
    missing = "\n".join(failed) if failed else "Nothing: every feature that was tried works."
    return _TEXT.read_text(encoding="utf-8").format(table="\n".join(lines), missing=missing)


if __name__ == "__main__":
    main()
