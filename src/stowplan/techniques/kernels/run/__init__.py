"""Compiled kernels: groups of ops as calls, compiled by inductor, compared with eager, priced and run."""
