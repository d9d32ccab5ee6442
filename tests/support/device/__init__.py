"""A stand-in for an accelerator: two devices with memory that the host cannot touch, and threads as streams.

`load()` registers it as `torch.device("standin")`, once for a process and for good: the process then has an
accelerator. Tests of it run in a process of their own (`tests/device`).
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from stowplan.ir.heap import BlockState

NAME = "standin"
_HERE = Path(__file__).parent
_SOURCES = tuple(sorted(_HERE.glob("*.cpp")))


def why_not() -> str:
    """Why the device cannot be built here, or nothing."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    return f"the stand-in device is C++, and here is no {' and no '.join(missing)}" if missing else ""


def load() -> types.ModuleType:
    """The device's module, `torch.standin`; built if no process has built it from these sources before."""
    if not hasattr(torch, NAME):
        ctypes.CDLL(str(_built()))
        rename_privateuse1_backend(NAME)
        sys.modules[f"torch.{NAME}"] = module = _module()
        setattr(torch, NAME, module)
        generate_methods_for_privateuse1_backend(for_storage=True)
    module = getattr(torch, NAME)
    assert isinstance(module, types.ModuleType)
    return module


def take_faults() -> list[str]:
    """Missing waits and early frees since the last call, each as a sentence."""
    return list(torch.ops.standin.take_faults())


def delay(most_microseconds: int, *, seed: int = 0) -> None:
    """Let each kernel and copy begin late by a random time."""
    torch.ops.standin.set_delay(most_microseconds, seed)


@contextmanager
def held(*streams: torch.Stream) -> Iterator[None]:
    """Let the streams begin nothing inside, whatever the host and other streams do."""
    for stream in streams:
        torch.ops.standin.hold(stream.device_index, stream.stream_id, True)
    try:
        yield
    finally:
        for stream in streams:
            torch.ops.standin.hold(stream.device_index, stream.stream_id, False)


def set_capacity(nbytes: int, device: int = 0) -> None:
    """The memory that a device has, 0 for its own."""
    torch.ops.standin.set_capacity(device, nbytes)


def reset() -> None:
    """No delays, and devices of their own size."""
    delay(0)
    for device in range(torch.ops.standin.device_count()):
        set_capacity(0, device)


class Segment(NamedTuple):
    """Memory that the allocator took at once, and its blocks: size, state, and bytes as requested."""

    address: int
    nbytes: int
    stream: int
    is_small: bool
    blocks: tuple[tuple[int, BlockState, int], ...]


def layout(device: int = 0) -> list[Segment]:
    """All segments of a device."""
    states = (BlockState.FREE, BlockState.ALLOCATED, BlockState.WAITING)
    numbers = iter(torch.ops.standin.layout(device))
    found = []
    for address in numbers:
        nbytes, stream, is_small, count = islice(numbers, 4)
        blocks = (islice(numbers, 3) for _ in range(count))
        told = tuple((size, states[state], requested) for size, state, requested in blocks)
        found.append(Segment(address, nbytes, stream, bool(is_small), told))
    return found


def _built() -> Path:
    files = sorted([*_SOURCES, *_HERE.glob("*.h")])
    content = b"".join([torch.__version__.encode(), *(path.read_bytes() for path in files)])
    key = f"stowplan-standin-{os.getuid()}-{hashlib.sha256(content).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / key
    folder.mkdir(mode=0o700, exist_ok=True)
    library, done = folder / f"{NAME}.so", folder / "done"
    with (folder / "building").open("w") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # another process may be building it: then it is there when this one goes on
        if not done.exists():
            from torch.utils.cpp_extension import load as build

            build(
                NAME,
                [str(path) for path in _SOURCES],
                build_directory=str(folder),
                extra_cflags=["-std=c++20", "-O0", "-fopenmp"],
                is_python_module=False,
            )
            done.touch()
    return library


class _Device:
    """`with torch.standin.device(1):`"""

    def __init__(self, device: "torch.device | int | str") -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _index(device: "torch.device | int | str | None" = None) -> int:
    found = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if found is None else found


def _module() -> types.ModuleType:
    """What PyTorch and its users expect of `torch.cuda` and its like."""
    ops, accelerator = torch.ops.standin, torch.accelerator
    module = types.ModuleType(f"torch.{NAME}")

    def manual_seed(seed: int) -> None:
        ops.manual_seed(_index(), seed)

    def manual_seed_all(seed: int) -> None:
        for device in range(ops.device_count()):
            ops.manual_seed(device, seed)

    def set_rng_state(state: torch.Tensor, device: "torch.device | int | str" = NAME) -> None:
        ops.set_rng_state(_index(device), state)

    def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
        for device, state in enumerate(states):
            ops.set_rng_state(device, state)

    offered = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": ops.device_count,
        "device": _Device,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "synchronize": accelerator.synchronize,
        "current_stream": lambda device=None: accelerator.current_stream(_index(device)),
        "Stream": torch.Stream,
        "Event": torch.Event,
        "empty_cache": accelerator.empty_cache,
        "get_device_name": lambda _device=None: "stand-in",
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda _including_emulation=True: True,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: ops.initial_seed(_index()),
        "get_rng_state": lambda device=NAME: ops.get_rng_state(_index(device)),
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [ops.get_rng_state(device) for device in range(ops.device_count())],
        "set_rng_state_all": set_rng_state_all,
    }
    for name, function in offered.items():
        setattr(module, name, function)
    return module
