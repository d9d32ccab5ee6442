"""A fitted model under the tools that people train with: the same bits as eager under the same tools."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stowplan import Search
from stowplan.errors import BadUse
from stowplan.run.fit import fit, plans_of
from stowplan.run.measure.measure import measure
from tests.support.models import MOVES, Chain, budget_halfway, fitted_copy, images
from tests.support.side_by_side import Training, different, trained
from tests.support.workers.processes import Work, two_processes

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

ARGS = (images(512, 16),)


def both(train: Callable[[nn.Module], Training], model: nn.Module) -> list[str]:
    """How `train` comes out differently for a fitted copy of the model."""
    fitted = fitted_copy(model, ARGS)
    return different(train(model), train(fitted))


def state_of(model: nn.Module) -> Training:
    """Parameters, buffers, gradients and the generator, where they are sharded as a whole."""
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {**model.state_dict(), **gradients, "generator": torch.get_rng_state()}
    return {name: _whole(tensor).clone() for name, tensor in found.items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
def test_autocast() -> None:
    def train(model: nn.Module) -> Training:
        def under_autocast(x: Tensor) -> object:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return trained(under_autocast, model, ARGS, steps=3)

    assert both(train, Chain(dropout=0.1)) == []


@pytest.mark.slow
def test_autocast_is_another_step() -> None:
    fitted = fitted_copy(Chain(), ARGS)
    with torch.autocast("cpu", torch.bfloat16):
        fitted(*ARGS)
    assert len(plans_of(fitted)) == 2


@pytest.mark.slow
def test_grad_scaler() -> None:
    """The first scale is too large for half precision: the scaler must see the overflow and skip a step."""

    def train(model: nn.Module) -> Training:
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-12), []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(*ARGS)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [2.0**12] * 4
        return {**state_of(model), "scales": torch.tensor(scales)}

    assert both(train, Chain(dropout=0.1)) == []


def accumulated(model: nn.Module) -> Training:
    """Two optimizer steps, each over the gradients of three batches."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        for part in range(3):
            (model(ARGS[0] * (part + 1)) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return state_of(model)


@pytest.mark.slow
def test_gradient_accumulation() -> None:
    assert both(accumulated, Chain(dropout=0.1)) == []


@pytest.mark.slow
def test_two_forwards_before_their_backwards() -> None:
    """Statistics are updated twice before the first backward."""

    def train(model: nn.Module) -> Training:
        return trained(lambda x: model(x) + model(2 * x), model, ARGS)

    assert both(train, Chain(dropout=0.1)) == []


@pytest.mark.slow
def test_second_derivatives_are_refused() -> None:
    """A penalty on gradients that came out as constants would be left out of the gradients without a word."""
    fitted = fitted_copy(Chain(), ARGS)
    with pytest.raises(BadUse, match="create_graph"):
        torch.autograd.grad(fitted(*ARGS), list(fitted.parameters()), create_graph=True)


@pytest.mark.slow
def test_what_comes_out_can_be_written_into() -> None:
    def train(model: nn.Module) -> Training:
        def with_residual(x: Tensor) -> Tensor:
            made: Tensor = model(x)
            made += x
            return made.relu_().square().sum()

        return trained(with_residual, model, ARGS)

    layers = (nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    assert both(train, nn.Sequential(*layers)) == []


@pytest.mark.slow
def test_gradients_that_are_there_already_are_reserved_for() -> None:
    model = Chain()
    fitted = fitted_copy(model, ARGS)
    (plan,) = plans_of(fitted)

    def step() -> None:
        fitted(*ARGS).backward()

    step()
    before = [p.grad for p in fitted.parameters() if p.grad is not None]
    there = [*fitted.parameters(), *fitted.buffers(), *ARGS, *before]
    reserve = sum(gradient.nbytes for gradient in before)
    del before
    assert measure(step, before=there).measured_peak_bytes <= plan.allowed_bytes + reserve


@pytest.mark.slow
def test_evaluation_between_steps() -> None:
    def train(model: nn.Module) -> Training:
        losses = []
        for _ in range(2):
            trained(model, model, ARGS, steps=1)
            model.eval()
            with torch.no_grad():
                losses.append(model(images(100, 16)))
            with torch.inference_mode():
                losses.append(model(images(100, 16)).clone())
            model.train()
        return {**state_of(model), "losses": torch.stack(losses)}

    model = Chain(dropout=0.1)
    fitted = fitted_copy(model, ARGS)
    assert different(train(model), train(fitted)) == []
    assert len(plans_of(fitted)) == 1


@pytest.mark.slow
def test_frozen_parameters() -> None:
    def train(model: nn.Module) -> Training:
        first = trained(model, model, ARGS)
        model.get_submodule("blocks.0").requires_grad_(False)
        return {**first, **{f"frozen {name}": t for name, t in trained(model, model, ARGS).items()}}

    assert both(train, Chain(dropout=0.1)) == []


@pytest.mark.slow
def test_state_is_saved_and_loaded(tmp_path: Path) -> None:
    """Training goes on from a file as if it had not been interrupted, between eager and fitted either way."""
    model = Chain(dropout=0.1)
    fitted = fitted_copy(model, ARGS)
    files = []
    for number, each in enumerate((model, fitted)):
        trained(each, each, ARGS)
        files.append(tmp_path / f"{number}.pt")
        torch.save(each.state_dict(), files[-1])
    states = [torch.load(file) for file in files]
    assert different(*states) == []
    fresh = Chain(dropout=0.1)
    fresh.load_state_dict(states[1])
    refitted = fitted_copy(Chain(dropout=0.1), ARGS)
    refitted.load_state_dict(states[0])
    assert different(trained(fresh, fresh, ARGS), trained(refitted, refitted, ARGS)) == []


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Work], None]]:
    """Runs a function of this module in two processes at once."""
    with two_processes(tmp_path_factory.mktemp("gloo")) as run:
        yield run


