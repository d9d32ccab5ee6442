"""`stowplan plan FILE --budget 4GiB`: decide for every tensor, show that it fits and what it costs."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from signal import SIGINT, default_int_handler, signal
from threading import current_thread, main_thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stowplan import api
from stowplan.cli.options import (
    add_allow,
    add_iteration,
    add_layouts,
    add_options,
    add_saved,
    add_training,
    read_iteration,
    read_options,
    refuse_unwritable,
    write_output,
)
from stowplan.errors import BadUse
from stowplan.plan.progress import Waiting, showing_progress
from stowplan.units import parse_bytes
from stowplan.watch import Patience, ended_by, limited_to

if TYPE_CHECKING:
    from stowplan.plan.allocator.projection import HeapProjection
    from stowplan.plan.explain.addresses import AddressesBeside
    from stowplan.plan.select import Tradeoff
    from stowplan.run.project import ProjectedStep


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("target", metavar="FILE|MODULE:FUNCTION", help=api.TARGET_HELP)
    parser.add_argument(
        "--budget",
        help="bytes for one forward and backward, parameters and gradients included, such as 6GiB or 500MB",
    )
    parser.add_argument("--frontier", action="store_true", help="show time against budget for all budgets")
    add_allow(parser)
    add_options(parser, api.Search, ("prefer", "gap", "time_limit"))
    add_options(parser, api.Execution, ("kernels", "arena", "held_blocks"))
    add_iteration(parser)
    parser.add_argument(
        "--allocator",
        metavar="cuda[,CONF]",
        help="let the budget limit the bytes that PyTorch's caching allocator reserves on a CUDA device, with"
        " settings as in PYTORCH_CUDA_ALLOC_CONF",
    )
    parser.add_argument(
        "--device",
        metavar="CARD|FILE.toml",
        help=f"{api.DEVICE_HELP}; the budget then limits reserved bytes, and defaults to the card's memory",
    )
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this file")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_training(parser)
    add_layouts(parser)
    add_saved(parser)


def run(arguments: Namespace) -> int:
    """Plan and print."""
    if not arguments.budget and not arguments.frontier and not arguments.device:
        raise BadUse("say --budget BYTES, or --frontier to see what there is to choose from")
    if arguments.allocator and not arguments.budget and not arguments.device:
        raise BadUse("--allocator needs --budget BYTES: it says what the budget limits")
    if arguments.held_blocks and not arguments.allocator and not arguments.device:
        raise BadUse("--held-blocks needs --allocator cuda or --device: it changes what is reserved there")
    words = {"allocator": arguments.allocator, "frontier": arguments.frontier, "card": arguments.device}
    execution = read_options(arguments, api.Execution)
    options = api.PlanOptions.of_call(arguments.allow, read_options(arguments, api.Search), execution)
    iteration = read_iteration(arguments)
    asked = api.facts_of(options, iteration).union(word for word, given in words.items() if given)
    api.refuse_together(asked)
    refuse_unwritable(arguments.output)
    started = perf_counter()
    allowed = parse_bytes(arguments.budget, "--budget") if arguments.budget else None
    with (
        showing_progress(f"planning {arguments.target}", allowed_bytes=allowed) as waiting,
        _kept_on_interrupt(waiting),
    ):
        answer = (_on_card if arguments.device else _here)(arguments, allowed, options, iteration)
    seconds = perf_counter() - started
    if answer.plan is not None and arguments.output:
        from stowplan.plan.files.plan_file import write

        write_output(arguments.output, write(answer.plan))
    show = _print_json if arguments.json else _print_for_people
    chosen = ", in chosen layouts" if arguments.layouts == api.Layouts.CHOSEN else ""
    show(f"{arguments.target}{chosen}", answer, seconds)
    return 0


@dataclass(slots=True)
class _Answer:
    """What there is to show."""

    plan: "api.Plan | None" = None
    heap: "HeapProjection | None" = None
    offers: "Sequence[Tradeoff]" = ()
    plain_seconds: float = 0.0
    faster: "Tradeoff | None" = None  # than the plan, in tiles
    step: "ProjectedStep | None" = None  # on a card that is not here
    addresses: "AddressesBeside | None" = None  # beside those of the file


def _here(
    arguments: Namespace, allowed: int | None, options: "api.PlanOptions", iteration: "api.Iteration | None"
) -> _Answer:
    answer, search = _Answer(), options.search
    words = "saved training layouts allow"
    how: Any = {name: getattr(arguments, name) for name in words.split()}
    how |= {"optimizer": iteration, "execution": options.execution}
    if allowed is not None and not arguments.allocator:
        answer.plan = api.plan_for(arguments.target, allowed, search=search, **how)
    if arguments.allocator or arguments.frontier:
        with limited_to(search.time_limit):
            to_the_end = replace(search, gap=0.0)
            planner = api.planner_for(arguments.target, search=to_the_end, allowed_bytes=allowed, **how)
            if allowed is not None and arguments.allocator:
                answer.plan, answer.heap = api.plan_for_allocator(
                    planner, allowed, arguments.allocator, held_blocks=arguments.held_blocks
                )
            answer.offers = planner.tradeoffs() if arguments.frontier else ()
            answer.plain_seconds = planner.baseline.seconds
            if answer.plan and arguments.frontier:
                answer.faster = planner.faster_in_tiles(answer.plan)
    if answer.plan and not api.names_a_function(arguments.target):
        answer.addresses = api.addresses_of(answer.plan, arguments.target, arguments.saved)
    return answer


def _on_card(
    arguments: Namespace, allowed: int | None, options: "api.PlanOptions", iteration: "api.Iteration | None"
) -> _Answer:
    settings = api.allocator_settings(arguments.allocator) if arguments.allocator else None
    options = replace(options, slowest=inf)
    steps = [api.projected_step(arguments.target, arguments.device)]
    if iteration is not None:
        from stowplan.run.target import load_iteration

        asked = load_iteration(iteration, steps[0].model)
        steps = steps[0].iterations(asked, offloads="offload" in options.allow)
    from stowplan.run.project import first_that_fits

    step, plan, heap = first_that_fits(steps, allowed, options, settings)
    if not arguments.frontier:
        return _Answer(plan, heap, step=step)
    planner = step.planner(options)
    return _Answer(plan, heap, planner.tradeoffs(), planner.baseline.seconds, step=step)


@contextmanager
def _kept_on_interrupt(waiting: Waiting) -> Iterator[None]:
    """Let the first Ctrl-C end the search with the best plan so far, if there is one; the second ends all."""
    patience = Patience()

    def end(*_: object) -> None:
        signal(SIGINT, default_int_handler)
        if not waiting.has_plan:
            raise KeyboardInterrupt
        waiting.make_room()
        print("stowplan: using the best plan so far; press Ctrl-C again to end", file=sys.stderr)
        patience.end("Ctrl-C")

    with ended_by(patience):
        if current_thread() is not main_thread():  # which alone may handle signals
            yield
            return
        before = signal(SIGINT, end)
        try:
            yield
        finally:
            signal(SIGINT, before)


def _print_json(_: str, answer: _Answer, solve_seconds: float) -> None:
    from stowplan.report.card import card_json
    from stowplan.report.heap import projection_json
    from stowplan.report.plan_json import frontier_json, plan_json

    shown = plan_json(answer.plan, solve_seconds) if answer.plan else {}
    if answer.heap:
        shown["heap"] = projection_json(answer.heap)
    if answer.step:
        shown["device"] = card_json(answer.step.peak)
    if answer.addresses:
        shown["addresses"] = asdict(answer.addresses)
    if answer.offers:
        shown["frontier"] = frontier_json(answer.offers, answer.plain_seconds)
    print(json.dumps(shown, indent=2))


def _print_for_people(title: str, answer: _Answer, solve_seconds: float) -> None:
    from stowplan.report.plan import show_addresses, show_frontier, show_plan
    from stowplan.report.terminal import console_for_output

    console = console_for_output()
    if answer.plan:
        show_plan(answer.plan, console, title=title, solve_seconds=solve_seconds)
        if answer.addresses:
            show_addresses(answer.addresses, answer.plan, console)
    if answer.heap:
        from stowplan.report.heap import show_projection

        show_projection(answer.heap, console)
    if answer.step:
        from stowplan.report.card import show_card

        show_card(answer.step.peak, console)
    if answer.offers:
        show_frontier(answer.offers, answer.plain_seconds, console, answer.faster)
