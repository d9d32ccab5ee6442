"""From lifetimes to blocks: what of a step wants a place in the arena."""

from stowplan.analyse.liveness import Liveness
from stowplan.analyse.packing import Block
from stowplan.ir import Graph, Kind


def blocks_of(graph: Graph, liveness: Liveness) -> tuple[Block, ...]:
    """A block per storage that exists, constants left out, and one for what an op needs aside as it runs."""
    storages = zip(
        liveness.storages.owners,
        liveness.storages.nbytes.tolist(),
        liveness.start.tolist(),
        liveness.end.tolist(),
        strict=True,
    )
    aside = enumerate(liveness.temporary_bytes.tolist())
    return (
        *(
            Block(owner, nbytes, start, end)
            for owner, nbytes, start, end in storages
            if start <= end and graph.tensors[owner].kind is not Kind.CONSTANT
        ),
        *(Block(f"temporary of {graph.ops[i].id}", nbytes, i, i) for i, nbytes in aside if nbytes),
    )
