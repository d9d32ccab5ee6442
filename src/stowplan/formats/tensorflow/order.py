"""An executable order for the table's rows, which are sorted by name.

The forward half follows its data. The backward half takes the forward ops from last to first, for each the
gradients of its parameters before that of its data. Everything else, reads and transposes, runs just before
its first reader.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from stowplan.formats.tensorflow.forward import is_backward
from stowplan.formats.tensorflow.rows import Listing, RowKind
from stowplan.formats.tensorflow.wiring import Wiring


def execution_order(listing: Listing, wiring: Wiring) -> list[str]:
    """The names of ops, transposes and reads in the order they run."""
    needs = {
        name: [edge.source for edge in edges if edge.source in wiring.edges]
        for name, edges in wiring.edges.items()
    }
    order: dict[str, None] = {}
    ops = [row.name for row in listing.of_kind(RowKind.OP)]
    _emit(listing, needs, (name for name in ops if not is_backward(name)), order)
    _emit(listing, needs, _backward_targets(wiring, list(order)), order)
    _emit(listing, needs, wiring.edges, order)
    return list(order)


def _backward_targets(wiring: Wiring, forward: list[str]) -> list[str]:
    by_forward: defaultdict[str, list[str]] = defaultdict(list)
    for adjoint in sorted(wiring.adjoints.values(), key=lambda adjoint: -adjoint.rule.makes):
        by_forward[adjoint.forward].append(adjoint.name)
    return [name for target in reversed(forward) for name in by_forward[target]]


def _emit(
    listing: Listing, needs: Mapping[str, list[str]], targets: Iterable[str], order: dict[str, None]
) -> None:
    """Append each target to `order`, after what it still needs."""
    for target in targets:
        waiting = [target]
        open_: set[str] = set()
        while waiting:
            name = waiting[-1]
            missing = [need for need in needs[name] if need not in order]
            if not missing or name in order:
                waiting.pop()
                order.setdefault(name)
            elif name in open_:
                raise listing.rows[name].fault(f"{name!r} waits for its own output")
            else:
                open_.add(name)
                waiting += reversed(missing)
