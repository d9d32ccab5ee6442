"""The documentation site: `make docs` builds it with Sphinx into build/site.

The pages are the Markdown files of this folder as they stand. What only the site needs is added while Sphinx
reads them: the table of contents below the index, and the reference, which is made from the code.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

import stowplan
from tools.reference import reference

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project, author, release = "stowplan", "the stowplan developers", stowplan.__version__
extensions = ["sphinx.ext.napoleon", "myst_parser", "sphinx.ext.autodoc"]
html_theme, html_title, html_show_copyright = "furo", f"stowplan {release}", False
myst_heading_anchors = 3
default_role = "code"  # docstrings write `name` as Markdown does
autodoc_typehints_format = "short"
maximum_signature_line_length = 140

CONTENTS = {
    "Start": ("repository/README", "questions", "tutorial", "tour"),
    "How-to": ("how-to", "inference", "iteration", "shards", "devices", "files", "report"),
    "Reference": ("reference", "limits", "compatibility", "glossary", "public-names", "dependencies"),
    "Explanation": ("concepts", "design", "allocator", "security", "decisions/index"),
    "Measurements": ("benchmarks", "measured", "accuracy", "zoo", "repositories", "databases"),
    "Work on it": (
        "repository/CONTRIBUTING",
        "adding-a-reader",
        "adding-an-op-rule",
        "releasing",
        "repository/CHANGELOG",
        "repository/SECURITY",
        "repository/SUPPORT",
        "repository/CODE_OF_CONDUCT",
    ),
}
NOTES = sorted(note.stem for note in Path(__file__).parent.glob("decisions/0*.md"))


def setup(app: "Sphinx") -> None:
    """Have pages completed while they are read."""
    app.connect("source-read", complete)


def complete(_: "Sphinx", page: str, source: list[str]) -> None:
    """Add to a page what only the site has; lead links to the repository's own pages to their copies."""
    if "/" not in page:
        source[0] = source[0].replace("](../", "](repository/")
    if page == "index":
        source[0] += "".join(contents(entries, caption) for caption, entries in CONTENTS.items())
    if page == "decisions/index":
        source[0] += contents(NOTES)
    if page == "reference":
        source[0] += reference()


def contents(entries: Iterable[str], caption: str = "") -> str:
    """A part of the table of contents, shown in the margin alone."""
    options = (":hidden:", *((f":caption: {caption}",) if caption else ()))
    return "\n".join(("", "```{toctree}", *options, "", *entries, "```", ""))
