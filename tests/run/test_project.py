"""Steps on cards that are not here: their kernels, why peaks differ from the CPU's, plans and files."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stowplan
from stowplan import Iteration
from stowplan.capture import capture
from stowplan.capture.cuda_calls import Chosen, CudaCalls
from stowplan.cli.main import main
from stowplan.errors import BadInput, BadUse, BudgetTooSmall, CaptureError, IllegalPlan
from stowplan.ir import DType
from stowplan.plan.cards import Card, card_named, cards, price_on_card
from stowplan.plan.files import plan_file
from stowplan.plan.options import PlanOptions
from stowplan.run.project import project_step
from stowplan.run.target import Target
from stowplan.techniques.iteration.run.one_by_one import UpdateBook, groups_by_parameter
from stowplan.techniques.iteration.run.state_elsewhere import WORTH_BYTES
from tests.support.asking import asked


class Mixed(nn.Module):
    """Every layer whose kernels differ by device."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.batch = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.instance = nn.InstanceNorm2d(16, affine=True, track_running_stats=True)
        self.rms, self.layer, self.drop = nn.RMSNorm(16), nn.LayerNorm(16), nn.Dropout(0.1)
        self.heads = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        rows = self.instance(self.batch(self.convolution(image))).flatten(2).transpose(1, 2)
        rows = self.layer(self.rms(self.drop(rows)))
        attended: torch.Tensor = self.heads(rows, rows, rows, need_weights=False)[0]
        return attended.sum()


class Rows(nn.Module):
    """A deep stack whose step can be planned for less than it takes."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.p = p

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = F.dropout(F.gelu(layer(rows)), self.p)
        return rows.sum()


def mixed(dtype: torch.dtype = torch.float32) -> Target:
    with torch.device("meta"):
        return Target(Mixed().to(dtype), (torch.empty(2, 3, 10, 10, dtype=dtype),))


def kinds(target: Target, cuda: CudaCalls) -> Counter[str]:
    graph = capture(target.model, target.args, cuda=cuda).graph
    return Counter(op.type.removeprefix("aten.").removesuffix(".default") for op in graph.ops)


def test_forward_calls_the_kernels_of_a_cuda_device() -> None:
    cuda = CudaCalls(("flash", "efficient"))
    found = kinds(mixed(), cuda)
    assert found["cudnn_batch_norm"] == found["cudnn_batch_norm_backward"] == 2
    assert found["native_dropout"] == found["_fused_rms_norm"] == found["_fused_rms_norm_backward"] == 1
    assert found["_scaled_dot_product_efficient_attention"] == 1
    assert not any(name.startswith(("bernoulli", "native_batch_norm", "pow", "bmm")) for name in found)
    assert set(cuda.counts) == set(Chosen)
    assert cuda.counts.total() == 5


@pytest.mark.parametrize(("preferred", "kernel"), [("flash", "flash"), ("cudnn", "cudnn")])
def test_narrow_attention_takes_the_preferred_kernel(preferred: str, kernel: str) -> None:
    found = kinds(mixed(torch.bfloat16), CudaCalls((preferred, "efficient")))
    assert found[f"_scaled_dot_product_{kernel}_attention"] == 1
    assert found[f"_scaled_dot_product_{kernel}_attention_backward"] == 1


def test_a_card_without_a_kernel_for_the_call_splits_attention_into_ops() -> None:
    assert kinds(mixed(torch.float64), CudaCalls(("flash", "efficient")))["bmm"] > 0


class SharedHeads(nn.Module):
    """Attention whose eight heads share four keys and values."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_share_keys_in_the_kernels_that_can(dtype: torch.dtype) -> None:
    args = tuple(torch.empty(2, heads, 16, 32, dtype=dtype, requires_grad=True) for heads in (8, 4, 4))
    found = kinds(Target(SharedHeads(), args), CudaCalls(("flash", "efficient")))
    is_fused = dtype is torch.bfloat16 or torch.__version__ >= "2.14"
    kernel = "flash" if dtype is torch.bfloat16 else "efficient"
    assert found[f"_scaled_dot_product_{kernel}_attention"] == is_fused
    assert (found["bmm"] == 0) == is_fused


class DropsScores(nn.Module):
    """Attention with dropout, whose generator's state is kept for backward."""

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, query, query, dropout_p=0.1).sum()


