"""Edges from names and ports: the drawing's arrows carry no names, but the grammar says what each port holds.

The forward ops form a chain from the data through the layers to the loss; each reads the result of the one
before. A backward op reads the gradient of its forward op's result and the tensors which that op saved, and
adds to the gradients of the tensors which that op read. The labels on the page check the rebuilt edges.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.grammar import OP_DRAWINGS, Entry, Sort, gradient_of
from stowplan.formats.regiongraph.names import Names
from stowplan.formats.regiongraph.page import Label, Remarks, Words
from stowplan.formats.regiongraph.spelling import Pattern, key_of, nearest
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
            last = next((entry.ports[port] for port in OP_DRAWINGS[entry.type].makes), last)
    return ports


def _edges(entry: Entry, ports: Mapping[str, Mapping[str, str]], names: Names) -> Edges:
    if entry.sort is Sort.SET_ZERO:
        return Edges(makes=(Edge("output", entry.stem),))
    if entry.sort is Sort.UPDATE:
        parameter = names.lexicon[entry.stem].stem
        return Edges(reads=(Edge("params", parameter), Edge("gradient", entry.stem)))
    form = OP_DRAWINGS[entry.type]
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
    """The gradients that a backward op adds to: those on the page of its forward op's inputs."""
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


_WORST = 0.35  # edits per character beyond which a text is no port
_SHORTEST = 5  # a text without an arrow that is shorter is debris


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many labels the edges expect, and how many labels of the page are among them."""

    expected: int
    matched: int


def compare_labels(
    labels: Sequence[Label], left: Iterable[Words], edges: Iterable[Edges], remarks: Remarks
) -> Agreement:
    """The page's labels against the edges, with remarks on both kinds of difference."""
    expected = Counter(edge.port for op in edges for edge in (*op.reads, *op.makes))
    seen = list(_ports_read(labels, left, Ports.of(expected), remarks))
    count = Counter(port for _, port in seen)
    agreement = Agreement(expected.total(), (expected & count).total())
    summary = (
        f"{agreement.expected} edges follow from names and ports; the page labels {agreement.matched} of them"
    )
    missing = ", ".join(f"{port} {number}" for port, number in sorted((expected - count).items()))
    remarks.inferred(1, summary + (f" (not readable: {missing})" if missing else ""))
    for line, port in seen:
        count[port] -= 1
        if count[port] >= expected[port]:
            remarks.odd(line, f"label {port!r}: there are only {expected[port]} such edges")
    return agreement


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports that a label may name, ready to be compared with."""

    by_key: dict[str, str]
    patterns: tuple[Pattern, ...]

    @staticmethod
    def of(ports: Iterable[str]) -> "Ports":
        by_key = {key_of(port): port for port in ports}
        return Ports(by_key, tuple(map(Pattern.of, by_key)))

    def meant_by(self, read: str) -> str | None:
        """The port that `read` is, nearly is, or is the beginning of."""
        key = key_of(read)
        if key in self.by_key:
            return self.by_key[key]
        _, near = nearest(key, self.patterns, int(_WORST * len(key)))
        keys = [pattern.key for pattern in near] or [whole for whole in self.by_key if whole.startswith(key)]
        return self.by_key[keys[0]] if len(keys) == 1 else None


def _ports_read(
    labels: Sequence[Label], left: Iterable[Words], ports: Ports, remarks: Remarks
) -> Iterator[tuple[int, str]]:
    for label in labels:
        port = ports.meant_by(label.port)
        if port is None:
            remarks.odd(label.line, f"label {label.port!r} names no port; left aside")
        else:
            yield label.line, port
    yield from _without_arrow({label.line for label in labels}, left, ports, remarks)


def _without_arrow(
    lines: Set[int], left: Iterable[Words], ports: Ports, remarks: Remarks
) -> Iterator[tuple[int, str]]:
    """Labels whose arrow is lost, on lines with other labels; other words are reported."""
    debris: dict[int, list[str]] = defaultdict(list)
    for rest in left:
        read = " ".join(rest.words)
        port = ports.meant_by(read) if rest.line in lines and len(key_of(read)) >= _SHORTEST else None
        if port is not None:
            yield rest.line, port
        else:
            debris[rest.line].append(read)
    for line, words in debris.items():
        if sum(char.isalnum() for word in words for char in word) >= _SHORTEST:
            remarks.odd(line, f"{' '.join(words)!r} is left aside")
