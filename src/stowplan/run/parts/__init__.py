"""Kernels on a part: an op applied to a rectangle of its output, for tiles and for workers."""
