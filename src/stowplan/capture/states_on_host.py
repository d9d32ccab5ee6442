"""What a CUDA op returns in the host's memory, although PyTorch's shape functions say that it is on the card.

The memory-efficient attention kernels keep seed and offset of their dropout as numbers of the host. They take
nothing of the card and cannot be offloaded from it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from stowplan.ir import Graph

if TYPE_CHECKING:
    from stowplan.capture import Captured

_ATTENTION = "aten._scaled_dot_product_efficient_attention.default"
_SEED, _OFFSET = ".2", ".3"


def with_states_on_host(captured: "Captured") -> "Captured":
    """The same step, whose states of a generator on the host count nothing on a CUDA device."""
    graph, eager = captured.graph, captured.eager
    there = set(_states(graph))
    if not there:
        return captured
    tensors = {
        name: replace(tensor, device="cpu", nbytes=0) if name in there else tensor
        for name, tensor in graph.tensors.items()
    }
    spans = tuple(replace(span, nbytes=0) if span.tensor in there else span for span in eager.spans)
    return replace(captured, graph=replace(graph, tensors=tensors), eager=replace(eager, spans=spans))


def _states(graph: Graph) -> Iterator[str]:
    for op in graph.ops:
        drops = bool(op.attributes.get("dropout_p"))
        if op.type == _ATTENTION and drops and op.device.startswith("cuda"):
            yield from (name for name in op.writes() if name.endswith((_SEED, _OFFSET)))
