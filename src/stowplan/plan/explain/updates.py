"""Updates: what a plan of a whole iteration says of its optimizer."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from stowplan.ir import Graph, Kind
from stowplan.ops.effects import UPDATE


@dataclass(frozen=True, slots=True)
class Updates:
    """The optimizer's name and options, how many parameters it updates when, and the bytes of its state.

    State that waits in the `tier` is not counted.
    """

    optimizer: str
    options: str
    tier: str | None
    parameters_by_time: Mapping[str, int]
    state_bytes: int


def updates_of(graph: Graph) -> Updates | None:
    """None for a graph of forward and backward alone."""
    updates = [op for op in graph.ops if op.type == UPDATE]
    if not updates:
        return None
    counts, states = Counter[str](), set[str]()
    for op in updates:
        kinds = {name: graph.tensors[name].kind for name in op.reads()}
        counts[str(op.attributes["when"])] += sum(kind is Kind.PARAMETER for kind in kinds.values())
        states.update(name for name, kind in kinds.items() if kind is Kind.BUFFER)
    named = [str(op.attributes["update"]).partition(", state from ") for op in updates]
    return Updates(
        optimizer=named[0][0].partition("(")[0],
        options=named[0][0],
        tier=next((tier for *_, tier in named if tier), None),
        parameters_by_time={when: count for when, count in counts.items() if count},
        state_bytes=sum(graph.tensors[name].nbytes or 0 for name in states),
    )
