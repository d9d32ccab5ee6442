"""What an op does besides computing its outputs: draw random numbers, update a buffer."""

from enum import Flag, auto

from stowplan.ops.table import Site, Table


class Effect(Flag):
    """Why an op may not simply be run a second time."""

    NONE = 0
    RANDOM = auto()
    BUFFER_UPDATE = auto()


def no_effect(_: Site) -> Effect:
    """The stated default: an op without a rule only computes its outputs."""
    return Effect.NONE


effect_of: Table[Effect] = Table("effects", default=no_effect)


@effect_of.entry("Dropout")
def draws_random_numbers(_: Site) -> Effect:
    """A second run would draw another mask."""
    return Effect.RANDOM
