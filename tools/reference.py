"""The reference, from the code: the site appends it to docs/reference.md.

Names and errors are entries of Sphinx's autodoc, which takes signatures and words from the objects; commands
are shown with their own help.
"""

import inspect
import io
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress

import stowplan
from stowplan import errors
from stowplan.cli.main import VERBS, main


def reference() -> str:
    """Every public name, every error and every command, as Markdown for Sphinx."""
    return "\n".join(("", *_names(), *_errors(), *_verbs()))


def _names() -> Iterator[str]:
    yield "## Python\n"
    for name in stowplan.__all__:
        thing = getattr(stowplan, name)
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            yield _documented("class", f"stowplan.{name}", ":members:")
        elif callable(thing) and not inspect.isclass(thing):
            yield _documented("function", f"stowplan.{name}")


def _errors() -> Iterator[str]:
    yield "## Errors\n"
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.StowplanError):
            yield f"### {name}\n\nExit code {kind.exit_code}."
            yield _documented("exception", f"stowplan.errors.{name}")


def _documented(kind: str, name: str, *options: str) -> str:
    lines = (f".. auto{kind}:: {name}", *(f"   {option}" for option in options))
    return "\n".join(("```{eval-rst}", *lines, "```", ""))


def _verbs() -> Iterator[str]:
    yield "## Command line\n"
    for verb in VERBS:
        words = io.StringIO()
        with redirect_stdout(words), suppress(SystemExit):
            main([verb, "--help"])
        yield f"### stowplan {verb}\n\n```text\n{words.getvalue().rstrip()}\n```\n"
