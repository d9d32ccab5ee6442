"""Causal attention of some queries: keys up to the last of them, under a mask that knows their places."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stowplan.run.parts.part import LocalCall, call_with

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def is_causal_part(call: LocalCall) -> bool:
    """Whether a call's own causal mask would count from the first query that it is given."""
    return call.target is _FLASH and bool(call.arguments["is_causal"]) and call.made.lo[-2] > 0


def causal_part(call: LocalCall, given: Mapping[str, Tensor]) -> Tensor:
    """The attended values of queries that begin at `call.made`."""
    arguments = call.given(given)
    query = arguments["query"]
    assert isinstance(query, Tensor)
    first, last = call.made.lo[-2], call.made.hi[-2]
    blocked = torch.ones(last - first, last, dtype=torch.bool, device=query.device).triu(first + 1)
    mask = torch.zeros_like(blocked, dtype=query.dtype).masked_fill(blocked, float("-inf"))
    made: tuple[Tensor, Tensor] = call_with(call.target, {**arguments, "is_causal": False, "attn_mask": mask})  # type: ignore[assignment]
    return made[0]
