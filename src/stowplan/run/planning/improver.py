"""Improver: a child process that looks for a better plan while training runs (`plan/improving.py`).

The child gets the plan as a file, at the lowest priority and without Ctrl-C, and is killed when this process
ends or forgets the plan. What it finds is judged here like any plan from a file: it has to be legal, for
this very graph, within the budget, and faster. Whatever goes wrong with the child, training goes on by the
plan that it has.
"""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from weakref import finalize

import msgspec
import torch

from stowplan.capture import Captured
from stowplan.errors import StowplanError
from stowplan.plan.draft import Draft
from stowplan.plan.files import plan_file
from stowplan.plan.files.sameness import first_difference
from stowplan.plan.improving import BETTER, FIRST, Improvement
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.problem import slices_last
from stowplan.run.planning.planner import replay_bytes, replayed_bytes

_LOGGER = logging.getLogger("stowplan")
_SECONDS = 120.0  # of the child, at a priority at which it may get little of them
_SINGLE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_NO_WINDOW = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0) | getattr(
    subprocess, "IDLE_PRIORITY_CLASS", 0
)


def may_have_children() -> bool:
    """Whether a child process may be started here: not in a daemon process, nor in one of several workers."""
    is_daemon = multiprocessing.current_process().daemon
    is_worker = os.environ.get("WORLD_SIZE", "1") != "1" or (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
    return bool(sys.executable) and not is_daemon and not is_worker


class Improver:
    """The search for a better plan than one, and what came of it. `keep` takes what is best in the end."""

    def __init__(
        self, plan: Plan, captured: Captured, options: PlanOptions, keep: Callable[[Draft], None]
    ) -> None:
        self.calls = 0  # of the step since it was planned
        self._plan, self._captured, self._keep = plan, captured, keep
        self._process_id, self._is_read = os.getpid(), False
        self._found: Plan | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="stowplan-"))
        unused = finalize(self, rmtree, self._folder, ignore_errors=True)
        (self._folder / FIRST).write_text(plan_file.write(plan.draft()), encoding="utf-8")
        search = options.search
        asked = Improvement(
            plan.allowed_bytes - replay_bytes(captured),
            search.gap,
            search.moves,
            min(_SECONDS, search.time_limit or _SECONDS),
        )
        self._process = _started(self._folder, asked)
        unused.detach()
        self._end = finalize(self, _ended, self._process, self._folder, os.getpid())

    @staticmethod
    def of(
        plan: Plan, captured: Captured, options: PlanOptions, keep: Callable[[Draft], None]
    ) -> "Improver | None":
        """An improver; None where the child cannot be started: training goes on without."""
        try:
            return Improver(plan, captured, options, keep)
        except (OSError, ValueError) as fault:
            _LOGGER.info("no better plan is looked for: a child process cannot be started (%s)", fault)
            return None

    @property
    def is_done(self) -> bool:
        """Whether the search has ended, one way or the other."""
        if os.getpid() != self._process_id:  # a fork of the process that has the child
            return True
        return self._is_read or self._process.poll() is not None

    def better(self) -> Plan | None:
        """The better plan, verified; None if there is none. The search has to be done."""
        if not self._is_read and os.getpid() == self._process_id:
            self._found = self._read()
            self._is_read = True
            self._end()
            self._keep((self._found or self._plan).draft())
        return self._found

    def end(self) -> None:
        """End the search."""
        self._end()

    def _read(self) -> Plan | None:
        path = self._folder / BETTER
        try:
            plan = plan_file.read(path.read_text(encoding="utf-8")) if path.exists() else None
        except (OSError, ValueError, StowplanError) as fault:
            _LOGGER.warning("a better plan was found and cannot be used: %s", fault)
            return None
        if plan is None:
            return None
        return plan if self._is_better(plan) else None

    def _is_better(self, plan: Plan) -> bool:
        """Whether it is faster for the same graph and prices, within the budget, and as exact."""
        first = self._plan
        is_same = (
            first_difference(plan.graph, slices_last(self._captured.graph)) is None
            and plan.pricing == first.pricing
            and plan.exactness is first.exactness
            and not plan.is_tiled
        )
        taken_bytes = plan.projected_peak_bytes + replayed_bytes(plan)
        is_within = plan.allowed_bytes == first.allowed_bytes and taken_bytes <= first.allowed_bytes
        return is_same and is_within and plan.projected_seconds < first.projected_seconds


def _started(folder: Path, asked: Improvement) -> "subprocess.Popen[bytes]":
    """The child; Ctrl-C in a terminal goes to all of its processes, and is blocked in this one."""
    paths = os.pathsep.join(path for path in sys.path if path)
    words: list[str | bytes] = [sys.executable, "-m", "stowplan.plan.improving", str(folder)]
    blocked = {signal.SIGINT} if hasattr(signal, "pthread_sigmask") else set()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked) if blocked else set()
    try:
        return subprocess.Popen(
            [*words, msgspec.json.encode(asked)],
            env={**os.environ, **dict.fromkeys(_SINGLE, "1"), "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            creationflags=_NO_WINDOW,
        )
    finally:
        if blocked:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(process: "subprocess.Popen[bytes]", folder: Path, owner: int) -> None:
    """Leave no process and no file behind; a fork of the owner leaves both alone."""
    if os.getpid() != owner:
        return
    with suppress(OSError):
        process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    rmtree(folder, ignore_errors=True)
