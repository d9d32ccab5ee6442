"""Program: a captured step as data that PyTorch can run, beside the Graph that plans are made on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec

from stowplan.capture.arguments import Spec
from stowplan.capture.handles import Handle


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor of the graph, by id, in the arguments of a call."""

    tensor: str


Argument: TypeAlias = (
    "Ref | Handle | tuple[Argument, ...] | bool | int | float | complex | str"
    " | torch.dtype | torch.device | torch.layout | torch.memory_format | torch.Generator | None"
)


@dataclass(frozen=True, slots=True)
class Call:
    """One op of the graph as a call: it has no effect but to make its outputs.

    `outputs` are tensor ids, None where the op makes no tensor there; `single` ops return the tensor itself,
    the others a tuple. `fresh` names arguments that the target overwrites, and which must therefore be
    copies: for ops that exist in PyTorch only as such. The result of a `copied` op is copied at once, for the
    op leaves it in a larger storage.
    """

    target: OpOverload
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]
    outputs: tuple[str | None, ...]
    single: bool
    fresh: tuple[str, ...] = ()
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """What running a graph takes besides its order: the calls by op id, and what its ends are bound to.

    Tensors are named by their ids in the graph. `parameters` and `buffers` give every name that the model has
    for a tensor, `inputs` and `tangents` are by position among the leaves of the arguments and of the outputs
    (None: not a tensor, or no gradient comes in there). `outputs` are the leaves of what the step returns: a
    Ref, or a value that is always the same; those that are `attached` take part in autograd. `gradients` maps
    what was differentiated to its gradient, `updates` what was there before to its new contents. Constants
    are tensors that the step's code found somewhere, or, if they are `literals`, wrote out as numbers. A
    program that `looks_at_values` of known integers has decided by them what it does.
    """

    calls: Mapping[str, Call]
    parameters: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, Tensor]
    inputs: tuple[str | None, ...]
    input_spec: Spec
    outputs: tuple[object, ...]
    attached: tuple[bool, ...]
    output_spec: TreeSpec
    tangents: tuple[str | None, ...]
    gradients: Mapping[str, str]
    updates: Mapping[str, str] = field(default_factory=dict)
    literals: frozenset[str] = frozenset()
    looks_at_values: bool = False
