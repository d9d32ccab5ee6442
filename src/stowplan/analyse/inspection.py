"""Inspection: all that can be said about one document without running anything."""

from collections.abc import Mapping
from dataclasses import dataclass

from stowplan.analyse.addresses import Addresses, addresses_of
from stowplan.analyse.blocks import blocks_of
from stowplan.analyse.facts import Facts, facts_of, memory_curve
from stowplan.analyse.liveness import Liveness, liveness_of
from stowplan.analyse.packing import Packing, pack
from stowplan.analyse.tile_costs import TileCosts, tile_costs_of
from stowplan.analyse.times import ClockTimes, times_of
from stowplan.analyse.without_layout import without_layout
from stowplan.ir import Document, Graph, Phase, Role
from stowplan.ops.aliasing import aliasing_of

PACKED_UNASKED = 50_000  # storages


@dataclass(frozen=True, slots=True)
class Inspection:
    """A document, the facts of its graph, and what its other facets add to them.

    `in_place_peak_bytes` is the peak if ops overwrite an input that dies, where they can. What the document
    has no facet for (or, for the peak without them, no layout ops) is None.
    """

    document: Document
    facts: Facts
    made_bytes_by_phase: Mapping[Phase, int]
    in_place_peak_bytes: int
    without_layout_peak_bytes: int | None
    packing: Packing | None
    times: Mapping[str, ClockTimes]
    addresses: Addresses | None
    tile_costs: TileCosts | None


def inspection_of(document: Document, *, packed: bool | None = None) -> Inspection:
    """Analyse a document whose graph is legal and has all its bytes.

    Unless `packed` says so, tensors are packed into an arena only if that is done within seconds.
    """
    graph = document.graph
    facts = facts_of(graph)
    packed = len(facts.liveness.storages.owners) <= PACKED_UNASKED if packed is None else packed
    return Inspection(
        document,
        facts,
        made_bytes_by_phase=_made_bytes_by_phase(graph),
        in_place_peak_bytes=_in_place_peak_bytes(graph, facts),
        without_layout_peak_bytes=_without_layout_peak_bytes(graph),
        packing=pack(blocks_of(graph, facts.liveness)) if packed else None,
        times=times_of(graph, document.profile) if document.profile else {},
        addresses=addresses_of(graph, document.allocation, facts.liveness) if document.allocation else None,
        tile_costs=tile_costs_of(graph, document.tiles) if document.tiles else None,
    )


def _made_bytes_by_phase(graph: Graph) -> dict[Phase, int]:
    """The bytes of all tensors that the ops of a phase make, views left out."""
    made: dict[Phase, int] = {}
    for op in graph.ops:
        tensors = (graph.tensors[use.tensor] for use in op.outputs if use.role is Role.DATA)
        size = sum(tensor.nbytes or 0 for tensor in tensors if tensor.alias_of is None)
        made[op.phase] = made.get(op.phase, 0) + size
    return made


def _in_place_peak_bytes(graph: Graph, plain: Facts) -> int:
    if not any(op.type in aliasing_of for op in graph.ops):
        return plain.peak.bytes
    return _peak_bytes(graph, liveness_of(graph, in_place=True))


def _peak_bytes(graph: Graph, liveness: Liveness) -> int:
    return int(memory_curve(graph, liveness).max(initial=0))


def _without_layout_peak_bytes(graph: Graph) -> int | None:
    if not any(op.phase is Phase.LAYOUT for op in graph.ops):
        return None
    bypassed = without_layout(graph)
    return _peak_bytes(bypassed, liveness_of(bypassed))
