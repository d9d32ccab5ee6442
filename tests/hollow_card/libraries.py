"""The libraries of CUDA that an installed PyTorch asks for, built from `stubs/`.

The names and versions of the functions are read from PyTorch's own libraries. What no file of `stubs/`
defines is generated: a function that does nothing, and returns what its library calls "not supported" (or
success, for products of matrices).
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"
VALUES = "libhollow_values.so"
_WRITTEN = {
    "libcudart": "runtime.cpp",
    "libcuda": "driver.cpp",
    "libcublas": "blas.cpp",
    "libcublasLt": "blas_lt.cpp",
    "libcudnn": "dnn.cpp",
}
_ANSWERS = {  # of the functions of a library that nobody wrote
    "libcublas": 0,
    "libcublasLt": 0,
    "libcudart": 801,
    "libcudnn": 3000,
    "libcufft": 16,
    "libcupti": 15,
    "libnccl": 3,
}
_FAILED = 1
_UNVERSIONED = (  # which library a function without a version is from, by the beginning of its name
    ("nccl", "libnccl"),
    ("cusparseLt", "libcusparseLt"),
    ("nvshmem", "libnvshmem_host"),
    ("cuFile", "libcufile"),
    ("cufile", "libcufile"),
    ("cu[A-Z]", "libcuda"),
)
_FLAGS = ("-O2", "-fPIC", "-Wall", "-Wextra", "-Werror")


class CannotBuild(Exception):
    """A sentence that says what is missing."""


@dataclass(slots=True)
class Wanted:
    """The functions of one library, by name with their versions."""

    file: str
    functions: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)

    @property
    def stem(self) -> str:
        return self.file.partition(".so")[0]


def why_not() -> str:
    """Why nothing can be built here, or nothing."""
    missing = [tool for tool in ("gcc", "g++", "readelf", "nm") if shutil.which(tool) is None]
    return f"the hollow card is compiled, and here is no {' and no '.join(missing)}" if missing else ""


def fingerprint(torch: Path) -> str:
    """What the built libraries depend on: PyTorch's version and the files here."""
    sources = [torch / "version.py", Path(__file__), *sorted(STUBS.iterdir())]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def build(torch: Path, into: Path) -> None:
    """All libraries for the PyTorch in this folder of its package."""
    if reason := why_not():
        raise CannotBuild(reason)
    wanted = sorted(_wanted_by(torch), key=lambda library: library.stem != "libcudart")
    if not wanted or wanted[0].stem != "libcudart":
        raise CannotBuild(f"{torch} is no CUDA build of PyTorch: nothing there asks for libcudart")
    into.mkdir(parents=True, exist_ok=True)
    runtime = into / wanted[0].file
    _run("g++", "-std=c++17", *_FLAGS, "-shared", "-Wl,-soname,libnvidia-ml.so.1", STUBS / "management.cpp",
         "-o", into / "libnvidia-ml.so.1")  # fmt: skip
    for library in wanted:
        _build_one(library, into, runtime)
    _build_values(torch, into, runtime)


def _wanted_by(torch: Path) -> Iterator[Wanted]:
    """The libraries of CUDA that PyTorch's libraries name, with the functions that they leave open."""
    own = [path for path in (*torch.glob("lib/*.so*"), *torch.glob("_C*.so")) if not path.is_symlink()]
    libraries, library_of = dict[str, Wanted](), dict[str, str]()
    for path in own:
        for file in re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)\S+)\]", _run("readelf", "-Wd", path)):
            libraries.setdefault(file, Wanted(file))
        for file, version in _versions_in(_run("readelf", "-WV", path)):
            library_of[version] = file
    for version, file in library_of.items():
        if file in libraries:
            libraries[file].versions.add(version)
    by_stem = {library.stem: library for library in libraries.values()}
    for path in own:
        for function, version in _open_functions(_run("readelf", "-W", "--dyn-syms", path)):
            if library := libraries.get(library_of.get(version, "")):
                library.functions.add(function)
            elif not version and (guess := by_stem.get(_stem_of(function))):
                guess.functions.add(function)
    yield from libraries.values()


def _versions_in(text: str) -> Iterator[tuple[str, str]]:
    """File and version, of each version that a library needs."""
    file = ""
    for line in text.splitlines():
        if named := re.search(r"File: (\S+)", line):
            file = named[1]
        if version := re.search(r"Name: (\S+)\s+Flags", line):
            yield file, version[1]


def _open_functions(text: str) -> Iterator[tuple[str, str]]:
    """Name and version, of each function that a library leaves to others."""
    for line in text.splitlines():
        columns = line.split()
        if len(columns) >= 8 and columns[6] == "UND":
            name, _, version = columns[7].replace("@@", "@").partition("@")
            yield name, version


def _stem_of(function: str) -> str:
    return next((stem for start, stem in _UNVERSIONED if re.match(rf"(_Z\d+)?{start}", function)), "")


def _build_one(library: Wanted, into: Path, runtime: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written, generated, script = (Path(folder) / name for name in ("written.o", "generated.s", "script"))
        objects, defined = [generated], set[str]()
        if source := _WRITTEN.get(library.stem):
            _run("g++", "-std=c++17", *_FLAGS, "-c", STUBS / source, "-o", written)
            objects.append(written)
            defined = {line.split()[-1] for line in _run("nm", "--defined-only", "-g", written).splitlines()}
        rest = sorted(library.functions - defined)
        generated.write_text(_assembly(rest, _ANSWERS.get(library.stem, _FAILED)))
        script.write_text(_version_script(sorted(library.versions), [*sorted(defined), *rest]))
        options = [f"-Wl,--version-script={script}"] if library.versions else []
        is_runtime = into / library.file == runtime
        _run("g++", "-shared", f"-Wl,-soname,{library.file}", "-Wl,-rpath,$ORIGIN", *objects, *options,
             *(() if is_runtime else (runtime,)), "-o", into / library.file)  # fmt: skip


def _assembly(functions: Iterable[str], answer: int) -> str:
    """A function for each name, which hands its name and the answer to `hollow_not_written`."""
    return (
        ".text\n"
        + "".join(
            f".globl {name}\n.type {name},@function\n{name}:\n"
            f" sub $8,%rsp\n lea 1f(%rip),%rdi\n mov ${answer},%esi\n"
            " call hollow_not_written@PLT\n add $8,%rsp\n ret\n"
            f'1: .asciz "{name}"\n'
            for name in functions
        )
        + '.section .note.GNU-stack,"",@progbits\n'
    )


def _version_script(versions: list[str], functions: list[str]) -> str:
    """All functions under the first version: the loader asks only that each version exists."""
    if not versions:
        return ""
    first, *others = versions
    everything = " ".join(f"{name};" for name in functions)
    return f"{first} {{ global: {everything} local: *; }};\n" + "".join(f"{name} {{ }};\n" for name in others)


def _build_values(torch: Path, into: Path, runtime: Path) -> None:
    folders = (torch / "include", torch / "include/torch/csrc/api/include")
    headers = [word for folder in folders for word in ("-isystem", folder)]
    found = f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-Wl,-rpath,$ORIGIN"
    flags = "-std=c++20", "-O1", *_FLAGS[1:], "-shared"
    _run("g++", *flags, *headers, STUBS / "values.cpp", "-o", into / VALUES, *found,
         "-lc10", "-ltorch_cpu", runtime)  # fmt: skip


def _run(*words: str | Path) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"{words[0]} failed on {words[-1]}:\n{done.stderr[-4000:]}")
    return done.stdout
