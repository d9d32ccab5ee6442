"""Measuring the memory and the time of a step, and comparing it with eager."""
