"""One reader (and writer) per foreign format; none knows another."""
