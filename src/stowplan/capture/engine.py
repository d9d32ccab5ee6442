"""Telling apart what autograd's formulas compute and what its engine adds up between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import Node

from stowplan.capture.watching import Watch


@contextmanager
def told_apart(watch: Watch, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Within, `watch` is told when autograd is between two nodes: then the ops are the engine's own sums."""

    def enter(_: object) -> None:
        watch.between_nodes = False

    def leave(_inputs: object, _outputs: object) -> None:
        watch.between_nodes = True

    for node in _nodes_below(outputs):
        node.register_prehook(enter)
        node.register_hook(leave)
    yield
    watch.between_nodes = False


def _nodes_below(outputs: Sequence[Tensor]) -> Iterator[Node]:
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
