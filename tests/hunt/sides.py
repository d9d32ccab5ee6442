"""Side: one of the two models of a case, and a record of everything that its training loop can see."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .batches import Arguments, Caller, Feed, Fields, loss_of, tensors_of
from .networks import Network

Note: TypeAlias = tuple[str, object]  # what was seen, and a tensor, a state or a plain value


@dataclass(slots=True)
class Side:
    """A model in its loop. Both sides of a case do the same, and their records are compared."""

    model: nn.Module
    network: Network
    feed: Feed
    record: list[Note] = field(default_factory=list)
    caller: Caller = field(init=False)

    def __post_init__(self) -> None:
        self.caller = Caller(self.network.signature)

    def note(self, name: str, value: object) -> None:
        """Write down what is seen now: tensors change later."""
        self.record.append((name, value.detach().clone() if isinstance(value, Tensor) else value))

    def batch(self, seed: int, rows: int | None = None) -> Fields:
        return self.feed.batch(self.network, seed, rows or self.network.sizes.batch)

    def arguments(self, batch: Fields, flag: object = 1) -> Arguments:
        return self.caller.arguments(batch, flag)

    def forward(self, batch: Fields, flag: object = 1) -> object:
        """Call the model, and note what it returns."""
        args, kwargs = self.arguments(batch, flag)
        output = self.model(*args, **kwargs)
        for position, tensor in enumerate(tensors_of(output)):
            self.note(f"output {position}", tensor)
        return output

    def loss(self, batch: Fields, flag: object = 1) -> Tensor:
        return loss_of(self.forward(batch, flag), self.network.output)

    def step(self, seed: int, rows: int | None = None, flag: object = 1) -> None:
        """Forward and backward on one batch; gradients are added to those that are there."""
        batch = self.batch(seed, rows)
        loss = self.loss(batch, flag)
        self.note("loss", loss)
        torch.autograd.backward(loss)
        self.note_inputs(batch)

    def note_inputs(self, batch: Fields) -> None:
        for name, value in self.caller.contents():
            self.note(f"in the argument, {name}", value)
        for name, tensor in batch._asdict().items():
            self.note(f"input {name}", tensor)
            self.note(f"input gradient {name}", tensor.grad if tensor.is_leaf else None)

    def clear(self) -> None:
        """Forget gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def note_state(self) -> None:
        """Write down gradients, parameters, buffers, plain attributes and the generators."""
        for name, parameter in self.model.named_parameters():
            self.note(f"gradient {name}", parameter.grad)
            self.note(f"parameter {name}", parameter)
        for name, buffer in self.model.named_buffers():
            self.note(f"buffer {name}", buffer)
        for name in self.network.owners("counter", "history", "kept_result", "offset"):
            value = getattr(self.model, name, None)
            self.note(f"attribute {name}", list(value) if isinstance(value, list) else value)
        self.note("generator", torch.get_rng_state())
        self.note("Python's generator", random.random())

    def standing(self) -> Iterator[Tensor]:
        """The tensors that count before a step. Plain tensor attributes are constants, which do not."""
        yield from self.model.parameters()
        yield from self.model.buffers()

    def modules(self) -> list[nn.Module]:
        """The inner modules."""
        return [module for module in self.model.modules() if module is not self.model]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that tensors are in, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def seed_generators(seed: int) -> None:
    """Set torch's generator and Python's: each side draws what the other drew."""
    torch.manual_seed(seed)
    random.seed(seed)
