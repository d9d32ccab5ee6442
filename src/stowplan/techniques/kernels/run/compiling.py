"""Compiling kernels in child processes, which leave what they compile in PyTorch's cache on disk.

The compiler may take seconds for each kernel, or hang: a child can be ended, and two compile on two cores.
This process then finds each kernel in the cache. A child is `python -m` of this module with a file.
"""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

import msgspec
import torch

from stowplan.capture import Argument, Call, Ref
from stowplan.run.cost.probe import Operand
from stowplan.techniques.kernels.run.kernel import Kernel
from stowplan.watch import patience, tell_phase

MOST_SECONDS = 300.0  # for all kernels of a step, unless a time limit leaves less
_FIRST_SECONDS, _SECONDS = 20.0, 4.0  # what the first kernel of a machine took here, and each other one
_MOST_CHILDREN = 4
_LOGGER = logging.getLogger("stowplan")


def compile_all(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Let children compile these, and return those for which there was no time."""
    if not kernels:
        return []
    limit = min(MOST_SECONDS, patience().seconds_left / 2)
    children = max(1, min(_MOST_CHILDREN, os.cpu_count() or 1, len(kernels) // 4))
    expected = _FIRST_SECONDS + _SECONDS * len(kernels) / children
    _LOGGER.info(
        "compiling %d kernels, once on this machine: about %.0f s, at most %.0f s",
        len(kernels),
        expected,
        limit,
    )
    with tempfile.TemporaryDirectory() as folder:
        shares = [kernels[number::children] for number in range(children)]
        lines: SimpleQueue[str | None] = SimpleQueue()
        running = [_Child(share, Path(folder) / str(number), lines) for number, share in enumerate(shares)]
        try:
            _wait_for(lines, len(running), len(kernels), monotonic() + limit)
        finally:
            late = [kernel for child in running for kernel in child.end()]
    if late:
        _LOGGER.warning(
            "the time for compiling is over: %d of %d kernels stay eager", len(late), len(kernels)
        )
    return late


class _Child:
    """A process that compiles some kernels, one after the other, and writes a line for each."""

    def __init__(self, kernels: Sequence[Kernel], file: Path, lines: "SimpleQueue[str | None]") -> None:
        file.write_bytes(msgspec.msgpack.encode((torch.get_num_threads(), [*map(packed, kernels)])))
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stowplan.techniques.kernels.run.compiling", str(file)],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._lines, self._kernels, self._done = lines, kernels, 0
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """One line for each kernel, as they come, and None at the end."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._done += 1
            self._lines.put(line)
        self._lines.put(None)

    def end(self) -> Sequence[Kernel]:
        """End the process, if it has not ended; the kernels that it did not come to."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._kernels[self._done :]


def _wait_for(lines: "SimpleQueue[str | None]", children: int, count: int, deadline: float) -> None:
    done = 0
    while children:
        tell_phase("compiling kernels", done, count)
        try:
            line = lines.get(timeout=max(0.0, deadline - monotonic()))
        except Empty:
            return
        done += line is not None
        children -= line is None


def packed(kernel: Kernel) -> Any:
    """A kernel for another process, as what msgspec writes."""
    return (
        [
            (str(c.target), _plain(c.args), {n: _plain(v) for n, v in c.kwargs.items()}, c.outputs, c.single)
            for c in kernel.calls
        ],
        [(n, o.shape, o.stride, _plain(o.dtype)) for n, o in zip(kernel.operands, kernel.looks, strict=True)],
        [
            (n, o.shape, o.stride, _plain(o.dtype))
            for n, o in zip(kernel.results, kernel.result_looks, strict=True)
        ],
    )


def unpacked(content: Any) -> Kernel:
    """The kernel that was packed."""
    calls, operands, results = content
    made = [
        Call(
            _found(torch.ops, op),
            _argument(args),
            {n: _argument(v) for n, v in kwargs.items()},
            tuple(outputs),
            single,
        )
        for op, args, kwargs, outputs, single in calls
    ]
    return Kernel(made, _looks(operands), _looks(results))


def _looks(content: Any) -> dict[str, Operand]:
    cpu = torch.device("cpu")
    return {
        name: Operand(tuple(shape), tuple(stride), _argument(dtype), cpu)
        for name, shape, stride, dtype in content
    }


def _plain(value: Argument) -> Any:
    """An argument as msgspec writes it: what is no number or text is a word and a text."""
    match value:
        case Ref(name):
            return {"tensor": name}
        case tuple():
            return [_plain(item) for item in value]
        case torch.device():
            return {"device": str(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(value).removeprefix("torch.")}
        case _:
            return value


def _argument(value: Any) -> Any:
    match value:
        case {"tensor": name}:
            return Ref(name)
        case list():
            return tuple(map(_argument, value))
        case {"device": name}:
            return torch.device(name)
        case {"torch": name}:
            return _found(torch, name)
        case _:
            return value


def _found(base: object, dotted: str) -> Any:
    return reduce(getattr, dotted.split("."), base)


def main(file: str) -> None:
    """Compile the kernels of a file that the parent wrote."""
    threads, kernels = msgspec.msgpack.decode(Path(file).read_bytes())
    torch.set_num_threads(threads)
    for content in kernels:
        try:
            unpacked(content).compile()
            print("compiled", flush=True)
        except Exception as fault:  # the parent meets it as well, and tells
            print(type(fault).__name__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
