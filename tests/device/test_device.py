"""The stand-in itself: its kernels, copies, streams, memory and generator, and the faults that it shows."""

import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stowplan.errors import OutOfDeviceMemory
from stowplan.ir.heap import BlockState
from stowplan.plan.allocator.caching import CachingAllocator
from stowplan.plan.allocator.settings import MIB, AllocatorSettings
from tests.support import device as stand_in
from tests.support.heap_streams import random_size

_ROOT = Path(__file__).parents[2]


def test_it_is_an_accelerator_with_two_devices(device: torch.device) -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("standin")
    assert torch.accelerator.device_count() == 2
    there = torch.ones(3, device="standin:1")
    assert there.device.index == 1
    assert torch.equal(there.to(device).cpu(), torch.ones(3))
    with pytest.raises(RuntimeError, match="two devices"):
        there + torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)


def test_kernels_give_the_bits_of_the_cpu(device: torch.device) -> None:
    def trained(where: torch.device | str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
        )
        data = torch.randn(4, 3, 8, 8)
        model, data = model.to(where), data.to(where)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(data), torch.arange(4, device=where)))
            optimizer.step()
        return [value.cpu() for value in model.state_dict().values()]

    assert all(map(torch.equal, trained(device), trained("cpu")))


def test_ops_whose_shape_depends_on_values_are_waited_for(device: torch.device) -> None:
    data = torch.arange(6.0, device=device)
    assert torch.nonzero(data > 2).shape == (3, 1)
    assert data[data > 2].tolist() == [3, 4, 5]
    assert torch.equal(data, data.clone())
    assert data.sum().item() == 15


def test_a_kernel_that_fails_is_told_at_the_next_wait(device: torch.device) -> None:
    torch.zeros(4, device=device).index_select(0, torch.tensor([9], device=device))
    with pytest.raises(RuntimeError, match="index"):
        torch.accelerator.synchronize()


def test_the_host_goes_on_while_kernels_and_copies_run(device: torch.device) -> None:
    stream = torch.Stream(device=device)
    pinned = torch.zeros(8, pin_memory=True)
    with stand_in.held(stream):
        with stream:
            made = torch.ones(8, device=device) * 2
            pinned.copy_(made, non_blocking=True)
        event = stream.record_event()
        assert not event.query()
        assert pinned.tolist() == [0] * 8
    event.synchronize()
    assert pinned.tolist() == [2] * 8


def test_a_missing_wait_is_a_fault_and_shows_in_the_bits(device: torch.device) -> None:
    stream = torch.Stream(device=device)
    target = torch.zeros(8, device=device)
    torch.accelerator.synchronize()
    with stand_in.held(stream):
        with stream:
            target.add_(1)
        assert (target * 1).tolist() == [0] * 8
    (fault,) = stand_in.take_faults()
    assert "mul on stream 0 reads memory that aten::add" in fault
    torch.accelerator.current_stream().wait_stream(stream)
    assert (target * 1).tolist() == [1] * 8


def test_a_missing_wait_is_a_fault_even_if_the_threads_ran_in_order(device: torch.device) -> None:
    stream = torch.Stream(device=device)
    data = torch.ones(8, device=device)
    with stream:
        data * 2
    stream.wait_event(torch.accelerator.current_stream().record_event())
    with stream:
        data * 2
    torch.accelerator.current_stream().wait_stream(stream)  # before `data` is freed
    (fault,) = stand_in.take_faults()
    assert "reads memory that" in fault


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_freed_while_a_stream_uses_it_is_a_fault(recorded: bool, device: torch.device) -> None:
    stream = torch.Stream(device=device)
    data = torch.ones(8, device=device)
    stream.wait_event(torch.accelerator.current_stream().record_event())
    with stand_in.held(stream):
        with stream:
            made = data * 2
        if recorded:
            data.record_stream(stream)
        del data
        torch.accelerator.current_stream().synchronize()
    stream.synchronize()
    faults = stand_in.take_faults()
    assert made.isnan().all() == (not recorded)
    assert ["was freed while aten::mul" in fault for fault in faults] == [True] * (not recorded)


def test_memory_that_is_emptied_cannot_be_used(device: torch.device) -> None:
    data = torch.ones(8, device=device)
    data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="after it was freed"):
        data + 1
    data.untyped_storage().resize_(32)
    assert data.isnan().all()


