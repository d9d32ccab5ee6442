"""What a check of a device found: JSON for programs, and a page in Markdown to send."""

from collections.abc import Iterator
from dataclasses import asdict

from stowplan.run.measure.device_check import Bytes, DeviceFindings, NetworkFinding, TransferFinding
from stowplan.units import format_bytes, format_seconds


def findings_json(found: DeviceFindings) -> dict[str, object]:
    """All figures, and whether everything held."""
    shown = asdict(found)
    return {"format": "stowplan.gpu-check", "version": 1, "holds": found.holds, **shown}


def findings_page(found: DeviceFindings) -> str:
    """One page: versions, then a table for each question."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: DeviceFindings) -> Iterator[str]:
    held = "every plan that ran held" if found.holds else "NOT everything held: see below"
    yield f"# stowplan gpu-check on {found.versions.get('device') or found.device}: {held}"
    yield ""
    yield ", ".join(f"{name} {text}" for name, text in found.versions.items())
    yield f"\n{found.seconds:.0f} s on `{found.device}`."
    yield "\n## Eager's peak: projected / measured\n"
    yield "| network | requested | allocated | reserved |"
    yield "|---|---|---|---|"
    for network in found.networks:
        yield f"| {network.name} | {' | '.join(_pairs(network.projected, network.measured))} |"
    yield "\n## Plans\n"
    yield "| network | budget | projected peak | measured peak | held | gradients | time of eager |"
    yield "|---|---|---|---|---|---|---|"
    for network in found.networks:
        yield from _plans(network)
    yield "\n## Seconds of a step\n"
    yield "| network | way | seconds |"
    yield "|---|---|---|"
    for network in found.networks:
        for way, seconds in network.seconds.items():
            shown = seconds if isinstance(seconds, str) else format_seconds(seconds)
            yield f"| {network.name} | {way} | {shown} |"
    yield "\n## Offloading\n"
    yield _transfer(found.transfer)
    if left := [f"{n.name}: {text}" for n in found.networks for text in n.not_run] + list(found.notes):
        yield "\n## Not run, or does not apply\n"
        yield from (f"- {line}" for line in left)


def _pairs(projected: Bytes | None, measured: Bytes | None) -> Iterator[str]:
    for name in Bytes.__dataclass_fields__:
        ours, theirs = getattr(projected, name, None), getattr(measured, name, None)
        if ours is None or theirs is None:
            yield "-"
        else:
            yield f"{format_bytes(ours)} / {format_bytes(theirs)} ({ours / max(1, theirs) - 1:+.2%})"


def _plans(network: NetworkFinding) -> Iterator[str]:
    for plan in network.plans:
        bits = "same bits" if plan.same_bits else f"{plan.worst_relative:.1e} apart, {plan.claimed}"
        sizes = (plan.budget_bytes, plan.projected_peak_bytes, plan.measured_peak_bytes)
        ratio = "-" if plan.time_ratio is None else f"{plan.time_ratio:.2f}"
        cells = (network.name, *map(format_bytes, sizes), "yes" if plan.held else "**no**")
        yield f"| {' | '.join(cells)} | {bits if plan.agrees else f'**{bits}**'} | {ratio} |"


def _transfer(found: TransferFinding | str) -> str:
    if isinstance(found, str):
        return found
    out, back = (
        format_bytes(int(rate)) for rate in (found.store_bytes_per_second, found.load_bytes_per_second)
    )
    return (
        f"{found.tier}: {out}/s out, {back}/s back, {found.hidden_share:.0%} of a transfer hidden beside ops."
    )
