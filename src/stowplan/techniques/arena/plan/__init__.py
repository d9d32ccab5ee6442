"""One storage for what a step computes: an offset for each tensor."""
