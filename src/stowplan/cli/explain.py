"""`stowplan explain PLAN [TENSOR]`: why it was decided so, and what would change otherwise."""

import json
from argparse import ArgumentParser, Namespace

from stowplan import api
from stowplan.plan.progress import showing_progress


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("plan", metavar="PLAN", help="a plan that `stowplan plan ... -o PLAN` wrote")
    parser.add_argument(
        "tensor",
        metavar="TENSOR",
        nargs="?",
        help="a tensor's id or name, or the path of a module such as layers.2.0 (default: the whole plan)",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: Namespace) -> int:
    """Explain one tensor, or the plan as a whole."""
    tensor = arguments.tensor
    with showing_progress(f"explaining {arguments.plan}"):
        plan = api.load_plan(arguments.plan)
        tiled = api.explain_tiled(plan, tensor) if tensor is not None else None
        found = api.explain(plan, tensor) if tensor is not None and tiled is None else None
    if tiled is not None:
        _print_tiled(tiled, as_json=arguments.json)
    elif found is not None:
        _print_tensor(found, plan, as_json=arguments.json)
    else:
        _print_plan(plan, arguments)
    return 0


def _print_plan(plan: "api.Plan", arguments: Namespace) -> None:
    from stowplan.report.plan import show_plan
    from stowplan.report.plan_json import plan_json
    from stowplan.report.terminal import console_for_output

    if arguments.json:
        print(json.dumps(plan_json(plan), indent=2))
    else:
        show_plan(plan, console_for_output(), title=arguments.plan)


def _print_tiled(found: "api.TiledTensor", *, as_json: bool) -> None:
    from stowplan.report.plan_json import tiled_tensor_json
    from stowplan.report.terminal import console_for_output
    from stowplan.report.tiles import show_tiled_tensor

    if as_json:
        print(json.dumps(tiled_tensor_json(found), indent=2))
    else:
        show_tiled_tensor(found, console_for_output())


def _print_tensor(explanation: "api.Explanation", plan: "api.Plan", *, as_json: bool) -> None:
    from stowplan.ir.text import Labels
    from stowplan.report.plan import show_explanation
    from stowplan.report.plan_json import explanation_json
    from stowplan.report.terminal import console_for_output

    if as_json:
        print(json.dumps(explanation_json(explanation), indent=2))
    else:
        show_explanation(explanation, Labels(plan.graph), console_for_output())
