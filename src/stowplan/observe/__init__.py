"""Observing a training script that nobody changed: its loop, and where the memory of an iteration goes.

`launch` starts the script in a process of its own, `boot/` lets `child` begin there, `observer` follows the
script by hooks, `loop` finds what repeats, `blocks` counts memory, and `record` is what the first process
reads in the end.
"""
