"""Offsets in one arena for everything a step holds, and the check that no two live blocks overlap."""

from stowplan.analyse.packing.blocks import Block, Offsets, max_live_bytes
from stowplan.analyse.packing.overlap import overlapping
from stowplan.analyse.packing.pack import Packing, pack

__all__ = ["Block", "Offsets", "Packing", "max_live_bytes", "overlapping", "pack"]
