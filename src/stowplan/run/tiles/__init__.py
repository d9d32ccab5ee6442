"""Segments run tile by tile: forms of ops on parts, sweeps over tiles, and steps that contain sweeps."""
