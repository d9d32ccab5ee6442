"""Tiles plug in here: importing these modules registers candidates, saved plans and the probe of sweeps."""

from stowplan.techniques.tiles.run import candidates, resumed, sampling

__all__ = ["candidates", "resumed", "sampling"]
