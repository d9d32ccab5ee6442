"""Side: one of the two models of a case, and a record of everything that its training loop can see."""

import random
from collections.abc import Callable, Iterable, Iterator
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
    optimizer: torch.optim.Optimizer | None = None

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

    def step(self, seed: int, rows: int | None = None, flag: object = 1, factor: float = 1.0) -> None:
        """Forward and backward on one batch; gradients are added to those that are there."""
        batch = self.batch(seed, rows)
        loss = self.loss(batch, flag) * factor if factor != 1.0 else self.loss(batch, flag)
        self.note("loss", loss)
        torch.autograd.backward(loss)
        self.note_inputs(batch)

    def iteration(
        self,
        seed: int,
        rows: int | None = None,
        factor: float = 1.0,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """A step and its update; what a loop does in between them is the caller's."""
        optimizer = self.its_optimizer()
        self.step(seed, rows, factor=factor)
        between()
        optimizer.step()
        optimizer.zero_grad()

    def its_optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None
        return self.optimizer

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
        if self.optimizer is not None:
            for number, state in self.optimizer.state_dict()["state"].items():
                for name, value in sorted(state.items()):
                    self.note(f"optimizer's {name} of {number}", value)
        for name in self.network.owners("counter", "history", "kept_result", "offset"):
            value = getattr(self.model, name, None)
            self.note(f"attribute {name}", list(value) if isinstance(value, list) else value)
        self.note("generator", torch.get_rng_state())
        self.note("Python's generator", random.random())

    def standing(self) -> Iterator[Tensor]:
        """The tensors that count before a step. Plain tensor attributes are constants, which do not."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            yield from (value for value in state.values() if isinstance(value, Tensor) and not value.is_meta)

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
