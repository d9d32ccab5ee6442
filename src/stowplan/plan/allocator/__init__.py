"""PyTorch's caching allocator for CUDA as a model: from requested bytes to reserved ones, without a card."""
