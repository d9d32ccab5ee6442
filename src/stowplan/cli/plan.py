"""`stowplan plan FILE --budget 4GiB`: decide for every tensor, show that it fits and what it costs."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from time import perf_counter

from stowplan import api
from stowplan.cli.patience import a_word_after_two_seconds, probing_shown
from stowplan.errors import BadUse
from stowplan.units import parse_bytes


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("target", metavar="FILE|MODULE:FUNCTION", help=api.TARGET_HELP)
    parser.add_argument("--budget", help="everything alive during the step, such as 6GiB or 500MB")
    parser.add_argument("--frontier", action="store_true", help="show time against budget for all budgets")
    parser.add_argument(
        "--allow", default="recompute", help=f"what may cost time: {', '.join(api.TECHNIQUES)}"
    )
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this file")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--saved", choices=("listed", "retain"), help="for Chainer files: as in inspect")


def run(arguments: Namespace) -> int:
    """Plan and print."""
    if not arguments.budget and not arguments.frontier:
        raise BadUse("say --budget BYTES, or --frontier to see what there is to choose from")
    allow = [word for word in arguments.allow.split(",") if word]
    started = perf_counter()
    with a_word_after_two_seconds(f"planning {arguments.target}"), probing_shown() as progress:
        planner = api.planner_for(arguments.target, saved=arguments.saved, allow=allow, progress=progress)
        plan = planner.plan(parse_bytes(arguments.budget)) if arguments.budget else None
    seconds = perf_counter() - started
    if plan is not None and arguments.output:
        from stowplan.plan.file import write

        Path(arguments.output).write_text(write(plan), encoding="utf-8")
    show = _print_json if arguments.json else _print_for_people
    show(arguments, planner, plan, seconds)
    return 0


def _print_json(
    arguments: Namespace, planner: "api.Planner", plan: "api.Plan | None", solve_seconds: float
) -> None:
    from stowplan.report.plan_json import frontier_json, plan_json

    shown = plan_json(plan, solve_seconds) if plan else {}
    if arguments.frontier:
        shown["frontier"] = frontier_json(planner.frontier, sum(planner.problem.seconds))
    print(json.dumps(shown, indent=2))


def _print_for_people(
    arguments: Namespace, planner: "api.Planner", plan: "api.Plan | None", solve_seconds: float
) -> None:
    from stowplan.report.plan import show_frontier, show_plan
    from stowplan.report.terminal import console_for_output

    console = console_for_output()
    if plan:
        show_plan(plan, console, title=arguments.target, solve_seconds=solve_seconds)
    if arguments.frontier:
        show_frontier(planner.frontier, sum(planner.problem.seconds), console)
