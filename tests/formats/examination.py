"""Reading damaged files under watch: what a reader may answer, how long it may take, what it may touch."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mutations import mutant

from stowplan.errors import BadInput
from stowplan.formats.door import Reader
from stowplan.ir import Document

LONGEST_SECONDS = 1.0
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


@dataclass
class Findings:
    """How many files were read and refused, and what no reader may do, with the mutant that made it."""

    accepted: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0


def examine(reader: Reader, texts: Sequence[str], others: Sequence[str], numbers: Iterable[int]) -> Findings:
    """Let `reader` read the mutants of these numbers; it may return a Document or raise a placed BadInput."""
    findings = Findings()
    for number in numbers:
        text = mutant(texts, others, number)
        began = time.process_time()
        with AUDIT.on() as touched:
            fault = _answer(reader, text, findings)
        seconds = time.process_time() - began
        findings.slowest_seconds = max(findings.slowest_seconds, seconds)
        if seconds > LONGEST_SECONDS:
            fault = f"took {seconds:.1f} s"
        if touched:
            fault = f"touched {touched[0]}"
        if fault:
            findings.faults.append(f"{reader.FORMAT} mutant {number}: {fault}")
    return findings


def _answer(reader: Reader, text: str, findings: Findings) -> str:
    """What is wrong with the reader's answer; nothing, if it is one of the two allowed ones."""
    try:
        document = reader.read(text)
    except BadInput as error:
        findings.refused += 1
        return "" if error.where and error.what else f"does not say where: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    findings.accepted += 1
    return "" if isinstance(document, Document) else f"returned {document!r}"
