"""Placeholders: a worker's step captured without buckets, and the buckets that replace its placeholders.

A bucket returns its parameters as views, which no op of a captured step can do. A step that is to be tiled is
therefore captured with placeholder ops; when it is captured a second time, each is replaced by its bucket.
"""

from collections.abc import Mapping
from functools import wraps

import torch
from torch import Tensor, nn

from stowplan.capture import Call, Ref, capture
from stowplan.run.planning.recapture import Replacement
from stowplan.run.planning.subject import Subject
from stowplan.run.shards.actions import entered
from stowplan.run.shards.operator import Collective
from stowplan.run.shards.step import ShardedStep
from stowplan.run.wrappers import with_forward
from stowplan.torch_private import OpOverload


def subject_with_placeholders(step: ShardedStep, model: nn.Module) -> Subject:
    """A worker's step with placeholders, which is planned like any other step."""

    @wraps(type(model).forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return step.run(step.bound_to(self).tensors(args, kwargs), with_placeholders=True)

    args, kwargs = step.example
    module = with_forward(model, forward)
    replacements = {} if step.parameters else _replacements(step)
    return Subject(capture(module, args, kwargs), module, args, kwargs, replacements)


def _replacements(step: ShardedStep) -> dict[OpOverload, Replacement]:
    buckets = {bucket.collective: bucket.parameters for bucket in step.buckets}

    def begin(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        token, *flats = step.begun(values)
        return {
            _made_by(call): token,
            **{each.key: flat for each, flat in zip(buckets, flats, strict=True)},
        }

    def enter(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        token, collective = call.args
        assert isinstance(token, Ref)
        assert isinstance(collective, Collective)
        names = buckets[collective]
        given = [values[name] for name in names]
        following, *parameters = entered(collective, values[collective.key], values[token.tensor], given)
        return {_made_by(call): following, **dict(zip(names, parameters, strict=True))}

    return {torch.ops.stowplan.first_token.default: begin, torch.ops.stowplan.bring.default: enter}


def _made_by(call: Call) -> str:
    (name,) = call.outputs
    assert name is not None
    return name
