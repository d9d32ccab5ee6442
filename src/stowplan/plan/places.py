"""Places: the storages of a schedule, step by step. Timelines and idle intervals are found on this walk."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stowplan.ir import Graph, Op, Role


@dataclass(slots=True)
class Place:
    """A storage: the tensor whose contents it has, the names bound to it, and how often it was written.

    `made` is False for what the step is given.
    """

    number: int
    tensor: str
    made: bool
    writes: int = 0
    names: set[str] = field(default_factory=set)


class Places:
    """Binds names to places; a place is left when its last name is freed.

    Who walks overrides what it wants to know of: that a place is opened, used, overwritten or left.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._place_of: dict[str, Place] = {}
        self._count = 0
        made = {name for op in graph.ops for name in op.writes()}
        roots = [name for name in graph.tensors if name not in made]
        for name in roots:
            if graph.tensors[name].alias_of is None:
                self._bind(name, self._new(name, made=False))
        for name in roots:
            if graph.tensors[name].alias_of is not None:
                self._bind(name, self._place_of[graph.storage_of(name)])

    def uses(self, place: Place) -> None:
        """The op that runs reads the place or adds to it."""

    def overwrites(self, place: Place) -> None:
        """The op that runs is about to write other contents over those of the place."""

    def opens(self, place: Place) -> None:
        """The place has a tensor that was not in it before."""

    def leaves(self, place: Place) -> None:
        """The last name of the place is gone."""

    def execute(self, op: Op, wanted: Sequence[str], overwritten: Mapping[str, str]) -> None:
        """One execution of an op: what it uses, what it makes and where."""
        added = [use.tensor for use in op.outputs if use.role is Role.ACCUMULATE]
        for place in _distinct(self._place_of[name] for name in (*op.reads(), *added)):
            self.uses(place)
        for name in added:
            self._place_of[name].writes += 1
        for name in (use.tensor for use in op.outputs if use.role is Role.DATA):
            is_view = self._graph.tensors[name].alias_of is not None
            if not is_view and name in overwritten:
                place = self._place_of[overwritten[name]]
                self.overwrites(place)
                place.tensor, place.made, place.writes = name, True, place.writes + 1
                self.opens(place)
                self._bind(name, place)
            elif name in wanted:
                self._bind(name, self._place_of[self._viewed(op, name)] if is_view else self._new(name))

    def load(self, names: Sequence[str]) -> None:
        """What was stored is loaded into a place of its own."""
        place = self._new(self._graph.storage_of(names[0]))
        for name in names:
            self._bind(name, place)

    def unbind(self, name: str) -> None:
        """Free a name, if it is bound."""
        place = self._place_of.pop(name, None)
        if place is not None:
            place.names.discard(name)
            if not place.names:
                self.leaves(place)

    def occupied(self) -> Iterable[Place]:
        """The places that have a name."""
        return _distinct(self._place_of.values())

    def place_of(self, name: str) -> Place:
        """The place that a bound name is in."""
        return self._place_of[name]

    def _bind(self, name: str, place: Place) -> None:
        self.unbind(name)
        self._place_of[name] = place
        place.names.add(name)

    def _new(self, name: str, *, made: bool = True) -> Place:
        place = Place(self._count, name, made)
        self._count += 1
        self.opens(place)
        return place

    def _viewed(self, op: Op, view: str) -> str:
        """A bound name for what `view` is a view of: its owner may be freed while another view lives on."""
        root = self._graph.storage_of(view)
        return next((name for name in op.reads() if self._graph.storage_of(name) == root), root)


def _distinct(places: Iterable[Place]) -> Iterator[Place]:
    return iter({place.number: place for place in places}.values())
