"""Storages: the blocks of memory behind tensors. Tensors that alias each other share one."""

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
    numbers: dict[str, int] = {}
    owners: list[str] = []
    for name, tensor in graph.tensors.items():
        if tensor.alias_of is None:
            numbers[name] = len(owners)
            owners.append(name)
    for name in graph.tensors:
        _file_alias(graph.tensors, name, numbers)
    sizes = np.array([_bytes_of(graph.tensors[owner]) for owner in owners], dtype=np.int64)
    return Storages(tuple(owners), sizes, numbers)


def _file_alias(tensors: Mapping[str, Tensor], name: str, numbers: dict[str, int]) -> None:
    chain = []
    while name not in numbers:
        chain.append(name)
        name = tensors[name].alias_of or name
    for link in chain:
        numbers[link] = numbers[name]


def _bytes_of(tensor: Tensor) -> int:
    if tensor.nbytes is None:
        raise InvalidGraph(
            f"the bytes of tensor {tensor.id!r} are not known, so its memory cannot be counted"
        )
    return tensor.nbytes


def is_resident(tensor: Tensor) -> bool:
    """Whether the tensor is there before, during and after every step."""
    return tensor.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)