def own_part() -> tuple[Tensor]:
    """Each process trains on data of its own."""
    return (torch.randn(512, 16, generator=torch.Generator().manual_seed(dist.get_rank())),)


def same_chain(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> Chain:
    """In both processes."""
    torch.manual_seed(0)
    return Chain(dropout=0.1, norm=norm)


@pytest.mark.distributed
def test_distributed_data_parallel(in_two_processes: Callable[[Work], None]) -> None:
    in_two_processes(_train_in_parallel)


def _train_in_parallel() -> None:
    model, args = same_chain(), own_part()
    fitted = fitted_copy(model, args)
    arrivals: Counter[Tensor] = Counter()
    for parameter in fitted.parameters():
        parameter.register_post_accumulate_grad_hook(lambda arrived: arrivals.update([arrived]))  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    pair = DistributedDataParallel(model), DistributedDataParallel(fitted)
    expected, found = (trained(each, each, args, steps=3) for each in pair)
    assert different(expected, found) == []
    assert arrivals == dict.fromkeys(fitted.parameters(), 3)

    expected, found = (_without_sync(each, args) for each in pair)
    assert different(expected, found) == []
    for gradient in (p.grad for p in fitted.parameters() if p.grad is not None):
        others = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(others, gradient)
        assert torch.equal(*others)


def _without_sync(model: DistributedDataParallel, args: tuple[Tensor]) -> Training:
    """Three batches of which only the last is averaged over the processes."""
    torch.manual_seed(7)
    model.zero_grad()
    for part in range(3):
        with nullcontext() if part == 2 else model.no_sync():
            model(*args).backward()
    return state_of(model)


@pytest.mark.distributed
def test_a_wrapped_model_is_refused(in_two_processes: Callable[[Work], None]) -> None:
    in_two_processes(_refuse_wrapped)


def _refuse_wrapped() -> None:
    model = Chain()
    with pytest.raises(BadUse, match=r"DistributedDataParallel\(fit\(...\)\)"):
        fit(DistributedDataParallel(model), ARGS, budget="1GiB")
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(BadUse, match=r"is a DTensor .* fully_shard\(fit\(...\)\)"):
        fit(sharded, ARGS, budget="1GiB")
    fitted = fit(model, ARGS, budget="1GiB", search=Search(moves=MOVES))
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(fitted, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(BadUse, match=r"blocks.0.* is a DTensor"):
        fitted(*ARGS)


@pytest.mark.distributed
def test_fully_shard(in_two_processes: Callable[[Work], None]) -> None:
    in_two_processes(_train_sharded)


def _train_sharded() -> None:
    args, mesh = own_part(), init_device_mesh("cpu", (2,))
    pair = same_chain(), fitted_copy(same_chain(), args)
    for each in pair:
        fully_shard(each, mesh=mesh)
        assert isinstance(each, FSDPModule)
    assert different(*(_sharded_steps(each, args) for each in pair)) == []
    assert len(plans_of(pair[1])) == 1
    fewer = (args[0][:256],)
    assert different(*(_sharded_steps(each, fewer) for each in pair)) == []
    assert len(plans_of(pair[1])) == 1  # half of the rows fit without a plan


def _sharded_steps(model: nn.Module, args: tuple[Tensor]) -> Training:
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    states: Training = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        optimizer.step()
        states |= {f"{name} {step}": tensor for name, tensor in {**state_of(model), "loss": loss}.items()}
    return states


@pytest.mark.distributed
def test_fully_shard_of_blocks_and_in_mixed_precision(in_two_processes: Callable[[Work], None]) -> None:
    in_two_processes(_train_sharded_blocks)


def _train_sharded_blocks() -> None:
    args, mesh = own_part(), init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    pair = tuple(same_chain(nn.LayerNorm) for _ in range(2))
    for number, block in enumerate(pair[1].blocks):
        pair[1].blocks[number] = fit(
            block, args, budget=budget_halfway(block, args), search=Search(moves=MOVES), allow=("recompute",)
        )
    for each in pair:
        for block in each.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(each, mesh=mesh, mp_policy=policy)
    assert different(*(_sharded_steps(each, args) for each in pair)) == []
