"""What a person reads of a plan: its timeline, its reasons, and how two plans differ."""
