"""What each gradient op of TensorFlow reads and makes, and where in the forward half that is found.

A gradient op is named "gradients/" + its forward op + "_grad/" + its own type. The gradient it starts from is
made by the gradient op of whoever reads the forward op's output.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from stowplan.formats.tensorflow.forward import Slot
from stowplan.formats.tensorflow.rows import Listing, RowKind
from stowplan.ir import Role

_GRADIENT_OP = re.compile(r"gradients/(.+)_grad/\w+")


class Part(Enum):
    """What of its forward op a gradient op reads."""

    INPUT = auto()
    OUTPUT = auto()
    GRADIENT = auto()  # of the output
    SIZES = auto()  # the shape of an input, as a constant


@dataclass(frozen=True, slots=True)
class Operand:
    """One input of a gradient op; `index` counts the forward op's inputs."""

    part: Part
    index: int = 0

    @property
    def role(self) -> Role:
        """Values of the forward half were kept for this; the gradient and constants were not."""
        return Role.SAVED if self.part in (Part.INPUT, Part.OUTPUT) else Role.DATA


@dataclass(frozen=True, slots=True)
class GradientRule:
    """What a gradient op reads, in order, and which of the forward op's inputs it makes the gradient of."""

    operands: tuple[Operand, ...]
    makes: int


_IMAGE, _FILTER = Operand(Part.INPUT, 0), Operand(Part.INPUT, 1)
_OUTPUT, _GRADIENT = Operand(Part.OUTPUT), Operand(Part.GRADIENT)

GRADIENT_RULES: Mapping[str, GradientRule] = {
    "ReluGrad": GradientRule((_GRADIENT, _OUTPUT), makes=0),
    "BiasAddGrad": GradientRule((_GRADIENT,), makes=1),
    "Conv2DBackpropFilter": GradientRule((_IMAGE, Operand(Part.SIZES, 1), _GRADIENT), makes=1),
    "Conv2DBackpropInput": GradientRule((Operand(Part.SIZES, 0), _FILTER, _GRADIENT), makes=0),
    "LRNGrad": GradientRule((_GRADIENT, _IMAGE, _OUTPUT), makes=0),
    "MaxPoolGrad": GradientRule((_IMAGE, _OUTPUT, _GRADIENT), makes=0),
}

_PASSED_ON = {("BiasAdd", 0)}
"""Inputs whose gradient is the gradient of the output, unchanged: no op makes it."""


@dataclass(frozen=True, slots=True)
class Adjoint:
    """A gradient op: its forward op, its rule, and the value each input reads (None where unclear)."""

    name: str
    forward: str
    rule: GradientRule
    values: tuple[str | None, ...] = ()


def adjoints_of(listing: Listing, forward: Mapping[Slot, str]) -> dict[str, Adjoint]:
    """The gradient ops by name."""
    search = _Search(listing, forward, {}, defaultdict(list))
    adjoints = [found for row in listing.of_kind(RowKind.OP) if (found := _adjoint(listing, row.name))]
    for adjoint in adjoints:
        search.makers[adjoint.forward, adjoint.rule.makes] = adjoint.name
    for slot, value in forward.items():
        search.readers[value].append(slot)
    return {adjoint.name: replace(adjoint, values=tuple(search.values_of(adjoint))) for adjoint in adjoints}


def _adjoint(listing: Listing, name: str) -> Adjoint | None:
    match = _GRADIENT_OP.fullmatch(name)
    rule = GRADIENT_RULES.get(listing.op_types[name])
    if match is None or rule is None or listing.kinds.get(match[1]) is not RowKind.OP:
        return None
    return Adjoint(name, match[1], rule)


@dataclass(frozen=True, slots=True)
class _Search:
    """Both halves, indexed: which gradient op belongs to an input, and which inputs read a value."""

    listing: Listing
    forward: Mapping[Slot, str]
    makers: dict[Slot, str]
    readers: defaultdict[str, list[Slot]]

    def values_of(self, adjoint: Adjoint) -> Iterator[str | None]:
        """What a gradient op's inputs read, in order."""
        for position, operand in enumerate(adjoint.rule.operands):
            if operand.part is Part.INPUT:
                yield self.forward.get((adjoint.forward, operand.index))
            elif operand.part is Part.OUTPUT:
                yield adjoint.forward
            elif operand.part is Part.GRADIENT:
                yield self.gradient_at(adjoint.forward)
            else:
                yield self.sizes_constant(adjoint, position, operand.index)

    def gradient_at(self, value: str) -> str | None:
        """The gradient op that makes a value's gradient.

        At the end of the forward half that is the value itself: the derivative of a loss of half its square,
        whose product with one TensorFlow's optimizer has folded away.
        """
        passed: set[str] = set()
        while value not in passed:
            passed.add(value)
            readers = self.readers.get(value, [])
            if len(readers) != 1:
                return None if readers else value
            reader, position = readers[0]
            if (self.listing.op_types[reader], position) not in _PASSED_ON:
                return self.makers.get((reader, position))
            value = reader
        return None

    def sizes_constant(self, adjoint: Adjoint, position: int, index: int) -> str | None:
        """The shape of a forward input, folded to a constant or rewritten for this input of the op."""
        names = (
            f"{adjoint.name}-{position}-LayoutOptimizer",
            f"ConstantFolding/gradients/{adjoint.forward}_grad/ShapeN-matshapes-{index}",
        )
        return next((name for name in names if name in self.listing.rows), None)
