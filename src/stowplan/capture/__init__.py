"""Capture: a PyTorch training step becomes a Graph without allocating its tensors."""

from stowplan.capture.capture import Captured, capture
from stowplan.capture.program import Argument, Call, Handle, Program, Ref

__all__ = ["Argument", "Call", "Captured", "Handle", "Program", "Ref", "capture"]
