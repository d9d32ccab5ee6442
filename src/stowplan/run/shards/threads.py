"""Gloo's own threads: they may not take a core from the thread that computes and sends.

A message wakes the thread that serves gloo's sockets. Where all cores are at work, the kernel gives it the
core of the thread that is just sending, which holds the lock of the connection; it then asks for that lock
again and again until its time is up. As a batch thread it waits until a core is free or its turn comes.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

_SERVING = "gloo_tcp_loop"


def let_computing_go_on() -> None:
    """Make the threads that serve sockets, as many as there are by now, wait for their turn."""
    if sys.platform != "linux":
        return
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread may end, and a container may forbid it: then it is as before
            if (task / "comm").read_text(encoding="utf-8").strip() == _SERVING:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
