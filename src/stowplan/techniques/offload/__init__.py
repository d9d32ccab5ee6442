"""Offload: a tensor waits in host memory or on disk."""
