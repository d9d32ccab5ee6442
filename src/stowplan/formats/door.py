"""Reading and writing of files: the content selects the reader, the caller or the suffix the writer.

The reader opens no other file and runs nothing in the file. Every fault is a BadInput that names the file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stowplan.errors import BadInput, BadUse
from stowplan.formats import (
    chainer,
    graphtext,
    megengine,
    onnx,
    regiongraph,
    stow,
    tensorflow,
    tilelog,
    torch_snapshot,
    torch_trace,
)
from stowplan.formats.chainer import SavedView
from stowplan.ir import Document
from stowplan.units import format_bytes

MOST_BYTES = 2**30


class Reader(Protocol):
    """The interface of a format's module."""

    FORMAT: str

    def recognise(self, text: str) -> bool:
        """Whether a text begins like a file of this format; cheap."""

    def read(self, text: str) -> Document:
        """The document in a text; BadInput if the text breaks the format."""


_TARGETS = "give a file, or MODULE:FUNCTION for a training step in Python"


class BinaryReader(Protocol):
    """The interface of a binary format's module."""

    FORMAT: str

    def recognise(self, data: bytes) -> bool:
        """Whether a file begins like one of this format; cheap."""

    def read(self, data: bytes) -> Document:
        """The document in a file; BadInput if the file breaks the format."""


BINARY_READERS: tuple[BinaryReader, ...] = (onnx, torch_snapshot)
READERS: tuple[Reader, ...] = (
    stow,
    graphtext,
    megengine,
    torch_trace,
    regiongraph,
    tilelog,
    tensorflow,
    chainer,
)


def read_document(path: str | Path, *, saved: str | None = None) -> Document:
    """Read a file in any of the known formats, recognised by its content.

    `saved` selects what the backward of a Chainer file keeps: what its records list ("listed") or what they
    say to retain ("retain").
    """
    try:
        return _read_data(_data_in(Path(path)), saved)
    except BadInput as fault:
        raise fault.in_file(str(path)) from fault


def _read_data(data: bytes, saved: str | None) -> Document:
    reader = next((reader for reader in BINARY_READERS if reader.recognise(data)), None)
    if reader is None:
        return read_text(decoded(data), saved=saved)
    _refuse_view(saved, reader.FORMAT)
    return reader.read(data)


def read_text(text: str, *, saved: str | None = None) -> Document:
    """The content of a text in any of the known formats."""
    reader = next((reader for reader in READERS if reader.recognise(text)), None)
    if reader is None:
        formats = [*(reader.FORMAT for reader in READERS), *(reader.FORMAT for reader in BINARY_READERS)]
        what = f"begins like none of the formats that can be read: {', '.join(formats)}"
        ours = "; it is a file of `stowplan plan` or `check`: explain and report read it" * _is_ours(text)
        raise BadInput(what + ours, where="line 1")
    if saved is not None and reader is chainer:
        return chainer.read(text, _view(saved))
    _refuse_view(saved, reader.FORMAT)
    return reader.read(text)


def _is_ours(text: str) -> bool:
    """Whether the text is a plan or a record."""
    return text[:200].lstrip().startswith('{"format":"stowplan.')


def _refuse_view(saved: str | None, format_name: str) -> None:
    if saved is not None:
        raise BadUse(f"--saved applies to chainer files only, and this is {format_name}")


def _view(saved: str) -> SavedView:
    try:
        return SavedView(saved)
    except ValueError:
        raise BadUse(f"{saved!r} is not a view of the saved tensors; say {' or '.join(SavedView)}") from None


def _data_in(path: Path) -> bytes:
    """The bytes of a regular file of acceptable size."""
    try:
        if path.is_dir():
            raise BadInput(f"is a folder; {_TARGETS}")
        if not path.is_file():
            raise BadInput("is not a file" if path.exists() else f"does not exist; {_TARGETS}")
        if path.suffix == ".py":
            raise BadInput(f"is Python, and is not run as a file; {_TARGETS}, here {path.stem}:FUNCTION")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as fault:
        raise BadInput(f"cannot be read: {fault.strerror or fault}") from fault
    if len(data) > MOST_BYTES:
        raise BadInput(f"is larger than {format_bytes(MOST_BYTES)}, the most that is read")
    return data


_PACKED = {
    b"\x1f\x8b": "is compressed with gzip; unpack it first: gunzip FILE",
    b"PK\x03\x04": "is a zip archive, as torch.save writes; give the graph, trace or snapshot itself",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it first: unzstd FILE",
}


def decoded(data: bytes) -> str:
    """The text of a file, with one kind of line end."""
    if not data.strip():
        raise BadInput("is empty")
    for magic, what in _PACKED.items():
        if data.startswith(magic):
            raise BadInput(what)
    if b"\0" in data:
        raise BadInput("holds a NUL byte, so it is no text", where=f"byte {data.index(0)}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise BadInput(f"is not UTF-8: {fault.reason}", where=f"byte {fault.start}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


FACETS = ("profile", "allocation", "regions", "tiles", "heap")


@dataclass(frozen=True, slots=True)
class Writer:
    """The writer of a format, the facets it can carry, and its suffix."""

    write: Callable[[Document], str]
    carries: tuple[str, ...] = ()
    suffix: str | None = None


def _chainer(document: Document) -> str:
    return chainer.write(document.graph)


WRITERS: Mapping[str, Writer] = {
    "stow": Writer(stow.write, FACETS, ".stow.json"),
    "text": Writer(graphtext.write, suffix=".stow.txt"),
    "chainer": Writer(_chainer),
    "regiongraph": Writer(regiongraph.write, ("regions",)),
    "tilelog": Writer(tilelog.write, ("tiles",)),
}


def format_for(path: Path) -> str:
    """The format that a file's suffix selects."""
    for name, writer in WRITERS.items():
        if writer.suffix and path.name.endswith(writer.suffix):
            return name
    suffixes = " or ".join(writer.suffix for writer in WRITERS.values() if writer.suffix)
    raise BadUse(
        f"{path.name!r} does not say its format: end it in {suffixes}, or name one of {', '.join(WRITERS)}"
    )


def text_of(document: Document, to: str) -> str:
    """The document in a format; BadUse if the format cannot carry part of it."""
    writer = WRITERS[to]
    lost = [name for name in FACETS if getattr(document, name) is not None and name not in writer.carries]
    if lost:
        raise BadUse(
            f"a {to} file has no place for the document's {' and '.join(lost)}; write stow, or the graph only"
        )
    return writer.write(document)
