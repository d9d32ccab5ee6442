"""Shards: a step is cut over workers."""
