"""Projections of meshes: exact traffic at any size, sane curves, a mesh chosen by time and budget."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from stowplan.capture import Captured, capture
from stowplan.cli.main import main
from stowplan.errors import BadUse, BudgetTooSmall, TooManyWorkers
from stowplan.ir import Graph, Kind
from stowplan.plan.pricing import Machine
from stowplan.techniques.shards.plan.choice import choose_mesh, meshes_of
from stowplan.techniques.shards.plan.curves import step_between, strong_scaling, weak_scaling
from stowplan.techniques.shards.plan.mesh import parse_mesh
from stowplan.techniques.shards.plan.projection import MeshProjection, Network, project
from stowplan.techniques.shards.plan.seeds import seeds_for
from tests.support.nets import NETS

NETWORK = Network()
TARGET = """
from tests.support.nets import NETS

def step():
    return tuple(NETS["unet"].build("tiny", device="meta", resolution=412))
"""


@pytest.fixture(scope="module")
def unet() -> Captured:
    return capture(*NETS["unet"].build("tiny", device="meta", resolution=412))


def projected(
    captured: Captured, mesh: str, network: Network = NETWORK, *, shards_parameters: bool = False
) -> MeshProjection:
    graph, found = captured.graph, parse_mesh(mesh)
    ends = [op.outputs[0].tensor for op in graph.ops if op.type == "aten.nll_loss2d_forward.default"]
    seeds = seeds_for(graph, found)
    return project(graph, found, seeds, ends, Machine(), network, shards_parameters=shards_parameters)


@pytest.mark.slow
def test_more_workers_take_less_compute_and_memory_each_and_send_more(unet: Captured) -> None:
    alone, four, many = (projected(unet, f"space={n}x{n}") for n in (1, 2, 8))
    assert alone.network_seconds == alone.sent_bytes == 0
    assert alone.compute_seconds > four.compute_seconds > many.compute_seconds
    assert alone.peak_bytes > four.peak_bytes > many.peak_bytes
    assert four.sent_bytes > 0
    assert four.efficiency(alone.step_seconds) > many.efficiency(alone.step_seconds)


@pytest.mark.slow
def test_workers_wait_for_the_slowest_of_more_the_more_uneven_their_pace(unet: Captured) -> None:
    even, uneven = Network(), Network(jitter_seconds=1e-3)
    assert projected(unet, "space=2", even).waiting_seconds == 0
    assert projected(unet, "space=1", uneven).waiting_seconds == 0
    pair = capture(*NETS["unet"].build("tiny", device="meta", resolution=220, batch=2))
    by_batch, by_space = (projected(pair, mesh, uneven).waiting_seconds for mesh in ("data=2", "space=2"))
    assert 0 < by_batch < by_space
    more = projected(unet, "space=2", Network(jitter_seconds=4e-3))
    assert more.waiting_seconds == pytest.approx(2 * projected(unet, "space=2", uneven).waiting_seconds)


def test_workers_that_share_a_core_compute_slower(unet: Captured) -> None:
    own, shared = (projected(unet, "space=2x2", Network(workers_per_core=n)) for n in (1, 2))
    assert shared.compute_seconds == pytest.approx(2 * own.compute_seconds)
    assert shared.network_seconds == own.network_seconds


@pytest.mark.slow
def test_the_mesh_chosen_is_the_fastest_that_fits(unet: Captured) -> None:
    ends = ["nll_loss2d_forward.0"]
    best = choose_mesh(unet.graph, 4, ends, Machine(), Network())
    every = [projected(unet, str(mesh)) for mesh in meshes_of(unet.graph, 4)]
    assert best.step_seconds == pytest.approx(min(p.step_seconds for p in every))
    with pytest.raises(BudgetTooSmall, match="try more workers") as fault:
        choose_mesh(unet.graph, 4, ends, Machine(), Network(), allowed_bytes=1000)
    assert fault.value.minimum_bytes == min(p.peak_bytes for p in every)


def test_curves_grow_along_the_axes_in_turn_and_through_the_mesh_asked_for() -> None:
    sizes = [mesh.size for mesh in strong_scaling(parse_mesh("data=3,space=2x2"), 300)]
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 256]
    meshes = [str(mesh) for mesh in strong_scaling(parse_mesh("data=128,model=2"), 256)]
    assert meshes[:3] == ["data=1,model=1", "data=1,model=2", "data=2,model=2"]
    assert meshes[-2:] == ["data=32,model=2", "data=128,model=2"]


def test_a_growing_batch_is_cut_by_a_data_axis_beside_those_asked_for() -> None:
    meshes = [str(mesh) for mesh in weak_scaling(parse_mesh("data=8,space=2x2"), 70)]
    assert meshes == [f"data={n},space={m},space={m}" for n, m in ((1, 1), (1, 2), (4, 2), (16, 2))]


@pytest.mark.parametrize("net", ["llama", "gpt", "pairs"])
def test_a_step_between_two_batches_is_the_one_that_would_be_captured(net: str) -> None:
    """Strided views included, and tensors whose bytes grow with the square of the batch."""
    first, between, last = (step_of(net, batch) for batch in (2, 6, 32))
    assert step_between(first, last, 16, 3) == between


def test_no_step_is_put_between_two_that_differ_in_more_than_their_batch() -> None:
    padded = step_of("padded", 2)
    assert step_between(padded, step_of("padded", 32), 16, 3) is None
    assert step_between(padded, step_of("pairs", 32), 16, 3) is None


def step_of(net: str, batch: int) -> Graph:
    """The step of a net, of the products of all pairs of rows, or of rows and one more."""
    if net in NETS:
        return capture(*NETS[net].build("tiny", device="meta", batch=batch)).graph
    model, rows = nn.Linear(4, 4).to("meta"), torch.empty(batch, 4, device="meta")
    losses = {
        "pairs": lambda made: (made @ made.T).sum(),
        "padded": lambda made: pad(made, (0, 0, 0, 1)).sum(),
    }
    return capture(model, (rows,), loss=losses[net]).graph


def test_workers_draw_their_parts_of_masks_alone() -> None:
    """Each has as much to do and to hold if the batch grows with the workers, dropout included."""
    one, many = (
        project(
            (graph := capture(*NETS["gpt"].build("tiny", device="meta", batch=4096 * workers)).graph),
            (mesh := parse_mesh(f"data={workers}")),
            seeds_for(graph, mesh),
            [op.outputs[0].tensor for op in graph.ops if op.type == "aten.nll_loss_forward.default"],
            Machine(),
            NETWORK,
        )
        for workers in (1, 64)
    )
    assert many.compute_seconds < 1.02 * one.compute_seconds
    assert many.peak_bytes < 1.02 * one.peak_bytes


@pytest.mark.slow
def test_a_mesh_of_many_workers_is_chosen_among_the_most_promising(unet: Captured) -> None:
    ends = ["nll_loss2d_forward.0"]
    best = choose_mesh(unet.graph, 66, ends, Machine(), Network())
    assert str(best.mesh) in ("data=1,space=6,space=11", "data=1,space=11,space=6")
    with pytest.raises(TooManyWorkers, match="have nothing of"):
        projected(unet, "space=2x64")


def test_sharded_parameters_take_less_memory_and_are_sent_in_place_of_sums(unet: Captured) -> None:
    whole, divided = (projected(unet, "space=2x2", shards_parameters=shards) for shards in (False, True))
    nbytes = sum(t.nbytes or 0 for t in unet.graph.tensors.values() if t.kind is Kind.PARAMETER)
    assert whole.peak_bytes - 2 * nbytes < divided.peak_bytes < whole.peak_bytes - nbytes // 2
    assert whole.summed_bytes - divided.summed_bytes == nbytes
    assert 0.74 * 2 * nbytes < divided.sent_bytes - whole.sent_bytes <= 0.76 * 3 * nbytes
    assert divided.network_seconds > whole.network_seconds


def test_more_workers_than_samples_are_refused(unet: Captured) -> None:
    with pytest.raises(TooManyWorkers, match="the axis data=128 cuts a dim of"):
        projected(unet, "data=128,space=2")


def test_an_axis_that_says_not_what_it_cuts_is_refused(unet: Captured) -> None:
    with pytest.raises(BadUse, match="name it data, space, sequence, model, or give dims"):
        seeds_for(unet.graph, parse_mesh("rows=2"))


@pytest.mark.slow
def test_simulate_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "simulated_step.py").write_text(TARGET)
    (tmp_path / "machine.toml").write_text("[network]\nlatency_seconds = 1e-3\n")
    monkeypatch.chdir(tmp_path)
    words = ["simulate", "simulated_step:step", "--mesh", "space=2x2", "--up-to", "16"]
    assert main([*words, "--machine", "machine.toml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["workers"] == 4
    assert [point["workers"] for point in shown["strong"]] == [1, 2, 4, 8, 16]
    assert [point["workers"] for point in shown["weak"]] == [1, 4, 16]
    _, four, sixteen = shown["weak"]
    assert four["compute_seconds"] == pytest.approx(sixteen["compute_seconds"], rel=0.1)  # dropout
    assert four["sent_bytes"] == sixteen["sent_bytes"]
    assert four["planner_bytes"] > 0
    assert main([*words, "--parameters", "shard", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] < shown["peak_bytes"]
    chosen = ["simulate", "simulated_step:step", "--workers", "2", "--parameters", "shard"]
    assert main(chosen) == BadUse.exit_code
    assert "not for a chosen division" in capsys.readouterr().err
    assert main(words) == 0
    assert "4 workers" in capsys.readouterr().out
    (tmp_path / "machine.toml").write_text("[network]\nspeed = 1\n")
    assert main([*words, "--machine", "machine.toml"]) == 2
    assert "it may have [compute]" in capsys.readouterr().err
