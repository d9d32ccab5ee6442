"""Reports in notebooks. Plans do not draw themselves: this shows them, as a frame that holds the whole page.

`%load_ext stowplan.report.notebook` shows every plan, record and document that a cell ends with;
`show(plan)` shows one, or several to compare.
"""

from dataclasses import dataclass
from html import escape
from typing import Any

from stowplan.report.page import Thing, page_of, subject_of

_HEIGHT = 860  # pixels
_SHOWN = (
    ("stowplan.plan.plan", "Plan"),
    ("stowplan.plan.record", "Record"),
    ("stowplan.ir.document", "Document"),
    ("stowplan.ir.graph", "Graph"),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a notebook draws."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def show(*things: Thing) -> Shown:
    """The report of one thing, or of several to compare."""
    return Shown(_frame(page_of([subject_of(thing) for thing in things])))


def _frame(page: str) -> str:
    """The page in an iframe: its script and the notebook cannot reach each other."""
    return (
        f'<iframe sandbox="allow-scripts" width="100%" height="{_HEIGHT}" style="border: 0" '
        f'srcdoc="{escape(page)}"></iframe>'
    )


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext` with IPython's shell, which has no types to be named here."""
    formatter = shell.display_formatter.formatters["text/html"]
    for module, name in _SHOWN:
        formatter.for_type_by_name(module, name, lambda thing: show(thing).html)
