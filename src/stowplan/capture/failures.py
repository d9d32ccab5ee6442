"""Saying in the user's terms why a step could not be captured."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from stowplan.capture.origins import line_of
from stowplan.errors import CaptureError

_ADVICE = {
    DataDependentOutputException: (
        "the step looks at the values of a tensor",
        "values are not there before it runs: decide on shapes or Python numbers, or use torch.where",
    ),
    DynamicOutputShapeException: (
        "the shape of a tensor depends on values",
        "use an op whose output has a fixed shape: torch.where or a mask instead of indexing by one",
    ),
    UnsupportedOperatorException: (
        "an op says nothing of the shape of its output",
        "give it a fake implementation with torch.library.register_fake",
    ),
}


@contextmanager
def explained() -> Iterator[None]:
    """Turns what PyTorch raises while a step is watched into a CaptureError with the user's line."""
    try:
        yield
    except CaptureError as error:
        if error.where:
            raise
        raise CaptureError(error.what, where=line_of(error), advice=error.advice) from error
    except tuple(_ADVICE) as error:
        what, advice = _ADVICE[type(error)]
        raise CaptureError(f"{what} ({_first_line(error)})", where=line_of(error), advice=advice) from error
    except Exception as error:
        raise CaptureError(
            f"{type(error).__name__}: {_first_line(error)}",
            where=line_of(error),
            advice="check that the step runs in eager with these arguments",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
