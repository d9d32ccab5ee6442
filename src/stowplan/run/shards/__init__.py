"""Where `Checkpoints` was imported from until 0.2."""