def test_the_state_of_dropout_in_attention_is_on_the_host_and_takes_nothing_of_the_card() -> None:
    query = torch.empty(2, 4, 16, 32, requires_grad=True)
    graph = project_step(Target(DropsScores(), (query,)), card_named("a100-80gb")).graph
    found = [tensor for name, tensor in graph.tensors.items() if name.endswith((".2", ".3"))]
    states = [tensor for tensor in found if tensor.dtype is DType.INT64]
    assert [(tensor.device, tensor.nbytes) for tensor in states] == [("cpu", 0)] * 2


@pytest.mark.parametrize("pooling", [nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2), nn.FractionalMaxPool2d(2, 2)])
def test_functions_that_choose_between_two_are_called_on_a_card(pooling: nn.Module) -> None:
    """By `return_indices`, in PyTorch's own functions for pooling."""
    target = Target(nn.Sequential(nn.Conv2d(3, 8, 3), pooling), (torch.empty(2, 3, 10, 10),))
    assert kinds(target, CudaCalls(("flash",)))["convolution"] == 1


def test_the_capture_without_a_card_is_untouched() -> None:
    """Entering and leaving the calls of a card leaves PyTorch as it was."""
    target = Target(Rows(p=0.5), (torch.empty(8, 64),))
    before = capture(target.model, target.args).graph
    kinds(target, CudaCalls(("flash",)))
    assert capture(target.model, target.args).graph == before


def test_every_difference_of_the_peak_has_a_cause_and_they_add_up() -> None:
    with torch.device("meta"):
        target = Target(Rows(p=0.5), (torch.empty(512, 64),))
    step = project_step(target, card_named("a100-80gb"))
    assert sum(d.peak_bytes for d in step.differences) == step.peak_bytes - step.here_peak_bytes
    (dropped,) = [d for d in step.differences if "dropout" in d.cause]
    assert dropped.calls == 6
    assert dropped.peak_bytes < 0  # a byte for each element instead of four
    assert any("cuBLAS" in d.cause and d.peak_bytes == 2 * 8_519_680 for d in step.differences)


def test_norms_of_narrow_numbers_keep_wide_statistics_on_the_card() -> None:
    graph = project_step(mixed(torch.bfloat16), card_named("a100-80gb")).graph
    (norm,) = [op for op in graph.ops if op.type == "aten.native_layer_norm.default"]
    dtypes = [graph.tensors[use.tensor].dtype for use in norm.outputs]
    assert dtypes == [DType.BFLOAT16, DType.FLOAT32, DType.FLOAT32]
    assert {op.device for op in graph.ops} == {"cuda:0"}
    assert {tensor.device for tensor in graph.tensors.values()} == {"cuda:0"}


@pytest.mark.slow
def test_the_budget_limits_reserved_bytes_and_the_plan_is_marked() -> None:
    with torch.device("meta"):
        model, rows = Rows(), torch.empty(2**15, 64)
    whole = stowplan.project(model, (rows,), device="t4")
    assert whole.heap is not None
    assert whole.plan.projected_for == "t4"
    assert "projected for t4" in repr(whole.plan)
    assert "not checked" in whole.plan.exactness
    budget = whole.heap.figures.reserved_peak_bytes * 8 // 10
    smaller = stowplan.project(model, (rows,), device="t4", budget=budget)
    assert smaller.heap is not None
    assert smaller.heap.figures.reserved_peak_bytes <= budget
    assert smaller.plan.projected_seconds > whole.plan.projected_seconds
    assert plan_file.read(plan_file.write(smaller.plan)).projected_for == "t4"
    with pytest.raises(BudgetTooSmall, match="another device, so none were considered"):
        stowplan.project(model, (rows,), device="t4", budget="1MiB")
    with pytest.raises(BadUse, match=r"tiles are not planned for another device, .* add recompute"):
        stowplan.project(model, (rows,), device="t4", budget="1MiB", allow=["tile"])


def here(tmp_path: Path, kind: str = "cpu") -> str:
    """A card of this machine's kind, so that its plans can run here."""
    path = tmp_path / "here.toml"
    lines = ('name = "this CPU"', f'kind = "{kind}"', 'memory = "1GiB"', "bandwidth = 1e10")
    path.write_text("\n".join((*lines, "flops = { float32 = 1e11 }")))
    return str(path)


