"""Segments that run tile by tile: sweeps, and captured steps that contain sweeps."""
