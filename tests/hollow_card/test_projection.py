"""What is projected for a card that is not here, held to what PyTorch's CUDA build is asked for."""
