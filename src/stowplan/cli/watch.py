"""`stowplan watch SCRIPT ARGS`: run a script as it is, and say where the memory of an iteration goes."""

import os
import tempfile
from argparse import ArgumentParser, Namespace

from stowplan.cli.options import refuse_unwritable, write_output
from stowplan.errors import BadUse
from stowplan.observe.launch import LaunchSettings, command_line, end_as, run_observed
from stowplan.observe.record import WatchRecord, records_in
from stowplan.units import parse_bytes

_FEWEST = 3


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes before the script."""
    parser.usage = (
        "stowplan watch [--iterations N] [--limit BYTES] [--json FILE] SCRIPT|-m MODULE|-c CODE|- [ARGS ...]"
    )
    parser.epilog = "The script's own output and exit code stay as they are; the page goes to standard error."
    parser.add_argument(
        "--iterations", type=int, metavar="N", help="end the script after N iterations, at least 3"
    )
    parser.add_argument(
        "--limit",
        metavar="BYTES",
        help="raise torch.OutOfMemoryError in the script when its tensors would take more, as on a smaller"
        " device; every op is then followed to the end",
    )
    parser.add_argument("--json", metavar="FILE", help="write what was seen to a file")


def run(arguments: Namespace) -> int:
    """Run the script, print the page, and end as the script did."""
    if arguments.iterations is not None and arguments.iterations < _FEWEST:
        raise BadUse(f"--iterations {arguments.iterations} is too few: two alike follow the first one")
    limit = None if arguments.limit is None else parse_bytes(arguments.limit, "limit")
    refuse_unwritable(arguments.json)
    command = command_line(arguments.command)
    with tempfile.TemporaryDirectory(prefix="stowplan-") as folder:
        settings = LaunchSettings(folder, arguments.iterations, limit, os.environ.get("PYTHONPATH"))
        code = run_observed(command, settings)
        records = list(records_in(folder, WatchRecord))
    if arguments.json:
        from stowplan.report.watch import records_json

        write_output(arguments.json, records_json(records))
    from stowplan.report.terminal import console_for_output
    from stowplan.report.watch import show_records

    show_records(records, console_for_output(to_errors=True))
    return end_as(code)
