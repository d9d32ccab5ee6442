"""Shows a Graph, Facts, Plan or Record; computes nothing."""
