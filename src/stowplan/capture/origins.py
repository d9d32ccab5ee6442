"""The origin of an op: the module that ran it and the line of the user's code; and errors in those terms."""

import linecache
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from stowplan.alone import replaced, undone
from stowplan.errors import CaptureError
from stowplan.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    fake_tensor_logger,
)

# With a separator at the end: torchvision is no part of torch.
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_RECORDER = str(Path(__file__).with_name("recording.py"))  # frames above it are not part of the step


@dataclass(frozen=True, slots=True)
class Origin:
    """The module's path and "file:line"; empty where unknown."""

    scope: str = ""
    source: str = ""


_NOWHERE = Origin()
_told = ContextVar("origin that a caller tells", default=_NOWHERE)


@contextmanager
def told(origin: Origin) -> Iterator[None]:
    """Within, ops whose module or line cannot be seen have this origin."""
    token = _told.set(origin)
    try:
        yield
    finally:
        _told.reset(token)


class Origins:
    """Follows the calls of modules while a step runs, without reading the variables of frames.

    (Reading them would keep their tensors alive.)
    """

    def __init__(self, paths: Mapping[nn.Module, str]) -> None:
        self._paths = paths
        self._entered: list[str] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within, `here` knows which module is running in this thread."""
        kind: Any = nn.Module
        thread, plain = get_ident(), kind._call_impl

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                return plain(module, *args, **kwargs)
            outer = self._entered[-1] if self._entered else ""
            self._entered.append(self._paths.get(module, outer))
            try:
                return plain(module, *args, **kwargs)
            finally:
                self._entered.pop()

        with replaced(kind, "_call_impl", call):
            yield

    def here(self) -> Origin:
        """The origin of the op being dispatched."""
        scope, line = self._entered[-1] if self._entered else "", _line_above(sys._getframe(1))
        return Origin(scope or _told.get().scope, line or _told.get().source)


def _line_above(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename != _RECORDER:
        if is_users(frame.f_code.co_filename):
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
    return f"{name}:{step.tb_lineno}" if is_users(name) else ""


def is_users(file: str) -> bool:
    """Whether a file belongs neither to PyTorch nor to stowplan, and is one."""
    return not file.startswith((*_LIBRARIES, "<"))


COMPILE = 'torch.compile(model, backend="stowplan", options={"budget": ...})'
BY_PARTS = f"or run it in Python and plan the parts around it: {COMPILE}"
_VALUES = (
    "the step reads the values of a tensor",
    f"values do not exist before it runs: branch on shapes or Python numbers, use torch.where, {BY_PARTS}",
)
_READERS = {  # what reads values in the user's line, and what to do instead
    r"\.item\(": "remove .item(): use the tensor itself in forward, or return it and read it after the step",
    r"\.tolist\(": "remove .tolist(): use the tensor itself in forward, or return it and read it after the"
    " step;"
    " of numbers that are drawn, read truth values alone, as in (torch.rand(n) < p).tolist()",
    r"\.numpy\(": "remove .numpy(): use the tensor itself in forward, or return it and read it after the"
    " step",
    r"\bfloat\(": "remove float(): use the tensor itself in forward, or return it and read it after the step",
    r"\bint\(": "remove int(): compute the number outside forward and pass it in, or compute it of shapes",
    r"\.uniform_\(": "of numbers that are drawn, forward may read truth values of a new tensor alone, as in"
    " torch.rand(n) < p",
}
_SHAPES = (
    "the shape of a tensor depends on values",
    f"use torch.where or a mask instead of indexing by one, {BY_PARTS}",
)
_UNKNOWN = (
    "an op does not define the shape of its output",
    "give it a fake implementation with torch.library.register_fake",
)
_SPARSE = (
    "forward makes a sparse tensor, and plans are of dense tensors",
    "use its dense form, x.to_dense(); embeddings take sparse=False",
)
_NESTED = (
    "forward makes a nested tensor, whose shapes a plan does not know",
    "pad instead: torch.nn.utils.rnn.pad_sequence",
)
OWN_BACKWARD = (
    "forward calls backward itself, which a planned step would not do again",
    "return the loss, and call backward on what the fitted model returns",
)
_NO_BACKWARD = (
    "an op cannot be differentiated",
    "give it a backward with torch.library.register_autograd, or call it under torch.no_grad",
)


def reads_values(origin: Origin) -> CaptureError:
    """The refusal of a step that branches on values which no argument determines."""
    module = f" in {origin.scope}" if origin.scope else ""
    return CaptureError(f"{_VALUES[0]}{module}", where=origin.source, advice=_advice_on_values(origin.source))


def _advice_on_values(where: str) -> str:
    """What to do instead of the call that reads values at "file:line", if the line shows it."""
    file, _, line = where.rpartition(":")
    text = linecache.getline(file, int(line)) if line.isdigit() else ""
    found = next((reader for reader in _READERS if re.search(reader, text)), None)
    return f"{_READERS[found]}; {BY_PARTS}" if found else _VALUES[1]


_BY_TYPE: dict[type[Exception], tuple[str, str]] = {
    DataDependentOutputException: _VALUES,
    DynamicOutputShapeException: _SHAPES,
    UnsupportedOperatorException: _UNKNOWN,
}
_BY_WORDS = {
    ".numpy() is not": _VALUES,
    "nested_tensor": _NESTED,
    "SparseTensorImpl": _SPARSE,
    "Sparse CSR tensors": _SPARSE,
    "no fake impl": _UNKNOWN,
    "no autograd formula": _NO_BACKWARD,
    "backward through the graph a second time": OWN_BACKWARD,
}
_ANY = "check that the step runs in eager with these arguments"


@contextmanager
def explained() -> Iterator[None]:
    """Turns an exception of PyTorch during the watched step into a CaptureError with the user's line."""
    try:
        with _quiet():
            yield
    except CaptureError as error:
        if error.where:
            raise
        raise CaptureError(error.what, where=_where(error), advice=error.advice) from error
    except Exception as error:
        words = _first_line(error)
        found = next((_BY_WORDS[w] for w in _BY_WORDS if w in words), None) or _BY_TYPE.get(type(error))
        where = _where(error)
        if found is None:
            said, advice = f"{type(error).__name__}: {words.rstrip('.')}", _ANY
        elif found is _VALUES:
            said, advice = found[0], _advice_on_values(where)
        else:
            said = (
                f"{found[0]} ({words.rstrip('.')})"
                if found in (_SHAPES, _UNKNOWN, _NO_BACKWARD)
                else found[0]
            )
            advice = found[1]
        raise CaptureError(said, where=where, advice=advice) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's log of failures on stand-ins: the error reports them."""
    silence = logging.Filter("nobody")
    with undone(partial(fake_tensor_logger.removeFilter, silence)):
        fake_tensor_logger.addFilter(silence)
        yield


def _where(error: Exception) -> str:
    """The user's line; for a failure in backward, the line of the op being differentiated."""
    return line_of(error) or next(iter(getattr(error, "__notes__", ())), "")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
