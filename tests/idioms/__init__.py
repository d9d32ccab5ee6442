"""Training as people write it: programs in the manner of tutorials and papers, eager against plans.

Each program names its source in one line; none is copied. `side.py` has what a program is given.
"""
