"""Saying in the user's terms why a step could not be captured."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from stowplan.capture.origins import line_of
from stowplan.errors import CaptureError

_BY_PARTS = (
    'or leave it to Python and plan the parts around it: torch.compile(model, backend="stowplan",'
    ' options={"budget": ...})'
)
_VALUES = (
    "the step looks at the values of a tensor",
    f"values are not there before it runs: decide on shapes or Python numbers, use torch.where, {_BY_PARTS}",
)
_SHAPES = (
    "the shape of a tensor depends on values",
    f"use torch.where or a mask instead of indexing by one, {_BY_PARTS}",
)
_UNKNOWN = (
    "an op says nothing of the shape of its output",
    "give it a fake implementation with torch.library.register_fake",
)
_NO_BACKWARD = (
    "an op cannot be differentiated",
    "give it a backward with torch.library.register_autograd, or call it under torch.no_grad",
)
_BY_TYPE: dict[type[Exception], tuple[str, str]] = {
    DataDependentOutputException: _VALUES,
    DynamicOutputShapeException: _SHAPES,
    UnsupportedOperatorException: _UNKNOWN,
}
_BY_WORDS = {".numpy() is not": _VALUES, "no fake impl": _UNKNOWN, "no autograd formula": _NO_BACKWARD}
_ANY = "check that the step runs in eager with these arguments"


@contextmanager
def explained() -> Iterator[None]:
    """Turns what PyTorch raises while a step is watched into a CaptureError with the user's line."""
    try:
        with _quiet():
            yield
    except CaptureError as error:
        if error.where:
            raise
        raise CaptureError(error.what, where=_where(error), advice=error.advice) from error
    except Exception as error:
        words = _first_line(error)
        found = _BY_TYPE.get(type(error)) or next((_BY_WORDS[w] for w in _BY_WORDS if w in words), None)
        what = (
            f"{found[0]} ({words.rstrip('.')})" if found else f"{type(error).__name__}: {words.rstrip('.')}"
        )
        raise CaptureError(what, where=_where(error), advice=found[1] if found else _ANY) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's own account of what fails on stand-ins: it is told by the error."""
    logger, silence = logging.getLogger("torch._subclasses.fake_tensor"), logging.Filter("nobody")
    logger.addFilter(silence)
    try:
        yield
    finally:
        logger.removeFilter(silence)


def _where(error: Exception) -> str:
    """The user's line; of what fails in backward, the line of the op that was being differentiated."""
    return line_of(error) or next(iter(getattr(error, "__notes__", ())), "")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
