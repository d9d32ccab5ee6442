"""A release: `python -m tools.release 0.1.0` sets the version, dates the changelog, commits and tags.

Nothing is pushed or uploaded. Refused are a dirty tree, a version that is not new, a changelog without news.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_RELEASED = re.compile(r'^date-released: "(.*)"$', re.MULTILINE)
_PLACES = {
    "pyproject.toml": re.compile(r'^version = "(.*)"$', re.MULTILINE),
    "src/stowplan/__init__.py": re.compile(r'^__version__ = "(.*)"$', re.MULTILINE),
    "CITATION.cff": re.compile(r"^version: (.*)$", re.MULTILINE),
}


def release(version: str) -> None:
    """Make the release commit and its tag."""
    if not _VERSION.fullmatch(version):
        raise SystemExit(f"{version!r} is not a version like 0.1.0")
    if _git("status", "--porcelain"):
        raise SystemExit("the tree has changes: commit them first")
    if version in _git("tag", "--list", f"v{version}"):
        raise SystemExit(f"v{version} exists")
    prepare(version)
    _git("commit", "--all", "--message", f"Release {version}")
    _git("tag", "--annotate", f"v{version}", "--message", f"stowplan {version}")
    print(f"v{version} is committed and tagged; push it when CI is green: git push origin main v{version}")


def prepare(version: str) -> None:
    """Set the version wherever it is told, and date the changelog."""
    for name, pattern in _PLACES.items():
        _rewrite(name, partial(_with_version, place=pattern, version=version))
    _rewrite("CHANGELOG.md", lambda text: with_date(text, version))


def with_date(changelog: str, version: str) -> str:
    """The changelog with what was unreleased under the version and today's date."""
    head, heading, news = changelog.partition("## Unreleased\n")
    if not heading or not news.strip() or news.lstrip().startswith("## "):
        raise SystemExit("CHANGELOG.md has nothing under 'Unreleased'")
    return f"{head}{heading}\n## {version} - {datetime.now(UTC).date().isoformat()}\n{news}"


def _with_version(text: str, place: re.Pattern[str], version: str) -> str:
    found = place.search(text)
    if found is None:
        raise SystemExit(f"no version at {place.pattern}")
    return text[: found.start(1)] + version + text[found.end(1) :]


def _rewrite(name: str, change: Callable[[str], str]) -> None:
    path = ROOT / name
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    release(sys.argv[1] if len(sys.argv) == 2 else "")
