"""Names and values as Python text: what generated code is made of.

Nothing in that text is the user's. A tensor is named by its kind, or by the op that makes it, and a counter;
a value is spelled by its exact type, and a string in ASCII with escapes.
"""

import keyword
import math
import re
from collections import Counter
from collections.abc import Mapping

import torch

from stowplan.capture import Argument, Call, Handle, Ref
from stowplan.errors import BadUse
from stowplan.ir import Graph, Kind
from stowplan.torch_private import OpOverload, schema_of

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LETTERS = {Kind.PARAMETER: "p", Kind.BUFFER: "b", Kind.INPUT: "x", Kind.CONSTANT: "c"}


def identifiers_of(graph: Graph, calls: Mapping[str, Call]) -> dict[str, str]:
    """A Python name for each tensor id, no two alike.

    What an op makes is `addmm_3`, its fourth `addmm`; what comes from outside is `p0`, `b0`, `x0`, `c0` or,
    as a gradient, `g0`. Other variables of generated code must not end in `_` and digits, nor be so short.
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    numbers: Counter[str] = Counter()
    for op in graph.ops:
        base = _base_of(calls[op.id].target)
        made = [name for name in op.writes() if name not in names]
        places = [""] if len(made) == 1 else [f"_{place}" for place in range(len(made))]
        while any(f"{base}_{numbers[base]}{place}" in taken for place in places):
            numbers[base] += 1
        for name, place in zip(made, places, strict=True):
            names[name] = f"{base}_{numbers[base]}{place}"
        taken.update(names[name] for name in made)
        numbers[base] += 1
    for name, tensor in graph.tensors.items():
        if name not in names:
            letter = _LETTERS.get(tensor.kind, "g")
            names[name] = f"{letter}{numbers[letter + ' outside']}"
            numbers[letter + " outside"] += 1
    return names


def _base_of(target: OpOverload) -> str:
    """The name of an op of PyTorch's or ours; the names of others are not ours to write."""
    namespace, _, name = schema_of(target).name.partition("::")
    return name if namespace in ("aten", "stowplan") and _IDENTIFIER.fullmatch(name) else "op"


def spelled(target: OpOverload) -> str:
    """The op as an expression."""
    namespace, *path = str(target).split(".")
    if all(map(_is_name, (namespace, *path))):
        return str(target) if namespace == "aten" else f"ops.{target}"
    found = "ops"
    for part in (namespace, *path):
        found = f"getattr({found}, {part!a})"
    return found


def keyword_argument(name: str, value: str) -> str:
    """`name=value`, where `name` may be a word that Python does not take there, such as `from`."""
    return f"{name}={value}" if _is_name(name) else f"**{{{name!a}: {value}}}"


def _is_name(text: str) -> bool:
    return _IDENTIFIER.fullmatch(text) is not None and not keyword.iskeyword(text)


def literal(value: Argument, names: Mapping[str, str]) -> str:
    """`value` as an expression. Of a subclass, the value is written that it has as its base type."""
    match value:
        case Ref(tensor):
            return names[tensor]
        case Handle():
            return ascii(value.key)
        case tuple():
            return "[" + ", ".join(literal(item, names) for item in value) + "]"
        case None | True | False:
            return str(value)
        case int():
            return int.__repr__(value)
        case float() if not math.isfinite(value):
            return f"float('{float.__repr__(value)}')"
        case float():
            return float.__repr__(value)
        case complex():
            return f"complex({literal(value.real, names)}, {literal(value.imag, names)})"
        case str():
            return ascii(str.__str__(value))
        case torch.device():
            return f"torch.device({str(value)!a})"
        case torch.Generator():
            raise BadUse(
                "a random op with a generator of its own cannot be written as source; use the default one"
            )
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case _:
            raise BadUse(
                f"an op is called with a {type(value).__name__}, which cannot be written as source;"
                " pass a number, a string or a tensor"
            )
