"""Small training steps, one for each feature, compared with eager to the bit.

`python -m tools.compatibility.features` prints one line of JSON for each feature: its name, and what failed,
or "". Tiles and workers add up in another order than eager; their net has whole numbers for weights and
inputs, whose sums are exact in any order.
"""

import copy
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice, pairwise
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.capture import capture
from stowplan.cli.main import main as command
from stowplan.plan.draft import Exactness
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import Planner
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine, Tier
from stowplan.plan.steps import Decision, Offload, Recompute, Tile
from stowplan.run.measure.measure import measure

_MOVES, _STEPS = 20, 2


class Decoder(nn.Module):
    """A block of a language model and its loss: attention, norms, dropout, an embedding, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Layer(nn.Module):
    """Attention and a gated unit, each after a norm and added to what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(32), nn.Linear(32, 96)
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1))
        self.outer = nn.Linear(128, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        queries, keys, values = self.mixed(self.norm(hidden)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + found.transpose(1, 2).flatten(2)
        result: Tensor = hidden + self.outer(self.inner(hidden))
        return result


class Whole(nn.Module):
    """Convolutions whose weights, inputs and results are whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 4, 4, 4, 1)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, bias=False, dtype=torch.float64)
            for before, after in pairwise(widths)
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))

    def forward(self, images: Tensor) -> Tensor:
        for convolution in self.convolutions:
            images = torch.relu(convolution(images))
        return images.sum()


def _tokens() -> Iterator[Tensor]:
    while True:
        yield torch.randint(50, (4, 32))


def _images() -> Iterator[Tensor]:
    while True:
        yield torch.randint(0, 2, (2, 1, 64, 64)).double()


def _capture() -> None:
    plan = _compared(Decoder(), _tokens(), "1GiB", ())
    assert plan.exactness is Exactness.BITWISE, plan.against_eager


def _recompute() -> None:
    model, tokens = Decoder(), next(_tokens())
    budget = int(0.7 * _peak(model, tokens))
    plan = _compared(model, _tokens(), budget, ("recompute",), Recompute)
    assert plan.exactness is Exactness.BITWISE, plan.against_eager
    fitted = stowplan.fit(model, (tokens,), budget=budget, allow=("recompute",), search=Search(moves=_MOVES))
    model.zero_grad(set_to_none=True)
    taken = measure(lambda: _differentiate(fitted(tokens))).measured_rise_bytes
    fixed = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), tokens))
    assert taken + fixed <= budget, f"{taken + fixed} bytes were taken, {budget} allowed"


def _tiles() -> None:
    model = Whole()
    budget = int(0.6 * _peak(model, next(_images())))
    plan = _compared(model, _images(), budget, ("tile",), Tile)
    assert plan.is_tiled


def _offload() -> None:
    model = Decoder()
    graph = capture(copy.deepcopy(model), (next(_tokens()),)).graph
    slow = price_by_roofline(graph, Machine(macs_per_second=1e8, bytes_per_second=1e8))  # time for transfers
    pricing = replace(slow, tier=Tier("disk", 2**30, 1e9, 1e9, 1e-5))
    planner = Planner.of(graph, pricing, options=PlanOptions(allow=("offload",)))
    plan = planner.plan((planner.minimum_bytes + planner.plain_peak_bytes) // 2)
    _compared(model, _tokens(), plan.allowed_bytes, ("offload",), Offload, plan)


def _shards() -> None:
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        list(pool.map(_worker, range(2), [f"file://{folder}/meeting"] * 2))


def _worker(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    try:
        model, images = Whole(), next(_images())
        eager = copy.deepcopy(model)
        fitted = stowplan.fit(model, (images,), mesh="space=2", budget="1GiB", search=Search(moves=_MOVES))
        (part,), _ = stowplan.shards_of(fitted).share(images)
        loss = fitted(part)
        expected = eager(images)
        _differentiate(loss)
        _differentiate(expected)
        _hold_equal([loss, *_gradients(fitted)], [expected, *_gradients(eager)])
    finally:
        dist.destroy_process_group()


def _compile() -> None:
    model = Decoder()
    eager = copy.deepcopy(model)
    budget = int(0.8 * _peak(model, next(_tokens())))
    compiled = torch.compile(model, backend="stowplan", options={"budget": budget, "moves": _MOVES})
    _train_alike(eager, compiled, model, _tokens())


def _report() -> None:
    model, tokens = Decoder(), next(_tokens())
    fitted = stowplan.fit(model, (tokens,), budget="1GiB", search=Search(moves=_MOVES))
    (plan,) = stowplan.plans_of(fitted)
    with tempfile.TemporaryDirectory() as folder:
        file, page = Path(folder, "step.plan.json"), Path(folder, "step.html")
        plan.save(file)
        assert stowplan.load_plan(file) == plan
        assert command(["report", str(file), "-o", str(page)]) == 0
        assert page.stat().st_size > 10_000


FEATURES: dict[str, Callable[[], None]] = {
    "capture": _capture,
    "recompute": _recompute,
    "tiles": _tiles,
    "offload": _offload,
    "shards": _shards,
    "compile backend": _compile,
    "report": _report,
}


def _peak(model: nn.Module, batch: Tensor) -> int:
    fitted = stowplan.fit(model, (batch,), budget="1GiB", allow=(), search=Search(moves=1))
    return stowplan.plans_of(fitted)[0].plain_peak_bytes


def _compared(
    model: nn.Module,
    batches: Iterator[Tensor],
    budget: int | str,
    allow: tuple[str, ...],
    decided: type[Decision] | None = None,
    given: stowplan.Plan | None = None,
) -> stowplan.Plan:
    """Train a fitted model beside its copy in eager; the plan must have made decisions of this kind."""
    eager = copy.deepcopy(model)
    fitted = stowplan.fit(
        model, (next(batches),), budget=budget, allow=allow, search=Search(moves=_MOVES), plan=given
    )
    (plan,) = stowplan.plans_of(fitted)
    assert decided is None or any(isinstance(d, decided) for d in plan.decisions.values()), decided
    _train_alike(eager, fitted, fitted, batches)
    return plan


def _train_alike(
    eager: nn.Module, step: Callable[[Tensor], Tensor], twin: nn.Module, batches: Iterator[Tensor]
) -> None:
    rate = 0.0 if isinstance(eager, Whole) else 0.5  # weights stay whole numbers
    optimizers = [torch.optim.SGD(m.parameters(), lr=rate, momentum=0.5) for m in (eager, twin)]
    for seed, batch in enumerate(islice(batches, _STEPS)):
        losses = []
        for run in (eager, step):
            torch.manual_seed(seed)
            losses.append(run(batch))
            _differentiate(losses[-1])
        _hold_equal([losses[1], *_gradients(twin)], [losses[0], *_gradients(eager)])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _hold_equal([*twin.state_dict().values()], [*eager.state_dict().values()])


def _differentiate(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _hold_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 1
    assert all(map(torch.any, expected)), "all zeros, which compare nothing"
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"tensor {position} differs by {(one - other).abs().max():.3g}"


def main(names: list[str]) -> None:
    """Try the features, and go on after one that fails."""
    torch.set_num_threads(1)
    for name in names or FEATURES:
        fault = ""
        try:
            torch.manual_seed(0)
            FEATURES[name]()
        except Exception as error:
            traceback.print_exc()
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        print(json.dumps([name, fault]), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # prices and plans of this version alone
        main(sys.argv[1:])
