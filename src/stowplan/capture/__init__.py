"""Capture: a PyTorch training step becomes a Graph without allocating its tensors."""

from stowplan.capture.capture import Captured, capture, is_same_step
from stowplan.capture.program import Argument, Call, Handle, Program, Ref

__all__ = ["Argument", "Call", "Captured", "Handle", "Program", "Ref", "capture", "is_same_step"]
