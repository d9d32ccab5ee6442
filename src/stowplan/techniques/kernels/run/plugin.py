"""Compiled kernels plug in here: importing this registers the candidate and what becomes of saved plans."""

from stowplan.techniques.kernels.run import candidates

__all__ = ["candidates"]
