"""`stowplan run` from the shell: scripts of many kinds keep their bits, their output and the budget."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stowplan.cli.main import main
from tests.support.live_bytes import counting_library

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

# What the scripts share. With COUNT, they print what PyTorch allocated at most, planning included.
COMMON = """
import hashlib, os, sys
import torch
from torch import nn

class Counts:
    def __init__(self):
        self.counts = None
        if os.environ.get("COUNT"):
            from tests.support.live_bytes import LiveBytes
            self.counts = LiveBytes()

    def line(self):
        if self.counts:
            print("most", self.counts.most(), file=sys.stderr)
            self.counts.forget_most()

def bits(tensors):
    return hashlib.md5(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()

class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.drop(self.second(nn.functional.gelu(self.first(self.norm(x)))))

def net(blocks, width_out):
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(64, width_out))

class Words(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.words, self.net = nn.Embedding(100, 64), net(blocks, 100)

    def forward(self, x, y=None):
        found = self.net(self.words(x))
        if y is None:
            return found, None
        return found, nn.functional.cross_entropy(found.flatten(0, 1), y.flatten())

torch.manual_seed(0)
counts, losses = Counts(), []
"""

LOOP = """
from common import *
model = net(4, 10)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(4):
    x, y = torch.randn(16, 32, 64), torch.randint(0, 10, (512,))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    counts.line()
print(bits(losses), bits(model.parameters()), bits([torch.get_rng_state()]))
sys.exit(7)
"""

GAN = """
from common import *
maker, judge = net(3, 64), nn.Sequential(net(3, 1), nn.Flatten(0))
of_maker = torch.optim.Adam(maker.parameters(), betas=(0.5, 0.999), foreach=False)
of_judge = torch.optim.Adam(judge.parameters(), betas=(0.5, 0.999), foreach=False)
loss_of = nn.BCEWithLogitsLoss()
for _ in range(4):
    judge.zero_grad()
    real = loss_of(judge(torch.randn(512, 64)), torch.ones(512))
    real.backward()
    images = maker(torch.randn(512, 64))
    fake = loss_of(judge(images.detach()), torch.zeros(512))
    fake.backward()
    of_judge.step()
    maker.zero_grad()
    fooled = loss_of(judge(images), torch.ones(512))
    fooled.backward()
    of_maker.step()
    losses += [real.detach(), fake.detach(), fooled.detach()]
    counts.line()
print(bits(losses), bits(maker.parameters()), bits(judge.parameters()), bits([torch.get_rng_state()]))
"""

ACCUMULATION = """
from common import *
import copy
model = Words()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for number in range(4):
    for _ in range(3):
        x = torch.randint(0, 100, (16, 32))
        loss = model(x, x)[1]
        (loss / 3).backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses.append(model(x)[0].mean())
    model.train()
    counts.line()
torch.save(model, "model.pt")
assert type(torch.load("model.pt", weights_only=False)) is type(copy.deepcopy(model)) is Words
print(bits(losses), bits(model.parameters()), bits([torch.get_rng_state()]))
"""

TRAINER = """
from common import *
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=100, n_positions=32))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 100, (64, 32))]

class Count(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        counts.line()

arguments = TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=8, gradient_accumulation_steps=2, report_to=[],
    save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=1, optim="adamw_torch",
)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Count()])
trainer.remove_callback(PrinterCallback)  # which prints seconds
trainer.train()
print([each.get("loss") for each in trainer.state.log_history])
print(bits(model.parameters()), type(trainer.model).__name__, bits([torch.get_rng_state()]))
"""

ACCELERATE = """
from common import *
from accelerate import Accelerator
from torch.utils.data import DataLoader
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
model = Words()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
loader = DataLoader(torch.randint(0, 100, (128, 32)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    with accelerator.accumulate(model):
        loss = model(x, x)[1]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.detach().float())
    counts.line()
print(bits(losses), bits(model.parameters()), bits([torch.get_rng_state()]))
"""

LIGHTNING = """
from common import *
import lightning as L
from torch.utils.data import DataLoader

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net(4, 10)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self(batch).flatten(0, 1), torch.zeros(512, dtype=torch.long))
        losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *args):
        counts.line()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=False)

model = Lit()
trainer = L.Trainer(
    max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(torch.randn(64, 32, 64), batch_size=16, shuffle=True))
