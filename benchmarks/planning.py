"""Planning time against size: a GPT and a Llama of growing depth, captured without memory and planned.

    python -m benchmarks.planning [--shallow]

Each row is one network: ops, seconds to capture, to search the frontier, to answer a budget of 70 % of the
baseline's peak with its bound, and the plan's time against the bound.
"""

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import torch

from benchmarks.results import Study
from stowplan.capture import capture
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine
from tests.support.nets import NETS

DEPTHS = {"gpt": (6, 12, 19, 38), "llama": (12, 25, 50, 100)}
Result = TypeVar("Result")


def row(net: str, layers: int) -> str:
    """One line of the table."""
    example = NETS[net].build("real", device="meta", batch=8, layers=layers)
    captured, capture_seconds = _timed(lambda: capture(example.model, example.args))
    graph = captured.graph
    pricing = price_by_roofline(graph, Machine())
    planner, search_seconds = _timed(lambda: Planner.of(graph, pricing))
    allowed = max(planner.minimum_bytes, planner.plain_peak_bytes * 7 // 10)
    plan, plan_seconds = _timed(lambda: planner.plan(allowed))
    study, case = Study("planning"), f"{net}, {layers} layers"
    study.tell(case, "stowplan", "ops", len(graph.ops), "ops")
    study.tell(case, "stowplan", "capture", capture_seconds, "s")
    study.tell(case, "stowplan", "search", search_seconds + plan_seconds, "s")
    study.tell(case, "stowplan", "gap", plan.gap, "of the bound")
    seconds = f"{capture_seconds:.1f} | {search_seconds:.1f} | {plan_seconds:.1f}"
    ratios = f"{plan.time_ratio:.4f} | {plan.bound:.4f}"
    return f"| {case} | {len(graph.ops)} | {seconds} | {ratios} |"


def _timed(call: Callable[[], Result]) -> tuple[Result, float]:
    started = perf_counter()
    return call(), perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shallow", action="store_true", help="the shallowest of each alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | ops | capture s | search s | plan and bound s | time ratio | bound |")
    print("|---|---|---|---|---|---|---|")
    for net, depths in DEPTHS.items():
        for layers in depths[:1] if options.shallow else depths:
            print(row(net, layers), flush=True)


if __name__ == "__main__":
    main()
