"""The cache of probes survives damage, company and read-only disks: at worst it knows nothing."""

from hashlib import sha256
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from stowplan.plan.pricing import Machine
from stowplan.run.cost.machine import VERSION, Cost, Platform, ProbeCache

HERE = Platform("a cpu", "cpu", "2.13.0", 1, "AVX2, mkldnn")


def test_what_is_added_is_read(tmp_path: Path) -> None:
    cache = ProbeCache(tmp_path / "deeper")
    cache.add(HERE, {"mm": Cost(0.5, 64)})
    cache.add(HERE, {"add": Cost(0.25, 0)}, Machine(1e9, 1e9, 1e-6))
    cache.add(HERE, {"mm": Cost(0.125, 64)})
    found = cache.read(HERE)
    assert found.costs == {"mm": Cost(0.125, 64), "add": Cost(0.25, 0)}
    assert found.machine == Machine(1e9, 1e9, 1e-6)


@pytest.mark.parametrize(
    "change", [{"threads": 2}, {"torch": "2.14.0"}, {"cpu": "another"}, {"kernels": "AVX512, mkldnn"}]
)
def test_other_platforms_know_nothing_of_it(tmp_path: Path, change: dict[str, object]) -> None:
    cache = ProbeCache(tmp_path)
    cache.add(HERE, {"mm": Cost(0.5, 64)})
    assert not cache.read(msgspec.structs.replace(HERE, **change)).costs


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_file_cut_short_is_forgotten_and_written_anew(tmp_path: Path, cut: int) -> None:
    cache = ProbeCache(tmp_path)
    cache.add(HERE, {"mm": Cost(0.5, 64)})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:cut])
    assert not cache.read(HERE).costs
    cache.add(HERE, {"add": Cost(0.25, 0)})
    assert cache.read(HERE).costs == {"add": Cost(0.25, 0)}


def test_a_changed_figure_is_noticed(tmp_path: Path) -> None:
    cache = ProbeCache(tmp_path)
    cache.add(HERE, {"mm": Cost(0.5, 64)})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes().replace(b"0.5", b"0.6"))
    assert not cache.read(HERE).costs


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = ProbeCache(blocked / "probes")
    cache.add(HERE, {"mm": Cost(0.5, 64)})
    assert not cache.read(HERE).costs


@pytest.mark.slow
def test_writers_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    cache = ProbeCache(tmp_path)

    def write(worker: int) -> None:
        for number in range(20):
            cache.add(HERE, {f"{worker} {number}": Cost(1.0, number)})

    threads = [Thread(target=write, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.read(HERE).costs
    assert len(list(tmp_path.iterdir())) == 1


def test_the_users_cache_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ProbeCache().add(HERE, {"mm": Cost(0.5, 64)})
    assert len(list((tmp_path / "stowplan" / "probes").iterdir())) == 1


@pytest.mark.parametrize(
    "findings",
    [
        '{"costs":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"platform":PLATFORM,"costs":{"mm":{"seconds":-1.0,"rise_bytes":0}}}',
        '{"platform":PLATFORM,"costs":{"mm":{"seconds":1e999,"rise_bytes":0}}}',
        '{"platform":PLATFORM,"costs":{"mm":{"seconds":1.0,"rise_bytes":1000000000000000000000}}}',
        '{"platform":PLATFORM,"tiers":{"disk":[0.0,1.0,1.0]}}',
        '{"platform":PLATFORM,"machine":{"macs_per_second":0.0}}',
    ],
)
def test_figures_that_no_machine_has_are_forgotten(tmp_path: Path, findings: str) -> None:
    """Under a digest that fits: whoever wrote them, nothing may be computed with them."""
    cache = ProbeCache(tmp_path)
    cache.add(HERE, {})
    (file,) = tmp_path.iterdir()
    content = findings.replace("PLATFORM", msgspec.json.encode(HERE).decode())
    digest = f"sha256:{sha256(content.encode()).hexdigest()}"
    file.write_text(f'{{"version":{VERSION},"digest":"{digest}","findings":{content}}}')
    found = cache.read(HERE)
    assert (found.costs, found.machine, found.tiers) == ({}, None, {})


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    cache = ProbeCache()
    cache.add(HERE, {"mm": Cost(0.5, 64)})
    assert not cache.read(HERE).costs
