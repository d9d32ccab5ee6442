"""Executes a plan on PyTorch and measures it."""
