"""A living PyTorch training step becomes a Graph, without allocating it."""
