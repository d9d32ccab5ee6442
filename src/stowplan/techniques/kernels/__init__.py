"""Compiled kernels: inductor compiles groups of ops where that is faster."""
