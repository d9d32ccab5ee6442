"""`stowplan convert IN OUT`: the same document in another format."""

import json
from argparse import ArgumentParser, Namespace

from stowplan import api
from stowplan.cli.options import add_saved
from stowplan.formats.door import WRITERS
from stowplan.plan.progress import showing_progress
from stowplan.units import printable


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("source", metavar="IN", help="a file in any of the formats that can be read")
    parser.add_argument(
        "target", metavar="OUT", help="output file; the suffix .stow.json or .stow.txt selects the format"
    )
    parser.add_argument("--to", choices=tuple(WRITERS), help="output format, for other suffixes")
    parser.add_argument(
        "--graph-only", action="store_true", help="leave out times, addresses, regions and tiles"
    )
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    add_saved(parser)


def run(arguments: Namespace) -> int:
    """Convert, and say what was written."""
    with showing_progress(f"converting {arguments.source}"):
        document = api.convert(
            arguments.source,
            arguments.target,
            to=arguments.to,
            graph_only=arguments.graph_only,
            saved=arguments.saved,
        )
    ops, tensors = len(document.graph.ops), len(document.graph.tensors)
    if arguments.json:
        print(json.dumps({"file": arguments.target, "from": document.format, "ops": ops, "tensors": tensors}))
    else:
        print(printable(f"{arguments.target}: {ops:,} ops, {tensors:,} tensors from {document.format}"))
    return 0
