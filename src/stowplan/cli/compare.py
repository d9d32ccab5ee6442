"""`stowplan compare BEFORE AFTER`: what changed between two plans, runs or documents."""

import json
from argparse import ArgumentParser, Namespace
from os.path import basename

from stowplan.cli.options import GRAPH_PLAN_OR_RUN, add_saved
from stowplan.ir.text import Labels
from stowplan.plan.explain.comparison import Side, comparison_of
from stowplan.plan.progress import showing_progress
from stowplan.report.compare import comparison_json, show_comparison
from stowplan.report.files import opened
from stowplan.report.page import subject_of
from stowplan.report.terminal import console_for_output


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument(
        "before",
        metavar="BEFORE",
        help=f"{GRAPH_PLAN_OR_RUN}; a graph file counts as a step without a plan",
    )
    parser.add_argument("after", metavar="AFTER", help="the second graph file, plan or run")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_saved(parser)


def run(arguments: Namespace) -> int:
    """Open both, compare, print."""
    files = (arguments.before, arguments.after)
    with showing_progress("comparing"):
        subjects = [subject_of(opened(file, saved=arguments.saved)) for file in files]
        before, after = (Side(subject.timeline, subject.plan, subject.record) for subject in subjects)
        comparison = comparison_of(before, after)
    if arguments.json:
        print(json.dumps(comparison_json(comparison), indent=2))
    else:
        names = (basename(arguments.before), basename(arguments.after))
        labels = Labels(subjects[1].graph)
        show_comparison(comparison, labels, console_for_output(), names=names)
    return 0
