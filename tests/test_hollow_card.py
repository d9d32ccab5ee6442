"""What of the hollow card can be seen without PyTorch's CUDA build: what is read, described and generated."""

import sys
from pathlib import Path

import pytest

from tests.hollow_card import LIBRARIES, CannotBuild, Card, libraries, run, settings_for

FUNCTIONS = """
   12: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND cudaMalloc@libcudart.so.13 (7)
   13: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND ncclSend
   14: 00000000000a1b20   120 FUNC    GLOBAL DEFAULT   12 defined_here
"""
VERSIONS = """
  000000: Version: 1  File: libcudart.so.13  Cnt: 1
  0x0010:   Name: libcudart.so.13  Flags: none  Version: 7
"""


def test_a_card_is_described_by_its_environment(tmp_path: Path) -> None:
    card = Card(capability="8.6", memory="24GiB", multiprocessors=82, untouched="64KiB", values=False)
    found = settings_for(card, tmp_path, {"PYTHONPATH": "own", "HOLLOW_CONTEXT": "5", "HOME": "/"})
    assert found["HOLLOW_CAPABILITY"] == "8.6"
    assert found["HOLLOW_MEMORY"] == str(24 * 2**30)
    assert (found["HOLLOW_MULTIPROCESSORS"], found["HOLLOW_UNTOUCHED"]) == ("82", "65536")
    assert "HOLLOW_CONTEXT" not in found
    assert "HOLLOW_VALUES" not in found
    assert found["PYTHONPATH"].endswith(":own")
    assert (found[LIBRARIES], found["HOME"]) == (str(tmp_path), "/")


def test_a_command_runs_with_the_card_and_returns_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['HOLLOW_CARDS']))"]
    assert run(command, Card(cards=3), tmp_path) == 3
    monkeypatch.setattr("tests.hollow_card._REAL", tmp_path)
    with pytest.raises(CannotBuild, match="has a card"):
        run(command, Card(), tmp_path)
    assert run(command, Card(cards=2), tmp_path, beside_a_real_card=True) == 2


def test_functions_are_read_with_their_versions() -> None:
    assert list(libraries._open_functions(FUNCTIONS)) == [("cudaMalloc", "libcudart.so.13"), ("ncclSend", "")]
    assert list(libraries._versions_in(VERSIONS)) == [("libcudart.so.13", "libcudart.so.13")]
    assert [libraries._stem_of(name) for name in ("ncclSend", "cuInit", "other")] == [
        "libnccl",
        "libcuda",
        "",
    ]


def test_what_is_not_written_is_generated() -> None:
    text = libraries._assembly(["cudaNew"], 801)
    assert ".globl cudaNew" in text
    assert "mov $801,%esi" in text
    script = libraries._version_script(["one", "two"], ["f", "g"])
    assert script == "one { global: f; g; local: *; };\ntwo { };\n"


def test_a_build_for_cpus_is_told_so(tmp_path: Path) -> None:
    if reason := libraries.why_not():
        pytest.skip(reason)
    (tmp_path / "lib").mkdir()
    with pytest.raises(CannotBuild, match="no CUDA build"):
        libraries.build(tmp_path, tmp_path / "into")
