"""A plan for people: whether it fits, its cost, its decisions, its distance from the lower bound."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from stowplan.analyse.layouts import with_fewest_changes
from stowplan.ir import Op, Phase
from stowplan.ir.text import Labels
from stowplan.plan.draft import Exactness
from stowplan.plan.explain.addresses import AddressesBeside
from stowplan.plan.explain.explain import Explanation
from stowplan.plan.explain.timeline import packed_bytes_of
from stowplan.plan.explain.updates import updates_of
from stowplan.plan.options import SLOWEST_UNASKED
from stowplan.plan.plan import Plan
from stowplan.plan.pricing import Basis
from stowplan.plan.select import Tradeoff
from stowplan.plan.steps import Compute, Decision, Keep, Offload, Recompute, RecomputeOp, Tile
from stowplan.report.terminal import (
    INDENT,
    Bar,
    blocks_of,
    memory_curve_drawing,
    modules_table,
    print_section,
    print_trimmed,
)
from stowplan.report.tiles import show_tile_map
from stowplan.units import format_bytes, format_count, format_seconds, format_share

_LARGEST = 8
_FRONTIER_ROWS = 16
_BAR = 40
_NARROW = 60  # columns of a terminal, for which tables leave something out


def show_plan(plan: Plan, console: Console, *, title: str, solve_seconds: float | None = None) -> None:
    """Print a plan section by section. Only the caller knows how long planning took."""
    width = console.width - INDENT
    runs = [(bytes_, step) for bytes_, step in zip(plan.projected_curve_bytes, plan.steps, strict=True)]
    ops = {op.id: op for op in plan.graph.ops}
    curve = [bytes_ for bytes_, step in runs if isinstance(step, Compute | RecomputeOp)]
    ran: list[Op] = [ops[step.op] for _, step in runs if isinstance(step, Compute | RecomputeOp)]
    drawing = memory_curve_drawing(curve, ran, width, blocks_of(console))
    print_section(console, title, _figures(plan, solve_seconds))
    print_section(console, "memory while each op of the plan runs", drawing)
    print_section(console, "largest recomputed tensors", _recomputed(plan))
    for told in plan.tile_maps:
        show_tile_map(told, console)


def show_addresses(addresses: AddressesBeside, plan: Plan, console: Console) -> None:
    """What the plan's addresses and the file's take, and where the largest tensors are in both."""
    labels = Labels(plan.graph)
    is_narrow = console.width < _NARROW
    table = Table.grid(padding=(0, 2))
    for heading in ("bytes", "offset") if is_narrow else ("bytes", "steps", "offset", "in the file"):
        table.add_column(Text(heading, "dim"), justify="right", no_wrap=True)
    table.add_column(Text("tensor", "dim"), overflow="ellipsis")
    table.show_header = True
    for place in addresses.tensors[:_LARGEST]:
        recorded = "-" if place.recorded is None else f"{place.recorded:#x}"
        steps = f"{place.first_step + 1:,} to {place.last_step + 1:,}"
        size, offset = format_bytes(place.nbytes), f"{place.offset:#x}"
        figures = (size, offset) if is_narrow else (size, steps, offset, recorded)
        table.add_row(*figures, labels.tensor(place.tensor))
    left = len(addresses.tensors) - _LARGEST
    rest = [Text(f"{left:,} more: --json has all")] if left > 0 else []
    ours, theirs = format_bytes(addresses.arena_bytes), format_bytes(addresses.recorded_bytes)
    print_section(
        console, f"addresses: {ours} in one arena, {theirs} at those of the file", Group(table, *rest)
    )


def show_frontier(
    offers: Sequence[Tradeoff], plain_seconds: float, console: Console, faster: Tradeoff | None = None
) -> None:
    """Budget against time, a row for each of some points; the smallest budgets; tiles if they are faster."""
    table = Table.grid(padding=(0, 2))
    rows = sorted({i * (len(offers) - 1) // (_FRONTIER_ROWS - 1) for i in range(_FRONTIER_ROWS)})
    ratios = [offer.seconds / (plain_seconds or 1.0) for offer in offers]
    worst = max(ratios, default=1.0) - 1.0 or 1.0
    for row in rows:
        drawn = Bar((ratios[row] - 1.0) / worst, _BAR, blocks_of(console))
        size = Text(format_bytes(offers[row].peak_bytes), justify="right")
        table.add_row(size, f"{ratios[row]:.4f}", drawn, Text(offers[row].exactness, "dim"))
    print_section(console, "budget and time against the baseline", table)
    least = {exactness: _least(offers, exactness) for exactness in {offer.exactness for offer in offers}}
    if least.keys() == {Exactness.BITWISE, Exactness.ROUNDING}:
        without, rounded = (format_bytes(least[kind]) for kind in (Exactness.BITWISE, Exactness.ROUNDING))
        print_trimmed(
            console, Text(f"smallest budget: {without} with the same bits, {rounded} within rounding")
        )
    if faster is not None:
        words = f"{faster.seconds / (plain_seconds or 1.0):.4f} at {format_bytes(faster.peak_bytes)}"
        print_trimmed(console, Text(f"tiles would be faster here, {words}: --prefer time"))


def _least(offers: Iterable[Tradeoff], exactness: Exactness) -> int:
    return min(offer.peak_bytes for offer in offers if offer.exactness is exactness)


def show_explanation(explanation: Explanation, labels: Labels, console: Console) -> None:
    """All about one tensor."""
    spans = ", ".join(f"{start:,} to {end:,}" for start, end in explanation.run_spans)
    readers = map(labels.op, explanation.readers)
    rows = (
        ("bytes", format_bytes(explanation.nbytes)),
        ("decided", _word(explanation.decision)),
        ("made by", labels.op(explanation.maker) or "outside the step"),
        ("read by", (",\n" if labels.captured else ", ").join(readers) or "nothing"),
        ("in memory", f"while ops {spans} of {explanation.runs:,} run" if spans else "never"),
        ("at the peak", "in memory" if explanation.alive_at_peak else "not in memory"),
        *_price(explanation),
        *_moved(explanation),
        ("alternative", explanation.otherwise),
    )
    print_section(console, explanation.tensor, _pairs(rows))


def _price(explanation: Explanation) -> Iterable[tuple[str, str]]:
    """The cost of not keeping the tensor."""
    if explanation.again_runs:
        times = "once" if explanation.again_runs == 1 else f"{explanation.again_runs} times"
        yield "recomputed", f"{times}, for {format_share(explanation.again_share)} of the baseline's time"


def _moved(explanation: Explanation) -> Iterable[tuple[str, str]]:
    """A row for each transfer of the tensor, and one for the time spent waiting."""
    for transfer, number in zip(explanation.transfers, explanation.transfer_runs, strict=True):
        seconds = format_seconds(transfer.end_seconds - transfer.start_seconds)
        way = "stored" if transfer.is_store else "loaded"
        yield way, f"begun as op {number:,}, takes {seconds}"
    if explanation.transfers:
        yield "waited for", format_seconds(explanation.stall_seconds)


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        table.add_row(Text(name, "cyan"), text)
    return table


def _figures(plan: Plan, solve_seconds: float | None) -> Table:
    unit = "multiply-accumulates" if plan.pricing.basis is Basis.MACS else f"{plan.pricing.basis} seconds"
    kept = sum(isinstance(decision, Keep) for decision in plan.decisions.values())
    remade = sum(isinstance(decision, Recompute) for decision in plan.decisions.values())
    tiled = sum(isinstance(decision, Tile) for decision in plan.decisions.values())
    return _pairs(
        (
            *(
                (("device", f"{plan.projected_for}: all figures are projected"),)
                if plan.projected_for
                else ()
            ),
            ("budget", f"{format_bytes(plan.allowed_bytes)} ({plan.allowed_bytes:,} bytes)"),
            (
                "projected peak",
                f"{format_bytes(plan.projected_peak_bytes)} ({plan.projected_peak_bytes:,} bytes),"
                f" baseline {format_bytes(plan.plain_peak_bytes)}",
            ),
            *_arena(plan),
            *_layouts(plan),
            ("time", f"{plan.time_ratio:.4f} of the baseline, in {unit}"),
            *_slow(plan),
            *_iteration(plan),
            *_without_backward(plan),
            *((("gradients", _exactness(plan)),) if plan.has_backward else ()),
            ("lower bound", f"{plan.bound:.4f}: no schedule in this order is faster, gap {plan.gap:.2%}"),
            *((("search", f"ended by {plan.cut_short}: the best so far"),) if plan.cut_short else ()),
            ("extra work", f"{format_count(plan.extra_macs)} multiply-accumulates"),
            ("decided", f"{kept} kept, {remade} recomputed, {tiled} never whole"),
            ("smallest budget", _smallest_budget(plan)),
            *((("planned in", f"{solve_seconds:.1f} s"),) if solve_seconds is not None else ()),
        )
    )


def _slow(plan: Plan) -> Iterator[tuple[str, str]]:
    """For a plan that nobody gets who does not ask for it."""
    if plan.time_ratio > SLOWEST_UNASKED:
        limit = f"more than {SLOWEST_UNASKED:g} times the baseline's time"
        yield "slow", f"{limit}: `fit` uses such a plan only if allow= or prefer= is given"


def _smallest_budget(plan: Plan) -> str:
    if plan.minimum_bytes is None:
        fits = plan.plain_peak_bytes <= plan.allowed_bytes
        why = "the baseline fits" if fits else "a search for this budget alone came near enough to its bound"
        return f"not searched, because {why}"
    tiles = "with these tiles" if plan.is_tiled else "without tiles"
    return f"{format_bytes(plan.minimum_bytes)} ({plan.minimum_bytes:,} bytes) {tiles}"


def _layouts(plan: Plan) -> Iterator[tuple[str, str]]:
    """For a step with changes of layout: what they copy, and how many are needed."""
    if any(op.phase is Phase.LAYOUT for op in plan.graph.ops):
        fewest = with_fewest_changes(plan.graph)
        copied = f"{fewest.changes_before} changes of layout copy {format_bytes(fewest.copied_bytes_before)}"
        needless = fewest.copied_bytes < fewest.copied_bytes_before
        advice = f"; --layouts chosen needs {fewest.changes}" if needless else ""
        yield "layouts", copied + advice


def _arena(plan: Plan) -> Iterator[tuple[str, str]]:
    """For a step in an arena: its parts, and what tensors request of them at most."""
    if use := plan.arena:
        copied = f", {format_bytes(use.copied_bytes)} are copied into it" if use.copied_bytes else ""
        yield "arena", f"{format_bytes(use.nbytes)}, and {format_bytes(use.beside_bytes)} beside it{copied}"
        yield "requested", f"{format_bytes(plan.requested_peak_bytes)} at most"


def _iteration(plan: Plan) -> Iterator[tuple[str, str]]:
    """For a plan of a whole iteration: the optimizer, and when it updates how many parameters."""
    if updates := updates_of(plan.graph):
        times = ", ".join(f"{count} {when}" for when, count in updates.parameters_by_time.items())
        where = f"in memory, the rest on {updates.tier}" if updates.tier else "in memory"
        yield "optimizer", f"{updates.optimizer}: {format_bytes(updates.state_bytes)} of state {where}"
        yield "updated", f"{times} (parameters)"


def _without_backward(plan: Plan) -> Iterator[tuple[str, str]]:
    """For a forward-only graph: why nothing is decided, and the size of one arena for its tensors."""
    if not plan.has_backward:
        yield "recompute", "nothing: the graph has no backward half"
        yield "packed", f"{format_bytes(packed_bytes_of(plan))} in one arena"


def _exactness(plan: Plan) -> str:
    note = plan.against_eager.note if plan.against_eager else ""
    match plan.exactness:
        case Exactness.BITWISE:
            return "those of the baseline, bit for bit"
        case Exactness.UNCHECKED:
            return f"those of the captured step, bit for bit; not checked against eager: {note}"
        case Exactness.ROUNDING:
            why = "tiles add up in another order" if plan.is_tiled else f"eager runs other ops: {note}"
            return f"those of the baseline within rounding: {_other_bits(plan) or why}"


def _other_bits(plan: Plan) -> str:
    """Which ops of a step with compiled kernels have other bits than eager's."""
    rounding = sum(op.attributes.get("exact") is not True for op in plan.kernels)
    groups = f"{rounding} of {len(plan.kernels)} groups of ops run by compiled kernels" if rounding else ""
    layouts = f"{len(plan.relaid)} convolutions run in channels-last layout" if plan.relaid else ""
    told = " and ".join(filter(None, (layouts, groups)))
    return f"{told}, with other bits" if told else ""


