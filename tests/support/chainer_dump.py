"""Chainer files made by hand: name the variables and the calls, get the text that Chainer would dump."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"


@dataclass(frozen=True)
class Call:
    """One function call; its backward lists the gradients of all outputs, all inputs and all outputs."""

    type: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, Json] = field(default_factory=dict)


def dump(variables: Mapping[str, tuple[int, str]], calls: Sequence[Call]) -> str:
    """The file of one training step; ranks are longest paths from the inputs."""
    ranks = _ranks(calls)
    lines = [f"{len(variables)} {2 * len(calls)}"]
    lines += [f"{name} {nbytes} {label}" for name, (nbytes, label) in variables.items()]
    for call, rank in zip(calls, ranks, strict=True):
        lines += _record("forward", [f"{name} _" for name in call.inputs], call.outputs, call, rank)
    for call, rank in zip(calls, ranks, strict=True):
        inputs = [f"{name} gradient" for name in call.outputs]
        inputs += [f"{name} input" for name in call.inputs]
        inputs += [f"{name} output" for name in call.outputs]
        lines += _record("backward", inputs, call.inputs, call, rank)
    return "\n".join(lines) + "\n"


def _record(phase: str, inputs: Sequence[str], outputs: Sequence[str], call: Call, rank: int) -> list[str]:
    attributes = json.dumps({**call.attributes, "rank": rank})
    return [phase, f"{len(inputs)} {len(outputs)}", *inputs, *outputs, call.type, attributes]


def _ranks(calls: Sequence[Call]) -> list[int]:
    rank_of: dict[str, int] = {}
    ranks = []
    for call in calls:
        ranks.append(max((rank_of.get(name, -1) for name in call.inputs), default=-1) + 1)
        rank_of.update(dict.fromkeys(call.outputs, ranks[-1]))
    return ranks
