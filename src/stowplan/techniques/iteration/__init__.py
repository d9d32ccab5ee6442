"""Iteration: the optimizer's updates are a part of the plan."""
