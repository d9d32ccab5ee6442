"""The file forms of plans and records, and the rules that a file is held to."""
