"""A disk that fails: a typed error, and no trace of the step but gradients that were final, if it says so."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from errno import EOPNOTSUPP
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stowplan.errors import BadUse, TierDamaged, TierFailed, TierFull
from stowplan.techniques.offload.run.disk import DiskTier
from stowplan.techniques.offload.run.host import HostTier
from tests.support.spilling import FailingCalls, Spilling, same, spilling


@pytest.mark.parametrize(
    ("kind", "direct"), [("write", True), ("read", True), ("write", False), ("read", False), ("flush", False)]
)
@pytest.mark.slow
def test_a_step_fails_cleanly_whichever_call_fails(tmp_path: Path, kind: str, direct: bool) -> None:
    calls = FailingCalls(kind)
    with spilling(tmp_path, calls=calls, direct=direct) as fine:
        before = fine.state()
        fine.train()
        expected, after = fine.gradients(), fine.state()
        failures = 0
        while True:
            fine.model.load_state_dict(before)
            fine.settle()
            calls.fail_at(failures + 1)
            if not _fails(fine, expected):
                break
            failures += 1
            assert calls.has_failed
            assert same(before, fine.state())
        assert same(expected, fine.gradients())
        assert same(after, fine.state())
    assert failures > 10
    assert not list(tmp_path.iterdir())


def _fails(fine: Spilling, expected: dict[str, Tensor]) -> bool:
    try:
        fine.train()
    except TierFailed as fault:
        _check_what_left(fine, expected, fault)
        return True
    return False


def _check_what_left(fine: Spilling, expected: dict[str, Tensor], fault: TierFailed) -> None:
    """Gradients that had left before are right, and the error tells how many they are."""
    left = fine.gradients()
    assert same({name: expected[name] for name in left}, left)
    told = [note for note in getattr(fault, "__notes__", ()) if "had left the step" in note]
    assert len(told) == bool(left)
    assert all(note.startswith(f"{len(left)} of {len(expected)} gradients") for note in told)


def test_room_that_cannot_be_had_is_refused_before_a_step(tmp_path: Path) -> None:
    calls = FailingCalls("allocate")
    calls.fail_at(3)
    with pytest.raises(TierFailed, match="told to fail"), spilling(tmp_path, calls=calls):
        pass


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may make a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_told_as_such(full_disk: Path) -> None:
    with pytest.raises(TierFull, match="the disk is full"), spilling(full_disk):
        pass
    assert not list(full_disk.iterdir())


def test_a_disk_that_fills_up_in_mid_step_leaves_no_trace(full_disk: Path) -> None:
    tier = DiskTier(full_disk, chunk_bytes=4096)
    with pytest.raises(TierFull):
        _ = [tier.store(torch.zeros(8, 1024)) for _ in range(9)]
    tier.close()


@pytest.mark.slow
def test_flipped_bytes_are_found(tmp_path: Path) -> None:
    chance = random.Random(0)
    with spilling(tmp_path) as fine:
        before = fine.state()
        fine.train()
        expected, found = fine.gradients(), 0
        for _ in range(200):
            fine.model.load_state_dict(before)
            found += _fails_with_a_flipped_byte(fine, chance, expected)
    assert found > 20  # the others hit room that is not in use


def _fails_with_a_flipped_byte(fine: Spilling, chance: random.Random, expected: dict[str, Tensor]) -> bool:
    before = fine.state()
    damage = partial(fine.flip, chance.randrange(fine.tier.spill.nbytes), chance.randrange(1, 256))
    try:
        fine.train(between=damage)
    except TierDamaged as fault:
        assert same(before, fine.state())
        _check_what_left(fine, expected, fault)
        return True
    assert same(expected, fine.gradients())
    return False


_KILLED = """
import os, signal, sys
from pathlib import Path
from stowplan.techniques.offload.run.calls import SystemCalls
from tests.support.spilling import spilling

class Killing(SystemCalls):
    writes = 0
    def write(self, file, data, offset):
        Killing.writes += 1
        if Killing.writes == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(file, data, offset)

with spilling(Path(sys.argv[1]), calls=Killing()) as fine:
    fine.train()
"""


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_on_disk(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)], cwd=root, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_nothing_grows_over_many_steps(tmp_path: Path) -> None:
    with spilling(tmp_path) as fine:
        fine.train()
        first = _held_by_the_process(), fine.tier.spill.nbytes
        for _ in range(200):
            fine.train()
        assert (_held_by_the_process(), fine.tier.spill.nbytes) == first


def _held_by_the_process() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_two_steps_under_way_do_not_share_room(tmp_path: Path) -> None:
    with spilling(tmp_path) as fine:
        batches = (fine.args[0], 2 * fine.args[0])
        alone = [_gradients_of(fine, _loss(fine, images)) for images in batches]
        losses = [_loss(fine, images) for images in batches]
        for expected, loss in zip(alone, losses, strict=True):
            assert same(expected, _gradients_of(fine, loss))


def _loss(fine: Spilling, images: Tensor) -> Tensor:
    torch.manual_seed(1)
    loss = fine.step(images)
    assert isinstance(loss, Tensor)
    return loss


def _gradients_of(fine: Spilling, loss: Tensor) -> dict[str, Tensor]:
    fine.model.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    return fine.gradients()


def test_buffers_changed_by_someone_else_meanwhile_are_left_alone(tmp_path: Path) -> None:
    calls = FailingCalls("read")
    with spilling(tmp_path, calls=calls) as fine:
        first, _ = _loss(fine, *fine.args), _loss(fine, *fine.args)
        after = fine.state()
        calls.fail_at(1)
        with pytest.raises(TierFailed):
            torch.autograd.backward(first)
        assert same(after, fine.state())


def test_a_spill_file_is_nobody_elses(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    tier = DiskTier(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.fstat(tier.spill.file).st_nlink == 0
    tier.close()


def test_the_host_tier_is_refused_where_host_and_device_are_one() -> None:
    if torch.accelerator.is_available():
        pytest.skip("here is an accelerator")
    with pytest.raises(BadUse, match="disk tier"):
        HostTier()


def test_where_every_file_has_a_name_the_users_own_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "spill-of-the-user"
    own.write_text("precious")
    opened = os.open

    def without_nameless(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(EOPNOTSUPP, "files have names here")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", without_nameless)
    tier = DiskTier(tmp_path)
    tier.close()
    assert [path.name for path in tmp_path.iterdir()] == [own.name]
    assert own.read_text() == "precious"


def test_a_user_without_a_home_is_asked_for_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("STOWPLAN_SPILL", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(BadUse, match="STOWPLAN_SPILL"):
        DiskTier()
