"""An executable order of the page's ops: from its top to its end, each once what it needs is complete."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.edges import Edges
from stowplan.formats.regiongraph.names import Sighting
from stowplan.ir import Role


def executable_order(found: Mapping[str, Sighting], edges: Mapping[str, Edges]) -> Iterator[str]:
    """The ops' names. A gradient is made first, then added to, and only then read."""
    followers: dict[str, list[str]] = defaultdict(list)
    missing: dict[str, int] = dict.fromkeys(edges, 0)
    for before, after in _precedences(edges):
        followers[before].append(after)
        missing[after] += 1
    ready = [(found[op].at, op) for op, count in missing.items() if not count]
    heapq.heapify(ready)
    while ready:
        _, op = heapq.heappop(ready)
        yield op
        del missing[op]
        for follower in followers[op]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (found[follower].at, follower))
    for op in missing:
        raise BadInput(f"{op} needs its own result", where=f"line {found[op].line}")


def _precedences(edges: Mapping[str, Edges]) -> Iterator[tuple[str, str]]:
    makers: dict[str, list[str]] = defaultdict(list)
    adders: dict[str, list[str]] = defaultdict(list)
    for op, ends in edges.items():
        for edge in ends.makes:
            (adders if edge.role is Role.ACCUMULATE else makers)[edge.tensor].append(op)
    for op, ends in edges.items():
        for edge in ends.reads:
            yield from ((before, op) for before in (*makers[edge.tensor], *adders[edge.tensor]))
        for edge in ends.makes:
            if edge.role is Role.ACCUMULATE:
                yield from ((before, op) for before in makers[edge.tensor])
