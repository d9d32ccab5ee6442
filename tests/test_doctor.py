"""The doctor tells versions, devices and what is usable; without torch it says what is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stowplan.cli import doctor
from stowplan.cli.main import main

_WITHOUT_TORCH = """
import importlib.metadata, sys
from stowplan.cli import doctor
doctor._version = lambda name: None if name == "torch" else "1"
from stowplan.cli.main import main
code = main(["doctor"])
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.mark.torch
@pytest.mark.slow
def test_findings_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"].startswith("2.13")
    cpu = found["devices"]["cpu"]
    assert 0 < cpu["free_bytes"] <= cpu["total_bytes"]
    assert min(cpu["macs_per_second"], cpu["bytes_per_second"], cpu["launch_seconds"]) > 0
    disk = found["tiers"]["disk"]
    assert disk["folder"].startswith(str(tmp_path))
    assert min(disk["store_bytes_per_second"], disk["load_bytes_per_second"], disk["latency_seconds"]) > 0
    assert found["usable"]["fit"] is True
    assert found["usable"]["offload to disk"] is True
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "MACs/s" in said
    assert "/s out" in said


@pytest.mark.torch
@pytest.mark.slow
def test_a_disk_that_cannot_be_written_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "file").touch()
    monkeypatch.setenv("STOWPLAN_SPILL", str(tmp_path / "file"))
    assert main(["doctor"]) == 0
    assert "STOWPLAN_SPILL=FOLDER" in capsys.readouterr().out


@pytest.mark.torch
def test_a_torch_that_is_newer_than_all_tested_ones_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: "2.99.0")
    monkeypatch.setattr(doctor, "_devices", dict)
    monkeypatch.setattr(doctor, "_disk", lambda: "not asked")
    assert main(["doctor"]) == 1
    assert "torch 2.99.0 is newer than 2.15" in " ".join(capsys.readouterr().out.split())


def test_without_torch_it_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "pip install 'stowplan[torch]'" in done.stdout
    assert "on files  yes" in " ".join(done.stdout.split(" ")).replace("   ", "  ")
