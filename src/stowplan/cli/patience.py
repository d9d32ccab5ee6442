"""A sign of life for whoever waits at a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

_SECONDS = 2.0


@contextmanager
def a_word_after_two_seconds(doing: str) -> Iterator[None]:
    """Say on a terminal what takes so long, and wipe that away in the end; quick work stays silent."""
    said: list[str] = []

    def say() -> None:
        said.append(f"{doing} ...")
        print(said[-1], end="\r", file=sys.stderr, flush=True)

    timer = Timer(_SECONDS, say)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for words in said:
            print(" " * len(words), end="\r", file=sys.stderr, flush=True)


@contextmanager
def probing_shown() -> Iterator[Callable[[int, int], None]]:
    """Hands out what a probe tells its progress to; on a terminal it is a line, wiped in the end."""
    width = 0

    def tell(done: int, of: int) -> None:
        nonlocal width
        line = f"trying ops: {done} of {of}"
        width = max(width, len(line))
        if sys.stderr.isatty():
            print(line.ljust(width), end="\r", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if width and sys.stderr.isatty():
            print(" " * width, end="\r", file=sys.stderr, flush=True)
