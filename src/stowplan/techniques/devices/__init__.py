"""Devices: each has a budget of its own."""
