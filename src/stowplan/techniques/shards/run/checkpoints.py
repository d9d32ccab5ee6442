"""Checkpoints of training over workers: where to go on after one of them was lost.

`torch.distributed.checkpoint` writes and reads them. Each has a folder of its own, whose metadata is written
last: a worker that is lost during a save leaves the checkpoint before as the newest that is whole. The state
of the random generator is part of it, for draws go on where they were. Sharded parameters and their state are
saved as parts of whole ones, so that any number of workers can load them, and one process as well.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stowplan.techniques.shards.run.fit import FittingOnMesh
from stowplan.techniques.shards.run.gather import Rows
from stowplan.techniques.shards.run.workers import Workers

_WRITTEN_LAST = ".metadata"


class Checkpoints:
    """Those of a model and its optimizer in a folder that all workers see, by the number of steps done."""

    def __init__(
        self, folder: Path, workers: Workers, model: nn.Module, *optimizers: torch.optim.Optimizer
    ) -> None:
        self._folder, self._workers = folder, workers
        self._mesh: DeviceMesh | None = None
        self._model, self._optimizers = model, optimizers
        fitting = model.__dict__.get("_fitting")
        self._shards = fitting.sharded.parameters if isinstance(fitting, FittingOnMesh) else None

    def save(self, done: int) -> None:
        """All workers come here after the same step."""
        with self._workers.naming_who_is_lost():
            save(self._laid_out(self._state()), storage_writer=FileSystemWriter(self._named(done)))

    def resume(self) -> int:
        """Load the newest that is whole; the number of steps done by then, 0 if there is none."""
        done = self.newest()
        if done:
            state = self._state()
            with self._workers.naming_who_is_lost():
                load(self._laid_out(state), storage_reader=FileSystemReader(self._named(done)))
            self._load(state)
            self._workers.step = done
        return done

    def newest(self) -> int:
        """The number of steps done in the newest that is whole, 0 if there is none."""
        whole = (path.parent.name for path in self._folder.glob(f"step-*/{_WRITTEN_LAST}"))
        return max((int(name.removeprefix("step-")) for name in whole), default=0)

    def _named(self, done: int) -> Path:
        return self._folder / f"step-{done}"

    def _state(self) -> dict[str, Any]:
        model, optimizers = get_state_dict(self._model, self._optimizers)
        return {"model": model, "optimizers": optimizers, "draws": _generators(self._model)}

    def _laid_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same memory; tensors of sharded parameters say which rows of the whole they are."""
        if self._shards is None:
            return state
        by_name = dict(self._model.named_parameters(remove_duplicate=False))
        rows = {name: self._shards.rows_of(parameter) for name, parameter in by_name.items()}
        model = {name: self._rows_of_whole(each, rows.get(name)) for name, each in state["model"].items()}
        updated = {
            name: {key: self._rows_of_whole(each, rows.get(name)) for key, each in own.items()}
            for name, own in state["optimizers"]["state"].items()
        }
        return {**state, "model": model, "optimizers": {**state["optimizers"], "state": updated}}

    def _rows_of_whole(self, shard: object, rows: Rows | None) -> object:
        if rows is None or not isinstance(shard, Tensor) or shard.shape != rows.of_shard:
            return shard
        self._mesh = self._mesh or self._workers.device_mesh(shard.device)
        own = shard[: rows.count(self._workers.rank)]
        shape = torch.Size(rows.shape or (1,))
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(own, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=strides)

    def _load(self, state: Mapping[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizers"],
        )
        for kind, drawn in state["draws"].items():
            _random_of(kind).set_rng_state(drawn)


def _generators(model: nn.Module) -> dict[str, Tensor]:
    """The states that draws go on from, by the kind of device."""
    kinds = {"cpu", *(parameter.device.type for parameter in model.parameters())}
    return {kind: _random_of(kind).get_rng_state() for kind in sorted(kinds)}


def _random_of(kind: str) -> Any:
    return torch.random if kind == "cpu" else torch.get_device_module(kind)
