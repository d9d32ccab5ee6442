"""Decide where, when and for how long every tensor of a training step lives, under a budget in bytes."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stowplan.api import convert, explain, inspect, planner_for, read_document, read_plan
    from stowplan.run.fit import fit, plans_of
    from stowplan.run.shards.fit import choices_of, shards_of

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "choices_of",
    "convert",
    "explain",
    "fit",
    "inspect",
    "planner_for",
    "plans_of",
    "read_document",
    "read_plan",
    "shards_of",
]

# Looked up when first asked for: importing stowplan is quick, and only what runs models brings torch.
_HOMES = {
    "fit": "stowplan.run.fit",
    "plans_of": "stowplan.run.fit",
    "choices_of": "stowplan.run.shards.fit",
    "shards_of": "stowplan.run.shards.fit",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'stowplan' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "stowplan.api")), name)
