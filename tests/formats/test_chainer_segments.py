"""The U-Net's step in segments, each run again before its backward: known peaks of a hand-made schedule."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from stowplan.analyse import facts_of
from stowplan.formats import chainer
from stowplan.formats.chainer import SavedView
from stowplan.ir import Graph, Op, Phase, Role, Use, validate

CUTS = (8, 15, 22, 30, 38, 45, 52)


def in_segments(graph: Graph, cuts: tuple[int, ...]) -> Graph:
    """Keep what crosses a cut, free the rest, and run each segment but the last again before its backward."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    segments = [forward[low:high] for low, high in pairwise((0, *cuts, len(forward)))]
    home = {name: index for index, ops in enumerate(segments) for op in ops for name in op.writes()}
    crossing = {
        name
        for index, ops in enumerate(segments)
        for op in ops
        for name in op.reads()
        if home.get(name) != index
    }
    steps, tensors = list(forward), dict(graph.tensors)
    for ops in reversed(segments):
        again = {name: f"{name}#2" for op in ops for name in op.writes() if name not in crossing}
        if ops is segments[-1]:
            again = {}
        ids = {op.id for op in ops}
        backward = [op for op in graph.ops if op.adjoint_of in ids]
        steps += [reading(op, again) for op in (*recomputed(ops, backward, again), *backward)]
        tensors |= {copy: replace(graph.tensors[name], id=copy) for name, copy in again.items()}
    used = {use.tensor for op in steps for use in (*op.inputs, *op.outputs)}
    kept = {name: tensor for name, tensor in tensors.items() if name in used}
    return validate(Graph(kept, tuple(steps), graph.held))


def reading(op: Op, copies: dict[str, str]) -> Op:
    """The op with its inputs taken from the second run."""
    return replace(op, inputs=tuple(Use(copies.get(use.tensor, use.tensor), use.role) for use in op.inputs))


def recomputed(ops: list[Op], backward: list[Op], again: dict[str, str]) -> Iterator[Op]:
    """The ops of a segment that its backward needs a second time, in order."""
    wanted = {use.tensor for op in backward for use in op.inputs if use.role is Role.SAVED} & again.keys()
    needed = []
    for op in reversed(ops):
        if wanted & set(op.writes()):
            needed.append(op)
            wanted |= set(op.reads()) & again.keys()
    for op in reversed(needed):
        outputs = tuple(Use(again[name]) for name in op.writes() if name in again)
        yield replace(op, id=f"{op.id}#2", outputs=outputs)


@pytest.mark.parametrize(
    ("view", "peak"), [(SavedView.LISTED, 4_405_615_888), (SavedView.RETAIN, 4_090_912_016)]
)
def test_eight_segments(dump: Callable[[str], Path], view: SavedView, peak: int) -> None:
    plain = chainer.read(dump("chainer").read_text(), view).graph
    facts = facts_of(in_segments(plain, CUTS))
    assert facts.peak.bytes == peak
    forward_macs = facts_of(plain).costs.forward_macs
    assert round(facts.costs.forward_macs / forward_macs - 1, 3) == 0.656
