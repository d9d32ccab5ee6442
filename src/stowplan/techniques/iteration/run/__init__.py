"""The whole iteration: parameters are updated in backward, and the budget counts gradients and state."""
