"""Techniques: each folder has the planning of one and its running, and can be deleted."""
