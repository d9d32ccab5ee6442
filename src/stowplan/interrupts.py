"""Interrupts: a handler of the user's may raise between any two lines of ours, as that of Ctrl-C does.

Python calls the handlers of signals in the main thread, wherever it is. While handlers are taken over, they
wait where something is put back and inside of PyTorch's C++, and what they raise is carried as a
BaseException, so that no `except Exception` on its way takes it for an error of the model or of a kernel.
"""

import signal
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


class Raised(BaseException):
    """Carries the exception that a handler raised."""

    def __init__(self, fault: Exception) -> None:
        super().__init__(fault)
        self.fault = fault


class Handlers:
    """The handlers of signals that are functions of Python."""

    def __init__(self) -> None:
        self.holding = 0  # above 0, they wait
        self.raised: BaseException | None = None  # what one of them raised last
        self._own: dict[int, Any] = {}
        self._waiting: list[tuple[int, FrameType | None]] = []

    def take(self) -> None:
        """Take them over, in the main thread: in others none is called."""
        if current_thread() is not main_thread():
            return
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._own[number] = handler
                signal.signal(number, self._handle)

    def release(self) -> None:
        """Hold them no longer, and call those that waited."""
        self.holding -= 1
        while self._waiting and not self.holding:
            self._handle(*self._waiting.pop(0))

    def let_through(self) -> None:
        """Call those that waited, though they are held."""
        holding, self.holding = self.holding, 0
        try:
            while self._waiting:
                self._handle(*self._waiting.pop(0))
        finally:
            self.holding = holding

    def give_back(self) -> None:
        """Put them back, unless there are others now, and call those that waited."""
        left, fault = list(self._own), None
        while left:
            try:
                while left:
                    if signal.getsignal(left[-1]) == self._handle:
                        signal.signal(left[-1], self._own[left[-1]])
                    left.pop()
            except BaseException as raised:  # of a handler that is back, which waits for the others
                fault = raised
        while self._waiting:
            number, frame = self._waiting.pop(0)
            self._own[number](number, frame)
        if fault is not None:
            raise fault

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.holding:
            self._waiting.append((number, frame))
            return
        try:
            self._own[number](number, frame)
        except Exception as fault:
            self.raised = fault
            raise Raised(fault) from None
        except BaseException as fault:
            self.raised = fault
            raise
