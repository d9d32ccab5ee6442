"""The caching allocator for people and for programs: a memory snapshot, and what a plan reserves."""

from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stowplan.plan.allocator.projection import HeapProjection
from stowplan.plan.allocator.survey import HeapSurvey, Pin
from stowplan.report.terminal import print_section
from stowplan.units import format_bytes, format_share

_PINS = 8
_BLOCKS = 3


def show_heap(survey: HeapSurvey, console: Console) -> None:
    """Print the figures, the segments that most free bytes are pinned in, and what settings would give."""
    sections = (
        (f"the caching allocator ({survey.settings or 'default settings'})", _figures(survey)),
        ("segments that blocks pin", _pins(survey)),
        ("the same requests with other settings", _outcomes(survey)),
    )
    for heading, body in sections:
        if body is not None:
            print_section(console, heading, body)


def _figures(survey: HeapSurvey) -> Table:
    peaks = survey.peaks
    table = Table.grid(padding=(0, 2))
    rows = (
        ("requested", survey.requested_bytes, peaks.requested_peak_bytes, "by tensors"),
        ("allocated", survey.allocated_bytes, peaks.allocated_peak_bytes, "in blocks, with rounding"),
        ("reserved", survey.reserved_bytes, peaks.reserved_peak_bytes, "in segments"),
    )
    for name, now, peak, meaning in rows:
        figures = f"{format_bytes(now)} at the end, {format_bytes(peak)} at most"
        table.add_row(Text(name, "cyan"), figures, meaning)
    lost = peaks.reserved_peak_bytes - peaks.requested_peak_bytes
    table.add_row(
        Text("fragmentation", "cyan"),
        f"{peaks.overhead:.3f} reserved for 1 requested",
        f"{format_bytes(lost)} at the peaks",
    )
    free = f"{format_bytes(survey.pinned_bytes)} pinned, {format_bytes(survey.releasable_bytes)} releasable"
    table.add_row(Text("free at the end", "cyan"), free, "in segments with blocks, and without")
    table.add_row(Text("replay", "cyan"), *_replayed(survey))
    return table


def _replayed(survey: HeapSurvey) -> tuple[str, str]:
    followed = survey.followed
    if followed is None:
        return "not at the recorded addresses", survey.not_followed
    right = followed.requests - followed.misplaced
    share = format_share(right / followed.requests) if followed.requests else "all"
    odd = f", {followed.unmatched} frees or allocations without the other" if followed.unmatched else ""
    segments = f"{followed.segment_faults} segments differ{odd}"
    return f"{share} of {followed.requests:,} requests at the recorded address", segments


def _pins(survey: HeapSurvey) -> Table | None:
    if not survey.pins:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("free", justify="right")
    table.add_column("of", justify="right")
    for heading in ("segment", "pinned by"):
        table.add_column(heading)
    for pin in survey.pins[:_PINS]:
        size, free = format_bytes(pin.segment.nbytes), format_bytes(pin.free_bytes)
        table.add_row(free, size, f"{pin.segment.address:#x}", Text(_holders(pin), overflow="ellipsis"))
    if len(survey.pins) > _PINS:
        rest = sum(pin.free_bytes for pin in survey.pins[_PINS:])
        table.add_row(format_bytes(rest), "", f"{len(survey.pins) - _PINS} more")
    return table


def _holders(pin: Pin) -> str:
    shown = zip(pin.blocks[:_BLOCKS], pin.made_by, strict=False)
    told = [format_bytes(block.nbytes) + (f" ({maker})" if maker else "") for block, maker in shown]
    more = [f"{len(pin.blocks) - _BLOCKS} more"] if len(pin.blocks) > _BLOCKS else []
    return ", ".join((*told, *more))


