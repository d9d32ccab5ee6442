"""`stowplan gpu-check`: what stowplan promises, measured on this device, as two files to send."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from stowplan.cli.options import write_output
from stowplan.errors import BadUse
from stowplan.plan.progress import showing_progress


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("--device", help="such as cuda:0 or cpu (default: the accelerator, if there is one)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="start no further network after this time (default 120)",
    )
    parser.add_argument(
        "--networks", metavar="NAMES", help="only these, such as gpt,unet (default: all eight)"
    )
    parser.add_argument(
        "-o",
        "--output",
        default=".",
        metavar="FOLDER",
        help="where gpu-check.json and gpu-check.md are written (default: here)",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the page")


def run(arguments: Namespace) -> int:
    """Check, write both files, print; exit 1 if a plan did not hold."""
    from stowplan.report.device_check import findings_json, findings_page
    from stowplan.run.measure.device_check import check_device
    from stowplan.run.measure.sample_networks import NETWORKS

    folder = Path(arguments.output)
    if not folder.is_dir():
        raise BadUse(f"{folder} is no folder; make it, or name another with -o")
    names = arguments.networks.split(",") if arguments.networks else tuple(NETWORKS)
    with showing_progress("checking this device"):
        found = check_device(arguments.device, time_limit=arguments.time_limit, names=names)
    text, page = json.dumps(findings_json(found), indent=2), findings_page(found)
    write_output(str(folder / "gpu-check.json"), text + "\n")
    write_output(str(folder / "gpu-check.md"), page)
    print(text if arguments.json else page)
    return 0 if found.holds else 1
