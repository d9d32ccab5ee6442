"""`stowplan watch` from the shell: the script's own output, and a page whose peak is the allocator's."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stowplan.cli.main import main
from stowplan.observe.record import Alive, CodePlace, Failure, PeakShare, Remedy, WatchRecord, records_in
from stowplan.report.watch import records_json
from tests.support.live_bytes import counted, counting_library

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

# Prints the bits of all losses, parameters and the generator, and with COUNT what PyTorch allocated at most.
SCRIPT = """
import hashlib, os, sys
import torch
from torch import nn

if os.environ.get("COUNT"):
    from tests.support.live_bytes import LiveBytes
    counts = LiveBytes()

def bits(tensors):
    return hashlib.md5(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()

class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
        )
        self.last = nn.Linear(32, 10)

    def forward(self, x):
        return self.last(self.layers(x).mean((2, 3)))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first = nn.Embedding(100, 64), nn.TransformerEncoderLayer(64, 4, 256)
        self.last = nn.Linear(64, 100)

    def forward(self, x):
        return self.last(self.first(self.words(x))).mean(1)

def batch(kind):
    return torch.randn(8, 3, 32, 32) if kind == "images" else torch.randint(0, 100, (8, 32))

def main(kind, how="", steps=6):
    torch.manual_seed(0)
    model = Images() if kind == "images" else Words()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=kind == "words")
    losses = []
    for number in range(int(steps)):
        x = batch(kind)
        if (how, number) in (("first", 0), ("later", 5)):
            model = Images()
            x = torch.zeros(1, 3, 32, 32).expand(1 << 32, 3, 32, 32)
        loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 10 if len(x) == 8 else x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if os.environ.get("COUNT"):
            print(counts.most(), file=sys.stderr)
            counts.forget_most()
    print(bits(losses), bits(model.parameters()), bits([torch.get_rng_state()]))
    sys.exit(7)

