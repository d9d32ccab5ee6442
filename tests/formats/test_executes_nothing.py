"""Foreign files under Python's own audit: a fresh process reads them, and nothing else happens.

The modules are loaded before the hook is set; from then on only the file itself may be opened, and no code,
no socket, no process, no other file.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = sorted((Path(__file__).parent / "samples").iterdir())

_READ = """
import sys
from stowplan.formats.door import read_document
{before}
seen = []
sys.addaudithook(lambda event, arguments: seen.append((event, str(arguments[:1]))))
{read}
harmless = ("object.__getattr__", "sys._getframe", "builtins.id")
print([entry for entry in seen if not entry[0].startswith(harmless)])
"""


def audited(read: str, before: str = "") -> list[tuple[str, str]]:
    """What the hook saw while `read` ran in a process of its own."""
    code = _READ.format(read=read, before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = done.stdout.strip().splitlines()[-1]
    entries: list[tuple[str, str]] = eval(found, {"__builtins__": {}})  # noqa: S307 - our own repr
    return entries


def test_reading_opens_one_file_and_does_nothing_else() -> None:
    reads = "\n".join(f"read_document({str(path)!r})" for path in SAMPLES)
    entries = audited(reads, before=reads)  # what Python loads late, such as encodings, is loaded by then
    assert [event for event, _ in entries] == ["open"] * len(SAMPLES)
    for (_, opened), path in zip(entries, SAMPLES, strict=True):
        assert str(path) in opened


@pytest.mark.parametrize(
    ("misdeed", "event"),
    [
        ("import wave", "import"),
        ("eval('1')", "compile"),
        ("import socket; socket.socket()", "socket.__new__"),
        ("open('/dev/null').close()", "open"),
    ],
)
@pytest.mark.slow
def test_the_audit_sees(misdeed: str, event: str) -> None:
    assert event in {name for name, _ in audited(misdeed, before="import socket")}
