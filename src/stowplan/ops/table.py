"""Table: one question about ops, answered by op type. A second entry for a type raises."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

from stowplan.errors import MalformedOp, MissingRule
from stowplan.ir import Attributes, Graph, Op, Shape, Tensor

Answer = TypeVar("Answer")

registered_types: set[str] = set()
"""Op types whose rules `register_op_rule` added: plans that are kept on disk depend on them."""


@dataclass(frozen=True, slots=True)
class Site:
    """An op with its tensors: the argument of a rule."""

    op: Op
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def attributes(self) -> Attributes:
        return self.op.attributes


def site_of(graph: Graph, op: Op) -> Site:
    """`op` with its tensors, in the order of its lists."""
    return Site(
        op,
        tuple(graph.tensors[use.tensor] for use in op.inputs),
        tuple(graph.tensors[use.tensor] for use in op.outputs),
    )


def shape_of(tensor: Tensor) -> Shape:
    """The shape of a tensor; raises if unknown."""
    if tensor.shape is None:
        raise MissingRule(f"the shape of tensor {tensor.id!r} is not known")
    return tensor.shape


def elements_of(tensor: Tensor) -> int:
    """How many elements a tensor has."""
    return prod(shape_of(tensor))


class Table(Generic[Answer]):
    """Rules by op type for one question, with a stated default (None: a missing rule raises)."""

    def __init__(self, question: str, default: Callable[[Site], Answer] | None = None) -> None:
        self.question = question
        self._default = default
        self._rules: dict[str, Callable[[Site], Answer]] = {}

    def entry(self, *types: str) -> Callable[[Callable[[Site], Answer]], Callable[[Site], Answer]]:
        """Decorator: the rule of these op types, each spelled as its framework writes it."""

        def register(rule: Callable[[Site], Answer]) -> Callable[[Site], Answer]:
            for name in types:
                if name in self._rules:
                    raise ValueError(f"{self.question}: {name!r} has an entry already")
                self._rules[name] = rule
            return rule

        return register

    def __iter__(self) -> Iterator[str]:
        """The op types that have a rule."""
        return iter(self._rules)

    def __contains__(self, op_type: str) -> bool:
        return op_type in self._rules

    def __call__(self, site: Site) -> Answer:
        rule = self._rules.get(site.op.type, self._default)
        if rule is None:
            raise MissingRule(f"{self.question}: no rule for op type {site.op.type!r} ({site.op.id!r})")
        try:
            return rule(site)
        except (LookupError, ValueError, TypeError, ArithmeticError) as fault:
            # Rules read the operands that a framework gives the type; a file may name the type alone.
            raise MalformedOp(
                f"{self.question}: op {site.op.id!r} lacks what a {site.op.type!r} has ({fault}): it has"
                f" {len(site.inputs)} inputs, {len(site.outputs)} outputs and attributes"
                f" {', '.join(site.attributes) or 'none'}; correct the file, or give the op another type"
            ) from fault
