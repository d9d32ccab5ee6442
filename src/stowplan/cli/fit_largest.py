"""`stowplan fit-largest MODULE:FUNCTION --budget 8GiB`: how large a step can get, and at what price."""

import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from stowplan import api
from stowplan.cli.options import add_options, read_options
from stowplan.errors import BadUse
from stowplan.plan.options import known_techniques
from stowplan.plan.progress import showing_progress
from stowplan.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from stowplan.run.largest import Largest

VARIES = ("batch", "resolution", "sequence")


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help=f"{api.FUNCTION_HELP}; it has an argument `batch`, `resolution` or `sequence` (--vary)",
    )
    parser.add_argument(
        "--budget", help="bytes for one forward and backward, parameters and gradients included, such as 8GiB"
    )
    parser.add_argument(
        "--device",
        metavar="CARD|FILE.toml",
        help=f"{api.DEVICE_HELP}; the budget then limits reserved bytes, and defaults to the card's memory",
    )
    parser.add_argument(
        "--vary", choices=VARIES, default="batch", help="the function's argument to enlarge (default batch)"
    )
    parser.add_argument("--first", type=int, help="the smallest size (default: the function's own)")
    parser.add_argument(
        "--multiple", type=int, default=1, help="distance between the sizes to plan (default 1)"
    )
    parser.add_argument("--most", type=int, help="the largest size to plan")
    parser.add_argument(
        "--allow",
        metavar="TECHNIQUES",
        help="techniques, added one after another (default recompute,tile, and then no size whose plan takes"
        " more than twice eager's time)",
    )
    parser.add_argument("--optimizer", help=f"for whole iterations: {api.OPTIMIZER_HELP}")
    add_options(parser, api.Execution, ("kernels",))
    add_options(parser, api.Search, ("moves",))
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(arguments: Namespace) -> int:
    """Search and print; exit 1 if nothing fits."""
    api.refuse_no_function(arguments.target, "fit-largest")
    from stowplan.plan.cards import card_named

    card = card_named(arguments.device) if arguments.device else None
    if not arguments.budget and card is None:
        raise BadUse("say --budget BYTES, or --device CARD for the memory of a card")
    allowed = (
        card.usable_bytes if card and not arguments.budget else parse_bytes(arguments.budget, "--budget")
    )
    from stowplan.run.largest import largest_of

    if arguments.allow:
        known_techniques(arguments.allow)
    for option, least in (("first", 1), ("multiple", 1), ("most", arguments.first or 1)):
        size = getattr(arguments, option)
        if size is not None and size < least:
            raise BadUse(f"--{option} is {size}; it is at least {least}")
    with showing_progress(f"trying sizes of {arguments.target}"):
        found = tuple(
            largest_of(
                arguments.target,
                allowed,
                card=card,
                vary=arguments.vary,
                first=arguments.first,
                multiple=arguments.multiple,
                most=arguments.most,
                optimizer=arguments.optimizer,
                search=read_options(arguments, api.Search),
                execution=read_options(arguments, api.Execution),
                allow=arguments.allow and [word for word in arguments.allow.split(",") if word],
            )
        )
    if arguments.json:
        print(json.dumps([_as_json(row, arguments.vary) for row in found], indent=2))
    else:
        on = f" on {card.name}, projected" if card else ""
        _show(found, arguments.vary, f"{arguments.target} within {format_bytes(allowed)}{on}")
    return 0 if found[-1].fit else 1


def _samples(row: "Largest", vary: str) -> int:
    return row.fit.size if row.fit and vary == "batch" else 1


def _as_json(row: "Largest", vary: str) -> dict[str, object]:
    fit = row.fit
    return {
        "techniques": list(row.techniques),
        vary: fit.size if fit else None,
        "projected_peak_bytes": fit.projected_peak_bytes if fit else None,
        "seconds_per_sample": fit.projected_seconds / _samples(row, vary) if fit else None,
        "time_ratio": fit.projected_seconds / fit.plain_seconds if fit and fit.plain_seconds else None,
        "next_needs_bytes": row.next_needs_bytes,
    }


def _show(found: "tuple[Largest, ...]", vary: str, title: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from stowplan.report.terminal import console_for_output, print_trimmed, table_or_lists

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="cyan")
    table.add_column("by", no_wrap=True)
    for heading in (vary, "peak", "time per sample", "of eager's at this size", "the next size needs"):
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(*_cells(row, vary))
    console = console_for_output()
    print_trimmed(console, Text(title, "bold"), table_or_lists(table, console, console.width))


def _cells(row: "Largest", vary: str) -> tuple[str, ...]:
    name = " + ".join(row.techniques) or "eager"
    needs = "-" if row.next_needs_bytes is None else format_bytes(row.next_needs_bytes)
    if row.fit is None:
        return name, "none fits", "-", "-", "-", needs
    seconds, plain = row.fit.projected_seconds, row.fit.plain_seconds
    return (
        name,
        str(row.fit.size),
        format_bytes(row.fit.projected_peak_bytes),
        format_seconds(seconds / _samples(row, vary)),
        f"{seconds / plain:.2f}" if plain else "-",
        needs,
    )
