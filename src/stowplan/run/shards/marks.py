"""Marks: a worker's step whose parameters are used as they are, and what its marks stand for.

A bucket hands parameters on as views, which no op of a captured step can. So a step that is to be tiled is
captured with marks in their place: run once more, it brings the buckets in where the marks stand.
"""

from collections.abc import Mapping
from functools import wraps

import torch
from torch import Tensor, nn

from stowplan.capture import Call, Ref, capture
from stowplan.run.planning.recapture import Replacement
from stowplan.run.planning.subject import Subject
from stowplan.run.shards.actions import brought_in
from stowplan.run.shards.operator import Collective
from stowplan.run.shards.step import ShardedStep
from stowplan.run.stand_in import with_forward
from stowplan.torch_private import OpOverload


def marked_subject(step: ShardedStep, model: nn.Module) -> Subject:
    """A worker's step with marks, to be planned as any other."""

    @wraps(type(model).forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return step.run(step.bound_to(self).tensors(args, kwargs), marked=True)

    args, kwargs = step.example
    marked = with_forward(model, forward)
    return Subject(capture(marked, args, kwargs), marked, args, kwargs, _what_marks_stand_for(step))


def _what_marks_stand_for(step: ShardedStep) -> dict[OpOverload, Replacement]:
    buckets = {bucket.collective: bucket.parameters for bucket in step.buckets}

    def begin(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        token, *stands = step.begun(values)
        return {
            _made_by(call): token,
            **{each.key: stand for each, stand in zip(buckets, stands, strict=True)},
        }

    def bring(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        token, collective = call.args
        assert isinstance(token, Ref)
        assert isinstance(collective, Collective)
        names = buckets[collective]
        parameters = [values[name] for name in names]
        following, *brought = brought_in(collective, values[collective.key], values[token.tensor], parameters)
        return {_made_by(call): following, **dict(zip(names, brought, strict=True))}

    return {torch.ops.stowplan.first_token.default: begin, torch.ops.stowplan.bring.default: bring}


def _made_by(call: Call) -> str:
    (name,) = call.outputs
    assert name is not None
    return name
