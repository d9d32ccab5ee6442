"""Explanations of a plan for people: its timeline, its reasons, and how two plans differ."""
