"""Cases run in a child process, so that a crash is a verdict and not the end of the hunt."""

from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType

from .cases import Case, draw_case
from .lockstep import Result, Verdict, judge
from .shrinking import shrunk

_CONTEXT = get_context("fork")  # planted faults and fixed prices come along


class Child:
    """Judges and shrinks in one process after another: the next begins where one has crashed."""

    def __init__(self) -> None:
        self._start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.close()
        self._process.join()

    def judge(self, seed: int) -> Result:
        """The result of a case."""
        return self._asked(draw_case(seed), None)[1]

    def shrunk(self, case: Case, result: Result) -> tuple[Case, Result]:
        """A smaller case with the same failure. One that crashes stays as it is."""
        return (case, result) if result.verdict is Verdict.CRASHED else self._asked(case, result)

    def _asked(self, case: Case, result: Result | None) -> tuple[Case, Result]:
        try:
            self._ours.send((case, result))
            answer: tuple[Case, Result] = self._ours.recv()
        except (EOFError, OSError):
            self._process.join()
            crashed = Result(Verdict.CRASHED, message=f"exit code {self._process.exitcode}")
            self._start()
            return case, result or crashed
        return answer

    def _start(self) -> None:
        self._ours, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, self._ours))
        self._process.start()
        theirs.close()


def _serve(asked: Connection, others: Connection) -> None:
    others.close()  # else the end of the parent would not be seen
    while True:
        try:
            case, result = asked.recv()
        except EOFError:
            return
        asked.send((case, judge(case)) if result is None else shrunk(case, result))
