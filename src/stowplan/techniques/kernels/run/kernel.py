"""Kernel: the ops of a group as one call of PyTorch, by inductor's kernel or by the ops themselves.

Groups that are alike share a kernel: its text has anonymous tensors (`%0` is the first operand) with their
shapes, strides and dtypes. The text, and the C++ compiler, are what a kernel is known by in graphs
and prices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from stowplan.capture import Argument, Call, Handle, Ref
from stowplan.capture.program import filled, handle_of, outputs_by_name
from stowplan.run.cost.probe import Operand, anonymous, spelled_argument
from stowplan.techniques.kernels.run import decompositions
from stowplan.torch_private import compiled_by_inductor, cpp_compiler

Function = Callable[[list[Tensor]], Sequence[Tensor]]


class Kernel(Handle):
    """Computes results from operands, by its ops until it adopts a compiled function.

    `is_exact` says whether the function gave the bits that the ops give.
    """

    def __init__(
        self, calls: Sequence[Call], operands: Mapping[str, Operand], results: Mapping[str, Operand]
    ) -> None:
        """Operands and results by the names that the calls have for them."""
        names = {name: f"%{number}" for number, name in enumerate(operands)}
        for call in calls:
            for name in filter(None, call.outputs):
                names[name] = f"%{len(names)}"
        self.calls = tuple(_anonymous_call(call, names) for call in calls)
        self.operands, self.looks = tuple(map(names.__getitem__, operands)), tuple(operands.values())
        self.results, self.result_looks = tuple(map(names.__getitem__, results)), tuple(results.values())
        self.compiled: Function | None = None
        self.is_exact = True
        digest = sha256(f"{cpp_compiler()}\n{_code_digest()}\n{self.text}".encode())
        super().__init__(digest.hexdigest()[:24], "kernel")

    @property
    def text(self) -> str:
        """The ops one by one, and the operands."""
        lines = (_spelled_call(call) for call in self.calls)
        looks = "; ".join(map(str, self.looks))
        return "\n".join((*lines, f"return {', '.join(self.results)}", f"of {looks}"))

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The results, each in memory of its own."""
        run = self.compiled or self.by_ops
        return list(run(list(inputs)))

    def by_ops(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The same by eager's kernels, one op after the other."""
        values = dict(zip(self.operands, inputs, strict=True))
        for call in self.calls:
            args = [filled(value, values) for value in call.args]
            kwargs = {name: filled(value, values) for name, value in call.kwargs.items()}
            values.update(outputs_by_name(call, call.target(*args, **kwargs), ()))
        return [values[name] for name in self.results]

    def compile(self) -> Function:
        """Inductor's function: from PyTorch's cache on disk if it is there, which takes a moment."""
        looks = [(look.shape, look.stride, look.dtype) for look in self.looks]
        return compiled_by_inductor(self.by_ops, looks, decompositions.DECOMPOSITIONS)


@cache
def _code_digest() -> str:
    """The code that says how ops are compiled: who changes it gets new kernels and new prices."""
    return sha256(Path(decompositions.__file__).read_bytes()).hexdigest()


def _anonymous_call(call: Call, names: Mapping[str, str]) -> Call:
    args = tuple(anonymous(value, names) for value in call.args)
    kwargs = {name: anonymous(value, names) for name, value in sorted(call.kwargs.items())}
    outputs = tuple(name if name is None else names[name] for name in call.outputs)
    return replace(call, args=args, kwargs=kwargs, outputs=outputs)


def _spelled_call(call: Call) -> str:
    given: list[str] = [spelled_argument(value) for value in call.args]
    given += (f"{name}={spelled_argument(value)}" for name, value in call.kwargs.items())
    made = ", ".join(name or "_" for name in call.outputs)
    return f"{made} = {call.target}({', '.join(given)})"


torch.library.define("stowplan::fused", "(Tensor[] inputs, str name) -> Tensor[]")


@torch.library.impl("stowplan::fused", "default")
def _fused(inputs: list[Tensor], name: str) -> list[Tensor]:
    found = handle_of(name)
    assert isinstance(found, Kernel), f"{name} is no kernel"
    return found.run(inputs)


def fused_call(kernel: Kernel, inputs: Sequence[str], outputs: Sequence[str]) -> Call:
    """The kernel as a call of a program."""
    given: tuple[Argument, ...] = tuple(map(Ref, inputs))
    return Call(torch.ops.stowplan.fused.default, (given, kernel), {}, tuple(outputs), single=False)
