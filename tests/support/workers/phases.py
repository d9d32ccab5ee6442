"""What a worker is at, in a file that outlives it, and the fault that it gives itself there."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from threading import Thread


class Phase(Enum):
    """The parts of a training loop."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SUMS = "gradient sums"
    OPTIMIZER = "optimizer"
    BETWEEN = "between steps"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal that a worker gets in a phase, in this step or later, `part` of the phase's time into it."""

    victim: int
    how: signal.Signals
    phase: Phase
    step: int
    part: float


@dataclass(frozen=True, slots=True)
class Hit:
    """Where the fault came, which may be the phase behind the one that was meant, and when."""

    phase: Phase
    when: float


class Journal:
    """Written at the beginning of each phase; `Hit` is read from it once the worker is gone."""

    def __init__(self, path: Path, fault: Fault | None) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
        self._fault, self._steps = fault, 0
        self._phase, self._since = Phase.BETWEEN, time.monotonic()
        self._seconds: dict[Phase, float] = {}

    def enter(self, phase: Phase) -> None:
        """The worker goes on to this phase."""
        now = time.monotonic()
        self._seconds[self._phase] = now - self._since
        self._phase, self._since = phase, now
        self._steps += phase is Phase.FORWARD
        os.pwrite(self._file, f"{phase.name:<16}".encode(), 0)
        fault = self._fault
        if fault and phase is fault.phase and self._steps >= fault.step:
            self._fault = None
            if not fault.part:
                self._strike(fault, 0.0)  # before anything else, however busy the machine is
            Thread(target=self._strike, args=(fault, self._seconds.get(phase, 0.02)), daemon=True).start()

    def _strike(self, fault: Fault, seconds: float) -> None:
        time.sleep(fault.part * seconds)
        os.pwrite(self._file, f"{time.monotonic():<24.6f}".encode(), 16)
        os.kill(os.getpid(), fault.how)


def hit_in(path: Path) -> Hit | None:
    """What the journal of a lost worker tells, None if it was not lost by its fault."""
    phase, when = path.read_text()[:16].strip(), path.read_text()[16:].strip()
    return Hit(Phase[phase], float(when)) if when else None


def phases_in_turn(number: int, phases: Sequence[Phase] = tuple(Phase)) -> Phase:
    """All of them, one after the other."""
    return phases[number % len(phases)]
