"""Storages: the memory of tensors. Tensors that alias each other share one storage."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowplan.errors import InvalidGraph
from stowplan.ir import Graph, Kind, Tensor


@dataclass(frozen=True, slots=True)
class Storages:
    """Every storage by number: the tensor that owns it, its bytes, and which tensors live in it."""

    owners: tuple[str, ...]
    nbytes: NDArray[np.int64]
    number_of: Mapping[str, int]  # tensor id -> storage number


def storages_of(graph: Graph) -> Storages:
    """Follow every alias to the tensor that owns the storage."""
    owners = tuple(name for name, tensor in graph.tensors.items() if tensor.alias_of is None)
    number = {owner: position for position, owner in enumerate(owners)}
    sizes = np.zeros(len(owners), dtype=np.int64)
    for owner, position in number.items():
        nbytes = graph.tensors[owner].nbytes
        if nbytes is None:
            raise InvalidGraph(
                f"the bytes of tensor {owner!r} are not known, so its memory cannot be counted"
            )
        sizes[position] = nbytes
    number_of = number | {name: number[graph.storage_of(name)] for name in graph.tensors}  # owners first
    return Storages(owners, sizes, number_of)


def is_resident(tensor: Tensor) -> bool:
    """Whether the tensor is there before, during and after every step."""
    return tensor.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)
