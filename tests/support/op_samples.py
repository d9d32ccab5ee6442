"""Samples of ops: random calls on tiny tensors, as an op of the graph and as something that runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from stowplan import ir
from stowplan.ir import Attribute
from stowplan.ops.table import Site

Run: TypeAlias = Callable[..., Tensor | tuple[Tensor, ...]]
NAN = (float("nan"),)
NUMBERS = (1e3, -1e3, 0.123)


@dataclass(frozen=True, slots=True)
class Sample:
    """An op type with tensors in the graph's order, attributes under the graph's names, and how to run it.

    `disturbances` are the values that show whether an element is used. A NaN shows every use, but also what
    an op hides by multiplying it by zero, and some ops refuse it.
    """

    type: str
    tensors: tuple[Tensor, ...]
    attributes: Mapping[str, Attribute]
    run: Run
    disturbances: tuple[float, ...] = NAN

    def outputs(self, tensors: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """What the op makes of `tensors`, its own unless given; the same random numbers every time."""
        torch.default_generator.manual_seed(0)
        made = self.run(*(self.tensors if tensors is None else tensors))
        return made if isinstance(made, tuple) else (made,)

    def site(self) -> Site:
        """The op with its tensors, as a rule is given it."""
        inputs = tuple(_described(f"in{i}", tensor) for i, tensor in enumerate(self.tensors))
        outputs = tuple(_described(f"out{i}", tensor) for i, tensor in enumerate(self.outputs()))
        op = ir.Op(
            "op",
            self.type,
            ir.Phase.FORWARD,
            tuple(ir.Use(tensor.id) for tensor in inputs),
            tuple(ir.Use(tensor.id) for tensor in outputs),
            self.attributes,
        )
        return Site(op, inputs, outputs)


def _described(name: str, tensor: Tensor) -> ir.Tensor:
    dtype = ir.DType(str(tensor.dtype).removeprefix("torch."))
    return ir.Tensor(name, ir.Kind.ACTIVATION, tuple(tensor.shape), dtype)


def aten(
    target: OpOverload, /, *args: object, disturbances: tuple[float, ...] = NAN, **kwargs: object
) -> Sample:
    """A call of an ATen op: tensors laid flat in the order of the schema, the rest by name with defaults."""
    bound = {}
    for position, argument in enumerate(target._schema.arguments):
        default = kwargs.get(argument.name, argument.default_value)
        bound[argument.name] = args[position] if position < len(args) else default
    tensors = tuple(leaf for value in bound.values() for leaf in _leaves(value) if isinstance(leaf, Tensor))
    return Sample(str(target), tensors, dict(_attributes(bound)), _caller(target, bound), disturbances)


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _attributes(bound: Mapping[str, object]) -> Iterator[tuple[str, Attribute]]:
    """Non-tensors, and lists of tensors with gaps as positions among the inputs."""
    seen = 0
    for name, value in bound.items():
        leaves = list(_leaves(value))
        found = sum(isinstance(leaf, Tensor) for leaf in leaves)
        if not found:
            yield name, _frozen(value)
        elif None in leaves:
            places = iter(range(seen, seen + found))
            yield name, tuple(None if leaf is None else next(places) for leaf in leaves)
        seen += found


def _frozen(value: object) -> Attribute:
    if isinstance(value, (tuple, list)):
        return tuple(_frozen(item) for item in value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _caller(target: OpOverload, bound: Mapping[str, object]) -> Run:
    """The op as a function of its tensors alone."""

    def run(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        given = iter(tensors)
        filled = {name: _filled(value, given) for name, value in bound.items()}
        positional = [filled[a.name] for a in target._schema.arguments if not a.kwarg_only]
        named = {a.name: filled[a.name] for a in target._schema.arguments if a.kwarg_only}
        made = target(*positional, **named)
        return made if isinstance(made, Tensor) else tuple(made)

    return run


def _filled(value: object, tensors: Iterator[Tensor]) -> object:
    if isinstance(value, (tuple, list)):
        return [_filled(item, tensors) for item in value]
    return next(tensors) if isinstance(value, Tensor) else value


Sampler: TypeAlias = Callable[[Random], Sample]


def numbers(*shape: int) -> Tensor:
    """Random float64 values, no two alike."""
    return torch.randn(shape, dtype=torch.float64)


def indices(below: int, *shape: int) -> Tensor:
    """Random integers in [0, below)."""
    return torch.randint(0, below, shape)


def some(random: Random, count: int, low: int, high: int) -> list[int]:
    """`count` random integers in [low, high], both included."""
    return [random.randint(low, high) for _ in range(count)]
