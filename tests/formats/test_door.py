"""The way in: files are recognised by content, opened once, and refused with their name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stowplan.errors import BadInput, BadUse
from stowplan.formats import door
from stowplan.formats.door import READERS, read_document
from stowplan.ir import Role
from tests.support.audit import AUDIT

SAMPLES = Path(__file__).parent / "samples"
TEXTS = [path for path in sorted(SAMPLES.iterdir()) if b"\0" not in path.read_bytes()]


@pytest.mark.parametrize("name", ["chainer", "megengine", "regiongraph", "tensorflow", "tilelog"])
def test_documents_are_recognised(dump: Callable[[str], Path], name: str) -> None:
    path = dump(name)
    text = path.read_text(encoding="utf-8")
    assert [reader.FORMAT for reader in READERS if reader.recognise(text)] == [name]
    assert read_document(path).format == name


def test_only_the_named_file_is_opened(tmp_path: Path) -> None:
    for path in sorted(SAMPLES.iterdir()):
        copy = tmp_path / "no suffix tells"
        copy.write_bytes(path.read_bytes())
        with AUDIT.on() as touched:
            read_document(copy)
        assert [(event, str(what[0])) for event, what in touched] == [("open", str(copy))]


def test_line_ends_and_byte_order_marks_do_not_matter(tmp_path: Path) -> None:
    for path in TEXTS:
        plain, other = path.read_bytes(), tmp_path / "other"
        for data in (plain.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + plain):
            other.write_bytes(data)
            assert read_document(other) == read_document(path)


def test_the_saved_view_is_for_chainer_alone() -> None:
    listed, retained = (read_document(SAMPLES / "chainer.txt", saved=view) for view in ("listed", "retain"))
    assert sum(use.role is Role.SAVED for op in listed.graph.ops for use in op.inputs) > sum(
        use.role is Role.SAVED for op in retained.graph.ops for use in op.inputs
    )
    with pytest.raises(BadUse, match="listed or retain"):
        read_document(SAMPLES / "chainer.txt", saved="all")
    with pytest.raises(BadUse, match="this is tilelog"):
        read_document(SAMPLES / "tilelog.txt", saved="listed")


@pytest.mark.parametrize(
    ("data", "where", "what"),
    [
        (b"", "", "is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0", "byte 8", "NUL"),
        (b"108 120\n\xff\xfe", "byte 8", "not UTF-8"),
        (b"hello\n", "line 1", "none of the formats"),
        (b"2 2\n1 4 _\n", "line 3", "ends"),
    ],
)
def test_refusals_name_the_file(tmp_path: Path, data: bytes, where: str, what: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(BadInput, match=what) as caught:
        read_document(path)
    assert (caught.value.file, caught.value.where) == (str(path), where)


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        read_document(tmp_path / "missing")
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(BadInput, match=r"is (not a file|a folder)"):
            read_document(path)
    monkeypatch.setattr(door, "MOST_BYTES", 100)
    with pytest.raises(BadInput, match="larger than 100 B"):
        read_document(SAMPLES / "chainer.txt")
