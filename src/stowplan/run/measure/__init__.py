"""Measuring the memory and the time of a step, and comparing it with eager."""

from stowplan.run.measure.measure import measure

__all__ = ["measure"]
