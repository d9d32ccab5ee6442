"""Public repositories' own models, losses and loops, trained by plans and compared with eager to the bit."""
