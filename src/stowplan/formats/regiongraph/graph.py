"""The graph and regions of a page whose names, numbers and edges are known, its ops in executable order."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.edges import Edges
from stowplan.formats.regiongraph.grammar import Sort
from stowplan.formats.regiongraph.names import Sighting
from stowplan.geometry import Rect
from stowplan.ir import (
    DType,
    Graph,
    Kind,
    Op,
    Phase,
    RegionLists,
    Role,
    Shape,
    Tensor,
    TensorRegion,
    Use,
    bytes_of_shape,
)


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


_KINDS = {
    Sort.PARAMETER: Kind.PARAMETER,
    Sort.ACTIVATION: Kind.ACTIVATION,
    Sort.GRADIENT: Kind.GRADIENT,
}
_PHASES = {
    Sort.FORWARD: Phase.FORWARD,
    Sort.BACKWARD: Phase.BACKWARD,
    Sort.SET_ZERO: Phase.BACKWARD,
    Sort.UPDATE: Phase.UPDATE,
}
BACKWARD = ".grad"
PORTS = {
    "result": "dist_result",
    "input": "dist_input",
    "filters": "dist_filters",
    "read": "read_rect",
    "write": "write_rect",
}


def graph_of(found: Mapping[str, Sighting], edges: Mapping[str, Edges], dims: Mapping[str, Shape]) -> Graph:
    """The tensors and ops of a page, the ops from its top to its end as far as the edges allow."""
    ids = {name: sighting.id for name, sighting in found.items()}
    tensors = {
        sighting.id: _tensor(sighting, dims[name], ids)
        for name, sighting in found.items()
        if sighting.entry.sort.is_tensor
    }
    ops = (_op(found[name], edges[name], dims.get(name), ids) for name in executable_order(found, edges))
    return Graph(tensors, tuple(ops))


def _tensor(sighting: Sighting, shape: Shape, ids: Mapping[str, str]) -> Tensor:
    return Tensor(
        sighting.id,
        _KINDS[sighting.entry.sort],
        shape,
        DType.FLOAT32,
        bytes_of_shape(shape, DType.FLOAT32),
        gradient_of=ids[sighting.entry.stem] if sighting.entry.stem else None,
    )


def _op(sighting: Sighting, edges: Edges, result: Shape | None, ids: Mapping[str, str]) -> Op:
    entry = sighting.entry
    is_backward = entry.sort is Sort.BACKWARD
    return Op(
        id=sighting.id,
        type=entry.type + BACKWARD if is_backward else entry.type,
        phase=_PHASES[entry.sort],
        inputs=tuple(Use(ids[edge.tensor], edge.role) for edge in edges.reads),
        outputs=tuple(Use(ids[edge.tensor], edge.role) for edge in edges.makes),
        attributes={} if result is None else {"result_dim": result},
        adjoint_of=ids[entry.stem] if is_backward else None,
    )


def regions_of(found: Mapping[str, Sighting], rects: Mapping[str, Mapping[str, Rect | None]]) -> RegionLists:
    """The rects of each tensor that the worker reads and writes, and the rects at the ports of ops."""
    tensors, ops = {}, {}
    for name, sighting in found.items():
        written = rects[name]
        if sighting.entry.sort.is_tensor:
            tensors[sighting.id] = TensorRegion(written["read_rect"], written["write_rect"])
        elif written:
            ops[sighting.id] = {
                port: rect for port, key in PORTS.items() if (rect := written.get(key)) is not None
            }
    return RegionLists(tensors, ops)
