"""The ways out that refusals name, tried on the very programs: each trains as the program does in eager."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stowplan
from stowplan.errors import BadUse, CaptureError, StowplanError
from tests.errors.programs import Forward, Net, Subclass, X, block, one_process, parent_of

pytestmark = pytest.mark.torch


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one process, which the next tests are not in."""
    one_process()
    yield
    torch.distributed.destroy_process_group()


def trained(model: nn.Module, run: Callable[..., Any], *args: Any) -> list[Tensor]:
    """The loss of two steps and the gradients of the last."""
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = run(*args)
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]


def refused(model: nn.Module, args: tuple[object, ...] = (X,), **how: Any) -> str:
    """What `fit` says of a model."""
    with pytest.raises(StowplanError) as refusal:
        stowplan.fit(model, args, **{"budget": "1MiB", **how})
    return str(refusal.value)


def works(model: nn.Module, *args: Any, **how: Any) -> bool:
    """Whether a fitted model trains with eager's bits, on `X` if nothing else is given."""
    args = args or (X,)
    twin = deepcopy(model)
    fitted = stowplan.fit(model, args, **{"budget": "1MiB", **how})
    ours, eager = trained(model, fitted, *args), trained(twin, twin, *args)
    return len(ours) == len(eager) and all(map(torch.equal, ours, eager))


