"""The judges of plans: whether a list of steps computes its graph, and the memory and seconds that it takes.

They share nothing with the search, so that each can show the other wrong. Their rules are their own, written
from the text of decision 0033, and they import the IR, the op tables, errors, units and the types of a plan
alone; a test holds them to it.

`simulate` is the only judge of peaks. `verify` makes the plan of a draft that is legal and within its
budget. Nothing else makes one, so that only what was verified can run.
"""
