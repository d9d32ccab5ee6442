"""The border between a plan and the user's program: what a step depends on, and whether that still holds."""
