"""The hunter: looks for faults by chance, for as long as it is given. A number repeats each case."""
