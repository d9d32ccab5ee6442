"""A log of fused, tiled forward and backward: the network, and which region each tile reads at each op."""

from stowplan.formats.tilelog.network import Layer, network_graph
from stowplan.formats.tilelog.reader import FORMAT, read, recognise
from stowplan.formats.tilelog.schedule import tile_schedule
from stowplan.formats.tilelog.writer import write

__all__ = ["FORMAT", "Layer", "network_graph", "read", "recognise", "tile_schedule", "write"]
