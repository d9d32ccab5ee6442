"""What Python itself sees being done while a file is read: nothing may be opened, run or imported."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_FORBIDDEN = (
    *("open", "exec", "compile", "import", "code.", "cpython.", "ctypes.", "ftplib.", "marshal.", "mmap."),
    *("os.", "pickle.", "shutil.", "smtplib.", "socket.", "sqlite3.", "subprocess.", "tempfile.", "urllib."),
)


@dataclass
class Audit:
    """Python's own account of files opened, code compiled and the like, kept only while it is on."""

    is_on: bool = False
    seen: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_on and event.startswith(_FORBIDDEN):
            self.seen.append((event, arguments))

    @contextmanager
    def on(self) -> Iterator[list[tuple[str, tuple[object, ...]]]]:
        """What happens inside; a hook cannot be taken away again, only told to look elsewhere."""
        self.seen, self.is_on = [], True
        try:
            yield self.seen
        finally:
            self.is_on = False


AUDIT = Audit()
sys.addaudithook(AUDIT)
