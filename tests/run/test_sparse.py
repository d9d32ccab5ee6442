"""Sparse arguments and buffers are planned with their indices and values."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowplan
from stowplan import Search
from stowplan.errors import BadUse, BudgetTooSmall, CaptureError
from stowplan.run.measure.measure import measure

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:Sparse")]

NODES = 60
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.spmm": torch.spmm,
    "torch.sparse.mm": torch.sparse.mm,
    "@": Tensor.__matmul__,
    "transposed": lambda adjacency, x: adjacency.t() @ x,
    "torch.sparse.addmm": lambda adjacency, x: torch.sparse.addmm(torch.ones_like(x), adjacency, x),
    "to_dense": lambda adjacency, x: adjacency.to_dense() @ x,
    "in float64": lambda adjacency, x: (adjacency.double() @ x.double()).float(),
    "columns": lambda adjacency, x: torch.stack([adjacency.mv(column) for column in x.unbind(1)], 1),
}


class Convolution(nn.Module):
    """A layer of pygcn."""

    def __init__(self, inputs: int, outputs: int, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.1)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.product(adjacency, torch.mm(x, self.weight)) + self.bias


class Network(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor] = torch.spmm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Convolution(20, 64, product), Convolution(64, 7, product)

    def forward(self, x: Tensor, y: Tensor, adjacency: Tensor) -> Tensor:
        h = F.dropout(F.relu(self.first(x, adjacency)), 0.5, self.training)
        return F.nll_loss(F.log_softmax(self.second(h, adjacency), dim=1), y)


class WithBuffer(Network):
    adjacency: Tensor

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], adjacency: Tensor) -> None:
        super().__init__(product)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: Tensor, y: Tensor, adjacency: Tensor | None = None) -> Tensor:
        return super().forward(x, y, self.adjacency if adjacency is None else adjacency)


def edges(seed: int, share: float = 0.1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(NODES, NODES, generator=draw).argsort() < share * NODES
    return chosen * torch.rand(NODES, NODES, generator=draw)


X = torch.randn(NODES, 20, generator=torch.Generator().manual_seed(3))
Y = torch.arange(NODES) % 7


def outcome(model: Any, *args: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = model(*args)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def same(one: Any, other: Any, *args: Any) -> bool:
    return all(map(torch.equal, outcome(one, *args), outcome(other, *args)))


def fitted_of(model: nn.Module, *args: Any, budget: int | str = "1GiB") -> Any:
    return stowplan.fit(model, args, budget=budget, search=Search(moves=1), allow=("recompute",))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_graph_network_has_eagers_bits(layout: str, product: str) -> None:
    first, second = (LAYOUTS[layout](edges(seed)) for seed in (1, 2))
    model = Network(PRODUCTS[product])
    fitted = fitted_of(deepcopy(model), X, Y, first)
    assert same(model, fitted, X, Y, first)
    assert same(model, fitted, X, Y, second)  # read anew
    (plan,) = stowplan.plans_of(fitted)
    assert plan.exactness == "bitwise"
    assert same(model, fitted, X, Y, LAYOUTS[layout](edges(1, share=0.3)))
    assert len(stowplan.plans_of(fitted)) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_buffer_is_read_anew(layout: str) -> None:
    model, twin = (WithBuffer(torch.sparse.mm, LAYOUTS[layout](edges(1))) for _ in range(2))
    fitted: Any = fitted_of(twin, X, Y)
    assert same(model, fitted, X, Y)
    for each in (model, fitted):
        (each.adjacency._values() if layout == "coo" else each.adjacency.values()).mul_(2)
    assert same(model, fitted, X, Y)
    model.adjacency = fitted.adjacency = LAYOUTS[layout](edges(2))
    assert same(model, fitted, X, Y)
    assert len(stowplan.plans_of(fitted)) == 1
    model.adjacency = fitted.adjacency = LAYOUTS[layout](edges(2, share=0.2))
    assert same(model, fitted, X, Y)
    assert len(stowplan.plans_of(fitted)) == 2


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_tight_budget_holds(layout: str) -> None:
    adjacency = LAYOUTS[layout](edges(1))
    model = Network()
    (roomy,) = stowplan.plans_of(fitted_of(model, X, Y, adjacency))
    with pytest.raises(stowplan.BudgetTooSmall) as refusal:
        fitted_of(model, X, Y, adjacency, budget="64KiB")
    smallest = refusal.value.minimum_bytes
    assert smallest < roomy.projected_peak_bytes
    fitted = fitted_of(deepcopy(model), X, Y, adjacency, budget=smallest)
    assert same(model, fitted, X, Y, adjacency)
    fitted.zero_grad(set_to_none=True)
    parts = [adjacency._indices(), adjacency._values()] if layout == "coo" else [adjacency.values()]
    parts += [] if layout == "coo" else [adjacency.crow_indices(), adjacency.col_indices()]
    there = [*fitted.parameters(), X, Y, *parts]
    measured = measure(lambda: fitted(X, Y, adjacency).backward(), before=there).measured_peak_bytes
    assert 0.8 * smallest < measured <= smallest


class Heads(nn.Module):
    """Whisper keeps a sparse table that its forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(20, 3)
        self.register_buffer("alignment_heads", torch.eye(3, dtype=torch.bool).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x).square().mean()
        return loss


