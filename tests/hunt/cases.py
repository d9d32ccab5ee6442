"""Case: everything that one integer stands for."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from stowplan.plan.options import Preference

from .actions import ACTIONS, Action
from .batches import Feed, draw_feed
from .iterations import OPTIMIZERS
from .networks import Network, draw_network

CASES_PER_NETWORK = 4  # consecutive seeds share a network: its ops have been probed then
_WITH_PROGRAM, _TILES_WITH_PROGRAM = 0.5, 0.25  # with tiles each new plan takes a second
_ROWS_TO_MOVE, _ROWS_TO_TILE, _OPS_TO_TILE = 8, 2, 5

_WITH_OPTIMIZER = 0.1  # drawn last, from a source of its own: all other cases stay as they were

_TRANSFERS: tuple[tuple[str, ...], ...] = (
    ("recompute", "offload"),
    ("offload",),
    ("recompute", "offload", "offload-gradients"),
)
_ALL = ("recompute", "tile", "offload", "offload-gradients")
_ANY = (*[("recompute",)] * 10, ("recompute", "tile"), ("tile",), _ALL, *_TRANSFERS)
_FOR_TILES = (*[("recompute",)] * 5, *[("recompute", "tile")] * 2, *[("tile",)] * 4, _ALL, *_TRANSFERS)


@dataclass(frozen=True, slots=True)
class Turn:
    """One action of a loop program, with the source of its choices."""

    action: str
    seed: int

    def __str__(self) -> str:
        return f"{self.action}({self.seed})"


@dataclass(frozen=True, slots=True)
class Case:
    """`share` places the budget: 0 is what stands before the step and its gradients, 1 is eager's peak."""

    seed: int
    network: Network
    feed: Feed
    techniques: tuple[str, ...]
    share: float
    prefer: Preference
    moves: int
    before: tuple[Turn, ...] = ()  # actions before `fit`
    after: tuple[Turn, ...] = ()
    optimizer: str = ""  # what `fit` is given as optimizer

    @property
    def has_tiles(self) -> bool:
        return "tile" in self.techniques

    @property
    def has_program(self) -> bool:
        return bool(self.before or self.after)

    def smaller(self) -> Iterator["Case"]:
        """Cases with a little less, the largest savings first."""
        for turns in _fewer(self.before):
            yield replace(self, before=turns)
        for turns in _fewer(self.after):
            yield replace(self, after=turns)
        for position in reversed(range(len(self.network.calls))):
            yield replace(self, network=self.network.without(position))
        if self.feed != (plain := Feed("contiguous", "own", wants_gradient=False)):
            yield replace(self, feed=plain)
        if self.network.reads_all:
            yield replace(self, network=replace(self.network, reads_all=False))
        if self.network.output != "square":
            yield replace(self, network=replace(self.network, output="square"))
        if self.network.signature != "tensors":
            yield replace(self, network=replace(self.network, signature="tensors"))

    def __str__(self) -> str:
        fit = f"fit with {self.optimizer}" if self.optimizer else "fit"
        program = [*map(str, self.before), fit, "step", *map(str, self.after)]
        return (
            f"{self.network.source()}\n"
            f"# seed {self.seed}: {self.network.sizes}, {self.network.dtype}, {self.feed}\n"
            f"# allow {', '.join(self.techniques)}; prefer {self.prefer}; moves {self.moves};"
            f" share of the budget {self.share:.3f}\n"
            f"# program: {'; '.join(program)}\n"
        )


def draw_case(seed: int) -> Case:
    """The case of a seed, whatever was drawn before."""
    random = Random(f"case {seed}")
    network = draw_network(Random(f"network {seed // CASES_PER_NETWORK}"))
    techniques = random.choice(_FOR_TILES if network.is_spatial() else _ANY)
    if "offload" in techniques:  # a tier takes room for its staging buffers, which tiny tensors do not repay
        network = replace(network, sizes=replace(network.sizes, batch=_ROWS_TO_MOVE))
    if "tile" in techniques:  # grids over many rows and ops take seconds to look through
        rows = min(network.sizes.batch, _ROWS_TO_TILE)
        sizes = replace(network.sizes, batch=rows)
        network = replace(network, sizes=sizes, calls=network.calls[:_OPS_TO_TILE])
    case = Case(
        seed,
        network,
        draw_feed(random),
        techniques,
        share=random.choice((0.0, random.random(), random.random(), random.random() ** 2)),
        prefer=random.choice(("exactness", "exactness", "time")),
        moves=random.choice((3, 3, 20)),
    )
    every = [a for a in ACTIONS.values() if a.suits(network, has_tiles=case.has_tiles)]
    suited = [action for action in every if not action.has_optimizer]
    draw = partial(_turns, random)
    if random.random() <= (_TILES_WITH_PROGRAM if case.has_tiles else _WITH_PROGRAM):
        tidy = [action for action in suited if not action.is_strange for _ in range(action.weight)]
        early = [action for action in tidy if action.comes_before_fit]
        case = replace(
            case, before=draw(early, random.choice((0, 0, 1, 2))), after=draw(tidy, random.randint(2, 6))
        )
    strange = [action for action in suited if action.is_strange]
    own = [action for action in strange if action.kinds or action.output]  # of what the network alone has
    count = random.choice((0, 0, 0, 1, 2))
    case = replace(case, after=case.after + draw(strange, count) + draw(own, min(len(own), 1)))
    iterations = [action for action in every if action.has_optimizer for _ in range(action.weight)]
    return _with_optimizer(case, Random(f"whole iteration {seed}"), iterations)


def _with_optimizer(case: Case, random: Random, actions: list[Action]) -> Case:
    """One case in a few is a loop of iterations instead."""
    if random.random() >= _WITH_OPTIMIZER:
        return case
    return replace(
        case,
        techniques=random.choice((("recompute",), ("recompute",), ("recompute", "offload"))),
        optimizer=random.choice(tuple(OPTIMIZERS)),
        before=(),
        after=_turns(random, actions, random.randint(1, 4)),
    )


def _fewer(turns: tuple[Turn, ...]) -> Iterator[tuple[Turn, ...]]:
    if turns:
        yield ()
    if len(turns) > 1:
        yield from ((*turns[:place], *turns[place + 1 :]) for place in range(len(turns)))


def _turns(random: Random, actions: list[Action], count: int) -> tuple[Turn, ...]:
    return tuple(Turn(random.choice(actions).name, random.randrange(1000)) for _ in range(count))
