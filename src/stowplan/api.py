"""The few verbs a user calls."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from stowplan.analyse.inspection import Inspection, inspection_of
from stowplan.errors import BadInput, BadUse
from stowplan.formats.door import read_document
from stowplan.formats.writers import format_for, text_of
from stowplan.ir import Document
from stowplan.plan import file as plan_file
from stowplan.plan.explain import Explanation, explain
from stowplan.plan.make import TECHNIQUES, Planner
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import price_by_macs, price_by_profile

__all__ = [
    "TARGET_HELP",
    "TECHNIQUES",
    "Explanation",
    "Inspection",
    "Plan",
    "Planner",
    "convert",
    "explain",
    "inspect",
    "planner_for",
    "read_document",
    "read_plan",
]

TARGET_HELP = "a graph file, or a function in a Python module that returns (model, args[, loss])"


def inspect(path: str | Path, *, saved: str | None = None, packed: bool | None = None) -> Inspection:
    """What is in a file, where its memory goes, and how small it could get; nothing is run.

    `saved` ("listed" or "retain") chooses between the two views that a Chainer file gives of its backward;
    `packed` asks for the tensors' places in one arena, which are found unasked unless there are very many.
    """
    return inspection_of(read_document(path, saved=saved), packed=packed)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str | None = None,
    graph_only: bool = False,
    saved: str | None = None,
) -> Document:
    """Write what `source` holds to `target`, in the format `to` or the one the target's suffix asks for.

    With `graph_only`, times, addresses, regions and tiles are left out. Returns the document written.
    """
    document = read_document(source, saved=saved)
    if graph_only:
        document = replace(document, profile=None, allocation=None, regions=None, tiles=None)
    text = text_of(document, to or format_for(Path(target)))
    try:
        Path(target).write_text(text, encoding="utf-8", newline="\n")
    except OSError as fault:
        raise BadUse(f"{target} cannot be written: {fault.strerror or fault}") from fault
    return document


def planner_for(
    target: str | Path, *, saved: str | None = None, allow: Iterable[str] = TECHNIQUES
) -> Planner:
    """A planner for a graph file: its frontier is searched, `plan(budget)` answers from it.

    Seconds come from the file's own profile, or else multiply-accumulates stand for them.
    """
    document = read_document(target, saved=saved)
    graph = document.graph
    pricing = price_by_profile(graph, document.profile, {}) if document.profile else price_by_macs(graph)
    return Planner.of(graph, pricing, allow=allow)


def read_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise BadUse(f"{path} cannot be read as a plan: {fault}") from fault
    try:
        return plan_file.read(text)
    except BadInput as fault:
        raise fault.in_file(str(path)) from fault
