"""`stowplan plan FILE --budget 4GiB`: decide for every tensor, show that it fits and what it costs."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from stowplan import api
from stowplan.cli.options import add_choices, refuse_unwritable, write_output
from stowplan.cli.patience import a_word_after_two_seconds
from stowplan.errors import BadUse
from stowplan.units import parse_bytes

if TYPE_CHECKING:
    from stowplan.plan.allocator.projection import HeapProjection
    from stowplan.plan.candidate import Tradeoff


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("target", metavar="FILE|MODULE:FUNCTION", help=api.TARGET_HELP)
    parser.add_argument("--budget", help="bytes for everything alive during the step, such as 6GiB or 500MB")
    parser.add_argument("--frontier", action="store_true", help="show time against budget for all budgets")
    add_choices(parser)
    parser.add_argument(
        "--allocator",
        metavar="cuda[,CONF]",
        help="let the budget limit the bytes that PyTorch's caching allocator reserves on a CUDA device, with"
        " settings as in PYTORCH_CUDA_ALLOC_CONF",
    )
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this file")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--training", action="store_true", help="for forward graphs such as ONNX: as in inspect"
    )
    parser.add_argument("--saved", choices=("listed", "retain"), help="for Chainer files: as in inspect")


def run(arguments: Namespace) -> int:
    """Plan and print."""
    if not arguments.budget and not arguments.frontier:
        raise BadUse("say --budget BYTES, or --frontier to see what there is to choose from")
    if arguments.allocator and not arguments.budget:
        raise BadUse("--allocator needs --budget BYTES: it says what the budget limits")
    refuse_unwritable(arguments.output)
    started = perf_counter()
    allowed = parse_bytes(arguments.budget) if arguments.budget else None
    with a_word_after_two_seconds(f"planning {arguments.target}", allowed_bytes=allowed) as waiting:
        planner = api.planner_for(
            arguments.target,
            saved=arguments.saved,
            training=arguments.training,
            allow=arguments.allow,
            prefer=arguments.prefer,
            progress=waiting.tried,
        )
        plan, heap = None, None
        if allowed is not None and arguments.allocator:
            plan, heap = api.plan_for_allocator(planner, allowed, arguments.allocator)
        elif allowed is not None:
            plan = planner.plan(allowed)
        offers = planner.tradeoffs() if arguments.frontier else ()
    seconds = perf_counter() - started
    if plan is not None and arguments.output:
        from stowplan.plan.files.plan_file import write

        write_output(arguments.output, write(plan))
    show = _print_json if arguments.json else _print_for_people
    show(arguments.target, plan, heap, offers, planner.baseline.seconds, seconds)
    return 0


def _print_json(
    _: str,
    plan: "api.Plan | None",
    heap: "HeapProjection | None",
    offers: "Sequence[Tradeoff]",
    plain_seconds: float,
    solve_seconds: float,
) -> None:
    from stowplan.report.heap import projection_json
    from stowplan.report.plan_json import frontier_json, plan_json

    shown = plan_json(plan, solve_seconds) if plan else {}
    if heap:
        shown["heap"] = projection_json(heap)
    if offers:
        shown["frontier"] = frontier_json(offers, plain_seconds)
    print(json.dumps(shown, indent=2))


def _print_for_people(
    title: str,
    plan: "api.Plan | None",
    heap: "HeapProjection | None",
    offers: "Sequence[Tradeoff]",
    plain_seconds: float,
    solve_seconds: float,
) -> None:
    from stowplan.report.plan import show_frontier, show_plan
    from stowplan.report.terminal import console_for_output

    console = console_for_output()
    if plan:
        show_plan(plan, console, title=title, solve_seconds=solve_seconds)
    if heap:
        from stowplan.report.heap import show_projection

        show_projection(heap, console)
    if offers:
        show_frontier(offers, plain_seconds, console)
