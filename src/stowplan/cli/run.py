"""`stowplan run --budget BYTES SCRIPT ARGS`: run a script as it is, its modules planned within a budget."""

import os
import tempfile
from argparse import ArgumentParser, Namespace

from stowplan.cli.options import add_allow, add_options, read_options, refuse_unwritable, write_output
from stowplan.errors import BadUse
from stowplan.observe.launch import BudgetedRun, LaunchSettings, command_line, end_as, run_observed
from stowplan.observe.record import RunRecord, records_in
from stowplan.plan.options import Search, known_techniques
from stowplan.units import parse_bytes


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes before the script."""
    parser.usage = "stowplan run --budget BYTES [OPTIONS] SCRIPT|-m MODULE|-c CODE|- [ARGS ...]"
    parser.epilog = (
        "The script's own output and exit code stay as they are; what is planned goes to standard error."
    )
    parser.add_argument(
        "--budget",
        metavar="BYTES",
        help="the bytes of all tensors on the device that the script trains on, such as 6GiB",
    )
    add_options(parser, BudgetedRun, ("strict",))
    add_allow(parser)
    add_options(parser, Search, ("prefer", "gap", "time_limit", "moves"))
    parser.add_argument("--json", metavar="FILE", help="write what was planned and measured to a file")


def run(arguments: Namespace) -> int:
    """Run the script, print what was planned, and end as the script did."""
    if arguments.budget is None:
        raise BadUse("run needs a budget of bytes, as in `stowplan run --budget 6GiB train.py`")
    allow = None if arguments.allow is None else ",".join(sorted(known_techniques(arguments.allow)))
    budgeted = BudgetedRun(
        parse_bytes(arguments.budget, "budget"), allow, arguments.strict, read_options(arguments, Search)
    )
    refuse_unwritable(arguments.json)
    command = command_line(arguments.command)
    with tempfile.TemporaryDirectory(prefix="stowplan-") as folder:
        settings = LaunchSettings(folder, path=os.environ.get("PYTHONPATH"), budgeted=budgeted)
        code = run_observed(command, settings)
        records = list(records_in(folder, RunRecord))
    if arguments.json:
        from stowplan.report.watch import records_json

        write_output(arguments.json, records_json(records))
    from stowplan.report.run import show_runs
    from stowplan.report.terminal import console_for_output

    show_runs(records, console_for_output(to_errors=True))
    return end_as(code)
