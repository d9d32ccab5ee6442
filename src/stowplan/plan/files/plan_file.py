"""Plans in files. A plan from a file is checked before anything computes with it: figures, then legal steps.

Whoever explains, draws or runs a plan may then rely on it as on one that was just made.
"""

from os import PathLike
from pathlib import Path

from stowplan.errors import BadInput, BadUse, IllegalPlan
from stowplan.plan.files.plan_form import read_draft, recognise, write
from stowplan.plan.judge.verify import verify
from stowplan.plan.plan import Plan

__all__ = ["load", "read", "recognise", "write"]


def read(text: str) -> Plan:
    """The plan in a file; BadInput if it is damaged, not one, or one that is not legal for its own graph."""
    draft = read_draft(text)
    try:
        return verify(draft)
    except IllegalPlan as fault:
        raise BadInput(f"is not a legal plan for its graph: {fault}", where="$.content.steps") from fault


def load(path: "str | PathLike[str]") -> Plan:
    """Read a plan that `stowplan plan -o` or `Plan.save` wrote, and check that it is legal for its graph."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:  # ValueError: a NUL in the path, or no UTF-8 in the file
        why = (fault.strerror or fault) if isinstance(fault, OSError) else "it is no text"
        raise BadUse(
            f"{path} cannot be read as a plan: {why}; write one with `stowplan plan X --budget BYTES -o PLAN`"
        ) from fault
    try:
        return read(text)
    except BadInput as fault:
        raise fault.in_file(str(path)) from fault
