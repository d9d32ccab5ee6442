"""An example call from a batch: which of its parts are a model's arguments."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from stowplan.errors import BadUse

Arguments: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
Chooser: TypeAlias = Callable[[object], tuple[object, ...] | Mapping[str, object]]


def arguments_of(batch: object, choose: Chooser | None = None) -> Arguments:
    """What `choose` makes of a batch: a tuple is positions, a mapping is names.

    Without it, a mapping is all names, and of a pair (input, target) the input is the only argument.
    """
    chosen = choose(batch) if choose else _usual(batch)
    if isinstance(chosen, Mapping):
        return (), {str(name): value for name, value in chosen.items()}
    return tuple(chosen), {}


def _usual(batch: object) -> tuple[object, ...] | Mapping[str, object]:
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, tuple | list) and batch:
        return (batch[0],)
    raise BadUse(
        f"a batch is a {type(batch).__name__}: say which of it are the model's arguments, "
        "as in inputs=lambda batch: (batch.image,)"
    )
