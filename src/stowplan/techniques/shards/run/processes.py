"""Processes: which process of torch.distributed each worker of a mesh is, and the groups that they have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from stowplan.errors import BadUse
from stowplan.techniques.shards.plan.mesh import Axis, MeshAxes, parse_mesh

MeshLike: TypeAlias = str | MeshAxes | DeviceMesh
"""A mesh in words (`data=2,space=2x2`) or as it is, on all processes; or PyTorch's, on those it is of."""


@dataclass(frozen=True, slots=True)
class Processes:
    """A mesh on processes: the rank of each worker, and groups that are there, by the axes they run along."""

    mesh: MeshAxes
    ranks: tuple[int, ...]
    groups: Mapping[tuple[int, ...], ProcessGroup] = field(default_factory=dict)

    @property
    def worker(self) -> int:
        """Which worker this process is."""
        return self.ranks.index(dist.get_rank())


def processes_of(mesh: MeshLike) -> Processes:
    """The processes that a mesh is on; this one must be among them."""
    if isinstance(mesh, DeviceMesh):
        return _of_device_mesh(mesh)
    found = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    there = dist.get_world_size() if dist.is_initialized() else 0
    if there != found.size:
        raise BadUse(f"mesh {found} has {found.size} workers, but {there} processes are connected")
    return Processes(found, tuple(range(there)))


def _of_device_mesh(mesh: DeviceMesh) -> Processes:
    """By the names of its dims; digits at their end tell apart those that would be called alike."""
    names = mesh.mesh_dim_names
    if names is None:
        raise BadUse("a DeviceMesh says what its dims cut by their names: give it mesh_dim_names")
    ranks = tuple(map(int, mesh.mesh.flatten()))
    if dist.get_rank() not in ranks:
        raise BadUse(f"rank {dist.get_rank()} is none of the mesh's, which are {', '.join(map(str, ranks))}")
    axes = (Axis(name.rstrip("0123456789"), size) for name, size in zip(names, mesh.shape, strict=True))
    groups: dict[tuple[int, ...], ProcessGroup] = {(dim,): mesh.get_group(dim) for dim in range(mesh.ndim)}
    return Processes(MeshAxes(tuple(axes)), ranks, groups)
