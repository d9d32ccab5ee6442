"""Tracebacks of a script as without an observer: what is shown leaves out this package's frames."""

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_BEFORE_MODE = tuple(
    os.path.join("torch", name) for name in ("_compile.py", os.path.join("_dynamo", "eval_frame.py"))
)
_AFTER_MODE = os.path.join("torch", "_ops.py")


def hide_own_frames() -> Callable[[], None]:
    """Show errors that end the script without own frames; how to undo that. A hook of the script's stays."""
    if sys.excepthook is not sys.__excepthook__:
        return lambda: None

    def show(kind: Any, error: BaseException, trace: Any) -> None:
        sys.__excepthook__(kind, error.with_traceback(_without_own(trace)), trace)

    def put_back() -> None:
        if sys.excepthook is show:
            sys.excepthook = sys.__excepthook__

    sys.excepthook = show
    return put_back


def _without_own(trace: Any) -> Any:
    """A traceback without the frames of this package."""
    steps = list(_steps(trace))
    files = [step.tb_frame.f_code.co_filename for step in steps]
    hidden = {number for number, file in enumerate(files) if file.startswith(_OWN)}
    for number in tuple(hidden):  # and of PyTorch's own around a dispatch mode
        before, after = number - 1, number + 1
        while before >= 0 and files[before].endswith(_BEFORE_MODE):
            hidden.add(before)
            before -= 1
        if after < len(files) and files[after].endswith(_AFTER_MODE):
            hidden.add(after)
    kept = [step for number, step in enumerate(steps) if number not in hidden]
    for step, following in zip(kept, [*kept[1:], None], strict=False):
        step.tb_next = following
    return kept[0] if kept else trace


def _steps(trace: Any) -> Iterable[Any]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
