"""Where an op comes from: the path of the module that ran it, and the line of the user's code."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_RECORDER = str(Path(__file__).with_name("recorder.py"))  # calls the step: what is above is not of it


@dataclass(frozen=True, slots=True)
class Origin:
    """The module's path and "file:line"; empty where unknown."""

    scope: str = ""
    source: str = ""


class Origins:
    """Follows the calls of modules while a step runs, without touching the frames' variables.

    (Asking a frame for its variables would keep their tensors alive.)
    """

    def __init__(self, paths: Mapping[nn.Module, str]) -> None:
        self._paths = paths
        self._entered: list[str] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within, `here` knows which module is running."""
        with (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            yield

    def here(self) -> Origin:
        """The origin of the op being dispatched."""
        return Origin(self._entered[-1] if self._entered else "", _line_above(sys._getframe(1)))

    def _enter(self, module: nn.Module, _: object) -> None:
        outer = self._entered[-1] if self._entered else ""
        self._entered.append(self._paths.get(module, outer))

    def _leave(self, _module: nn.Module, _args: object, _result: object) -> None:
        self._entered.pop()


def _line_above(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename != _RECORDER:
        if not frame.f_code.co_filename.startswith(_LIBRARIES) and _is_a_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of(error: BaseException) -> str:
    """The innermost line of the user's code that `error` passed through."""
    found, step = "", error.__traceback__
    while step is not None:
        found = _line_in(step) or found
        step = step.tb_next
    return found


def _line_in(step: TracebackType) -> str:
    name = step.tb_frame.f_code.co_filename
    return f"{name}:{step.tb_lineno}" if not name.startswith(_LIBRARIES) and _is_a_file(name) else ""


def _is_a_file(name: str) -> bool:
    return not name.startswith("<")
