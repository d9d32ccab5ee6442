"""Following autograd's engine: which gradients each node is given, and what is added up between nodes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.autograd.graph import Node

from stowplan.capture.watching import Watch


@contextmanager
def followed(watch: Watch, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Within, `watch` is told when autograd enters a node, with which gradients, and when it leaves it."""

    def leave(_inputs: object, _outputs: object) -> None:
        watch.between_nodes = True

    for node in _nodes_below(outputs):
        node.register_prehook(partial(watch.enter_node, node._sequence_nr()))
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
