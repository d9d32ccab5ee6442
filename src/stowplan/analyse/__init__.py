"""Facts that follow from a graph: storages, lifetimes, the memory curve, bounds, costs, packing."""

from stowplan.analyse.facts import (
    Costs,
    Facts,
    Liveness,
    Peak,
    Storages,
    costs_of,
    facts_of,
    liveness_of,
    storages_of,
)

__all__ = [
    "Costs",
    "Facts",
    "Liveness",
    "Peak",
    "Storages",
    "costs_of",
    "facts_of",
    "liveness_of",
    "storages_of",
]
