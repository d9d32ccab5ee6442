"""Arena: what a step computes lies in one storage."""