def _recomputed(plan: Plan) -> Table | None:
    remade = [name for name, decision in plan.decisions.items() if isinstance(decision, Recompute)]
    if not remade:
        return None
    labels = Labels(plan.graph)
    if labels.captured:
        return modules_table(labels.groups(remade), _LARGEST, lambda group: _words(plan, group.names))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("bytes", justify="right")
    for heading in ("tensor", "recomputed", "by"):
        table.add_column(heading)
    makers = {name: op for op in plan.graph.ops for name in op.writes()}
    for name in sorted(remade, key=lambda tensor: -(plan.graph.tensors[tensor].nbytes or 0))[:_LARGEST]:
        size = format_bytes(plan.graph.tensors[name].nbytes or 0)
        table.add_row(size, name, _word(plan.decisions[name]), makers[name].scope or makers[name].id)
    return table


def _words(plan: Plan, names: Iterable[str]) -> str:
    words = Counter(_word(plan.decisions[name]) for name in names)
    return " / ".join(f"{count} {word}" if len(words) > 1 else word for word, count in words.items())


def _word(decision: Decision | None) -> str:
    match decision:
        case Recompute(hold=True):
            return "once, then held"
        case Recompute(hold=False):
            return "for each reader"
        case Keep():
            return "kept"
        case None:
            return "nothing: the planner has no choice"
        case Offload(tier):
            return f"offloaded to {tier}"
        case _:
            return str(decision)