def own(run: Callable[[Forward, Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    return Forward(run)


def by_parts(model: nn.Module) -> bool:
    """Whether the backend trains a model with a gradient for all that eager has one for."""
    twin = deepcopy(model)
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend="stowplan", options={"budget": "1MiB"})
    ours, eager = trained(model, run, X), trained(twin, twin, X)
    return len(ours) == len(eager) and all(map(torch.allclose, ours, eager))


def test_a_number_that_is_read() -> None:
    assert "remove .item(): use the tensor itself" in refused(
        own(lambda m, x: m.a(x).mean() * x.max().item())
    )
    assert works(own(lambda m, x: m.a(x).mean() * x.max()))


def test_a_choice_by_values_is_run_in_parts() -> None:
    chooses = own(lambda m, x: m.a(x).mean() if m.a(x).sum() > 0 else m.a(x).square().mean())
    assert 'torch.compile(model, backend="stowplan", options=' in refused(chooses)
    assert by_parts(chooses)
    assert works(own(lambda m, x: torch.where(m.a(x).sum() > 0, m.a(x).mean(), m.a(x).square().mean())))


def test_drawn_numbers() -> None:
    """A list of truth values may steer forward, numbers may not."""
    numbers = own(lambda m, x: m.a(x).mean() if torch.rand(3).tolist()[0] < 0.5 else m.a(x).sum())
    assert "(torch.rand(n) < p).tolist()" in refused(numbers)
    assert works(own(lambda m, x: m.a(x).mean() if (torch.rand(3) < 0.5).tolist()[0] else m.a(x).sum()))
    assert works(own(lambda m, x: sum(m.a(x).mean() if d else m.a(x).sum() for d in torch.rand(2) < 0.5)))
    written = own(lambda m, x: m.a(x).mean() if torch.zeros(3).uniform_(0, 1)[0] < 0.5 else m.a(x).sum())
    assert "as in torch.rand(n) < p" in refused(written)


def test_operands_of_two_dtypes() -> None:
    said = refused(Net(), (X.double(),))
    assert "as in x.to(torch.float32)" in said
    assert works(Net(), X.double().to(torch.float32))


def test_lazy_modules() -> None:
    model = parent_of(nn.LazyLinear(4))
    assert "call the model once before fit" in refused(model)
    model(X)
    assert works(model, X)


def test_compiled_modules() -> None:
    model = Net(block())
    compiled: Any = torch.compile(model, backend="eager")
    assert "model._orig_mod" in refused(compiled)
    assert works(compiled._orig_mod, X)


def test_sparse_tensors_and_subclasses() -> None:
    model = own(lambda m, x: torch.mm(m.get_buffer("table"), m.a(x)).mean())
    model.register_buffer("table", torch.eye(8).to_sparse().requires_grad_())
    assert "give x.to_dense()" in refused(model)
    model.register_buffer("table", torch.eye(8))
    assert works(model, X)
    model = own(lambda m, x: torch.mm(getattr(m, "table"), m.a(x)).mean())  # noqa: B009 -- of Any
    vars(model)["table"] = torch.eye(8).to_sparse()
    assert "register it with register_buffer" in refused(model)
    model.register_buffer("table", vars(model).pop("table"))
    assert works(model, X)
    assert "x.as_subclass(torch.Tensor)" in refused(Net(), (X.as_subclass(Subclass),))
    assert works(Net(), X.as_subclass(Subclass).as_subclass(Tensor))


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_collective_in_forward() -> None:
    def gathered(h: Tensor) -> Tensor:
        others = [torch.ones_like(h)]
        torch.distributed.all_gather(others, h)
        return torch.cat(others)

    def gathers(m: Forward, x: Tensor) -> Tensor:
        h = m.a(x)
        loss: Tensor = (h - gathered(h.detach()).flip(0)).square().mean()
        return loss

    said = refused(own(gathers))
    assert "forward calls the collective allgather" in said
    assert "in a function under @torch.compiler.disable" in said
    gathered = vars(torch.compiler)["disable"](gathered)
    assert by_parts(own(gathers))


def test_a_part_that_was_fitted_before() -> None:
    """The whole model's plan has its ops."""
    torch.manual_seed(0)
    model = Net(block())
    twin = deepcopy(model)
    part: Any = model.b
    model.b = stowplan.fit(part, (X,), budget="1MiB", outputs="all")
    fitted = stowplan.fit(model, (X,), budget="1MiB")
    ours, eager = trained(model, fitted, X), trained(twin, twin, X)
    assert all(map(torch.equal, ours, eager))
    assert len(stowplan.plans_of(fitted)) == 1


def test_a_call_inside_a_checkpoint_is_planned_there() -> None:
    model, head = block(), nn.Linear(16, 16)
    fitted = stowplan.fit(model, (X,), budget="1MiB", outputs="all")
    twin = deepcopy((model, head))
    checkpoint(fitted, head(X), use_reentrant=False).sum().backward()
    checkpoint(twin[0], twin[1](X), use_reentrant=False).sum().backward()
    ours, eager = nn.ModuleList((model, head)), nn.ModuleList(twin)
    found = [[p.grad for p in both.parameters() if p.grad is not None] for both in (ours, eager)]
    assert len(found[0]) == len(found[1]) == 4
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
        pytest.param(
            lambda p: torch.optim.Muon(p, lr=0.1),
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="since PyTorch 2.9"),
        ),
    ],
)
def test_optimizers_that_update_in_backward(kind: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    twin = deepcopy(model)
    optimizer, other = kind(model.parameters()), kind(twin.parameters())
    fitted: Any = stowplan.fit(model, (X,), budget="1MiB", loss=torch.sum, optimizer=optimizer)
    for _ in range(3):
        fitted(X).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss: Any = torch.sum(twin(X))
        loss.backward()
        other.step()
        other.zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_plan_by_its_path(tmp_path: Any) -> None:
    model = Net()
    path = tmp_path / "net.plan.json"
    stowplan.plans_of(stowplan.fit(model, (X,), budget="1MiB"))[0].save(path)
    assert stowplan.plans_of(stowplan.fit(model, (X,), budget="1MiB", plan=path))
    with pytest.raises(BadUse, match="cannot be read as a plan"):
        stowplan.fit(model, (X,), budget="1MiB", plan=str(tmp_path / "none.json"))


def test_several_gradients_at_a_time() -> None:
    fitted = stowplan.fit(block(), (X,), budget="1MiB", outputs="all")
    functional: Any = torch.autograd.functional
    with pytest.raises(BadUse, match="one after the other"):
        functional.jacobian(fitted, X, vectorize=True)


def test_a_forward_that_calls_backward() -> None:
    def runs(m: Forward, x: Tensor) -> Tensor:
        loss: Any = m.a(x).mean()
        loss.backward()
        again: Tensor = m.a(x).mean()
        return again

    with pytest.raises(CaptureError, match="forward calls backward itself"):
        stowplan.fit(own(runs), (X,), budget="1MiB")
