"""A plan with tiles from elsewhere: its sweeps are built from the segments and grids that it tells of."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from stowplan.capture import Captured
from stowplan.errors import IllegalPlan, NotTileable
from stowplan.ir import Graph, Phase
from stowplan.ir.text import parse_graph
from stowplan.plan.draft import Draft
from stowplan.plan.files.sameness import first_difference
from stowplan.plan.problem import slices_last
from stowplan.plan.tile_map import TileMap
from stowplan.run.planning.planner import Subject
from stowplan.run.planning.saved import ADOPTED, RESUMED
from stowplan.techniques.tiles.plan.borders import in_tiling_order
from stowplan.techniques.tiles.plan.cutout import segment_text
from stowplan.techniques.tiles.plan.rematerialise import PlannedSweep, RematerialisedInputs, rematerialise
from stowplan.techniques.tiles.plan.segment import Segment, segment_of
from stowplan.techniques.tiles.run.candidates import refuse_untileable, subject_with_sweeps
from stowplan.techniques.tiles.run.remade import with_skips_recomputed
from stowplan.techniques.tiles.run.rematerialised import rematerialised_sweeps, with_rematerialised_inputs
from stowplan.techniques.tiles.run.sweep import Sweep

Compare: TypeAlias = Callable[[Graph, Graph], str | None]
"""Says in words where two graphs first differ."""


@RESUMED.register("tile")
def resumed(draft: Draft, subject: Subject) -> Captured:
    """The step of a plan, with the plan's sweeps; IllegalPlan names the first op that differs."""
    return _resumed(draft, subject, first_difference)


@ADOPTED.register("tile")
def adopted(draft: Draft, subject: Subject) -> Captured:
    """The same for the plan of another worker, which may differ in attributes: they tell of its own part."""
    return _resumed(draft, subject, partial(first_difference, with_attributes=False))


def _resumed(draft: Draft, subject: Subject, compare: Compare) -> Captured:
    try:
        refuse_untileable(subject)
    except NotTileable as refusal:
        raise IllegalPlan(f"the plan is for another step: {refusal}") from refusal
    refusals = list[str]()
    for captured in _bases(subject):  # which of them a plan is for it does not tell
        try:
            found = _with_sweeps(draft, replace(subject, captured=captured), compare)
            difference = compare(draft.graph, slices_last(found.graph))
        except (IllegalPlan, NotTileable) as refusal:
            difference = str(refusal)
        if difference is None:
            return found
        refusals.append(difference)
    raise IllegalPlan(f"the plan is for another step: {refusals[0]}")


def _bases(subject: Subject) -> Iterator[Captured]:
    """The step as captured, then with skips recomputed."""
    yield subject.captured
    yield from with_skips_recomputed(subject.captured, subject.model, subject.args, subject.kwargs)


def _with_sweeps(draft: Draft, subject: Subject, compare: Compare) -> Captured:
    graph, calls = in_tiling_order(subject.captured.graph), subject.captured.program.calls
    ordered = replace(subject.captured, graph=graph)
    segments = [_segment(told, graph, compare) for told in draft.tile_maps]
    sweeps = [
        Sweep(segment, calls, told.parts) for told, segment in zip(draft.tile_maps, segments, strict=True)
    ]
    remats = dict(_remats(draft.tile_maps, sweeps))
    return with_rematerialised_inputs(
        subject_with_sweeps(replace(subject, captured=ordered), sweeps),
        sweeps,
        rematerialised_sweeps(sweeps, remats, calls),
    )


def _remats(maps: Sequence[TileMap], sweeps: Sequence[Sweep]) -> Iterator[tuple[str, RematerialisedInputs]]:
    """By the name of the sweep, the inputs that it rematerialises in the plan."""
    known = [PlannedSweep(sweep.segment, sweep.rounds) for sweep in sweeps]
    for place, (told, sweep) in enumerate(zip(maps, sweeps, strict=True)):
        if told.made_of:
            remat = rematerialise(known[:place], known[place], told.made_of, told.made_whole)
            if remat is None:
                raise IllegalPlan(f"nothing makes what {told.sweep!r} reads of {', '.join(told.made_of)}")
            yield sweep.name, remat


def _segment(told: TileMap, graph: Graph, compare: Compare) -> Segment:
    """The same stretch of this step; IllegalPlan if it has none, or another one."""
    planned = parse_graph(told.text)
    places = {op.id: place for place, op in enumerate(graph.ops) if op.phase is Phase.FORWARD}
    for op in planned.ops:
        if op.id not in places:
            raise IllegalPlan(f"{op.id!r} ({op.type}) of {told.sweep!r} is in the plan alone")
    if not planned.ops:
        raise IllegalPlan(f"{told.sweep!r} has no ops")
    inside = [places[op.id] for op in planned.ops]
    stretch = (op for op, place in places.items() if min(inside) <= place <= max(inside))
    segment = segment_of(graph, stretch)
    difference = compare(planned, parse_graph(segment_text(segment)))
    if difference is not None:
        raise IllegalPlan(f"in {told.sweep!r}, {difference}")
    return segment
