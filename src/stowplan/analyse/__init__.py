"""What follows from a graph: aliases, lifetimes, the memory curve, bounds, costs, packing."""
