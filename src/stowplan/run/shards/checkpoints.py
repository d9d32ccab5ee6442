"""The former place of `stowplan.Checkpoints`: it goes with version 0.4."""

import warnings

from stowplan.techniques.shards.run.checkpoints import Checkpoints

__all__ = ["Checkpoints"]

warnings.warn(
    "stowplan.run.shards.checkpoints moved: write `from stowplan import Checkpoints`",
    DeprecationWarning,
    stacklevel=2,
)
