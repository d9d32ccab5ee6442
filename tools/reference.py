"""The reference page, from the code: `python -m tools.reference build/reference.md`."""

import inspect
import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path

import stowplan
from stowplan import errors
from stowplan.cli.main import VERBS, main


def reference() -> str:
    """Every public name with its signature and words, every error, every verb with its options."""
    return "\n".join(["# Reference", "", *_names(), *_errors(), *_verbs()])


def _names() -> Iterator[str]:
    yield "## Python\n"
    for name in stowplan.__all__:
        thing = getattr(stowplan, name)
        if callable(thing):
            yield f"### stowplan.{name}\n\n```python\n{name}{inspect.signature(thing)}\n```\n"
            yield f"{inspect.getdoc(thing)}\n"


def _errors() -> Iterator[str]:
    yield "## Errors\n"
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.StowplanError):
            yield f"- **{name}** (exit code {kind.exit_code}): {inspect.getdoc(kind)}"


def _verbs() -> Iterator[str]:
    yield "\n## Command line\n"
    for verb in VERBS:
        words = io.StringIO()
        with redirect_stdout(words), suppress(SystemExit):
            main([verb, "--help"])
        yield f"### stowplan {verb}\n\n```text\n{words.getvalue().rstrip()}\n```\n"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(reference() + "\n", encoding="utf-8")
