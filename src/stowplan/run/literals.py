"""Names and values as Python text: what generated code is made of."""

import keyword
import math
import re
from collections.abc import Iterable, Mapping

import torch

from stowplan.capture import Argument, Ref
from stowplan.errors import BadUse


def identifiers_of(tensors: Iterable[str]) -> dict[str, str]:
    """A Python name for each tensor id, as close to the id as can be, no two alike."""
    names: dict[str, str] = {}
    taken = {"torch", "ops", "aten", "forward", "backward", "primals", "saved", "tangents"}
    for tensor in tensors:
        name = re.sub(r"\W", "_", re.sub(r"\.(?=\d+$)", "__", tensor))  # output 1 of `split` is split__1
        if name[:1].isdigit() or keyword.iskeyword(name):
            name = f"t_{name}"
        while name in taken:
            name += "_"
        taken.add(name)
        names[tensor] = name
    return names


def literal(value: Argument, names: Mapping[str, str]) -> str:
    """`value` as an expression."""
    match value:
        case Ref(tensor):
            return names[tensor]
        case tuple():
            return "[" + ", ".join(literal(item, names) for item in value) + "]"
        case float() if not math.isfinite(value):
            return f"float({str(value)!r})"
        case torch.device():
            return f"torch.device({str(value)!r})"
        case torch.Generator():
            raise BadUse(
                "a random op with a generator of its own cannot be written as source; use the default one"
            )
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case _:
            return repr(value)
