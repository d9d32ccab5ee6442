"""Paths: which of the gradients that come in for outputs each tensor of backward is made from.

A loss may use some outputs only. Autograd then runs a node if one of the gradients it waits for is there, and
its engine adds two gradients only where both are: parameters that no used output depends on have no gradient.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from stowplan.capture.program import Call, inputs_of
from stowplan.torch_private import OpOverload

Sources = frozenset[str]
"""Gradients that come in, by id. What is made from them is there if one of them is."""

NOTHING: Sources = frozenset()

_SPLITTING: frozenset[OpOverload] = frozenset((torch.ops.aten.cat.default, torch.ops.aten.stack.default))


@dataclass(frozen=True, slots=True)
class Paths:
    """What autograd's nodes received, by op of backward that runs in one, and the sums that its engine made.

    `sources_of` has those of each differentiated tensor, as captured: a plan in tiles computes them together.
    """

    received: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sums: frozenset[str] = frozenset()
    sources_of: Mapping[str, Sources] = field(default_factory=dict)

    def sources(self, calls: Iterable[tuple[str, Call]], incoming: Iterable[str]) -> dict[str, Sources]:
        """By tensor of backward, for calls in order. All of what runs in a node is there or none of it."""
        found: dict[str, Sources] = {name: frozenset((name,)) for name in incoming}
        for op, call in calls:
            read = (*self.received.get(op, ()), *inputs_of(call))
            union = NOTHING.union(*(found.get(name, NOTHING) for name in read))
            if union:
                found.update((name, union) for name in call.outputs if name is not None)
        return found

    def takes_zeros(self, op: str, call: Call) -> bool:
        """Whether autograd itself puts zeros in place of the gradients that an op lacks: of parts."""
        return call.target in _SPLITTING and set(self.received.get(op, ())) == set(inputs_of(call))
