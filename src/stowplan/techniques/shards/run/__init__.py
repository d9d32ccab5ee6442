"""A training step on several workers: exact exchanges over torch.distributed, no transport of our own."""
