"""Compiled kernels: which ops of a step one kernel can compute, and the step with these as single ops."""