def test_a_plan_is_taken_to_its_device_and_runs_there(tmp_path: Path) -> None:
    model, rows = Rows(), torch.randn(512, 64)
    found = stowplan.project(model, (rows,), device=here(tmp_path))
    assert found.heap is None
    budget = int(found.plan.projected_peak_bytes * 0.8)
    plan = stowplan.project(model, (rows,), device=here(tmp_path), budget=budget).plan
    fitted = stowplan.fit(model, (rows,), budget=budget, plan=plan)
    model(rows).backward()
    eager = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    fitted(rows).backward()
    for parameter, expected in zip(model.parameters(), eager, strict=True):
        assert parameter.grad is not None
        assert expected is not None
        assert torch.equal(parameter.grad, expected)


def test_a_plan_for_another_card_is_refused_with_what_differs() -> None:
    model, rows = Rows(p=0.5), torch.randn(64, 64)
    plan = stowplan.project(model, (rows,), device="a100-80gb").plan
    with pytest.raises(
        IllegalPlan, match=r"projected for a100-80gb.*native_dropout.*6 in the plan, 0 in the"
    ):
        stowplan.fit(model, (rows,), budget="1GiB", plan=plan)(rows)


class Cast(nn.Module):
    """Forward under autocast of a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer, self.device = nn.Linear(4, 4), device

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            made: torch.Tensor = self.layer(rows)
            return made.sum()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_refused_rather_than_projected_wrongly(device: str) -> None:
    with pytest.raises(CaptureError, match="autocast"):
        stowplan.project(Cast(device), (torch.ones(2, 4),), device="t4")


class Recurrent(nn.Module):
    """A layer that runs in cuDNN as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.cells(rows)[0]
        return made.sum()