def test_the_host_faults_on_memory_of_the_device() -> None:
    code = (
        "import ctypes, torch; from tests.support.device import load; load();"
        "ctypes.string_at(torch.ones(8, device='standin').data_ptr(), 4)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=_ROOT).returncode == -signal.SIGSEGV


def test_a_full_device_is_out_of_memory_and_goes_on(device: torch.device) -> None:
    torch.accelerator.empty_cache()
    held = torch.accelerator.memory_reserved()
    stand_in.set_capacity(held + 40 * MIB)
    first = torch.zeros(30 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20971520 bytes"):
        torch.zeros(20 * MIB, dtype=torch.uint8, device=device)
    del first
    assert torch.zeros(20 * MIB, dtype=torch.uint8, device=device).sum().item() == 0
    assert torch.accelerator.get_memory_info(device) == (8 * MIB, held + 40 * MIB)


def test_a_generator_is_its_state(device: torch.device) -> None:
    module = torch.get_device_module(device)
    torch.manual_seed(7)
    state = module.get_rng_state()
    first, dropped = torch.randn(5, device=device), F.dropout(torch.ones(50, device=device))
    module.set_rng_state(state)
    assert torch.equal(torch.randn(5, device=device), first)
    assert torch.equal(F.dropout(torch.ones(50, device=device)), dropped)
    assert not torch.equal(torch.randn(5, device=device), first)
    own = torch.Generator(device).manual_seed(7)
    assert torch.equal(torch.randn(5, device=device, generator=own), first)
    with torch.random.fork_rng([0], device_type="standin"):
        before = torch.randn(5, device=device)
    assert torch.equal(torch.randn(5, device=device), before)


@pytest.mark.parametrize("seed", range(6))
def test_its_allocator_places_every_block_where_the_model_does(seed: int) -> None:
    random = Random(seed)
    torch.accelerator.synchronize(1)
    torch.accelerator.empty_cache()
    assert stand_in.layout(1) == []
    capacity = random.choice((64, 200, 600)) * MIB
    stand_in.set_capacity(capacity, 1)
    model = CachingAllocator(AllocatorSettings(capacity_bytes=capacity))
    streams = [torch.accelerator.current_stream(1), *(torch.Stream(device="standin:1") for _ in range(2))]
    living: list[tuple[Tensor, int]] = []
    for _ in range(150):
        if living and random.random() < 0.45:
            model.free(living.pop(random.randrange(len(living)))[1])
        elif living and random.random() < 0.1:
            chosen, number = random.randrange(len(living)), random.randrange(3)
            living[chosen][0].record_stream(streams[number])
            model.record_stream(living[chosen][1], number)
        else:
            _request(model, random, streams, living)
    found = [segment._replace(address=0) for segment in stand_in.layout(1)]
    numbers = {stream.stream_id: number for number, stream in enumerate(streams)}
    assert len(found) == len(model.segments()) > 2
    for ours, theirs in zip(found, model.segments(), strict=True):
        assert (ours.nbytes, ours.is_small) == (theirs.nbytes, theirs.is_small)
        assert numbers[ours.stream % 17] == theirs.stream
        assert ours.blocks == tuple((b.nbytes, b.state, b.requested_bytes) for b in theirs.blocks)
    stats = torch.accelerator.memory_stats(1)
    assert stats["reserved_bytes.all.current"] == model.reserved_bytes
    assert stats["allocated_bytes.all.current"] == model.allocated_bytes
    assert stats["requested_bytes.all.current"] == model.requested_bytes
    assert {block[1] for segment in found for block in segment.blocks} >= {BlockState.FREE}


def _request(
    model: CachingAllocator, random: Random, streams: list[torch.Stream], living: list[tuple[Tensor, int]]
) -> None:
    nbytes, number = random_size(random), random.randrange(3)
    torch.accelerator.synchronize(1)
    for stream in range(3):
        model.pass_events(stream)
    try:
        address = model.malloc(nbytes, number)
    except OutOfDeviceMemory:
        with streams[number], pytest.raises(torch.OutOfMemoryError):
            torch.empty(nbytes, dtype=torch.uint8, device="standin:1")
        return
    with streams[number]:
        living.append((torch.empty(nbytes, dtype=torch.uint8, device="standin:1"), address))