print(bits(losses), bits(model.parameters()), type(model).__name__, bits([torch.get_rng_state()]))
"""


@dataclass(frozen=True)
class Done:
    """A script that has run, and what `--json` wrote."""

    code: int
    output: str
    errors: str
    record: Any = None

    @property
    def peaks(self) -> list[int]:
        """Counted below PyTorch, in each iteration."""
        return [int(line) for line in re.findall(r"^most (\d+)$", self.errors, flags=re.MULTILINE)]

    @property
    def said(self) -> str:
        """What stowplan said meanwhile."""
        return "\n".join(line for line in self.errors.splitlines() if line.startswith("stowplan run: "))


def python(folder: Path, words: Sequence[str], **environment: str) -> Done:
    around = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **environment}
    around["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=around, capture_output=True, text=True, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def written(folder: Path, script: str) -> None:
    (folder / "common.py").write_text(COMMON)
    (folder / "train.py").write_text(script)


def budgeted(folder: Path, budget: int, *options: str, **environment: str) -> Done:
    words = ["run", "--budget", str(budget), "--json", "done.json", "--moves", "50", *options, "train.py"]
    done = python(folder, ["-m", "stowplan", *words], **environment)
    (record,) = json.loads((folder / "done.json").read_text())["processes"]
    return Done(done.code, done.output, done.errors, record)


def both(folder: Path, script: str, share: float, library: Path, *options: str) -> tuple[Done, Done]:
    """The script alone, and within a share of its own peak."""
    written(folder, script)
    count = {"COUNT": "1", "LD_PRELOAD": str(library)}
    alone = python(folder, ["train.py"], **count)
    assert alone.peaks, alone.errors
    return alone, budgeted(folder, int(share * max(alone.peaks)), *options, **count)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counting_library(tmp_path_factory.mktemp("count"))


@pytest.mark.parametrize(
    ("script", "share", "modules"),
    [
        pytest.param(LOOP, 0.7, ["Sequential"], id="loop"),
        pytest.param(GAN, 0.75, ["Sequential", "Sequential #2"], id="gan"),
        pytest.param(ACCUMULATION, 0.7, ["Words"], id="accumulation"),
        pytest.param(TRAINER, 0.75, ["GPT2LMHeadModel"], id="trainer"),
        pytest.param(ACCELERATE, 0.75, ["Words"], id="accelerate"),
        pytest.param(LIGHTNING, 0.7, ["Lit"], id="lightning"),
    ],
)
def test_training_is_the_same_within_the_budget(
    script: str, share: float, modules: list[str], library: Path, tmp_path: Path
) -> None:
    alone, done = both(tmp_path, script, share, library)
    assert (done.code, done.output) == (alone.code, alone.output), done.errors
    assert [module["name"] for module in done.record["modules"]] == modules, done.errors
    for module in done.record["modules"]:
        assert not module["refusals"], done.errors
        assert {plan["exactness"] for plan in module["plans"]} == {"bitwise"}
        assert module["plans"][-1]["projected_peak_bytes"] < module["plans"][-1]["eager_peak_bytes"]
    budget = done.record["budget_bytes"]
    assert max(done.peaks) <= budget < max(alone.peaks), done.errors
    assert max(done.record["peaks"]) == pytest.approx(max(done.peaks), rel=0.02)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run"], "run needs a budget"),
        (["run", "train.py"], "run needs a budget"),
        (["run", "--budget", "much", "x.py"], "is not a size"),
        (["run", "--budget", "1GiB"], "name a script"),
        (["run", "--budgt", "1GiB", "x.py"], "did you mean '--budget'"),
        (["run", "--budget", "1GiB", "--allow", "tiling", "x.py"], "no technique 'tiling'"),
    ],
)
def test_bad_use_is_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


ODD = """
from common import *
how = sys.argv[1]

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.last = net(3, 64), nn.Linear(64, 1)

    def forward(self, x):
        found = self.last(self.net(x)).square().mean()
        return found * float(found.detach().numpy()) if how == "numbers" else found

model = Odd()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for number in range(4):
    loss = model(torch.randn(16384 if how == "sizes" and number == 2 else 256, 64))
    if how == "twice":
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + sum(gradient.square().sum() for gradient in gradients)
    if how == "raises" and number == 2:
        raise ValueError("the script's own")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    counts.line()
print(bits(losses), bits(model.parameters()), bits([torch.get_rng_state()]))
"""


def odd(folder: Path, how: str, budget: int, *options: str) -> Done:
    written(folder, ODD)
    words = ["run", "--budget", str(budget), "--json", "done.json", "--moves", "50", *options]
    done = python(folder, ["-m", "stowplan", *words, "train.py", how])
    (record,) = json.loads((folder / "done.json").read_text())["processes"]
    return Done(done.code, done.output, done.errors, record)


@pytest.mark.parametrize(
    ("how", "budget", "told"),
    [
        ("numbers", 3_500_000, "Odd runs as it is: "),
        ("twice", 3_500_000, "Odd runs as it is from now on: create_graph=True asks for second derivatives"),
        ("sizes", 3_500_000, "Odd runs this call as it is: 3.34 MiB is too small"),
        ("small", 900_000, "Odd runs as it is: 879 KiB is too small"),
    ],
)
def test_what_is_refused_runs_as_it_is(how: str, budget: int, told: str, tmp_path: Path) -> None:
    done = odd(tmp_path, how, budget)
    alone = python(tmp_path, ["train.py", how])
    assert told in done.said, done.errors
    assert done.code == alone.code == 0, done.errors
    if how == "twice":  # is within rounding, and says so
        assert "its gradients are eager's within rounding" in done.said
    else:
        assert done.output == alone.output
    assert any(told.partition(": ")[2] in why for why in done.record["modules"][0]["refusals"])


@pytest.mark.parametrize(("how", "budget", "steps"), [("small", 900_000, 0), ("sizes", 3_500_000, 2)])
def test_strict_ends_the_run_before_such_an_iteration(
    how: str, budget: int, steps: int, tmp_path: Path
) -> None:
    done = odd(tmp_path, how, budget, "--strict")
    assert (done.code, done.output) == (1, ""), done.errors
    assert "stowplan run: --strict ends the run here" in done.said
    assert "Traceback" not in done.errors
    assert len(done.record["peaks"]) >= steps


def test_errors_of_the_script_are_its_own(tmp_path: Path) -> None:
    done, alone = odd(tmp_path, "raises", 3_500_000), python(tmp_path, ["train.py", "raises"])
    assert done.code == alone.code == 1
    assert alone.errors in done.errors
    assert done.record["modules"][0]["plans"]
