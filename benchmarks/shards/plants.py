"""Faults of the code, each of which must be found: they show that the checks can fail."""

from typing import Any

from stowplan.run.shards import checkpoints, workers
from stowplan.run.shards.checkpoints import Checkpoints
from stowplan.run.shards.workers import Workers

UPDATE_BEFORE_THE_SUMS = "update before the sums"


def _changed_buffers_stay(_: Workers) -> None:
    pass


def _no_draws(_: object) -> dict[str, object]:
    return {}


def _newest_of_any_kind(self: Checkpoints) -> int:
    return max((int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*")), default=0)


def _whom_it_talked_to(_: int, __: object, suspects: tuple[int, ...], ___: object) -> tuple[int, ...]:
    return suspects


_REPLACED: dict[str, tuple[Any, str, Any]] = {
    "buffers not given back": (Workers, "_give_back", _changed_buffers_stay),
    "draws not saved": (checkpoints, "_generators", _no_draws),
    "half a checkpoint taken": (Checkpoints, "newest", _newest_of_any_kind),
    "no roll call": (workers, "lost_among", _whom_it_talked_to),
}

PLANTS = (UPDATE_BEFORE_THE_SUMS, *_REPLACED)


def plant_in_this_process(plant: str) -> None:
    """Put the fault of this name in the place of what is right."""
    if plant in _REPLACED:
        setattr(*_REPLACED[plant])
