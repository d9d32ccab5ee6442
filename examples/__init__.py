"""Training steps within a budget, in the places where people train. Each runs within a minute."""
