"""Options of `fit` by themselves, as cases list them, in the groups that `fit` takes."""

from collections.abc import Mapping
from typing import Any

from stowplan.request import grouped


def asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as `fit` takes them."""
    return grouped(options)
