"""`stowplan check MODULE:FUNCTION --budget ...`: eager and the plan side by side. Exit 1 if they differ."""

import json
from argparse import ArgumentParser, Namespace

from stowplan import api
from stowplan.cli.options import (
    add_allow,
    add_iteration,
    add_options,
    read_iteration,
    read_options,
    refuse_unwritable,
    write_output,
)
from stowplan.errors import BadUse
from stowplan.plan.progress import showing_progress
from stowplan.units import parse_bytes


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help=api.FUNCTION_HELP)
    parser.add_argument(
        "--budget",
        help="bytes for one forward and backward, parameters and gradients included, such as 6GiB"
        " (default: the plan's)",
    )
    parser.add_argument("--plan", metavar="PLAN", help="run this plan, which `stowplan plan -o` wrote")
    add_allow(parser)
    add_options(parser, api.Search, ("prefer", "gap", "time_limit"))
    add_options(parser, api.Execution, ("kernels", "arena"))
    add_iteration(parser)
    parser.add_argument(
        "--steps",
        "--iterations",
        type=int,
        default=3,
        help="training steps, or iterations with --optimizer, to compare (default 3)",
    )
    parser.add_argument(
        "-o", "--output", metavar="RECORD", help="write what was measured, for `stowplan report`"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: Namespace) -> int:
    """Check and print."""
    refuse_unwritable(arguments.output)
    if not arguments.budget and not arguments.plan:
        raise BadUse("say --budget BYTES, or --plan PLAN to run a plan that was written before")
    if arguments.steps < 1:
        raise BadUse(f"--steps is {arguments.steps}; it is a number of steps to compare, at least 1")
    plan = api.load_plan(arguments.plan) if arguments.plan else None
    allowed = (
        parse_bytes(arguments.budget, "--budget") if arguments.budget else plan.allowed_bytes if plan else 0
    )
    with showing_progress(f"checking {arguments.target}", allowed_bytes=allowed):
        record = api.check(
            arguments.target,
            allowed,
            allow=arguments.allow,
            steps=arguments.steps,
            optimizer=read_iteration(arguments),
            plan=plan,
            search=read_options(arguments, api.Search),
            execution=read_options(arguments, api.Execution),
        )
    if arguments.output:
        from stowplan.plan.files.record_file import write

        write_output(arguments.output, write(record))
    if arguments.json:
        from stowplan.report.record import record_json

        print(json.dumps(record_json(record), indent=2))
    else:
        from stowplan.report.record import show_record
        from stowplan.report.terminal import console_for_output

        show_record(record, console_for_output(), title=arguments.target)
    return 0 if record.holds else 1
