"""Steps that run in one storage."""
