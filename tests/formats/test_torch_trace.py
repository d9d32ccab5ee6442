"""Traces of torch.profiler: the curve is the profiler's own, ops have their phases and times."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from stowplan.analyse.inspection import inspection_of
from stowplan.cli.main import main
from stowplan.errors import BadInput, BudgetTooSmall
from stowplan.formats.door import read_document, read_text
from stowplan.formats.torch_trace import read
from stowplan.ir import Kind, Phase
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_profile

SAMPLE = (Path(__file__).parent / "samples" / "torch_trace.json").read_text(encoding="utf-8")

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training steps of a small convolutional network, profiled."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 5)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(2, 3, 16, 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            model(images).sum().backward()
            optimizer.step()
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    profiler.export_chrome_trace(str(path))
    return path


def memory_events(path: Path) -> list[dict[str, int]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event["args"] for event in sorted(events, key=lambda e: e["ts"]) if event["name"] == "[memory]"]


@pytest.mark.slow
def test_the_peak_and_the_end_are_the_profilers(trace: Path) -> None:
    inspection, events = inspection_of(read_document(trace)), memory_events(trace)
    assert inspection.facts.peak.bytes == max(event["Total Allocated"] for event in events)
    graph = inspection.document.graph
    left = sum(graph.tensors[name].nbytes or 0 for name in graph.held)
    assert left == events[-1]["Total Allocated"]
    assert inspection.addresses is not None
    assert not inspection.addresses.overlaps


def test_what_was_there_before_counts(trace: Path) -> None:
    shifted = json.loads(trace.read_text())
    for event in shifted["traceEvents"]:
        if event["name"] == "[memory]":
            event["args"]["Total Allocated"] += 10**9
    assert bytes_before(json.dumps(shifted)) == bytes_before(trace.read_text()) + 10**9


def bytes_before(text: str) -> int:
    """What the process had allocated when the profiler began, whatever that was."""
    tensors = read_text(text).graph.tensors.values()
    return sum(t.nbytes or 0 for t in tensors if t.kind is Kind.INPUT and t.id == "before")


def test_ops_have_phases_and_times(trace: Path) -> None:
    document = read_document(trace)
    assert {op.phase for op in document.graph.ops} == {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}
    assert document.profile is not None
    host = document.profile.clocks["host"]
    assert host.keys() == {op.id for op in document.graph.ops}
    assert all(i.start_seconds <= i.end_seconds and i.kernel_seconds <= i.end_seconds for i in host.values())
    spent = sum(i.end_seconds - i.kernel_seconds for i in host.values())
    assert 0 < spent <= max(i.end_seconds for i in host.values())


@pytest.mark.slow
def test_a_history_cannot_be_planned_away(trace: Path) -> None:
    """Its ops tell no operands, so nothing in it can be made again."""
    document = read_document(trace)
    assert document.profile is not None
    planner = Planner.of(document.graph, price_by_profile(document.graph, document.profile, {}))
    peak = inspection_of(document).facts.peak.bytes
    assert planner.minimum_bytes == peak
    with pytest.raises(BudgetTooSmall):
        planner.plan(peak - 1)


@pytest.mark.slow
def test_it_can_be_reported(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(trace), "-o", str(tmp_path / "page.html")]) == 0
    assert main(["inspect", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["format"] == "torch_trace"


def test_a_trace_without_memory_is_refused_with_advice() -> None:
    events = [event for event in json.loads(SAMPLE)["traceEvents"] if event["name"] != "[memory]"]
    with pytest.raises(BadInput, match="profile_memory=True") as caught:
        read(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    assert caught.value.where == "traceEvents"


def test_other_devices_and_kernels_are_told(trace: Path) -> None:
    changed = json.loads(trace.read_text())
    first = next(event for event in changed["traceEvents"] if event["name"] == "[memory]")
    first["args"] |= {"Device Type": 1, "Device Id": 0}
    changed["traceEvents"].append({"ph": "X", "cat": "kernel", "name": "gemm", "ts": first["ts"], "dur": 1})
    notes = [note.what for note in read_text(json.dumps(changed)).notes]
    assert any("memory events of cuda:0 are not shown" in note for note in notes)
    assert any("1 kernels ran on a device" in note for note in notes)
