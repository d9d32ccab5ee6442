"""Each integration against its real package: the losses of the plain run, to the bit, in less memory."""

import logging
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stowplan
from stowplan import Search
from stowplan.errors import BadUse
from stowplan.integrations.batches import arguments_of
from stowplan.ops.effects import UPDATE
from stowplan.plan.plan import Plan
from stowplan.units import parse_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of the partners' own making
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def holds(plan: Plan, budget: str) -> None:
    assert plan.projected_peak_bytes <= parse_bytes(budget) < plan.plain_peak_bytes


def plan_of(fitted: nn.Module) -> Plan:
    """Its only plan: the call that was planned is the call that was made."""
    (plan,) = stowplan.plans_of(fitted)
    return plan


def test_a_training_script_prints_the_same_without_its_three_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[2] / "examples/training_script.py"
    lines = script.read_text(encoding="utf-8").splitlines()
    ordinary = tmp_path / "ordinary.py"
    ordinary.write_text("\n".join(line for line in lines if not line.endswith("# stowplan")))
    runpy.run_path(str(script), run_name="__main__")
    *losses, plan = capsys.readouterr().out.splitlines()
    runpy.run_path(str(ordinary), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == losses
    assert plan.startswith("<Plan for 7.60 MiB: peak 7.")
    assert len(lines) == len(ordinary.read_text().splitlines()) + 3


def test_accelerate() -> None:
    from examples.accelerate_loop import train

    plain, (fitted, model) = train(None, steps=2)[0], train("9MiB", steps=2)
    assert fitted == plain
    holds(plan_of(model), "9MiB")


@pytest.mark.slow
def test_huggingface_trainer() -> None:
    from examples.huggingface_trainer import train

    plain, (fitted, model) = train(None)[0], train("5MiB")
    assert fitted == plain
    holds(plan_of(model), "5MiB")


def test_huggingface_trainer_with_adapters_of_lora() -> None:
    from examples.huggingface_trainer import train

    (plain, eager), (fitted, model) = train(None, lora=True), train("5MiB", lora=True, optimizer=True)
    assert fitted == plain
    assert all(map(torch.equal, eager.parameters(), model.parameters()))
    holds(plan_of(model), "5MiB")


def test_lightning() -> None:
    from lightning.pytorch import LightningModule, Trainer

    from examples.lightning_module import train
    from stowplan.integrations.lightning import FitWithinBudget

    plain, fitted = train(None), train("9MiB")
    assert fitted.losses == plain.losses
    assert fitted.plan is not None
    holds(fitted.plan, "9MiB")
    assert type(fitted.network) is nn.Sequential  # given back in the end
    for expected, got in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(expected, got)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(BadUse, match="no submodule 'net'"):
        FitWithinBudget("1GiB", module="net").on_train_batch_start(trainer, LightningModule(), (0,), 0)


def saves(plan: Plan) -> None:
    """An iteration in which gradients are consumed, below the peak of eager."""
    assert any(op.type == UPDATE for op in plan.graph.ops)
    assert plan.projected_peak_bytes < plan.plain_peak_bytes


def test_accelerate_with_its_optimizer_in_the_plan() -> None:
    from accelerate import Accelerator

    from stowplan.integrations.accelerate import prepare_within

    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(4, 32)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        run: Any = model
        if planned:
            how: Any = {"optimizer": True, "loss": torch.sum, "search": Search(moves=2)}
            run, optimizer = prepare_within(accelerator, "1MiB", model, (x,), optimizer, **how)
            saves(plan_of(run))
        else:
            run, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(6):
            with accelerator.accumulate(run):
                accelerator.backward(run(x).sum())
                optimizer.step()
                optimizer.zero_grad()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))
    with pytest.raises(BadUse, match="0 optimizers"):
        prepare_within(accelerator, "1MiB", model, (x,), optimizer=True)


def test_huggingface_trainer_with_its_optimizer_in_the_plan() -> None:
    from examples.huggingface_trainer import train

    settings: Any = {"gradient_accumulation_steps": 2, "max_steps": 2, "max_grad_norm": 0.1, "save_steps": 1}
    (plain, eager), (fitted, model) = train(None, **settings), train("64MiB", optimizer=True, **settings)
    assert fitted == plain
    assert len(stowplan.plans_of(model)) == 1  # a checkpoint plans nothing again
    assert all(map(torch.equal, eager.parameters(), model.parameters()))
    saves(plan_of(model))


def test_lightning_with_its_optimizer_in_the_plan() -> None:
    from examples.lightning_module import train

    settings: Any = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}
    plain, fitted = train(None, **settings), train("9MiB", optimizer=True, **settings)
    assert fitted.losses == plain.losses
    assert all(map(torch.equal, plain.parameters(), fitted.parameters()))
    assert fitted.plan is not None
    saves(fitted.plan)


def test_monai() -> None:
    from examples.monai_unet import train

    plain, (fitted, network) = train(None, steps=2)[0], train("2400KiB", steps=2)
    assert fitted == plain
    holds(plan_of(network), "2400KiB")


def test_a_large_volume() -> None:
    from examples.large_volume import train

    plain, (fitted, model) = train(32, None, steps=1)[0], train(32, "64MiB", steps=1)
    assert fitted == plain
    holds(plan_of(model), "64MiB")


def test_a_diffusion_unet() -> None:
    from examples.diffusion_unet import train

    plain, (fitted, model) = train(None, steps=2)[0], train("36MiB", steps=2)
    assert fitted == plain
    holds(plan_of(model), "36MiB")


def test_metrics_have_the_names_that_dashboards_know() -> None:
    from stowplan.integrations.metrics import memory_metrics

    fitted = stowplan.fit(nn.Linear(4, 4), (torch.randn(2, 4),), budget="1MiB")
    found = memory_metrics(fitted)
    assert found["memory/allowed(GiB)"] == 2**-10
    assert 0 < found["memory/projected_peak(GiB)"] <= 2**-10


def test_batches_become_arguments() -> None:
    assert arguments_of((1, 2)) == ((1,), {})
    assert arguments_of({"x": 1}) == ((), {"x": 1})
    assert arguments_of((1, 2), lambda batch: {"both": batch}) == ((), {"both": (1, 2)})
    with pytest.raises(BadUse, match="inputs=lambda"):
        arguments_of(7)


def test_no_integration_loads_another_package() -> None:
    code = "import sys, stowplan.integrations.batches; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"'torch'", "'lightning'", "'monai'", "'transformers'"} & set(done.stdout.split(", "))
