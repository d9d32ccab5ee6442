"""Facts that follow from a graph: storages, lifetimes, the memory curve, bounds, costs, packing."""

from stowplan.analyse.costs import Costs, costs_of
from stowplan.analyse.facts import Facts, Peak, facts_of
from stowplan.analyse.liveness import Liveness, liveness_of
from stowplan.analyse.storages import Storages, storages_of

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
