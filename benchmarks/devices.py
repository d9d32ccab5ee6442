"""Large steps planned for a card that is not here, from the model alone: nothing of them is allocated.

    python -m benchmarks.devices [--device a100-80gb] [NET ...]

For each network: seconds of the processor for capture (all captures that split the difference from the CPU's
peak by cause) and for planning, peaks of requested bytes on this CPU and on the card without a plan, the plan
for the card's memory, and the causes of the difference. All figures of the card are projected.
"""

import argparse
from collections.abc import Mapping
from time import process_time

import torch

from benchmarks.results import Study
from stowplan.errors import BudgetTooSmall
from stowplan.plan.cards import card_named
from stowplan.plan.options import PlanOptions
from stowplan.report.card import show_card
from stowplan.report.terminal import console_for_output
from stowplan.run.project import project_step
from stowplan.run.target import Target
from stowplan.units import format_bytes
from tests.support.nets import NETS

_STUDY = Study("devices")
_NETS: Mapping[str, tuple[str, torch.dtype, dict[str, int]]] = {
    "gpt2-xl": (
        "gpt",
        torch.bfloat16,
        {"batch": 32, "sequence": 1024, "vocabulary": 50257, "dim": 1600, "layers": 48, "heads": 25},
    ),
    "llama-8b": (
        "llama",
        torch.bfloat16,
        {"batch": 2, "sequence": 8192, "vocabulary": 128256, "dim": 4096, "layers": 32, "heads": 32}
        | {"groups": 8, "hidden": 14336},
    ),
    "unet3d-256": ("unet3d", torch.float32, {"batch": 2, "resolution": 256, "width": 32, "levels": 6}),
}


def main() -> None:
    """Print a section for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(_NETS), metavar="NET", help=", ".join(_NETS))
    parser.add_argument("--device", default="a100-80gb")
    options = parser.parse_args()
    for name in options.nets:
        _show(name, options.device)


def _show(name: str, device: str) -> None:
    net, dtype, settings = _NETS[name]
    model, args = NETS[net].build("real", device="meta", dtype=dtype, **settings)
    started = process_time()
    step = project_step(Target(model, args), card_named(device))
    captured = process_time() - started
    _STUDY.tell(f"{name} on {device}", "capture", "processor time", captured, "s")
    print(
        f"## {name}: {len(step.graph.ops):,} ops, captured in {captured:.1f} s of the processor", flush=True
    )
    show_card(step.peak, console_for_output())
    started = process_time()
    try:
        plan, heap = step.plan(None, PlanOptions())
    except BudgetTooSmall as refusal:
        print(f"planned in {process_time() - started:.1f} s: {refusal}\n", flush=True)
        return
    planned = process_time() - started
    assert heap is not None
    reserved = heap.figures.reserved_peak_bytes
    _STUDY.tell(f"{name} on {device}", "plan", "processor time", planned, "s")
    _STUDY.tell(f"{name} on {device}", "plan", "reserved", reserved / 2**20, "MiB")
    _STUDY.tell(f"{name} on {device}", "plan", "time of the baseline", plan.time_ratio, "ratio")
    print(
        f"planned in {planned:.1f} s: requests {format_bytes(plan.projected_peak_bytes)}, reserves"
        f" {format_bytes(reserved)}, {plan.time_ratio:.3f} of the baseline's time, projected\n",
        flush=True,
    )


if __name__ == "__main__":
    main()
