"""A step in which the backward of sweeps rematerialises inputs: it recomputes them from kept tensors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from stowplan.capture import Argument, Call, Captured, Ref
from stowplan.capture.program import attributes_of, inputs_of, leaves
from stowplan.ir import Op, Phase, Role, Use
from stowplan.ops.table import shape_of
from stowplan.techniques.tiles.plan.rematerialise import RematerialisedInputs
from stowplan.techniques.tiles.plan.segment import Segment
from stowplan.techniques.tiles.run.sweep import Sweep

_GATHER, _BACKWARD = "stowplan.gather.default", "stowplan.sweep_backward.default"


@dataclass(frozen=True, slots=True)
class RematerialisedSweep:
    """How a sweep is differentiated: as `sweep`, after `before`, which recomputes whole inputs, if any."""

    sweep: Sweep
    before: Sweep | None


def rematerialised_sweeps(
    sweeps: Sequence[Sweep], remats: Mapping[str, RematerialisedInputs], calls: Mapping[str, Call]
) -> dict[str, RematerialisedSweep]:
    """By the name of a sweep that rematerialises inputs, how it is differentiated."""
    gathered = {op: gathering for sweep in sweeps for op, gathering in sweep.gatherings.items()}
    found: dict[str, RematerialisedSweep] = {}
    for sweep in (sweep for sweep in sweeps if sweep.name in remats):
        remat = remats[sweep.name]
        whole, parts = remat.at_once, remat.in_parts
        found[sweep.name] = RematerialisedSweep(
            sweep if parts is None else sweep.rematerialising(remat, calls, gathered),
            None if whole is None else Sweep(whole, calls, _grid(whole, sweeps), gathered),
        )
    return found


def _grid(segment: Segment, sweeps: Sequence[Sweep]) -> tuple[int, ...]:
    """A grid as fine as those of the sweeps that the segment repeats, as far as its outputs allow."""
    inside = {op.id for op in segment.ops}
    grids = [sweep.parts for sweep in sweeps if not inside.isdisjoint(op.id for op in sweep.segment.ops)]
    shapes = [shape_of(segment.graph.tensors[name]) for name in segment.outputs]
    finest = (max(of_dim) for of_dim in zip(*grids, strict=False))
    return tuple(min(of_dim) for of_dim in zip(finest, *shapes, strict=False))


def with_rematerialised_inputs(
    captured: Captured, sweeps: Sequence[Sweep], rematerialised: Mapping[str, RematerialisedSweep]
) -> Captured:
    """The step, captured with `sweeps`, with the backward of those that `rematerialised` names replaced."""
    rewriting = _Rewriting(captured, _names_in(captured, sweeps))
    for op in captured.graph.ops:
        found = rematerialised.get(str(op.attributes.get("name")))
        if found is not None and op.type == _BACKWARD:
            rewriting.add(op, found)
        else:
            rewriting.ops.append(op)
    return rewriting.done()


class _Rewriting:
    """The ops, tensors and calls of the rewritten step so far."""

    def __init__(self, captured: Captured, names: Mapping[str, str]) -> None:
        self._captured, self._names = captured, names
        self._calls, self._tensors = dict(captured.program.calls), dict(captured.graph.tensors)
        self._ahead = {n for op in captured.graph.ops if op.phase is Phase.FORWARD for n in op.writes()}
        self.ops: list[Op] = []

    def add(self, op: Op, found: RematerialisedSweep) -> None:
        """Add a backward sweep, after the op that recomputes some of its inputs."""
        names = dict(self._names)
        if found.before is not None:
            names |= self._remake(op, found.before)
        self._put(op, self._calls[op.id].replacing(_operands(found.sweep, names)))

    def _remake(self, reader: Op, sweep: Sweep) -> dict[str, str]:
        """Add an op that recomputes inputs of the reader; returns their new names by the old ones."""
        outputs = sweep.segment.outputs
        made = {name: f"{self._names[name]}_for_{reader.id}" for name in outputs}
        for name, again in made.items():
            self._tensors[again] = replace(self._tensors[self._names[name]], id=again)
        given = {**_operands(sweep, self._names), "over": (-1,) * len(outputs)}
        call = Call.by_name(torch.ops.stowplan.sweep.default, given, tuple(made.values()))
        op = replace(reader, id=f"again_for_{reader.id}", type=str(call.target), adjoint_of=None)
        self._put(replace(op, outputs=tuple(map(Use, made.values()))), call)
        return made

    def _put(self, op: Op, call: Call) -> None:
        self._calls[op.id] = call
        uses = (Use(n, Role.SAVED if n in self._ahead else Role.DATA) for n in inputs_of(call))
        self.ops.append(replace(op, inputs=tuple(uses), attributes=attributes_of(call)))

    def done(self) -> Captured:
        """The step as it is now."""
        graph = replace(self._captured.graph, ops=tuple(self.ops), tensors=self._tensors)
        return replace(
            self._captured, graph=graph, program=replace(self._captured.program, calls=self._calls)
        )


def _operands(sweep: Sweep, names: Mapping[str, str]) -> dict[str, Argument]:
    """Arguments of the ops of a sweep: the tensors that it reads, the statistics that it is given, itself."""
    inputs, statistics = (tuple(Ref(names[name]) for name in of) for of in (sweep.reads, sweep.known))
    return {"inputs": inputs, "statistics": statistics, "name": sweep}


def _names_in(captured: Captured, sweeps: Sequence[Sweep]) -> dict[str, str]:
    """The names of tensors that sweeps read, make and gather, by their names in the step without sweeps."""
    by_name = {sweep.name: sweep for sweep in sweeps}
    names: dict[str, str] = {}
    for op in captured.graph.ops:
        sweep, call = by_name.get(str(op.attributes.get("name"))), captured.program.calls.get(op.id)
        if sweep is not None and call is not None:
            names.update(_pairs(op, call, sweep))
    return names


def _pairs(op: Op, call: Call, sweep: Sweep) -> Iterator[tuple[str, str]]:
    if op.phase is not Phase.FORWARD:
        return
    made = sweep.statistics if op.type == _GATHER else sweep.segment.outputs
    yield from ((name, output) for name, output in zip(made, call.outputs, strict=False) if output)
    if op.type != _GATHER:
        yield from zip(
            sweep.segment.inputs, (ref.tensor for ref in _refs(call.arguments()["inputs"])), strict=True
        )


def _refs(argument: object) -> Iterator[Ref]:
    return (leaf for leaf in leaves(argument) if isinstance(leaf, Ref))
