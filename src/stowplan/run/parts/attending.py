"""Causal attention of some queries: their mask depends on their position among all queries."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stowplan.run.parts.part import LocalCall, call_with


def attended(call: LocalCall, given: Mapping[str, Any]) -> Tensor:
    """The values that a tile of queries attends to; with a causal mask keys and values end with the tile."""
    first = call.made.lo[-2]
    if given["is_causal"] and first:
        given = {**given, "is_causal": False, "attn_mask": _mask(given["query"], given["key"], first)}
    made: Any = call_with(call.target, given)
    part: Tensor = made[0]
    return part


def _mask(query: Tensor, key: Tensor, first: int) -> Tensor:
    """Zero for keys up to each query's own position, minus infinity for later ones."""
    shape = (query.shape[-2], key.shape[-2])
    hidden = torch.full(shape, float("-inf"), dtype=query.dtype, device=query.device)
    return hidden.triu(first + 1)
