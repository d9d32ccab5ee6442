"""Steps that hold blocks of the caching allocator for a moment, so that it has one place for each result."""
