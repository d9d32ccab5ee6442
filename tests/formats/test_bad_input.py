"""Damaged copies of the real documents, and what the file door says of damage; samples are `hunt`'s prey."""

import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest

from stowplan.errors import BadInput
from stowplan.formats.door import BINARY_READERS, READERS, BinaryReader, Reader, read_document
from stowplan.ir import Document
from tests.hunt.files import MOST_SECONDS
from tests.support.mutations import mutant

Given = TypeVar("Given")
REAL_MUTANTS = 100  # of the large real documents, which take longer to read
DOCUMENTS = ("chainer", "megengine", "regiongraph", "tensorflow", "tilelog")


class AsText:
    """A reader of bytes as a reader of text, a Latin-1 character for each byte; others become "?"."""

    def __init__(self, reader: BinaryReader) -> None:
        self.FORMAT, self._reader = reader.FORMAT, reader

    def recognise(self, text: str) -> bool:
        """As the reader does."""
        return self._reader.recognise(bytes_of(text))

    def read(self, text: str) -> Document:
        """As the reader does."""
        return self._reader.read(bytes_of(text))


def bytes_of(text: str) -> bytes:
    """The bytes that a text of Latin-1 stands for."""
    return text.encode("latin-1", errors="replace")


ALL: tuple[Reader, ...] = (*READERS, *map(AsText, BINARY_READERS))


def encoding_of(reader: Reader) -> str:
    return "latin-1" if isinstance(reader, AsText) else "utf-8"


SAMPLES = {
    reader.FORMAT: [
        path.read_bytes().decode(encoding_of(reader))
        for path in sorted((Path(__file__).parent / "samples").glob(f"{reader.FORMAT}*"))
    ]
    for reader in ALL
}

each_reader = pytest.mark.parametrize("reader", ALL, ids=lambda reader: str(reader.FORMAT))


def others_than(reader: Reader) -> list[str]:
    return [text for name, texts in SAMPLES.items() if name != reader.FORMAT for text in texts]


@each_reader
def test_samples_are_read(reader: Reader) -> None:
    assert SAMPLES[reader.FORMAT]
    for text in SAMPLES[reader.FORMAT]:
        assert [other.FORMAT for other in ALL if other.recognise(text)] == [reader.FORMAT]
        assert reader.read(text).format == reader.FORMAT


@pytest.mark.parametrize("reader", [r for r in READERS if r.FORMAT in DOCUMENTS], ids=lambda r: str(r.FORMAT))
@pytest.mark.slow
def test_damaged_documents(reader: Reader, dump: Callable[[str], Path]) -> None:
    text = dump(reader.FORMAT).read_text(encoding="utf-8")
    for number in range(REAL_MUTANTS):
        damaged = mutant(text, others_than(reader), Random(number))
        began = time.process_time()
        fault = refusal(reader.read, damaged)
        assert fault is None or fault.where, f"mutant {number} is refused without a place"
        assert time.process_time() - began < MOST_SECONDS, f"mutant {number}"


@each_reader
@pytest.mark.slow
def test_damaged_files_are_told_by_name(reader: Reader, tmp_path: Path) -> None:
    """Through the file door: bytes that are no text, and every refusal with the file's name."""
    path, random = tmp_path / "damaged", Random(reader.FORMAT)
    for text in SAMPLES[reader.FORMAT] * 50:
        data = bytearray(text.encode(encoding_of(reader)))
        for _ in range(random.choice((1, 3))):
            data[random.randrange(len(data))] = random.randrange(256)
        path.write_bytes(data)
        fault = refusal(read_document, path)
        if fault is not None:
            assert fault.file == str(path)
            assert fault.where
            assert str(fault).startswith(f"{path}: {fault.where}: ")


def refusal(read: Callable[[Given], object], given: Given) -> BadInput | None:
    try:
        read(given)
    except BadInput as fault:
        return fault
    return None
