"""The search's inner loop in C, and how Python calls it; `plan/annealing.py` is the same in Python.

`core.h` describes the values, `ledger.c` keeps the accounts of one schedule, `search.c` changes it and keeps
the archive. `build.py` compiles them, and `annealer.py` calls them by ctypes.
"""
