"""`stowplan inspect FILE`: what is in it, where the memory goes, how small it could get."""

import json
from argparse import ArgumentParser, Namespace

from stowplan import api
from stowplan.cli.patience import a_word_after_two_seconds


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument(
        "file", metavar="FILE", help="a graph or profile in any of the formats that can be read"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--notes", action="store_true", help="show every note of the reader, not one per group"
    )
    parser.add_argument("--pack", action="store_true", help="find places in one arena, however many tensors")
    parser.add_argument(
        "--saved",
        choices=("listed", "retain"),
        help="for Chainer files: backward keeps what its records list (default) or what they say to retain",
    )


def run(arguments: Namespace) -> int:
    """Inspect and print."""
    with a_word_after_two_seconds(f"reading and analysing {arguments.file}"):
        inspection = api.inspect(arguments.file, saved=arguments.saved, packed=arguments.pack or None)
    if arguments.json:
        from stowplan.report.inspect_json import inspection_json

        print(json.dumps(inspection_json(inspection), indent=2))
    else:
        from stowplan.report.inspect import show_inspection
        from stowplan.report.terminal import console_for_output

        show_inspection(inspection, console_for_output(), title=arguments.file, all_notes=arguments.notes)
    return 0