def seconds_of_update(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Kernels of the update of all parameters, and bytes that they read and write."""
    taken = UpdateBook(optimizer, torch.device("cuda")).together(list(groups_by_parameter(optimizer)))
    return taken.launches, taken.traffic_bytes


def test_updates_are_priced_by_the_kernels_that_the_optimizer_would_launch() -> None:
    parameters = [nn.Parameter(torch.empty(100, 10, device="meta")) for _ in range(3)]
    one = sum(parameter.nbytes for parameter in parameters)
    assert seconds_of_update(torch.optim.SGD(parameters)) == (1, 3 * one)  # foreach, as on any CUDA device
    assert seconds_of_update(torch.optim.SGD(parameters, foreach=False)) == (3, 3 * one)
    # reads parameters, gradients and two of state, writes all but gradients
    assert seconds_of_update(torch.optim.AdamW(parameters, fused=True)) == (1, 7 * one)
    launches, traffic = seconds_of_update(torch.optim.AdamW(parameters))
    singles, same = seconds_of_update(torch.optim.AdamW(parameters, foreach=False))
    assert singles >= 2 * launches > 10
    assert traffic >= same > 7 * one


def test_an_iteration_is_projected_with_its_state_on_the_card_or_on_the_host() -> None:
    with torch.device("meta"):
        model, rows = Rows(), torch.empty(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = stowplan.project(model, (rows,), device="t4")
    whole = stowplan.project(model, (rows,), device="t4", optimizer=optimizer)
    assert whole.plan.projected_seconds > step.plan.projected_seconds
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert whole.step.peak_bytes >= step.step.peak_bytes + 2 * parameters  # steps are counted on the host
    assert not optimizer.state_dict()["state"]
    away = step.step.iterations(Iteration(optimizer), offloads=True)[1]
    plan, _ = away.plan(None, PlanOptions(("recompute",)))
    assert plan.projected_peak_bytes < whole.plan.projected_peak_bytes - parameters
    moved = 2 * 2 * sum(p.nbytes for p in model.parameters() if p.nbytes >= WORTH_BYTES)
    added = plan.projected_seconds - whole.plan.projected_seconds
    assert added == pytest.approx(
        moved / away.card.host_bytes_per_second + 24 * away.card.launch_seconds, rel=0.2
    )
    kept = step.step.iterations(Iteration(optimizer, keep_gradients=True))[0].without_a_plan()
    assert kept is not None
    assert whole.heap is not None
    assert kept.figures.reserved_peak_bytes >= whole.heap.figures.reserved_peak_bytes
    with pytest.raises(BadUse, match="give optimizer= too"):
        stowplan.project(model, (rows,), device="t4", **asked({"accumulate": 2}))


def test_a_projected_iteration_runs_on_its_device(tmp_path: Path) -> None:
    rows, models = torch.randn(8, 64), (Rows(), Rows())
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    found = stowplan.project(models[0], (rows,), device=here(tmp_path), optimizer=optimizers[0])
    fitted = stowplan.fit(models[0], (rows,), budget="1GiB", plan=found.plan, optimizer=optimizers[0])
    for model, optimizer in zip((fitted, models[1]), optimizers, strict=True):
        for _ in range(3):
            model(rows).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_recurrent_layers_are_refused() -> None:
    with pytest.raises(CaptureError, match="gru runs in cuDNN"):
        stowplan.project(Recurrent(), (torch.ones(2, 1, 4),), device="t4")


def test_cards_have_sane_figures_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    for card in cards().values():
        assert 0 < card.usable_bytes < card.memory_bytes
        assert card.flops["float16"] > card.flops["float32"] >= card.flops["float64"]
    with pytest.raises(BadUse, match="a100-80gb"):
        card_named("a1000")
    path = tmp_path / "other.toml"
    path.write_text('name = "x"\nmemory = "1GiB"\nbandwidth = 1e9\nflops = { float16 = 1e12 }\n')
    with pytest.raises(BadInput, match="float32"):
        card_named(str(path))
    path.write_text('name = "x"\nmemory = "1GiB"\nspeed = 3\n')
    with pytest.raises(BadInput, match="speed"):
        card_named(str(path))


def test_a_faster_card_is_priced_faster_and_half_precision_at_its_own_rate() -> None:
    def seconds(card: Card, dtype: torch.dtype) -> float:
        with torch.device("meta"):
            target = Target(Rows().to(dtype), (torch.empty(2**16, 64, dtype=dtype),))
        graph = project_step(target, card).graph
        return sum(price_on_card(graph, card, PlanOptions()).seconds.values())

    a100 = replace(card_named("a100-80gb"), launch_seconds=1e-9, bytes_per_second=1e18)
    assert seconds(replace(a100, flops={"float32": 39e12}), torch.float32) < seconds(a100, torch.float32)
    assert seconds(a100, torch.bfloat16) < seconds(a100, torch.float32) / 8


def test_the_commands_tell_the_card_and_the_causes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "card_steps.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def step(batch=64):\n"
        "    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), (torch.ones(batch, 64),), torch.sum\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "card_steps:step", "--device", "t4", "--json", "-o", "step.plan"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["projected_for"] == planned["device"]["card"] == "t4"
    causes = planned["device"]["differences"]
    gap = planned["device"]["peak_bytes"] - planned["device"]["cpu_peak_bytes"]
    assert sum(cause["peak_bytes"] for cause in causes) == gap
    assert planned["heap"]["reserved_peak_bytes"] <= planned["device"]["usable_bytes"]
    assert stowplan.load_plan("step.plan").projected_for == "t4"
    assert main(["inspect", "card_steps:step", "--device", "t4", "--optimizer", "adamw", "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert inspected["optimizer"]["implementation"] == "foreach"
    assert inspected["optimizer"]["state_bytes"] > 0
    assert main(["inspect", "card_steps:step", "--device", "t4", "--measure"]) == 2
    assert main(["fit-largest", "card_steps:step", "--device", "t4", "--most", "65", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["techniques"] for row in rows] == [[], ["recompute"]]
    assert rows[0]["batch"] == 65
    assert main(["fit-largest", "card_steps:step"]) == 2


def test_the_commands_tell_of_iterations_on_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "card_loops.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def step(batch=8):\n"
        "    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), (torch.ones(batch, 64),), torch.sum\n"
        "def fused(model):\n"
        "    return torch.optim.AdamW(model.parameters(), fused=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    card = ["card_loops:step", "--device", "t4", "--optimizer"]
    assert main(["plan", *card, "card_loops:fused", "--clip-norm", "1", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    causes, gap = planned["device"]["differences"], planned["device"]["peak_bytes"]
    assert "state and step of AdamW" in {cause["cause"] for cause in causes}
    assert sum(cause["peak_bytes"] for cause in causes) == gap - planned["device"]["cpu_peak_bytes"]
    assert main(["plan", "card_loops:step", "--device", "t4", "--accumulate", "2"]) == 2
    capsys.readouterr()
    assert main(["inspect", *card, "card_loops:fused", "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert inspected["optimizer"]["implementation"] == "fused"
    assert inspected["heap"]["requested_peak_bytes"] == inspected["device"]["peak_bytes"]
    assert main(["fit-largest", *card, "sgd", "--most", "9", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["techniques"], row["batch"]) for row in rows] == [([], 9), (["recompute"], 9)]