main(*sys.argv[1:])
"""


def run(folder: Path, words: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    around = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **environment}
    around["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=around, capture_output=True, text=True, check=False)


def watched(folder: Path, *words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    command = ["-m", "stowplan", "watch", "--json", "seen.json", *words]
    done = run(folder, command, **environment)
    return done, json.loads((folder / "seen.json").read_text())["processes"]


@pytest.mark.parametrize("kind", ["images", "words"])
def test_the_peak_is_that_of_the_allocator(kind: str, tmp_path: Path) -> None:
    """Counted below PyTorch in the same iterations, and in those after them that nobody observes."""
    environment = counted(counting_library(tmp_path))
    done, (record,) = watched(tmp_path, "train.py", kind, COUNT="1", LD_PRELOAD=environment["LD_PRELOAD"])
    most = [int(line) for line in done.stderr.splitlines() if line.isdecimal()]
    assert len(most) == 6, done.stderr
    assert record["peaks"] == most[1:3]
    assert record["peaks"][-1] == pytest.approx(most[-1], rel=0.01)
    assert (
        record["peak"]["nbytes"] == record["peaks"][-1] == sum(k["nbytes"] for k in record["peak"]["kinds"])
    )
    assert max(phase["nbytes"] for phase in record["phases"]) == record["peaks"][-1]
    assert done.returncode == 7
    if kind == "words":
        assert done.stdout == run(tmp_path, ["train.py", kind]).stdout
    page = done.stderr[done.stderr.index("stowplan watch: train.py") :]
    assert max(map(len, page.splitlines())) <= 80
    if kind == "images":
        assert "inside kernels" in json.dumps(record)
    else:
        assert "loop      Words forward, backward, AdamW step" in page


def test_it_ends_after_the_iterations_that_were_asked_for(tmp_path: Path) -> None:
    done, (record,) = watched(tmp_path, "--iterations", "4", "train.py", "images", "", "9")
    assert (done.returncode, done.stdout) == (0, "")
    assert record["loop"] == "Images forward, backward, AdamW step"


@pytest.mark.parametrize("how", ["first", "later"])
def test_a_script_that_runs_out_of_memory_leaves_the_page(how: str, tmp_path: Path) -> None:
    done, (record,) = watched(tmp_path, "train.py", "images", how)
    assert done.returncode == 1
    frames = re.findall(r'^  File "([^"]*)".*\n *(.*)$', done.stderr, flags=re.MULTILINE)
    assert [text for file, text in frames if file.endswith("train.py")] == [
        "main(*sys.argv[1:])",
        "loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 10 if len(x) == 8 else x)",
        "return self.last(self.layers(x).mean((2, 3)))",
    ]
    assert not [file for file, _ in frames if "stowplan" in file]
    failure = record["failure"]
    assert "can't allocate memory" in failure["message"]
    line = int(failure["alive"]["where"].rpartition(":")[2])
    assert "self.layers(x)" in SCRIPT.splitlines()[line - 1]
    assert {"parameters"} <= {share["what"] for share in failure["alive"]["kinds"]}
    if how == "first":
        assert (failure["alive"]["phase"], failure["op"]) == ("forward", "aten::convolution")
    else:
        assert record["peaks"]


def test_a_limit_ends_the_script_as_a_smaller_device_would(tmp_path: Path) -> None:
    limit = 2_000_000  # less than its peak
    done, (record,) = watched(tmp_path, "--limit", str(limit), "train.py", "images")
    assert done.returncode == 1
    assert f"torch.OutOfMemoryError: the limit of {limit:,} bytes is exceeded" in done.stderr
    assert "out of memory  OutOfMemoryError" in done.stderr
    assert record["failure"]["alive"]["nbytes"] <= limit * 1.5


def test_a_script_that_is_killed_leaves_what_was_alive(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(
        "import os, torch\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))\n"
        "model(torch.zeros(8192, 64)).sum()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done, (record,) = watched(tmp_path, "large.py")
    assert done.returncode == -signal.SIGKILL
    assert record["so_far"]["nbytes"] > 2**26
    assert "killed before an iteration came twice" in done.stderr


@pytest.mark.distributed
def test_each_worker_of_torchrun_observes_itself(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(5):\n"
        "    model(torch.randn(32, 64)).square().mean().backward()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "dist.destroy_process_group()\n"
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "workers.py"]
    done, records = watched(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert [record["rank"] for record in records] == ["0", "1"]
    assert {record["loop"] for record in records} == {"DistributedDataParallel forward, backward, SGD step"}
    assert "peaks of all processes" in done.stderr


def test_what_was_seen_is_read_as_it_was_written(tmp_path: Path) -> None:
    place = CodePlace("activations", "train.py", 3, "Net.first", "aten::addmm", 8, 1)
    alive = Alive(8, "forward", [PeakShare("activations", 8)], [place], "Net", "train.py:3")
    record = WatchRecord(
        "train.py",
        peak=alive,
        findings=[Remedy("a", "b", "c", 1, 2)],
        failure=Failure("E", "m", "op", alive),
    )
    record.write(str(tmp_path))
    (read,) = records_in(str(tmp_path), WatchRecord)
    assert read == record
    assert json.loads(records_json([read]))["processes"][0]["peak"]["places"][0]["line"] == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["watch"], "name a script"),
        (["watch", "no_such_script.py"], "there is no script no_such_script.py"),
        (["watch", "--iterations", "2", "x.py"], "--iterations 2 is too few"),
        (["watch", "--iterations", "many", "x.py"], "no whole number"),
        (["watch", "--limit", "all", "x.py"], "is not a size"),
        (["watch", "--json", "no/such/folder.json", "x.py"], "there is no folder"),
        (["watch", "--iteratoins", "3", "x.py"], "did you mean '--iterations'"),
        (["watch", "-m"], "-m needs a module"),
    ],
)
def test_bad_use_is_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err
