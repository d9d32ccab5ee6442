"""Transfers as lines of generated code, and where that code has to wait for them."""

from collections.abc import Iterable, Mapping, Sequence

from stowplan.ir import Graph
from stowplan.units import format_bytes


class Moves:
    """Goes along with the steps of both halves. `handles` are the variables of all stores so far."""

    def __init__(self, names: Mapping[str, str], graph: Graph) -> None:
        self._names, self._graph = names, graph
        self.handles: list[str] = []
        self.stored_bytes: list[int] = []
        self._stored: dict[tuple[str, ...], str] = {}  # handles by all names of a storage
        self._handle_of: dict[str, str] = {}  # the handle that last moved a tensor
        self._under_way: set[str] = set()

    def store(self, tensors: tuple[str, ...]) -> str:
        """The line that begins to write a storage."""
        handle = f"away{len(self.handles)}"
        self.handles.append(handle)
        self._stored[tensors] = handle
        self._begin(handle, tensors)
        self.stored_bytes.append(self._bytes(tensors[0]))
        return f"{handle} = tier.store({self._list(tensors)})  # {format_bytes(self.stored_bytes[-1])}"

    def load(self, tensors: tuple[str, ...]) -> str:
        """The line that begins to read it back."""
        handle = self._stored[tensors]
        self._begin(handle, tensors)
        return f"[{self._list(tensors)}] = {handle}.load()"

    def _begin(self, handle: str, tensors: Iterable[str]) -> None:
        self._handle_of.update(dict.fromkeys(tensors, handle))
        self._under_way.add(handle)

    def wait_for(self, tensors: Iterable[str]) -> list[str]:
        """Lines that wait until none of the tensors is on its way out or back."""
        handles = dict.fromkeys(self._handle_of[name] for name in tensors if name in self._handle_of)
        waiting = [handle for handle in handles if handle in self._under_way]
        self._under_way.difference_update(waiting)
        return [f"{handle}.wait()" for handle in waiting]

    def _list(self, tensors: Sequence[str]) -> str:
        return ", ".join(self._names[name] for name in tensors)

    def _bytes(self, name: str) -> int:
        return self._graph.tensors[self._graph.storage_of(name)].nbytes or 0
