"""Decide where, when and for how long every tensor of a training step lives, under a budget in bytes."""

__version__ = "0.0.1"
