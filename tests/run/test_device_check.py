"""`stowplan gpu-check`: what it measures, what it says does not apply, and that it can fail."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stowplan.cli.main import main
from stowplan.errors import BadUse
from stowplan.report.device_check import findings_json, findings_page
from stowplan.run.measure.device_check import DeviceFindings, PlanFinding, check_device
from stowplan.run.measure.measure import measure
from stowplan.run.measure.sample_networks import NETWORKS


@pytest.mark.slow
def test_a_device_is_checked_and_two_files_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--networks", "perceptron", "--device", "cpu", "--time-limit", "100000", "-o", str(tmp_path)]
    assert main(["gpu-check", *words]) == 0
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    page = (tmp_path / "gpu-check.md").read_text()
    assert page in capsys.readouterr().out
    (network,) = found["networks"]
    assert found["holds"] is True
    assert network["projected"]["requested"] == network["measured"]["requested"] > 0
    assert network["measured"]["reserved"] is None
    assert [plan["share"] for plan in network["plans"]] == [0.9, 0.75, 0.6]
    assert all(plan["held"] and plan["same_bits"] for plan in network["plans"])
    assert set(network["seconds"]) >= {"eager", "checkpointing"}
    assert found["transfer"]["store_bytes_per_second"] > 0
    assert "reserved bytes do not apply" in page
    assert "torch.compile was not timed" in page


def test_nothing_begins_after_the_time_and_that_is_no_success() -> None:
    found = check_device("cpu", time_limit=0.0, names=("gpt",))
    assert not found.holds
    assert findings_json(found)["transfer"] == "not run: the time was over"
    assert "gpt: not run: the time was over" in findings_page(found)
    with pytest.raises(BadUse, match="perceptron"):
        check_device("cpu", names=("resnet",))


@pytest.mark.parametrize("fault", ["held", "agrees"])
def test_a_plan_that_fails_is_shown_and_ends_the_command_with_1(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def findings(*_: object, **__: object) -> DeviceFindings:
        found = check_device("cpu", time_limit=0.0, names=("gpt",))
        good = PlanFinding(0.9, 100, 90, 90, True, "bitwise", False, 0.5, True, 1.0)
        broken: Any = {fault: False}
        found.networks[0].plans.append(replace(good, **broken))
        return found

    monkeypatch.setattr("stowplan.run.measure.device_check.check_device", findings)
    assert main(["gpu-check", "-o", str(tmp_path)]) == 1
    assert "NOT everything held" in (tmp_path / "gpu-check.md").read_text()
    assert "**" in (tmp_path / "gpu-check.md").read_text()


def test_there_are_eight_networks_of_blocks() -> None:
    assert len(NETWORKS) == 8
    with torch.device("meta"):
        for make in NETWORKS.values():
            target = make(1)
            assert len(list(target.model.children())) > 1
            (rows,) = target.args
            assert isinstance(rows, torch.Tensor)
            assert target.model(rows).shape == rows.shape


def test_on_an_accelerator_the_bytes_of_others_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics of a device count all of its memory; a step's peak is that of what it can see."""
    stats = {"requested_bytes.all.current": 1000, "requested_bytes.all.peak": 1000}
    here = torch.accelerator
    monkeypatch.setattr(here, "synchronize", lambda *_: None)
    monkeypatch.setattr(here, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(here, "memory_stats", lambda *_: stats)

    def step() -> None:
        stats["requested_bytes.all.peak"] = 1500
        stats["requested_bytes.all.current"] = 1100

    standing = torch.empty(100, dtype=torch.uint8, device="meta")  # of 1000 bytes that are there
    found = measure(step, device="meta", before=[standing, standing.view(10, 10)])
    assert found.before_bytes == 100
    assert found.measured_curve_bytes == (100, 600, 200)


def test_the_notebook_is_valid_and_has_no_outputs() -> None:
    notebook = json.loads((Path(__file__).parents[2] / "examples/gpu_check.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
    for source in sources:
        python = "\n".join(line for line in source.splitlines() if not line.startswith("!"))
        compile(python, "cell", "exec")
    assert "!stowplan gpu-check" in sources[-2]
