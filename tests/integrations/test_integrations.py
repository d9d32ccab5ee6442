"""Each integration against its real package: the losses of the plain run, to the bit, in less memory."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import stowplan
from stowplan.errors import BadUse
from stowplan.integrations.batches import arguments_of
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


def test_a_plain_loop() -> None:
    from examples.plain_loop import train

    plain, (fitted, model) = train(None, steps=2)[0], train("9MiB", steps=2)
    assert fitted == plain
    holds(plan_of(model), "9MiB")


def test_accelerate() -> None:
    from examples.accelerate_loop import train

    plain, (fitted, model) = train(None, steps=2)[0], train("9MiB", steps=2)
    assert fitted == plain
    holds(plan_of(model), "9MiB")


@pytest.mark.slow
def test_huggingface_trainer() -> None:
    from examples.huggingface_trainer import train

    plain, (fitted, model) = train(None)[0], train("8MiB")
    assert fitted == plain
    holds(plan_of(model), "8MiB")


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


def test_monai() -> None:
    from examples.monai_unet import train

    plain, (fitted, network) = train(None, steps=2)[0], train("2400KiB", steps=2)
    assert fitted == plain
    holds(plan_of(network), "2400KiB")


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
    import subprocess

    code = "import sys, stowplan.integrations.batches; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"'torch'", "'lightning'", "'monai'", "'transformers'"} & set(done.stdout.split(", "))
