"""The few verbs a user calls."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stowplan.analyse.inspection import PACKED_UNASKED, Inspection, inspection_of
from stowplan.analyse.layouts import Layouts, with_fewest_changes
from stowplan.analyse.training import training_step_of
from stowplan.errors import BadUse, BudgetTooSmall
from stowplan.formats.door import format_for, read_document, text_of
from stowplan.ir import Document, Note, NoteKind
from stowplan.plan.explain.explain import Explanation, TiledTensor, explain, explain_tiled
from stowplan.plan.files.plan_file import load as load_plan
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import (
    ON_REQUEST,
    TECHNIQUES,
    USUAL_EXECUTION,
    USUAL_SEARCH,
    Execution,
    PlanOptions,
    Search,
    Techniques,
)
from stowplan.plan.plan import Plan
from stowplan.plan.planner import refuse_hopeless
from stowplan.plan.prices import price_by_macs, price_by_profile
from stowplan.plan.record import Record
from stowplan.plan.select import Selector, planner_of
from stowplan.plan.sockets import is_installed
from stowplan.plan.tile_map import DOCUMENT_TILES, TileMap
from stowplan.request import Iteration, facts_of, refuse_together, with_former_spellings
from stowplan.units import parse_bytes
from stowplan.watch import limited_to, tell_phase

if TYPE_CHECKING:
    from stowplan.plan.allocator.caching import HeapFigures
    from stowplan.plan.allocator.projection import HeapProjection
    from stowplan.plan.allocator.settings import AllocatorSettings
    from stowplan.plan.allocator.survey import HeapSurvey
    from stowplan.plan.explain.addresses import AddressesBeside
    from stowplan.run.measure.inspect_step import StepInspection
    from stowplan.run.project import ProjectedStep

__all__ = [
    "DEVICE_HELP",
    "FUNCTION_HELP",
    "ON_REQUEST",
    "OPTIMIZER_HELP",
    "TARGET_HELP",
    "TECHNIQUES",
    "Execution",
    "Explanation",
    "Inspection",
    "Iteration",
    "Layouts",
    "Plan",
    "PlanOptions",
    "Record",
    "Search",
    "Selector",
    "TiledTensor",
    "addresses_of",
    "allocator_settings",
    "check",
    "convert",
    "explain",
    "explain_tiled",
    "facts_of",
    "heap_of",
    "inspect",
    "inspect_step",
    "load_plan",
    "names_a_function",
    "plan_for",
    "plan_for_allocator",
    "planner_for",
    "projected_step",
    "read_document",
    "refuse_no_function",
    "refuse_together",
    "tiles_for_document",
]

FUNCTION_HELP = (
    "a function in a Python module that returns (model, args[, kwargs][, loss]): kwargs is a dict, loss a"
    " function of the model's output, or the name or index of the output that is the loss"
)
OPTIMIZER_HELP = (
    "a name of torch.optim, such as adamw or sgd, or MODULE:FUNCTION, which takes the model and returns its"
    " optimizer"
)
TARGET_HELP = f"a graph file, or {FUNCTION_HELP}"

DEVICE_HELP = (
    "a card that is not here, such as a100-80gb, or FILE.toml with its figures: the step is captured with its"
    " kernels and priced by its published rates, and all figures are projected"
)


def inspect(
    path: str | Path,
    *,
    saved: str | None = None,
    packed: bool | None = None,
    training: bool = False,
    layouts: str = Layouts.RECORDED,
) -> Inspection:
    """Inspect a file: its ops and tensors, its memory curve and peak, and lower bounds. Nothing is run.

    `saved` is the option of `read_document`. `packed` asks for offsets of all tensors in one arena; without
    it they are computed unless the graph is very large. `training` derives the backward half of a forward
    graph such as an ONNX model. `layouts="chosen"` leaves out changes of layout that other layouts of the ops
    make needless.
    """
    return inspection_of(_document(path, saved, training=training, layouts=layouts), packed=packed)


def _document(path: str | Path, saved: str | None, *, training: bool, layouts: str) -> Document:
    tell_phase("reading the file")
    document = read_document(path, saved=saved)
    if training:
        document = replace(document, graph=training_step_of(document.graph))
    if layouts == Layouts.CHOSEN:
        if document.profile:
            raise BadUse(f"{path} has the times of its ops, but not of their kernels for another layout")
        relaid = with_fewest_changes(document.graph)
        note = Note(NoteKind.CHANGED, "layouts", str(relaid))
        document = replace(document, graph=relaid.graph, notes=(*document.notes, note))
    return document


def inspect_step(
    target: str,
    *,
    tried: bool = True,
    measured: bool = False,
    optimizer: str | None = None,
) -> "StepInspection":
    """The memory and the work of the eager training step of MODULE:FUNCTION; `measured` also runs it once.

    With an `optimizer`, a name of `torch.optim` or MODULE:FUNCTION, so does the whole iteration.
    """
    from stowplan.run.measure.inspect_step import inspect_step as look
    from stowplan.run.target import load_optimizer, load_target

    step = load_target(target)
    own = load_optimizer(optimizer, step.model) if optimizer else None
    return look(step, tried=tried, measured=measured, optimizer=own)


def projected_step(target: str | Path, device: str) -> "ProjectedStep":
    """The step of MODULE:FUNCTION as it would run on a card that is not here: a name, or FILE.toml."""
    if not names_a_function(target):
        raise BadUse(f"--device is for steps of PyTorch, given as MODULE:FUNCTION; {target} is a file")
    from stowplan.plan.cards import card_named
    from stowplan.run.project import project_step
    from stowplan.run.target import load_target

    card = card_named(device)
    return project_step(load_target(str(target)), card)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str | None = None,
    graph_only: bool = False,
    saved: str | None = None,
) -> Document:
    """Write the document in `source` to `target`, in the format `to` or the one of the target's suffix.

    `graph_only` leaves out times, addresses, regions and tiles. Returns the document that was written.
    """
    document = read_document(source, saved=saved)
    if graph_only:
        document = replace(document, profile=None, allocation=None, regions=None, tiles=None, heap=None)
    text = text_of(document, to or format_for(Path(target)))
    try:
        Path(target).write_text(text, encoding="utf-8", newline="\n")
    except OSError as fault:
        raise BadUse(f"{target} cannot be written: {fault.strerror or fault}") from fault
    return document


def tiles_for_document(document: Document) -> TileMap | None:
    """Tiles for the network of a file that has a tile schedule; None if there is none, or nothing fits."""
    return DOCUMENT_TILES.of("tile")(document) if document.tiles and is_installed("tile") else None


def heap_of(document: Document) -> "HeapSurvey | None":
    """What the caching allocator did in a memory snapshot, and what other settings would give."""
    if document.heap is None:
        return None
    from stowplan.plan.allocator.survey import survey_of

    return survey_of(document)


def names_a_function(target: str | Path) -> bool:
    """Whether a word of the command line is MODULE:FUNCTION rather than a file."""
    module, colon, function = str(target).rpartition(":")
    dotted = all(part.isidentifier() for part in module.split("."))
    return bool(colon) and dotted and function.isidentifier() and not Path(target).exists()


def refuse_no_function(target: str, verb: str) -> None:
    """BadUse if a verb that runs a step is given anything but MODULE:FUNCTION."""
    if names_a_function(target):
        return
    if Path(target).exists():
        raise BadUse(
            f"{target} is a file, which has no program to run, and {verb} runs the step: give"
            " MODULE:FUNCTION, as in train:step; for files there are inspect, plan, explain, report,"
            " simulate and convert"
        )
    raise BadUse(
        f"{target!r} is neither a file nor MODULE:FUNCTION, such as train:step; `stowplan {verb}"
        " -h` says what to write"
    )


_TO_THE_END = Search(gap=0.0)


@with_former_spellings
def planner_for(
    target: str | Path,
    *,
    saved: str | None = None,
    training: bool = False,
    layouts: str = Layouts.RECORDED,
    allow: Techniques | None = None,
    allowed_bytes: int | None = None,
    optimizer: Iteration | str | None = None,
    search: Search = _TO_THE_END,
    execution: Execution = USUAL_EXECUTION,
) -> "Selector[Any]":
    """A planner for a graph file or for MODULE:FUNCTION; `plan(budget_bytes)` makes a plan for a budget.

    Seconds come from probes of a model's ops, or from the profile in a file; without either,
    multiply-accumulates replace them. Plans without tiles come first, because they give the same bits;
    `Search(prefer="time")` takes the fastest plan. `training` and `layouts` are options of `inspect`.
    `allowed_bytes` is refused, before ops are probed, if it is below what every plan takes; no plan is
    refused because it is slow. With an `optimizer`, an `Iteration` or the name that it has for one, the plans
    are of whole iterations; with "offload" in `allow`, those for small budgets have its state in a tier.
    `search` and `execution` are those of `fit`.
    """
    options = replace(PlanOptions.of_call(allow, search, execution), slowest=inf)
    asked = Iteration.of(optimizer)
    refuse_together(_facts(target, options, asked, layouts, saved, training=training))
    if names_a_function(target):
        from stowplan.run.measure.agreement import compared
        from stowplan.run.planning.planner import step_planner
        from stowplan.run.target import load_iteration, load_target, subject_of

        subject = subject_of(load_target(str(target)))
        if asked is not None:
            from stowplan.run.planning.iterations import iterations

            own = load_iteration(asked, subject.model)
            iteration = iterations().planner(own, offloads="offload" in options.allow)
            steps, options = iteration.steps(subject), iteration.options(options)
        else:
            steps = [subject]
        if allowed_bytes is not None:
            least = partial(_smallest_budget, partial(step_planner, steps[-1], options))
            refuse_hopeless(steps[-1].captured.graph, allowed_bytes, options, least)
        planner = step_planner(steps[0], options)
        if steps[1:]:  # they take less memory and more time, as tiles do
            smaller = [step_planner(step, options).plain for step in steps[1:]]
            planner = replace(planner, find_candidates=lambda _: smaller)
        return replace(planner, compare=partial(compared, subject=steps[0]))
    document = _document(target, saved, training=training, layouts=layouts)
    graph = document.graph
    pricing = price_by_profile(graph, document.profile, {}) if document.profile else price_by_macs(graph)
    if allowed_bytes is not None:
        least = partial(_smallest_budget, partial(planner_of, graph, pricing, options))
        refuse_hopeless(graph, allowed_bytes, options, least)
    return planner_of(graph, pricing, options)


def _facts(
    target: str | Path,
    options: PlanOptions,
    iteration: Iteration | None = None,
    layouts: str = Layouts.RECORDED,
    saved: str | None = None,
    *,
    training: bool = False,
) -> set[str]:
    """What was asked of a target, in the words of the table of what is not offered together."""
    named = {
        "layouts": layouts != Layouts.RECORDED,
        "saved": saved is not None,
        "training": training,
    }
    kind = "function" if names_a_function(target) else "file"
    return {kind, *facts_of(options, iteration), *(name for name, asked in named.items() if asked)}


def _smallest_budget(planner: "Callable[[], Selector[Any]]") -> BudgetTooSmall:
    return planner().smallest


def plan_for(
    target: str | Path,
    allowed_bytes: int,
    *,
    saved: str | None = None,
    training: bool = False,
    layouts: str = Layouts.RECORDED,
    allow: Techniques | None = None,
    optimizer: Iteration | str | None = None,
    search: Search = USUAL_SEARCH,
    execution: Execution = USUAL_EXECUTION,
) -> Plan:
    """A plan for a graph file or for MODULE:FUNCTION, whose plan is kept in the cache that `fit` reads.

    The options are those of `planner_for`. A slow plan of MODULE:FUNCTION is refused as in `fit`, unless
    `allow` or `prefer` is given; that of a file is made. With an `optimizer` it is the plan that `fit` makes:
    its state may wait in a tier, and clipping may need two backwards.
    """
    options = PlanOptions.of_call(allow, search, execution)
    asked = Iteration.of(optimizer)
    refuse_together(_facts(target, options, asked, layouts, saved, training=training))
    if not names_a_function(target):
        of_file: Any = {"saved": saved, "training": training, "layouts": layouts}
        with limited_to(search.time_limit):
            planner = planner_for(target, allowed_bytes=allowed_bytes, allow=allow, search=search, **of_file)
            return planner.plan(allowed_bytes)
    from stowplan.run.measure.agreement import compared
    from stowplan.run.planning.road import draft_for
    from stowplan.run.target import load_iteration, load_target, subject_of

    loaded = load_target(str(target))
    if asked is not None:
        from stowplan.run.fit import fit, plans_of

        fitted = fit(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            loss=loaded.loss,
            budget=allowed_bytes,
            allow=allow,
            optimizer=load_iteration(asked, loaded.model),
            search=search,
            execution=execution,
        )
        return plans_of(fitted)[0]
    subject = subject_of(loaded)
    return verify(compared(draft_for(subject, allowed_bytes, options).draft, subject))


def addresses_of(plan: Plan, path: str | Path, saved: str | None = None) -> "AddressesBeside | None":
    """The places of a plan's tensors in one arena beside those in its file.

    None if the file has none, or if there are too many tensors to pack them within seconds.
    """
    document = read_document(path, saved=saved)
    if document.allocation is None or len(plan.steps) > PACKED_UNASKED:
        return None
    from stowplan.plan.explain.addresses import addresses_beside

    return addresses_beside(plan, document.allocation)


def plan_for_allocator(
    planner: "Selector[Any]", allowed_bytes: int, allocator: str, *, held_blocks: bool = False
) -> "tuple[Plan, HeapProjection]":
    """A plan of which PyTorch's caching allocator reserves at most `allowed_bytes`, and what it reserves.

    `allocator` is "cuda", with settings as in PYTORCH_CUDA_ALLOC_CONF after a comma. `held_blocks` is the
    option of `fit`, with which the step then has to run.
    """
    from stowplan.plan.allocator.projection import plan_for_device

    settings = allocator_settings(allocator)
    draft, heap = plan_for_device(
        lambda budget: planner.answer(budget)[0], allowed_bytes, settings, held_blocks=held_blocks
    )
    return planner.plan_of(draft), heap


def reserved_in_turn(plans: Iterable[Plan], allocator: str = "cuda") -> "tuple[HeapFigures, ...]":
    """What PyTorch's caching allocator holds after an iteration of each plan, as shapes change.

    `allocator` is that of `plan_for_allocator`.
    """
    from stowplan.plan.allocator.projection import project_in_turn

    return project_in_turn(plans, allocator_settings(allocator))


def allocator_settings(allocator: str) -> "AllocatorSettings":
    """The settings in "cuda,CONF", as in PYTORCH_CUDA_ALLOC_CONF after the comma."""
    from stowplan.plan.allocator.settings import parse_settings

    name, _, text = allocator.partition(",")
    if name != "cuda":
        raise BadUse(f"no allocator {name!r}; there is cuda, as in --allocator cuda,expandable_segments:True")
    return parse_settings(text)


@with_former_spellings
def check(
    target: str,
    budget: int | str,
    *,
    allow: Techniques | None = None,
    steps: int = 3,
    optimizer: Iteration | str | None = None,
    plan: Plan | None = None,
    search: Search = USUAL_SEARCH,
    execution: Execution = USUAL_EXECUTION,
) -> Record:
    """Run MODULE:FUNCTION eagerly and by a plan for `budget`, side by side, and compare all there is.

    With an `optimizer`, an `Iteration` or the name that it has for one, whole iterations are planned, run and
    compared; `search` and `execution` are those of `fit`. A saved `plan` is used instead of a new one.
    """
    refuse_no_function(target, "check")
    options = PlanOptions.of_call(allow, search, execution)
    asked = Iteration.of(optimizer)
    refuse_together(facts_of(options, asked))
    from stowplan.run.measure.check import check as run_check
    from stowplan.run.measure.check import check_iterations
    from stowplan.run.planning.road import draft_for
    from stowplan.run.target import load_iteration, load_target

    loaded, allowed_bytes = load_target(target), parse_bytes(budget, "budget")
    if asked is not None:
        from stowplan.run.fit import fit

        call = loaded.model, loaded.args, loaded.kwargs
        how: Any = {"allow": allow, "plan": plan, "search": search, "execution": execution}
        fitting = partial(fit, *call, loss=loaded.loss, budget=budget, **how)
        return check_iterations(
            loaded, lambda own: fitting(optimizer=own), partial(load_iteration, asked), iterations=steps
        )
    planning = partial(draft_for, allowed_bytes=allowed_bytes, options=options, given=plan)
    return run_check(loaded, planning, steps=steps)
