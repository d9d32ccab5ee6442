"""`stowplan demo`: a U-Net and a GPT train under 60 % of their memory, beside eager PyTorch."""

import sys
import webbrowser
from argparse import ArgumentParser, Namespace
from pathlib import Path

from stowplan import api
from stowplan.errors import BadUse
from stowplan.plan.progress import showing_progress
from stowplan.units import format_bytes, printable

_STEPS = {"unet": "a U-Net, 4 images of 128x128", "gpt": "a GPT, 8 sequences of 128 tokens"}
_SHARE = 0.6  # of eager's peak
_GAP = 0.05  # the search ends this near to its bound: a demo wants a good plan soon


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("step", nargs="?", choices=tuple(_STEPS), help="network to train (default: both)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        default="stowplan-demo",
        help="where to write the reports (default stowplan-demo)",
    )
    parser.add_argument("--no-open", action="store_true", help="write the reports without opening one")


def run(arguments: Namespace) -> int:
    """Run the steps, write their reports, and show the first."""
    folder = Path(arguments.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise BadUse(f"{folder} cannot be made: {fault.strerror or fault}") from fault
    pages = []
    for name in (arguments.step,) if arguments.step else _STEPS:
        page = folder / f"{name}.html"
        if not _shown(name, page):
            return 1
        pages.append(page)
    if sys.stdout.isatty() and not arguments.no_open:
        webbrowser.open(pages[0].resolve().as_uri())
    return 0


def _shown(name: str, page: Path) -> bool:
    """Run one step eagerly and by a plan; whether the budget held and everything is equal."""
    from stowplan.report.files import write_report
    from stowplan.report.page import subject_of
    from stowplan.report.record import show_record
    from stowplan.report.terminal import console_for_output

    target = f"stowplan.demo:{name}"
    with showing_progress(f"measuring {target}"):
        step = api.inspect_step(target, tried=False)
    allowed = int(_SHARE * step.projected_peak_bytes)
    with showing_progress(f"checking {target}", allowed_bytes=allowed):
        record = api.check(target, allowed, search=api.Search(gap=_GAP))
    show_record(record, console_for_output(), title=f"{_STEPS[name]}: 60 % of eager's memory")
    write_report([subject_of(record, f"{name}: {format_bytes(allowed)}")], str(page))
    print(printable(f"  the report: {page}"))
    print(f"  the same by hand: stowplan check {target} --budget {allowed}\n")
    return record.holds
