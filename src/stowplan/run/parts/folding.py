"""Folding: a tile that is only run goes through memory fewer times than one that is differentiated.

A norm whose statistics are known scales and shifts what the convolution before it makes: weight and bias can
do that. Sums and rectifiers are written over what nobody reads any more.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stowplan.ir import DType, Graph
from stowplan.ops.statistics import BATCH_NORMS
from stowplan.run.parts.part import LocalCall
from stowplan.run.step.last_uses import last_uses

aten = torch.ops.aten
_WRITTEN_OVER = (aten.relu.default, aten.add.Tensor)
_FRESH = (aten.convolution.default, *_WRITTEN_OVER)  # what they make is theirs alone
_EXACT = (DType.FLOAT32, DType.FLOAT64)


def folded(graph: Graph, calls: Sequence[LocalCall], kept: Mapping[str, object]) -> tuple[LocalCall, ...]:
    """The same in fewer steps; what is `kept` is read at the end."""
    return tuple(_over_the_dead(graph, tuple(_norms_folded(graph, calls, kept)), kept))


def _norms_folded(
    graph: Graph, calls: Sequence[LocalCall], kept: Mapping[str, object]
) -> Iterator[LocalCall]:
    made = {call.name: call for call in calls}
    readers = Counter(name for call in calls for name in read_by(call))
    gone = set[str]()
    for call in calls:
        first = call.sources[0] if call.sources else None
        before = made.get(first.tensor) if first is not None and first.index is None else None
        if before and readers[before.name] == 1 and before.name not in kept and _fold(graph, before, call):
            gone.add(before.name)
            made[call.name] = replace(
                before, name=call.name, norm=replace(call, sources=(None, *call.sources[1:]))
            )
    yield from (made[call.name] for call in calls if call.name not in gone)


def _fold(graph: Graph, before: LocalCall, call: LocalCall) -> bool:
    """Whether a norm goes into the convolution before it."""
    is_norm = bool(call.statistics) and str(call.target) in BATCH_NORMS
    is_plain = before.target is aten.convolution.default and not before.arguments["transposed"]
    return is_norm and is_plain and graph.tensors[before.name].dtype in _EXACT


def _over_the_dead(
    graph: Graph, calls: Sequence[LocalCall], kept: Mapping[str, object]
) -> Iterator[LocalCall]:
    gone = last_uses([tuple(read_by(call)) for call in calls], kept)
    fresh = dict[str, LocalCall]()
    for call, dead in zip(calls, gone, strict=True):
        if call.target in _FRESH or call.statistics:
            fresh[call.name] = call
        victims = [fresh[name] for name in dead if name in fresh] if call.target in _WRITTEN_OVER else []
        yield replace(call, over=_place(graph, call, victims))


def _place(graph: Graph, call: LocalCall, victims: Sequence[LocalCall]) -> int | None:
    """The position of an operand that the result may be written over."""
    dtype = graph.tensors[call.name].dtype
    alike = {v.name for v in victims if v.shape == call.shape and graph.tensors[v.name].dtype == dtype}
    operands = call.sources if call.arguments.get("alpha", 1) == 1 else call.sources[:1]
    places = (n for n, s in enumerate(operands) if s and s.index is None and s.tensor in alike)
    return next(places, None)


def factors_of(call: LocalCall, norm: LocalCall, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weight and bias of a convolution that normalises what it makes."""
    given, behind = call.given(values), norm.given(values)
    weight, bias = given["weight"], given["bias"]
    mean, variance = (source.of(values) for source in norm.statistics)
    assert isinstance(weight, Tensor)
    eps, scale, shift = behind["eps"], behind["weight"], behind["bias"]
    assert isinstance(eps, float)
    spread = torch.rsqrt(variance + eps)
    times = spread * scale if isinstance(scale, Tensor) else spread
    moved = (bias - mean if isinstance(bias, Tensor) else -mean) * times
    shape = (-1, *(1 for _ in weight.shape[1:]))
    return {
        "weight": weight * times.view(shape).to(weight.dtype),
        "bias": (moved + shift if isinstance(shift, Tensor) else moved).to(weight.dtype),
    }


def written_over(call: LocalCall, values: Mapping[str, Tensor]) -> Tensor:
    """The result of a call, written over the operand that it may overwrite."""
    assert call.over is not None
    parts = [source.of(values) for source in call.sources if source is not None]
    place = parts.pop(call.over)
    if call.target is aten.relu.default:
        return place.relu_()
    given = call.arguments["alpha"]
    assert isinstance(given, int | float)
    return place.add_(*parts, alpha=given)


def read_by(call: LocalCall) -> Iterator[str]:
    """All that a call reads."""
    for each in (call, call.norm):
        if each is not None:
            yield from (source.tensor for source in (*each.sources, *each.statistics) if source is not None)
