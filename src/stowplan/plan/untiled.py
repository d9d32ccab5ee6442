"""Untiled: why stretches of a step are not in tiles, written down while candidates are gathered."""

from collections.abc import Iterable, Sequence

from stowplan.errors import NotTileable
from stowplan.ir import Graph, Op

WHOLE_STEP = "the whole step"


class Untiled:
    """Reasons, each with the first stretch that it was found for; one reason often holds for many."""

    def __init__(self) -> None:
        self._stretches: dict[str, str] = {}

    def add(self, stretch: str, refusal: NotTileable) -> None:
        """This stretch cannot be tiled, or not so."""
        self._stretches.setdefault(refusal.reason, stretch)

    def told(self) -> tuple[str, ...]:
        """All reasons, in the order in which they were found."""
        return tuple(f"{stretch}: {reason}" for reason, stretch in self._stretches.items())


def stretch_named(ops: Sequence[Op]) -> str:
    """What a user knows a stretch by: the modules of its first and last op, or the ops."""
    if not ops:
        return "nothing"
    first, last = ((op.scope or op.id) for op in (ops[0], ops[-1]))
    return first if first == last else f"{first} to {last}"


def stretch_of(graph: Graph, ops: Iterable[str]) -> str:
    """The same for ops by id."""
    chosen = set(ops)
    return stretch_named([op for op in graph.ops if op.id in chosen])