def test_a_sparse_buffer_that_is_never_read() -> None:
    model = Heads()
    fitted = fitted_of(Heads(), X)
    assert same(model, fitted, X)
    assert same(model, fitted, X[:7])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stowplan.fit(model, (X,), budget="1GiB", optimizer=optimizer, search=Search(moves=1))


def test_its_parts_may_be_read() -> None:
    class Edges(Network):
        def forward(self, x: Tensor, y: Tensor, adjacency: Tensor) -> Tensor:
            h = self.first(x, adjacency)[adjacency.indices()[0]] * adjacency.values()[:, None]
            total: Tensor = h.square().mean() + torch.sparse.sum(adjacency)
            return total * adjacency._nnz() / y.numel()

    model, adjacency = Edges(), edges(1).to_sparse()
    fitted = stowplan.fit(deepcopy(model), (X, Y, adjacency), budget="1GiB", search=Search(moves=1))
    for seed in (1, 2):
        adjacency = edges(seed).to_sparse()
        pairs = zip(_losses(model, X, Y, adjacency), _losses(fitted, X, Y, adjacency), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def _losses(model: Any, *args: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(*args)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_forward_may_write_into_the_values() -> None:
    class Decaying(WithBuffer):
        def forward(self, x: Tensor, y: Tensor, adjacency: Tensor | None = None) -> Tensor:
            self.adjacency.values().mul_(0.5)
            return super().forward(x, y, adjacency)

    model = Decaying(torch.spmm, edges(1).to_sparse())
    fitted: Any = fitted_of(Decaying(torch.spmm, edges(1).to_sparse()), X, Y)
    for _ in range(3):
        assert same(model, fitted, X, Y)
        assert torch.equal(model.adjacency.values(), fitted.adjacency.values())


def test_a_sparse_argument_that_forward_keeps() -> None:
    class Keeping(Network):
        def forward(self, x: Tensor, y: Tensor, adjacency: Tensor) -> Tensor:
            self.kept = adjacency
            return super().forward(x, y, adjacency)

    adjacency = edges(1).to_sparse()
    fitted: Any = fitted_of(Keeping(), X, Y, adjacency)
    fitted(X, Y, adjacency)
    assert fitted.kept is adjacency


def test_inside_autocast() -> None:
    model, adjacency = Network(), edges(1).to_sparse()
    with torch.autocast("cpu", torch.bfloat16):
        assert same(model, fitted_of(deepcopy(model), X, Y, adjacency), X, Y, adjacency)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (lambda adjacency, x: (adjacency * 2) @ x, "aten.mul"),
        (lambda adjacency, x: torch.sparse.softmax(adjacency, 1) @ x, "_sparse_softmax"),
        (lambda adjacency, x: adjacency.mul_(2) @ x, "aten.mul_"),
        (lambda adjacency, x: torch.sparse.mm(adjacency, adjacency) @ x, "_sparse_sparse_matmul"),
    ],
)
def test_other_ops_are_refused_by_name(line: Callable[[Tensor, Tensor], Tensor], words: str) -> None:
    with pytest.raises(CaptureError, match=words) as refusal:
        fitted_of(Network(line), X, Y, edges(1).to_sparse())
    assert "outside forward" in str(refusal.value)
    assert "test_sparse.py" in str(refusal.value)


def test_gradients_for_sparse_tensors_are_refused_by_name() -> None:
    adjacency = edges(1).to_sparse().requires_grad_()
    with pytest.raises(BadUse, match="argument 'adjacency' is a sparse tensor that requires a gradient"):
        fitted_of(Network(), X, Y, adjacency)
    fitted = fitted_of(Network(), X, Y, edges(1).to_sparse())
    with pytest.raises(CaptureError, match="sparse tensor of 60x60 requires a gradient"):
        fitted(X, Y, adjacency)
    assert same(Network(), fitted, X, Y, adjacency.detach())


def test_a_step_with_a_sparse_argument_is_not_tiled() -> None:
    args = (X, Y, edges(1).to_sparse())
    with pytest.raises(BudgetTooSmall) as smallest:
        stowplan.fit(Network(), args, budget=1, allow=("recompute",))
    with pytest.raises(BudgetTooSmall, match="reads a sparse tensor, of which tiles know no rows"):
        stowplan.fit(Network(), args, budget=smallest.value.minimum_bytes - 8, allow=("recompute", "tile"))
