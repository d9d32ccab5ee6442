"""PlanOptions: how a plan is searched for, and the sockets that techniques plug into.

One value of options travels from the verbs down to the search. Each technique lives in a folder of its own,
and no module outside of it imports it by name. A folder's `plugin` module registers in sockets what the
technique offers. It is imported when a socket is first asked for that technique. Without the folder the
technique is not there, and everything else works.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from math import inf
from typing import Any, Generic, TypeAlias, TypeVar

from stowplan.errors import BadUse, nearest

_FOLDERS = {
    "tile": "tiles",
    "offload": "offload",
    "offload-gradients": "offload",
    "mesh": "shards",
    "compiled": "kernels",
}

T = TypeVar("T")


def is_installed(technique: str) -> bool:
    """Whether the folder of a technique is there; some need none."""
    folder = _FOLDERS.get(technique)
    return folder is None or find_spec(f"stowplan.plan.{folder}") is not None


class Socket(Generic[T]):
    """The entries that techniques register for one purpose. `layer` is the folder that has their folders."""

    def __init__(self, layer: str, *techniques: str) -> None:
        self._layer, self._techniques = layer, techniques
        self._offered: dict[str, T] = {}

    def register(self, *techniques: str) -> Callable[[T], T]:
        """A decorator for what these techniques offer."""

        def add(offered: T) -> T:
            for technique in techniques:
                assert technique not in self._offered, f"{technique} is registered already"
                self._offered[technique] = offered
            return offered

        return add

    def of(self, technique: str) -> T:
        """The entry of one technique; BadUse if it is not installed."""
        if technique not in self._offered:
            if not is_installed(technique):
                raise BadUse(f"the technique {technique!r} is not installed")
            import_module(f"stowplan.{self._layer}.{_FOLDERS[technique]}.plugin")
        return self._offered[technique]

    def offered(self, allowed: Iterable[str]) -> list[T]:
        """The entries of the allowed techniques, each entry once."""
        return list(dict.fromkeys(self.of(name) for name in self._techniques if name in set(allowed)))


Progress: TypeAlias = Callable[[int, int], None]  # called with how many of how many ops have been probed

TECHNIQUES = tuple(filter(is_installed, ("recompute", "tile")))  # may cost time
ON_REQUEST = tuple(filter(is_installed, ("offload", "offload-gradients")))  # also need room outside of memory


SLOWEST_UNASKED = 2.0  # times eager's time


class Prefer(StrEnum):
    """The criterion between plans that are within the budget."""

    EXACTNESS = "exactness"  # bits before time
    TIME = "time"  # whatever is fastest


class Kernels(StrEnum):
    """What computes the ops of a step."""

    EAGER = "eager"  # PyTorch's own, op by op: the same bits
    COMPILED = "compiled"  # inductor's for groups of ops, where they are faster


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`allow` names the techniques that may be used, `moves` limits the search of each candidate.

    A search ends when the time of its plan is at most a share of `gap` above the lower bound, or after
    `seconds`, with the best plan so far. With `arena` the step runs in one storage, which the budget limits.
    With `held_blocks` its code holds blocks of a caching allocator, so that it reserves less. A plan that
    takes more than `slowest` times eager's time is refused.
    """

    allow: Collection[str] = TECHNIQUES
    prefer: Prefer | str = Prefer.EXACTNESS
    moves: int | None = None
    progress: Progress | None = field(default=None, compare=False)
    seconds: float | None = None
    gap: float = 0.01
    kernels: Kernels | str = Kernels.EAGER
    arena: bool = False
    held_blocks: bool = False
    slowest: float = inf

    @staticmethod
    def of_call(allow: Iterable[str] | None, prefer: Prefer | str | None, **how: Any) -> "PlanOptions":
        """What a caller wrote, None where nothing was. Who says what is allowed or preferred has chosen, and
        who says nothing gets no plan that takes more than twice eager's time."""
        slowest = SLOWEST_UNASKED if allow is None and prefer is None else inf
        allow = TECHNIQUES if allow is None else known_techniques(allow)
        prefer = Prefer.EXACTNESS if prefer is None else prefer
        return PlanOptions(allow, prefer, slowest=slowest, **how)

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow", known_techniques(self.allow))
        if self.prefer not in tuple(Prefer):
            raise BadUse(f"prefer is {self.prefer!r}; it is one of {', '.join(Prefer)}")
        object.__setattr__(self, "prefer", Prefer(self.prefer))
        if self.kernels not in tuple(Kernels):
            raise BadUse(f"kernels is {self.kernels!r}; it is one of {', '.join(Kernels)}")
        object.__setattr__(self, "kernels", Kernels(self.kernels))
        if self.seconds is not None and not (_is_number(self.seconds) and self.seconds > 0):
            raise BadUse(
                f"time_limit is {self.seconds!r}; it is seconds, above 0, or None to search to the end"
            )
        if not (_is_number(self.gap) and 0 <= self.gap < inf):
            raise BadUse(
                f"gap is {self.gap!r}; it is a share of the time such as 0.01, and 0 searches to the end"
            )
        if self.moves is not None and not (_is_number(self.moves) and self.moves >= 0):
            raise BadUse(
                f"moves is {self.moves!r}; it is a number of moves of the search, or None for no limit"
            )
        if self.progress is not None and not callable(self.progress):
            raise BadUse(
                f"progress is {self.progress!r}; it is a function of two numbers, ops probed and all ops"
            )

    @property
    def offloads(self) -> bool:
        """Whether tensors may leave for a tier."""
        return not set(ON_REQUEST).isdisjoint(self.allow)


def known_techniques(allow: object) -> frozenset[str]:
    """The techniques in a list of names, or in one text with commas; BadUse names the first unknown one."""
    names = allow.split(",") if isinstance(allow, str) else allow
    if not isinstance(names, Iterable):
        raise BadUse(f'allow is {allow!r}; it names techniques, as in allow=("recompute", "tile")')
    allowed = [name.strip() if isinstance(name, str) else name for name in names]
    there = (*TECHNIQUES, *ON_REQUEST)
    if unknown := [name for name in allowed if name not in there and name != ""]:
        raise BadUse(f"no technique {unknown[0]!r}{nearest(unknown[0], there)}; there is {', '.join(there)}")
    return frozenset(filter(None, allowed))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


DEFAULT_OPTIONS = PlanOptions()
