"""The code of a documentation page as one program: its Python blocks and its commands, in their order.

A Python block that opens with a file's name, as in `# train.py`, is written to that file, not run.
"""

import re
import shlex
from pathlib import Path

_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")
ELSEWHERE = ("pip", "make", "git")
"""Commands that are not run with a page: they install, or are what CI itself does."""


def program_of(page: Path) -> str:
    """What the page would have its reader do."""
    parts = ["import sys", "sys.path.insert(0, '')", "from pathlib import Path"]
    for kind, body in _BLOCK.findall(page.read_text(encoding="utf-8")):
        parts.append(_python(body) if kind == "python" else _commands(body))
    return "\n".join(parts)


def _python(body: str) -> str:
    if body.startswith("# torchrun "):  # a program for several processes: only read
        return f"compile({body!r}, 'page', 'exec')"
    named = _FILE.match(body)
    return f"Path({named[1]!r}).write_text({body!r})" if named else body


def _commands(body: str) -> str:
    lines = []
    for line in body.splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True) if line.startswith("$ ") else []
        if words and words[0] not in ELSEWHERE:
            assert words[0] == "stowplan", f"{line!r}: only stowplan is run from a page"
            lines.append(f"assert main({words[1:]!r}) == 0, {line!r}")
    return "\n".join(["from stowplan.cli.main import main", *lines])
