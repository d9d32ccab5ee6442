"""Regions in space: which worker owns which rect of every tensor, and what they must send each other."""