def _outcomes(survey: HeapSurvey) -> Table:
    """From a new start, so that all settings have the same chance; the first row is a fair baseline."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    for heading in ("reserved at most", "of requested"):
        table.add_column(heading, justify="right")
    table.add_column("PYTORCH_CUDA_ALLOC_CONF")
    for outcome in survey.outcomes:
        figures = outcome.figures
        size = format_bytes(figures.reserved_peak_bytes)
        table.add_row(size, f"{figures.overhead:.3f}", outcome.settings or "the defaults")
    return table


def heap_json(survey: HeapSurvey) -> dict[str, object]:
    """What `stowplan inspect --json` prints for a memory snapshot under `heap`."""
    followed = survey.followed
    return {
        "settings": survey.settings,
        "at_end": {
            "requested_bytes": survey.requested_bytes,
            "allocated_bytes": survey.allocated_bytes,
            "reserved_bytes": survey.reserved_bytes,
            "releasable_bytes": survey.releasable_bytes,
            "pinned_bytes": survey.pinned_bytes,
        },
        "peaks": asdict(survey.peaks) | {"overhead": survey.peaks.overhead},
        "pins": [_pin_json(pin) for pin in survey.pins],
        "replay": {
            "requests": followed.requests,
            "misplaced": followed.misplaced,
            "segment_faults": followed.segment_faults,
            "unmatched": followed.unmatched,
        }
        if followed
        else None,
        "not_replayed": survey.not_followed or None,
        "outcomes": [
            {
                "settings": outcome.settings,
                "reserved_peak_bytes": outcome.figures.reserved_peak_bytes,
                "overhead": outcome.figures.overhead,
            }
            for outcome in survey.outcomes
        ],
    }


def _pin_json(pin: Pin) -> dict[str, object]:
    return {
        "segment": pin.segment.address,
        "bytes": pin.segment.nbytes,
        "free_bytes": pin.free_bytes,
        "blocks": [
            {"address": block.address, "bytes": block.nbytes, "made_by": maker}
            for block, maker in zip(pin.blocks, pin.made_by, strict=True)
        ],
    }


def show_projection(heap: HeapProjection, console: Console) -> None:
    """Print what a plan takes from a device, and what to do about fragmentation."""
    table = Table.grid(padding=(0, 2))
    figures = heap.figures
    growth = figures.reserved_peak_bytes - heap.iterations[0].reserved_peak_bytes
    rows = [
        ("requested", format_bytes(figures.requested_peak_bytes), "at most, by tensors"),
        ("allocated", format_bytes(figures.allocated_peak_bytes), "in blocks, with rounding"),
        (
            "reserved",
            format_bytes(figures.reserved_peak_bytes),
            f"in segments, {figures.overhead:.3f} for 1 requested; grows by {format_bytes(growth)} after the"
            f" first of {len(heap.iterations)} iterations",
        ),
        (
            "at least",
            format_bytes(heap.floor_bytes),
            "however blocks are placed: the two pools share nothing",
        ),
        ("fragmentation", format_bytes(heap.fragmentation_bytes), "reserved and not requested"),
    ]
    if heap.held_segments:
        sizes = ", ".join(f"{nbytes:,}" for nbytes in heap.held_segments)
        rows.append(
            (
                "held segments" if len(heap.held_segments) > 1 else "held segment",
                format_bytes(sum(heap.held_segments)),
                f"allocate {sizes} bytes, then free them, before the model is loaded; without,"
                f" {format_bytes(heap.unrepaired_bytes)} would be reserved",
            )
        )
    if heap.held_blocks:
        ops = f"each while one of {len(heap.held_blocks.by_run):,} ops runs"
        meaning = f"in an iteration, {ops}: use fit(..., execution=Execution(held_blocks=True))"
        rows.append(("held blocks", f"{heap.held_blocks.count:,}", meaning))
    for name, size, meaning in rows:
        table.add_row(Text(name, "cyan"), Text(size, justify="right"), meaning)
    print_section(console, "through the caching allocator, projected, without context and libraries", table)


def projection_json(heap: HeapProjection) -> dict[str, object]:
    """What `stowplan plan --allocator --json` prints under `heap`."""
    figures = heap.figures
    return {
        "requested_peak_bytes": figures.requested_peak_bytes,
        "allocated_peak_bytes": figures.allocated_peak_bytes,
        "reserved_peak_bytes": figures.reserved_peak_bytes,
        "reserved_by_iteration": [each.reserved_peak_bytes for each in heap.iterations],
        "overhead": figures.overhead,
        "fragmentation_bytes": heap.fragmentation_bytes,
        "floor_bytes": heap.floor_bytes,
        "held_segments": list(heap.held_segments),
        "held_blocks": heap.held_blocks.count if heap.held_blocks else 0,
        "unrepaired_bytes": heap.unrepaired_bytes,
    }
