"""Held blocks: the caching allocator has one place for each result."""
