"""An observer in this process, around a loop of a test."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stowplan.observe.launch import LaunchSettings
from stowplan.observe.observer import Observer


@contextmanager
def observed(folder: Path, limit_bytes: int | None = None) -> Iterator[Observer]:
    """Within, loops are observed; the record is described at the end at the latest."""
    gc.collect()  # models of other tests are garbage
    observer = Observer(LaunchSettings(str(folder), limit_bytes=limit_bytes))
    observer.begin()
    atexit.unregister(observer.exit)
    try:
        yield observer
    finally:
        observer.end("the loop has ended")
        observer.memory.stop()
        observer.remove_last_hooks()
