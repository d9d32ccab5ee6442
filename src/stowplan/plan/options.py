"""What a user may choose of a plan: techniques, search, execution. One value of it goes to the search."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Literal, TypeAlias, get_args

from stowplan.errors import BadUse, nearest
from stowplan.plan.sockets import is_installed

Progress: TypeAlias = Callable[[int, int], None]  # called with how many of how many ops have been probed

Technique: TypeAlias = Literal["recompute", "tile", "offload", "offload-gradients"]
Techniques: TypeAlias = Iterable[Technique] | Iterable[str] | str  # names, or one text with commas
_QUICK: tuple[Technique, ...] = ("recompute", "tile")
_AWAY: tuple[Technique, ...] = ("offload", "offload-gradients")
TECHNIQUES = tuple(filter(is_installed, _QUICK))  # may cost time
ON_REQUEST = tuple(filter(is_installed, _AWAY))  # also need room outside of memory


SLOWEST_UNASKED = 2.0  # times eager's time


Preference: TypeAlias = Literal["exactness", "time"]
KernelChoice: TypeAlias = Literal["eager", "compiled"]


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


def told(words: str, metavar: str | None = None) -> dict[str, str | None]:
    """What the command line says of an option, as metadata of its field."""
    return {"help": words, "metavar": metavar}


@dataclass(frozen=True, slots=True)
class Search:
    """How a plan is looked for, and which plan within the budget is taken.

    Args:
        prefer: "exactness" uses tiles only if nothing else fits, "time" wherever they are faster. Whoever
            says one of them has chosen, and also gets a plan that takes more than twice eager's time.
        gap: the search ends when the plan's time is at most this share above the lower bound.
        time_limit: after these seconds the search ends with the best plan so far, which then says so.
        moves: limits the search of each candidate in a way that does not depend on the machine.
        wait: False lets training start with a first plan, which takes little longer than capture: ops run
            once for their prices, and only the asked budget is searched. A child process looks for a better
            plan meanwhile, and a later call runs by it. The bits stay the same and the budget holds; which
            call that is depends on the machine. True waits for the best plan, and gives the same one to
            everybody with the same prices. Commands wait, and so does `fit` for plans that cannot be
            exchanged: with a mesh, an optimizer, an arena and others, which it then says.
        progress: called with the number of probed ops and their total.
    """

    prefer: Preference | None = field(
        default=None,
        metadata=told(
            "exactness (default): tiles only if nothing else fits; time: tiles wherever they are faster"
        ),
    )
    gap: float = field(
        default=0.005,
        metadata=told(
            "end the search when the plan's time is at most this share above the lower bound (default 0.005;"
            " 0 searches to the end)",
            "SHARE",
        ),
    )
    time_limit: float | None = field(
        default=None,
        metadata=told(
            "end the search after this time with the best plan so far, and say how far that may be"
            " from the best",
            "SECONDS",
        ),
    )
    moves: int | None = field(
        default=None, metadata=told("limit the search for each plan, for a quick answer")
    )
    wait: bool = True
    progress: Progress | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.prefer is not None and self.prefer not in get_args(Preference):
            raise BadUse(f"prefer is {self.prefer!r}; it is one of {', '.join(get_args(Preference))}")
        if self.time_limit is not None and not (_is_number(self.time_limit) and self.time_limit > 0):
            raise BadUse(
                f"time_limit is {self.time_limit!r}; it is seconds, above 0, or None to search to the end"
            )
        if not (_is_number(self.gap) and 0 <= self.gap < inf):
            raise BadUse(
                f"gap is {self.gap!r}; it is a share of the time such as 0.01, and 0 searches to the end"
            )
        if self.moves is not None and not (_is_number(self.moves) and self.moves >= 0):
            raise BadUse(
                f"moves is {self.moves!r}; it is a number of moves of the search, or None for no limit"
            )
        if not isinstance(self.wait, bool):
            raise BadUse(f"wait is {self.wait!r}; it is True to wait for the best plan, or False")
        if self.progress is not None and not callable(self.progress):
            raise BadUse(
                f"progress is {self.progress!r}; it is a function of two numbers, ops probed and all ops"
            )


@dataclass(frozen=True, slots=True)
class Execution:
    """What computes the ops of a planned step, and where its tensors lie.

    Args:
        kernels: "compiled" lets inductor compile groups of ops (chains of pointwise ops, norms, softmax,
            losses) where that is faster; products and convolutions stay eager. Each distinct group is
            compiled once on a machine, in child processes, which takes seconds for each and five minutes at
            most. The budget holds as for other plans, and gradients are equal within rounding unless every
            kernel gave the bits of its ops.
        arena: the step runs in one storage. Each tensor that it computes lies at an offset that the plan
            gives it, so the step takes the same memory whatever the allocator does, and nothing fragments.
            The budget limits the arena and what lies beside it, and gradients are the same to the bit.
            Gradients lie in the arena too: it ends when they do, as with `zero_grad()`. With an optimizer
            they lie beside it.
        held_blocks: for a device with PyTorch's caching allocator. The plan places what ops allocate: blocks
            are held for a moment where the allocator would else take another place. The step then reserves
            hardly more than it requests. Hold one segment before the model is loaded, as docs/allocator.md
            shows.
    """

    kernels: KernelChoice = field(
        default="eager",
        metadata=told(
            "eager (default): PyTorch's own, the same bits; compiled: inductor compiles groups of ops, once"
            " on a machine, where that is faster; gradients then differ by rounding"
        ),
    )
    arena: bool = field(
        default=False,
        metadata=told(
            "run the step in one storage, each tensor at an offset that the plan gives it: the budget limits"
            " this arena and what lies beside it, whatever the allocator does"
        ),
    )
    held_blocks: bool = field(
        default=False,
        metadata=told(
            "with --allocator or --device: plan for a step that runs with fit(...,"
            " execution=Execution(held_blocks=True)), for which the allocator reserves hardly more than is"
            " requested"
        ),
    )

    def __post_init__(self) -> None:
        if self.kernels not in get_args(KernelChoice):
            raise BadUse(f"kernels is {self.kernels!r}; it is one of {', '.join(get_args(KernelChoice))}")
        object.__setattr__(self, "arena", bool(self.arena))
        object.__setattr__(self, "held_blocks", bool(self.held_blocks))

    @property
    def constraints(self) -> tuple[str, ...]:
        """What was chosen that a step has to keep to, as techniques call it."""
        chosen = {"arena": self.arena, "held blocks": self.held_blocks}
        return tuple(name for name, is_chosen in chosen.items() if is_chosen)

    @property
    def is_compiled(self) -> bool:
        """Whether kernels are compiled where that is faster."""
        return self.kernels == "compiled"


USUAL_SEARCH, USUAL_EXECUTION = Search(), Execution()


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the search gets of a request.

    `allow` names the techniques that may be used. A plan that takes more than `slowest` times eager's time is
    refused. A plan that `is_first` is wanted soon, for a longer search may find a better one later.
    """

    allow: Collection[str] = TECHNIQUES
    search: Search = USUAL_SEARCH
    execution: Execution = USUAL_EXECUTION
    slowest: float = inf
    is_first: bool = False

    @staticmethod
    def of_call(
        allow: Techniques | None,
        search: Search = USUAL_SEARCH,
        execution: Execution = USUAL_EXECUTION,
    ) -> "PlanOptions":
        """What a caller wrote, None where nothing was. Who says what is allowed or preferred has chosen, and
        who says nothing gets no plan that takes more than twice eager's time."""
        slowest = SLOWEST_UNASKED if allow is None and search.prefer is None else inf
        allowed = TECHNIQUES if allow is None else known_techniques(allow)
        return PlanOptions(allowed, search, execution, slowest)

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow", known_techniques(self.allow))

    @property
    def prefer(self) -> Preference:
        """The criterion between plans that are within the budget."""
        return self.search.prefer or "exactness"

    @property
    def offloads(self) -> bool:
        """Whether tensors may leave for a tier."""
        return not set(ON_REQUEST).isdisjoint(self.allow)


DEFAULT_OPTIONS = PlanOptions()
