"""Compiled kernels plug in here: importing this registers the candidate and what becomes of saved plans."""

from stowplan.run.kernels import candidates

__all__ = ["candidates"]
