"""Steps on several devices, each with a budget of its own."""
