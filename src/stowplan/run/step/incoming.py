"""Incoming gradients: those that came in for the outputs of a step, made ready for its backward half.

A plan takes a layout other than the captured one as it is, with eager's bits, if the captured calls run on it
and no op then writes over an operand that is laid out otherwise than eager's result. Others are copied into
the captured layout, which gives the gradients of eager for the copy: those for the original within rounding.
"""

import logging
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from stowplan.capture import Captured, Program, Ref
from stowplan.capture.changes import changes_of
from stowplan.capture.layouts import swayed_ops
from stowplan.capture.paths import Sources
from stowplan.capture.recording import output_keys
from stowplan.capture.stand_ins import same_strides, stride_of
from stowplan.errors import BadUse
from stowplan.plan.steps import Compute, RecomputeOp, Step
from stowplan.run.step.source import Source

_log = logging.getLogger("stowplan")
_Strides = tuple[tuple[int, ...], ...]


class IncomingGradients:
    """Of one step, whose code is `source`."""

    def __init__(self, captured: Captured, steps: Sequence[Step], source: Source) -> None:
        self._captured, self._source = captured, source
        self._names = [name for name in captured.program.tangents if name is not None]
        tensors = (captured.graph.tensors[name] for name in self._names)
        self._expected: _Strides = tuple(map(stride_of, tensors))
        runs = (step for step in steps if isinstance(step, (Compute, RecomputeOp)))
        self._overwriting = frozenset(step.op for step in runs if step.overwrites)
        self._taken: dict[_Strides, bool] = {}
        self._said: set[str] = set()
        leaves = zip(captured.program.outputs, captured.program.tangents, strict=True)
        of_output = {leaf.tensor: name for leaf, name in leaves if isinstance(leaf, Ref) and name is not None}
        self._of_output = tuple(of_output.get(output) for output in source.outputs)

    def came(self, gradients: Sequence[Tensor | None]) -> Sources:
        """The names of those that came in, for gradients by output; BadUse for one that has no part here."""
        found = []
        for name, gradient, output in zip(self._of_output, gradients, self._source.outputs, strict=True):
            if gradient is not None and name is None:
                raise BadUse(_unplanned(self._captured.program, output))
            if gradient is not None and name is not None:
                found.append(name)
        return frozenset(found)

    def reaches(self, came: Sources) -> Mapping[str, bool]:
        """Whether a differentiated tensor depends on an output whose gradient came in."""
        sources_of = self._captured.paths.sources_of
        if not came or not sources_of:
            return dict.fromkeys(self._captured.program.gradients, bool(came))
        return {name: not sources.isdisjoint(came) for name, sources in sources_of.items()}

    def suited(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Those for the step's tangents, in order and laid out as it takes them; the list is emptied."""
        by_name = dict(zip(self._of_output, gradients, strict=True))
        gradients.clear()
        tangents = [by_name.pop(name) for name in self._names]
        self._tell_of_meetings(
            [n for n, tangent in zip(self._names, tangents, strict=True) if tangent is not None]
        )
        pairs = zip(tangents, self._expected, strict=True)
        strides = tuple(expected if each is None else each.stride() for each, expected in pairs)
        if strides == self._expected or self._takes(strides):
            return tangents
        for number, (tangent, expected) in enumerate(zip(tangents, self._expected, strict=True)):
            if tangent is not None:
                tangents[number] = _laid_out(tangent, expected)
            del tangent
        return tangents

    def _takes(self, strides: _Strides) -> bool:
        if strides not in self._taken:
            captured, given = self._captured, dict(zip(self._names, strides, strict=True))
            swayed = swayed_ops(captured.graph, captured.program, given)
            self._taken[strides] = swayed is not None and self._overwriting.isdisjoint(swayed)
            if not self._taken[strides]:
                _log.warning(
                    "gradients come in with strides %s, and the step was captured for %s: they are copied,"
                    " and the gradients of parameters are those of eager within rounding",
                    *(", ".join(map(str, each)) for each in (strides, self._expected)),
                )
        return self._taken[strides]

    def _tell_of_meetings(self, came: Collection[str]) -> None:
        for place in (each.place for each in self._source.meetings if not each.is_exact(came)):
            if place not in self._said:
                self._said.add(place)
                _log.warning(
                    "the loss uses some outputs of the step and not all, and the plan has one op for several"
                    " of them (%s): zeros stand for the gradients that are missing, and the gradients of"
                    " parameters are those of eager within rounding. This is said once.",
                    place,
                )


def copied(gradient: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy with these strides."""
    copy = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device)
    return copy.copy_(gradient)


def zeros(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """What stands for a gradient that is missing."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _laid_out(gradient: Tensor, stride: tuple[int, ...]) -> Tensor:
    if same_strides(tuple(gradient.shape), gradient.stride(), stride):
        return gradient
    return copied(gradient, stride)


def _unplanned(program: Program, output: str) -> str:
    """Why a gradient for this output is refused, and what to do."""
    keys = output_keys(program.output_spec)
    key = keys[program.outputs.index(Ref(output))]
    pairs = zip(keys, program.tangents, strict=True)
    planned = ", ".join(_named(known) for known, tangent in pairs if tangent is not None)
    changes = changes_of(program.output_spec)
    is_stored = changes is not None and any(key == each.name for each in changes.stored)
    return (
        f"a gradient came in for {_named(key)}, but the step is planned for a gradient of {planned}"
        ' alone; use fit(..., outputs="all") for gradients of all outputs'
        + ("" if is_stored else f", or fit(..., loss={key!r}) if that is the loss")
    )


def _named(key: str | int | None) -> str:
    return "the output" if key is None else f"output {key!r}"
