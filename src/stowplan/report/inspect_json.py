"""An inspection for machines: plain values under stable names."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import islice

from stowplan.analyse.inspection import ClockTimes, Inspection
from stowplan.analyse.packing import Packing
from stowplan.ir import Kind, Tensor

_TOP = 10


def inspection_json(inspection: Inspection) -> dict[str, object]:
    """What `stowplan inspect --json` prints. A part that the document does not have is null."""
    document, costs = inspection.document, inspection.facts.costs
    graph = document.graph
    return {
        "format": document.format,
        "name": graph.name,
        "ops": {
            "total": len(graph.ops),
            "by_phase": _counted(op.phase for op in graph.ops),
            "by_type": _counted(op.type for op in graph.ops),
        },
        "tensors": {
            "total": len(graph.tensors),
            "by_kind": _counted(tensor.kind for tensor in graph.tensors.values()),
        },
        "bytes": _bytes(inspection),
        "macs": {"forward": costs.forward_macs, "step": costs.step_macs},
        "flops": {
            "forward": 2 * costs.forward_macs,
            "step": 2 * costs.step_macs,
            "recorded": document.counts.get("footprint_flops"),
        },
        "peak": _peak(inspection),
        "lower_bound_bytes": inspection.facts.lower_bound_bytes,
        "packing": _packing(inspection.packing) if inspection.packing else None,
        "profile": {clock: _times(times) for clock, times in inspection.times.items()} or None,
        "allocation": asdict(inspection.addresses) if inspection.addresses else None,
        "tiles": asdict(inspection.tile_costs) if inspection.tile_costs else None,
        "counts": dict(document.counts),
        "notes": [asdict(note) for note in document.notes],
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    """How often each name comes, most often first."""
    return {str(name): count for name, count in Counter(names).most_common()}


def _bytes(inspection: Inspection) -> dict[str, object]:
    by_kind = inspection.facts.bytes_by_kind
    return {
        "total": sum(by_kind.values()),
        "by_kind": {str(kind): size for kind, size in by_kind.items() if size},
        "made_by_phase": {str(phase): size for phase, size in inspection.made_bytes_by_phase.items()},
    }


def _peak(inspection: Inspection) -> dict[str, object]:
    facts, tensors = inspection.facts, inspection.document.graph.tensors
    return {
        "bytes": facts.peak.bytes,
        "op": facts.peak.op,
        "tensors": list(facts.peak.tensors),
        "largest": [_tensor(tensors[name]) for name in facts.peak.tensors[:_TOP]],
        "with_constants_bytes": facts.peak.bytes + facts.bytes_by_kind[Kind.CONSTANT],
        "in_place_bytes": inspection.in_place_peak_bytes,
        "without_layout_bytes": inspection.without_layout_peak_bytes,
    }


def _packing(packing: Packing) -> dict[str, object]:
    return {
        "arena_bytes": packing.arena_bytes,
        "max_live_bytes": packing.max_live_bytes,
        "gap": packing.gap,
    }


def _tensor(tensor: Tensor) -> dict[str, object]:
    return {
        "id": tensor.id,
        "name": tensor.name,
        "kind": str(tensor.kind),
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "bytes": tensor.nbytes,
    }


def _times(times: ClockTimes) -> dict[str, object]:
    return {
        "span_seconds": times.span_seconds,
        "seconds_by_type": dict(times.seconds_by_type),
        "top_ops": _first(times.seconds_by_op),
    }


def _first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(islice(seconds.items(), _TOP))
