"""Edge labels as a check: every label on the page should be one that the rebuilt edges expect."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from stowplan.formats.regiongraph.edges import Edges
from stowplan.formats.regiongraph.page import Label, Words
from stowplan.formats.regiongraph.remarks import Remarks
from stowplan.formats.regiongraph.spelling import Pattern, key_of, nearest

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
    told = (
        f"{agreement.expected} edges follow from names and ports; the page labels {agreement.matched} of them"
    )
    missing = ", ".join(f"{port} {number}" for port, number in sorted((expected - count).items()))
    remarks.inferred(1, told + (f" (not readable: {missing})" if missing else ""))
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
    """Labels whose arrow is lost, on lines with other labels; words that are no label either are told."""
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
