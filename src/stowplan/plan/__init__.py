"""Decisions under a budget: simulate, solve, verify."""
