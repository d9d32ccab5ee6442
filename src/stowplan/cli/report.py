"""`stowplan report X -o report.html`: see where the memory goes, what a plan did about it, at what cost."""

import json
from argparse import ArgumentParser, Namespace
from os.path import basename
from pathlib import Path

from stowplan.cli.options import GRAPH_PLAN_OR_RUN, add_saved, refuse_unwritable
from stowplan.errors import BadInput
from stowplan.plan.explain.peers import Peer, read_peers
from stowplan.plan.frontier import Frontier
from stowplan.plan.plan import Plan
from stowplan.plan.planner import Planner
from stowplan.plan.progress import showing_progress
from stowplan.plan.record import Record
from stowplan.report.files import opened, write_report
from stowplan.report.page import PageSubject, Thing, subject_of
from stowplan.units import printable


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("files", metavar="FILE", nargs="+", help=f"{GRAPH_PLAN_OR_RUN}; several to compare")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        required=True,
        help="where to write: a page .html, a trace .json.gz, the curve .svg or .png, the tensors .csv",
    )
    parser.add_argument(
        "--frontier",
        action="store_true",
        help="also draw peak against time over all budgets, which searches again",
    )
    parser.add_argument(
        "--peers",
        metavar="JSON",
        help="also draw other methods, from a file"
        ' {"peers": [{"name": ..., "peak_bytes": ..., "time_ratio": ...}]}',
    )
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    add_saved(parser)


def run(arguments: Namespace) -> int:
    """Open, show, and say what was written."""
    refuse_unwritable(arguments.output)
    with showing_progress(f"drawing {', '.join(arguments.files)}"):
        subjects = _subjects(arguments)
        size = write_report(subjects, arguments.output)
    if arguments.json:
        print(json.dumps({"file": arguments.output, "bytes": size, "subjects": [s.name for s in subjects]}))
    else:
        print(printable(f"{arguments.output}: {size:,} B"))
    return 0


def _subjects(arguments: Namespace) -> list[PageSubject]:
    peers = _peers(arguments.peers) if arguments.peers else ()
    found: list[PageSubject] = []
    for file in arguments.files:
        thing = opened(file, saved=arguments.saved)
        frontier = _frontier_of(thing) if arguments.frontier else None
        found.append(subject_of(thing, basename(file), frontier=frontier, peers=peers if not found else ()))
    return found


def _frontier_of(thing: Thing) -> Frontier | None:
    """The frontier of a plan's graph, at the plan's prices."""
    plan = thing.plan if isinstance(thing, Record) else thing
    return Planner.of(plan.graph, plan.pricing).frontier if isinstance(plan, Plan) else None


def _peers(file: str) -> tuple[Peer, ...]:
    try:
        return read_peers(Path(file).read_text(encoding="utf-8"))
    except BadInput as fault:
        raise fault.in_file(file) from fault
    except (OSError, UnicodeDecodeError) as fault:
        why = (fault.strerror or fault) if isinstance(fault, OSError) else "it is no text"
        raise BadInput(f"cannot be read: {why}", file=file) from fault
