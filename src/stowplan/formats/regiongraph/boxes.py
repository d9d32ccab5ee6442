"""Which field belongs to which box, though boxes stand side by side and lines cut through all of them.

Every kind of box has its fields in a fixed order, at most one on a line. So a field belongs to the leftmost
open box that waits for it. Boxes with an unreadable name, that have to skip a lost field, or whose dims
disagree come second.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.grammar import Entry
from stowplan.formats.regiongraph.names import Sighting
from stowplan.formats.regiongraph.numbers import digits_of
from stowplan.formats.regiongraph.page import Field, Token, Words

_SIDE_BY_SIDE = 16  # more boxes than any row of a drawing holds open at once


@dataclass(slots=True, eq=False)
class Box:
    """A name with the fields found for it so far."""

    sighting: Sighting
    fields: dict[str, Field] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()

    @staticmethod
    def of(sighting: Sighting) -> "Box":
        return Box(sighting, waiting=sighting.entry.fields)

    @property
    def entry(self) -> Entry:
        return self.sighting.entry

    @property
    def name(self) -> str:
        """Its name in the grammar."""
        return self.entry.name

    @property
    def title(self) -> str:
        """Its name as the page spells it."""
        return self.sighting.id

    @property
    def where(self) -> str:
        return f"line {self.sighting.line}"

    def take(self, token: Field) -> None:
        """Accept a field; those before it in the box can no longer come."""
        self.fields[token.key] = token
        self.waiting = self.waiting[self.waiting.index(token.key) + 1 :]


def boxes_on(page: Iterable[Token], sightings: Iterable[Sighting]) -> dict[str, Box]:
    """Every sighting as a box with its fields, by its name in the grammar."""
    boxes = {sighting.entry.name: Box.of(sighting) for sighting in sightings}
    starting = defaultdict(list)
    for box in sorted(boxes.values(), key=lambda box: box.sighting.at):
        starting[box.sighting.at[0]].append(box)
    line, run = 0, -1
    waiting: deque[Box] = deque(maxlen=_SIDE_BY_SIDE)
    served: list[Box] = []
    for token in page:
        if token.line != line:
            line, served = token.line, []
        if isinstance(token, Words):
            run += 1
            waiting.extend(box for box in starting[run] if box.waiting)
        elif isinstance(token, Field):
            _serve(token, waiting, served)
    return boxes


def _serve(token: Field, waiting: deque[Box], served: list[Box]) -> None:
    box = _owner(token, [box for box in waiting if token.key in box.waiting and box not in served])
    if box is not None:
        box.take(token)
        served.append(box)
        if not box.waiting:
            waiting.remove(box)


def _owner(token: Field, candidates: Sequence[Box]) -> Box | None:
    if candidates:
        return min(candidates, key=lambda box: _misfit(token, box))
    if any(digits_of(part) for part in token.parts) or not token.parts:
        raise BadInput(f"{token.key} belongs to no box on the page", where=f"line {token.line}")
    return None


def _misfit(token: Field, box: Box) -> tuple[bool, int, bool]:
    return not box.sighting.is_readable, box.waiting.index(token.key), _disagrees(token, box)


def _disagrees(token: Field, box: Box) -> bool:
    dim = box.fields.get("dim") or box.fields.get("result_dim")
    return dim is not None and digits_of(token.parts[-1] if token.parts else "") != digits_of(dim.parts[0])
