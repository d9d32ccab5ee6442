"""Empty CUDA libraries: with them a CUDA build of PyTorch runs on the CPU of a machine without CUDA.

`pip install --no-deps torch==X` leaves out gigabytes of libraries that the CPU's kernels never call. The
loader still asks for their names and symbols; each function here returns an error, or the text of one. Needs
gcc and objdump, on x86-64.
"""

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

_NO_DEVICE = 100  # cudaErrorNoDevice
_RETURNS_TEXT = re.compile(r"Error(String|Name)$|^ncclGetLastError$")  # 100 is no address: reading it crashes


class Symbol(NamedTuple):
    """A name that a library exports or asks for; `version` is "" where it has none."""

    name: str
    version: str
    is_defined: bool
    is_weak: bool


def make_stubs(torch_folder: Path) -> list[str]:
    """Write the libraries that PyTorch lacks into its own folder of libraries. Returns their names."""
    libraries = [*(torch_folder / "lib").glob("*.so*"), *torch_folder.glob("_C*.so")]
    missing = sorted({name for library in libraries for name in _missing(library)})
    symbols = {symbol for library in libraries for symbol in _symbols(library)}
    versions = {version: owner for library in libraries for version, owner in _versions(library)}
    defined = {symbol.name for symbol in symbols if symbol.is_defined}
    wanted: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    for version, owner in versions.items():
        if owner in wanted:
            wanted[owner][version] = {s.name for s in symbols if not s.is_defined and s.version == version}
    # Libraries without versions leave no trace of who defines a symbol, so each stub defines all of these.
    free = {s.name for s in symbols if not (s.is_defined or s.version or s.is_weak) and s.name not in defined}
    # Those of C++ and of Python begin otherwise and are found elsewhere.
    anywhere = {name for name in free if not name.startswith(("_", "Py"))}
    for name in missing:
        _build(torch_folder / "lib" / name, wanted[name], anywhere)
    return missing


def _missing(library: Path) -> Iterator[str]:
    found = subprocess.run(["ldd", library], capture_output=True, text=True, check=False).stdout
    yield from re.findall(r"(\S+) => not found", found)


def _symbols(library: Path) -> Iterator[Symbol]:
    """Lines such as `0000 g DF .text 0042 (VERSION) name`, of which the version may be missing."""
    for line in _objdump("-T", library).splitlines():
        found = re.match(r"[0-9a-f]{8,} (.{7}) (\S+)\s+[0-9a-f]+ +(?:\(?([^\s()]+)\)? +)?(\S+)$", line)
        if found:
            kind, section, version, name = found.groups()
            yield Symbol(name, _unless_base(version), section != "*UND*", "w" in kind)


def _unless_base(version: str | None) -> str:
    return "" if version in (None, "Base") else str(version)


def _versions(library: Path) -> Iterator[tuple[str, str]]:
    """Each version that symbols are asked for with, and the library that must define it."""
    owner = ""
    for line in _objdump("-p", library).splitlines():
        if found := re.match(r"\s+required from (\S+):", line):
            owner = found[1]
        elif owner and (found := re.match(r"\s+0x[0-9a-f]+ 0x[0-9a-f]+ \d+ (\S+)", line)):
            yield found[1], owner


def _objdump(option: str, library: Path) -> str:
    return subprocess.run(["objdump", option, library], capture_output=True, text=True, check=True).stdout


def _build(path: Path, versions: dict[str, set[str]], free: Iterable[str]) -> None:
    names = sorted({*free, *(name for owned in versions.values() for name in owned)})
    code = "".join(f".globl {n}\n.type {n}, @function\n{n}: {_answer(n)}\n ret\n" for n in names)
    nodes = (
        f"{version} {{ {'global: ' + '; '.join(sorted(owned)) + ';' if owned else ''} }};\n"
        for version, owned in versions.items()
    )
    with TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.s"), Path(folder, "versions")
        source.write_text(f'.text\ntext: .asciz "no CUDA device"\n{code}')
        script.write_text("".join(nodes))
        command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", str(source), "-o", str(path)]
        if versions:
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def _answer(name: str) -> str:
    return "lea text(%rip), %rax" if _RETURNS_TEXT.search(name) else f"mov ${_NO_DEVICE}, %eax"
