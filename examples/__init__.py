"""Training within a budget, once with each package that people train with; each takes less than a minute."""
