"""A release: `python -m tools.release 0.1.0` sets the version, writes the changelog, commits and tags.

The changelog gets what stands in its "Unreleased" section and the fragments of `changes/`, by kind. Nothing
is pushed or uploaded. Refused are a dirty tree, a version that is not new, a changelog without news.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("Breaking", "Added", "Changed", "Fixed")
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
    _git("add", "--all")
    _git("commit", "--message", f"Release {version}")
    _git("tag", "--annotate", f"v{version}", "--message", f"stowplan {version}")
    print(f"v{version} is committed and tagged; push it when CI is green: git push origin main v{version}")


def prepare(version: str) -> None:
    """Set the version wherever it is told, collect the news, and date the changelog."""
    for name, pattern in _PLACES.items():
        _rewrite(name, partial(_with_text, place=pattern, told=version))
    _rewrite("CITATION.cff", partial(_with_text, place=_RELEASED, told=_today()))
    told = news(version)
    _rewrite("CHANGELOG.md", lambda text: with_date(with_news(text, told), version))
    for fragment in fragments():
        fragment.unlink()


def fragments() -> list[Path]:
    """The files with news; their names end with their kind."""
    return sorted(path for path in (ROOT / "changes").glob("*.md") if path.name != "README.md")


def news(version: str) -> str:
    """What the fragments say, as sections of the changelog; nothing if there are none."""
    if not fragments():
        return ""
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", version]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def with_news(changelog: str, told: str) -> str:
    """The changelog with further entries at the head of each section of its unreleased part."""
    head, heading, rest = changelog.partition("## Unreleased\n")
    unreleased, mark, released = rest.partition("\n## ")
    sections = _sections(unreleased)
    for kind, entries in _sections(told).items():
        sections[kind] = f"{entries}\n{sections[kind]}" if kind in sections else entries
    ordered = [kind for kind in KINDS if kind in sections]
    text = "".join(f"\n### {kind}\n\n{sections[kind]}\n" for kind in ordered)
    return f"{head}{heading}{text}{mark}{released}"


def _sections(text: str) -> dict[str, str]:
    """The entries under each heading."""
    parts = re.split(r"^### (.*)$", text, flags=re.MULTILINE)
    if parts[0].strip() or not {*parts[1::2]} <= {*KINDS}:
        raise SystemExit(f"the news have more than the sections {', '.join(KINDS)}")
    return {kind: entries.strip("\n") for kind, entries in zip(parts[1::2], parts[2::2], strict=True)}


def with_date(changelog: str, version: str) -> str:
    """The changelog with what was unreleased under the version and today's date."""
    head, heading, unreleased = changelog.partition("## Unreleased\n")
    if not heading or not unreleased.strip() or unreleased.lstrip().startswith("## "):
        raise SystemExit("CHANGELOG.md has nothing under 'Unreleased'")
    return f"{head}{heading}\n## {version} - {_today()}\n{unreleased}"


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _with_text(text: str, place: re.Pattern[str], told: str) -> str:
    found = place.search(text)
    if found is None:
        raise SystemExit(f"nothing at {place.pattern}")
    return text[: found.start(1)] + told + text[found.end(1) :]


def _rewrite(name: str, change: Callable[[str], str]) -> None:
    path = ROOT / name
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    release(sys.argv[1] if len(sys.argv) == 2 else "")
