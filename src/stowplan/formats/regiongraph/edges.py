"""Edges from names and ports: the drawing's arrows carry no names, but the grammar says what each port holds.

The chain of forward ops runs from the data through the layers in order to the loss; each takes the result of
the one before. A backward op reads the gradient of its forward op's result and what that op saved, and adds
to the gradients of what that op read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.grammar import FORMS, Entry, Sort, gradient_of
from stowplan.formats.regiongraph.names import Names
from stowplan.ir import Role


@dataclass(frozen=True, slots=True)
class Edge:
    """One arrow: the port at its label, the tensor's name in the grammar, and how the op uses that tensor."""

    port: str
    tensor: str
    role: Role = Role.DATA


@dataclass(frozen=True, slots=True)
class Edges:
    """The arrows into and out of one op."""

    reads: tuple[Edge, ...] = ()
    makes: tuple[Edge, ...] = ()


def edges_of(names: Names) -> dict[str, Edges]:
    """The edges of every op on the page, by its name in the grammar."""
    ports = _chained_ports(names)
    edges = {}
    for name, sighting in names.found.items():
        if not sighting.entry.sort.is_tensor:
            edges[name] = _edges(sighting.entry, ports, names)
            _check_ends(name, edges[name], names)
    _check_origins(names, edges)
    return edges


def _chained_ports(names: Names) -> dict[str, Mapping[str, str]]:
    """The tensors at the ports of each forward op; where the grammar leaves `input` open, the last result."""
    ports: dict[str, Mapping[str, str]] = {}
    last = ""
    for entry in names.lexicon.values():  # the lexicon lists forward ops in the order of their chain
        if entry.sort is Sort.FORWARD and entry.name in names.found:
            ports[entry.name] = {"input": last, **entry.ports}
            last = next((entry.ports[port] for port in FORMS[entry.type].makes), last)
    return ports


def _edges(entry: Entry, ports: Mapping[str, Mapping[str, str]], names: Names) -> Edges:
    if entry.sort is Sort.SET_ZERO:
        return Edges(makes=(Edge("output", entry.stem),))
    if entry.sort is Sort.UPDATE:
        parameter = names.lexicon[entry.stem].stem
        return Edges(reads=(Edge("params", parameter), Edge("gradient", entry.stem)))
    form = FORMS[entry.type]
    if entry.sort is Sort.FORWARD:
        at = ports[entry.name]
        return Edges(
            tuple(Edge(port, at[port]) for port in form.reads),
            tuple(Edge(port, at[port]) for port in form.makes),
        )
    if entry.stem not in ports:
        raise BadInput(
            f"{entry.name} has no forward op {entry.stem} on the page", where=names.where(entry.name)
        )
    at = ports[entry.stem]
    saved = (Edge(port, at[port], Role.SAVED) for port in form.saves)
    return Edges(
        (Edge("output.delta", gradient_of(at["output"])), *saved), tuple(_deltas(form.reads, at, names))
    )


def _deltas(reads: tuple[str, ...], at: Mapping[str, str], names: Names) -> Iterator[Edge]:
    """What a backward op adds to: the gradients that the page has of what its forward op read."""
    for port in reads:
        gradient = gradient_of(at[port])
        if gradient in names.found:
            yield Edge(f"{port}.delta", gradient, Role.ACCUMULATE)


def _check_ends(op: str, edges: Edges, names: Names) -> None:
    for edge in (*edges.reads, *edges.makes):
        if edge.tensor not in names.found:
            what = f"{edge.tensor} at port {edge.port} of {op} is not on the page"
            raise BadInput(what if edge.tensor else f"{op} has no op before it", where=names.where(op))


def _check_origins(names: Names, edges: Mapping[str, Edges]) -> None:
    """Every activation has the op that makes it, every gradient the tensor it is the gradient of."""
    made = {edge.tensor for op in edges.values() for edge in op.makes}
    for name, sighting in names.found.items():
        if sighting.entry.sort is Sort.ACTIVATION and name not in made:
            raise BadInput(f"the op that makes {name} is not on the page", where=names.where(name))
        if sighting.entry.sort is Sort.GRADIENT and sighting.entry.stem not in names.found:
            what = f"{name} is the gradient of {sighting.entry.stem}, which is not on the page"
            raise BadInput(what, where=names.where(name))
