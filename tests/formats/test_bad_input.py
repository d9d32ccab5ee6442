"""Ten thousand damaged files for each reader: only documents and placed refusals, soon, nothing touched."""

import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from as_text import AsText
from examination import LONGEST_SECONDS, examine
from mutations import mutant

from stowplan.analyse.inspection import inspection_of
from stowplan.errors import BadInput, StowplanError
from stowplan.formats.door import BINARY_READERS, READERS, Reader, read_document
from stowplan.ir import Document, Graph, validate

MUTANTS = 10_000
REAL_MUTANTS = 100  # of the large real documents, which take longer to read
ANALYSED = 300
DOCUMENTS = {
    "chainer": "000",
    "megengine": "001",
    "regiongraph": "002",
    "tensorflow": "003",
    "tilelog": "004",
}
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


@each_reader
def test_damaged_samples(reader: Reader) -> None:
    findings = examine(reader, SAMPLES[reader.FORMAT], others_than(reader), range(MUTANTS))
    assert not findings.faults, "\n".join(findings.faults[:5])
    assert findings.accepted + findings.refused == MUTANTS
    assert findings.refused > MUTANTS / 2


@pytest.mark.parametrize("reader", [r for r in READERS if r.FORMAT in DOCUMENTS], ids=lambda r: str(r.FORMAT))
def test_damaged_documents(reader: Reader, seeds: Callable[[str], Path]) -> None:
    text = seeds(DOCUMENTS[reader.FORMAT]).read_text(encoding="utf-8")
    findings = examine(reader, [text], others_than(reader), range(REAL_MUTANTS))
    assert not findings.faults, "\n".join(findings.faults[:5])


@each_reader
def test_what_is_accepted_can_be_analysed(reader: Reader) -> None:
    for number in range(ANALYSED):
        with suppress(BadInput):
            document = reader.read(mutant(SAMPLES[reader.FORMAT], others_than(reader), number))
            validate(document.graph)
            with suppress(StowplanError):
                inspection_of(document)


@each_reader
def test_damaged_files_are_told_by_name(reader: Reader, tmp_path: Path) -> None:
    """Through the file door: bytes that are no text, and every refusal with the file's name."""
    path, random = tmp_path / "damaged", Random(reader.FORMAT)
    for text in SAMPLES[reader.FORMAT] * 50:
        data = bytearray(text.encode(encoding_of(reader)))
        for _ in range(random.choice((1, 3))):
            data[random.randrange(len(data))] = random.randrange(256)
        path.write_bytes(data)
        fault = refusal_of(path)
        if fault is not None:
            assert fault.file == str(path)
            assert fault.where
            assert str(fault).startswith(f"{path}: {fault.where}: ")


def refusal_of(path: Path) -> BadInput | None:
    try:
        read_document(path)
    except BadInput as fault:
        return fault
    return None


class Broken:
    """A reader with a fault of each kind that the examination must see."""

    FORMAT = "broken"

    def __init__(self, misdeed: Callable[[str], object]) -> None:
        self.misdeed = misdeed

    def recognise(self, text: str) -> bool:
        """Everything is its own."""
        return bool(text)

    def read(self, text: str) -> Document:
        """Do what must not be done."""
        self.misdeed(text)
        return Document(self.FORMAT, Graph({}, ()))


def lose_the_key(text: str) -> object:
    return SAMPLES[text]


def refuse_without_a_place(text: str) -> object:
    raise BadInput(f"bad: {text}")


def open_a_file(_: str) -> object:
    return Path(__file__).read_bytes()


def evaluate(_: str) -> object:
    return eval("1 + 1")  # noqa: S307 - the misdeed itself


def unpickle(_: str) -> object:
    return pickle.loads(pickle.dumps(Path))  # noqa: S301 - the misdeed itself


def hang(_: str) -> object:
    end = time.process_time() + LONGEST_SECONDS * 1.1
    while time.process_time() < end:
        pass
    return None


@pytest.mark.parametrize(
    ("misdeed", "told"),
    [
        (lose_the_key, "KeyError"),
        (refuse_without_a_place, "does not say where"),
        (open_a_file, "touched ('open'"),
        (evaluate, "touched ('compile'"),
        (unpickle, "touched ('pickle.find_class'"),
        (hang, "took 1.1 s"),
    ],
)
def test_the_examination_sees(misdeed: Callable[[str], object], told: str) -> None:
    findings = examine(Broken(misdeed), ["x"], [], range(1))
    assert len(findings.faults) == 1
    assert told in findings.faults[0]
