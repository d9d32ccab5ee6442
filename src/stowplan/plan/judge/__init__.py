"""Judges of plans: they share no code with the search."""
