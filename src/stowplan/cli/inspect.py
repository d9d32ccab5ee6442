"""`stowplan inspect FILE|MODULE:FUNCTION`: what is in it, where the memory goes, how small it could get."""

import json
from argparse import ArgumentParser, Namespace

from stowplan import api
from stowplan.cli.options import add_layouts, add_saved, add_training
from stowplan.errors import BadUse
from stowplan.plan.progress import showing_progress


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("target", metavar="FILE|MODULE:FUNCTION", help=api.TARGET_HELP)
    parser.add_argument(
        "--measure", action="store_true", help="for models: also run one step, and show what it took"
    )
    parser.add_argument("--optimizer", help=f"for models: count its state and step too; {api.OPTIMIZER_HELP}")
    parser.add_argument(
        "--no-probe", action="store_true", help="for models: run no op, take workspace from a table"
    )
    parser.add_argument("--device", metavar="CARD|FILE.toml", help=f"for models: {api.DEVICE_HELP}")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--notes", action="store_true", help="show every note of the reader, not one per group"
    )
    parser.add_argument(
        "--pack", action="store_true", help="place all tensors in one arena, also if that takes long"
    )
    add_training(parser)
    add_layouts(parser)
    add_saved(parser)


def run(arguments: Namespace) -> int:
    """Inspect and print."""
    if arguments.device:
        return _inspect_on_card(arguments)
    if api.names_a_function(arguments.target):
        if (
            arguments.training
            or arguments.saved
            or arguments.pack
            or arguments.layouts != api.Layouts.RECORDED
        ):
            raise BadUse(
                f"--training, --saved, --layouts and --pack are for files, and {arguments.target} is a step"
            )
        return _inspect_step(arguments)
    if arguments.measure or arguments.optimizer or arguments.no_probe:
        raise BadUse(
            f"{arguments.target} is a file, whose step cannot run: --measure, --optimizer and --no-probe are"
            " for MODULE:FUNCTION"
        )
    with showing_progress(f"reading and analysing {arguments.target}"):
        inspection = api.inspect(
            arguments.target,
            saved=arguments.saved,
            packed=arguments.pack or None,
            training=arguments.training,
            layouts=arguments.layouts,
        )
        heap = api.heap_of(inspection.document)
        ours = api.tiles_for_document(inspection.document)
    if arguments.json:
        from stowplan.report.heap import heap_json
        from stowplan.report.inspect_json import inspection_json
        from stowplan.report.plan_json import tiles_json

        shown = inspection_json(inspection) | ({"tiles_of_ours": tiles_json(ours)} if ours else {})
        shown["heap"] = heap_json(heap) if heap else None
        print(json.dumps(shown, indent=2))
    else:
        from stowplan.report.inspect import show_inspection
        from stowplan.report.terminal import console_for_output
        from stowplan.report.tiles import show_tile_map

        console = console_for_output()
        show_inspection(inspection, console, title=arguments.target, all_notes=arguments.notes)
        if heap:
            from stowplan.report.heap import show_heap

            show_heap(heap, console)
        if ours:
            show_tile_map(
                ours, console, heading=f"its network in {ours.tiles} tiles of ours, as small as its"
            )
    return 0


def _inspect_step(arguments: Namespace) -> int:
    with showing_progress(f"inspecting {arguments.target}"):
        found = api.inspect_step(
            arguments.target,
            tried=not arguments.no_probe,
            measured=arguments.measure,
            optimizer=arguments.optimizer,
        )
    if arguments.json:
        from stowplan.report.step import step_json

        print(json.dumps(step_json(found), indent=2))
    else:
        from stowplan.report.step import show_step
        from stowplan.report.terminal import console_for_output

        show_step(found, console_for_output(), title=arguments.target, all_notes=arguments.notes)
    return 0


def _inspect_on_card(arguments: Namespace) -> int:
    if arguments.measure:
        raise BadUse("--measure runs the step here, and --device is for a card that is not here: drop one")
    with showing_progress(f"inspecting {arguments.target}"):
        step = api.projected_step(arguments.target, arguments.device)
        found = step.inspected()
        if arguments.optimizer:
            from stowplan.run.target import load_optimizer

            optimizer = load_optimizer(arguments.optimizer, step.model)
            found = step.inspected(optimizer)
            (step,) = step.iterations(api.Iteration(optimizer, keep_gradients=True))
        heap = step.without_a_plan()
    from stowplan.report.card import card_json, show_card
    from stowplan.report.heap import projection_json, show_projection
    from stowplan.report.step import show_step, step_json

    if arguments.json:
        shown = step_json(found) | {"device": card_json(step.peak)}
        shown["heap"] = projection_json(heap) if heap else None
        print(json.dumps(shown, indent=2))
        return 0
    from stowplan.report.terminal import console_for_output

    console = console_for_output()
    show_step(found, console, title=arguments.target, all_notes=arguments.notes)
    show_card(step.peak, console)
    if heap:
        show_projection(heap, console)
    return 0
