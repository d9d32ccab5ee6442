"""`stowplan doctor`: what is installed, what this machine has, what is usable. Exit 1 if nothing trains."""

import json
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TypeAlias

from stowplan import __version__
from stowplan.errors import BadUse, TierFailed
from stowplan.plan.progress import showing_progress

Findings: TypeAlias = dict[str, dict[str, object]]

_REQUIRED = ("msgspec", "numpy", "rich", "scipy")
_PARTNERS = ("transformers", "accelerate", "lightning", "monai", "onnx")


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: Namespace) -> int:
    """Look around and print."""
    with showing_progress("measuring this machine"):
        findings = findings_here()
    if arguments.json:
        print(json.dumps(findings, indent=2))
    else:
        _show(findings)
    return 0 if findings["usable"]["fit"] is True else 1


def findings_here() -> Findings:
    """Everything there is to say, section by section."""
    torch_version = _version("torch")
    disk = _disk() if torch_version else "needs torch"
    return {
        "versions": {
            "stowplan": __version__,
            "python": platform.python_version(),
            "torch": torch_version,
            **{name: _version(name) for name in (*_REQUIRED, *_PARTNERS)},
        },
        "devices": _devices() if torch_version else {},
        "tiers": {"disk": disk} if isinstance(disk, dict) else {},
        "usable": _usable(torch_version, disk),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, object]:
    from stowplan.run.measure.diagnosis import devices_here, threads_here

    return {
        found.device: {
            "name": found.name,
            "total_bytes": found.total_bytes,
            "free_bytes": found.free_bytes,
            "macs_per_second": found.machine.macs_per_second,
            "bytes_per_second": found.machine.bytes_per_second,
            "launch_seconds": found.machine.launch_seconds,
            **({"threads": threads_here()} if found.device == "cpu" else {}),
        }
        for found in devices_here()
    }


def _disk() -> dict[str, object] | str:
    """The measured speed of offloading to disk, or the reason why it is impossible."""
    from stowplan.run.measure.diagnosis import disk_here

    try:
        folder, tier = disk_here()
    except BadUse as fault:
        return str(fault)
    except (TierFailed, OSError) as fault:
        return f"{fault}; STOWPLAN_SPILL=FOLDER names another place"
    return {
        "folder": folder,
        "free_bytes": tier.capacity_bytes,
        "store_bytes_per_second": tier.store_bytes_per_second,
        "load_bytes_per_second": tier.load_bytes_per_second,
        "latency_seconds": tier.latency_seconds,
    }


def _usable(torch_version: str | None, disk: dict[str, object] | str) -> dict[str, object]:
    """True, or why not."""
    missing = "needs torch: pip install 'stowplan[torch]'"
    trains: bool | str = missing if torch_version is None else _trains_with(torch_version)
    return {
        "inspect, plan, report, convert on files": True,
        "planning in C": _planning_in_c(),
        "fit": trains,
        "torch.compile(backend='stowplan')": trains,
        "offload to disk": (disk if isinstance(disk, str) else True) if trains is True else trains,
        **{f"integration with {name}": _integration(name, trains) for name in _PARTNERS[:-1]},
    }


def _planning_in_c() -> bool | str:
    from stowplan.plan.native.annealer import ADVICE, loaded
    from stowplan.plan.native.build import is_switched_off

    library, why_not = loaded()
    if library is not None:
        return True
    return why_not if is_switched_off() else f"{why_not}, so plans are searched in Python; {ADVICE}"


def _trains_with(torch_version: str) -> bool | str:
    from stowplan.torch_private import untested

    why = untested(torch_version)
    return f"{why}: run stowplan check first" if why else True


def _integration(package: str, trains: bool | str) -> bool | str:
    if trains is not True:
        return trains
    return True if find_spec(package) else f"needs {package}: pip install {package}"


def _show(findings: Findings) -> None:
    from rich.table import Table
    from rich.text import Text

    from stowplan.report.terminal import console_for_output, print_trimmed

    console = console_for_output()
    for section, rows in findings.items():
        table = Table.grid(padding=(0, 2))
        for label, value in _rows(section, rows):
            table.add_row(Text(f"  {label}", "cyan"), value)
        if rows:
            print_trimmed(console, Text(section, "bold"), table, "")


def _rows(section: str, rows: dict[str, object]) -> Iterator[tuple[str, str]]:
    for label, value in rows.items():
        if section == "devices":
            yield label, _device_line(value)
        elif section == "tiers":
            yield label, _tier_line(value)
        elif section == "usable":
            yield label, "yes" if value is True else f"no: {value}"
        else:
            yield label, "not installed" if value is None else str(value)
    if section == "versions":
        yield "system", f"{platform.system()} {platform.machine()}, {sys.implementation.name}"


def _device_line(value: object) -> str:
    from stowplan.units import format_bytes, format_count, format_seconds

    assert isinstance(value, dict)
    threads = f" on {value['threads']} threads" if "threads" in value else ""
    free, total = format_bytes(value["free_bytes"]), format_bytes(value["total_bytes"])
    return (
        f"{value['name']}{threads}: {free} of {total} free\n"
        f"measured {format_count(int(value['macs_per_second']))} MACs/s, "
        f"{format_bytes(int(value['bytes_per_second']))}/s in copies, "
        f"{format_seconds(value['launch_seconds'])} to start an op"
    )


def _tier_line(value: object) -> str:
    from stowplan.units import format_bytes, format_seconds

    assert isinstance(value, dict)
    out, back = (format_bytes(int(value[f"{way}_bytes_per_second"])) for way in ("store", "load"))
    return (
        f"{value['folder']}: {format_bytes(value['free_bytes'])} free\n"
        f"measured {out}/s out, {back}/s back, {format_seconds(value['latency_seconds'])} at least"
    )
