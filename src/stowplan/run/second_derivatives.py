"""Second derivatives: a backward with `create_graph=True` through a planned step.

A plan has the ops of one backward, and none that differentiate these. So the model runs as it is, within that
backward, and autograd differentiates this run. It does what the planned forward did: with the draws of that
forward, on copies of the buffers that the step changes, and with the same results to the bit, or the backward
is refused. Calls of the same kind run as they are from then on.

All that forward and backward make may be alive until the second derivatives are there, and differentiating
them takes as much again at most twice: three times the bytes that the step makes must fit the budget, beside
what is there. Else the backward is refused before it begins.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from stowplan.capture.capture import Captured
from stowplan.capture.changes import AsBefore, Stores
from stowplan.capture.composite import opened
from stowplan.capture.program import Ref, draws
from stowplan.capture.stand_ins import flatten, with_tensors
from stowplan.errors import BadUse
from stowplan.run.cost.machine import rng_state, set_rng_state
from stowplan.run.measure.agreement import Copies, written_tensors
from stowplan.torch_private import pytree, version_of
from stowplan.units import format_bytes

_NONE = (
    "create_graph=True asks for gradients that can be differentiated again; a plan has no second derivatives"
)
_ELSE = "call the model that you gave to fit for this"


def second_bytes(captured: Captured) -> int:
    """What a step takes at most that is differentiated twice."""
    spans = captured.eager.spans
    there = sum(span.nbytes for span in spans if not span.first)
    states = 2 * sum(rng_state(device).nbytes for device in drawing_devices(captured))
    return there + states + 3 * sum(span.nbytes for span in spans if span.first)


def drawing_devices(captured: Captured) -> tuple[torch.device, ...]:
    """The devices of a step that draws random numbers; none if it draws none."""
    if not any(draws(event.target, event.args, event.kwargs) for event in captured.forward):
        return ()
    return tuple({torch.device(tensor.device) for tensor in captured.graph.tensors.values()})


@dataclass(frozen=True, slots=True)
class Differentiable:
    """A planned step that may be run as it is. `run` calls the model, `is_same` says whether it is unchanged.

    `drawing` are the devices that it draws on, by `drawing_devices`, and `needed_bytes` those of
    `second_bytes`. `seen` is called when second derivatives were asked for.
    """

    captured: Captured
    model_of: Callable[[], nn.Module | None]  # a weak reference: the model holds its steps
    casts: tuple[tuple[str, torch.dtype], ...]
    allowed_bytes: int
    needed_bytes: int
    drawing: tuple[torch.device, ...]
    run: Callable[[tuple[object, ...], Mapping[str, object]], object]
    is_same: Callable[[Sequence[object]], bool]
    seen: Callable[[], None]

    @property
    def model(self) -> nn.Module:
        """The model as it is now."""
        model = self.model_of()
        assert model is not None, "its gradients are asked for"
        return model

    def has_room(self) -> bool:
        """Whether the budget has room; without it, a call keeps nothing for a second run."""
        return self.needed_bytes <= self.allowed_bytes

    def refused(self, _incoming: Mapping[str, Tensor]) -> NoReturn:
        """What takes the place of `Call.gradients` without room."""
        raise BadUse(
            f"{_NONE}, and without a plan this takes up to {format_bytes(self.needed_bytes)}, more than the"
            f" {format_bytes(self.allowed_bytes)} allowed: give fit that much, or {_ELSE}"
        )

    def call(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> "EagerCall":
        """A call of the step, which is about to begin."""
        return EagerCall(self, args, kwargs, [(device, rng_state(device)) for device in self.drawing])


class EagerCall:
    """What a call needs to run a second time as it is."""

    def __init__(
        self,
        step: Differentiable,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        states: list[tuple[torch.device, Tensor]],
    ) -> None:
        self._step, self._args, self._kwargs, self._states = step, args, kwargs, states
        self._outputs: dict[str, weakref.ref[Tensor]] = {}
        self._versions: list[tuple[Tensor, int | None]] = []

    def ends(self, outputs: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
        """Forward has made these outputs of the tensors that were `found`."""
        self._outputs = {name: weakref.ref(output) for name, output in outputs.items()}
        updates = self._step.captured.program.updates
        self._versions = [(held, version_of(held)) for name, held in found.items() if name not in updates]

    def gradients(
        self, found: Mapping[str, Tensor], incoming: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None]:
        """Of the tensors in `found`, with a graph, for these gradients of outputs."""
        step = self._step
        leaves = flatten(self._args, self._kwargs)[0]
        untouched = all(version_of(tensor) == version for tensor, version in self._versions)
        if not untouched or not step.is_same(leaves):
            raise BadUse(f"{_NONE}, and the model or its arguments were changed since forward: {_ELSE}")
        step.seen()
        again = self._again(leaves)
        self._refuse_other(again)
        names = [name for name in incoming if again[name].requires_grad]
        wanted = [name for name, tensor in found.items() if tensor.requires_grad]
        gradients = torch.autograd.grad(
            [again[name] for name in names],
            [found[name] for name in wanted],
            [incoming[name] for name in names],
            create_graph=True,
            allow_unused=True,
        )
        return dict(zip(wanted, gradients, strict=True))

    def _again(self, leaves: Sequence[object]) -> dict[str, Tensor]:
        """The outputs of a run as it is, by name."""
        step, program = self._step, self._step.captured.program
        copies = Copies(written_tensors(program, [step.model], leaves))
        tensors = [*opened((*step.model.parameters(), *step.model.buffers()))]
        tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        paths = {module: path for path, module in step.model.named_modules()}
        with ExitStack() as stack:
            stack.enter_context(with_tensors(step.model, copies.of))
            stack.callback(Stores(paths, step.captured.containers).put_back)
            stack.enter_context(AsBefore([*tensors, *program.constants.values()]))
            for device, state in self._states:
                stack.callback(set_rng_state, device, rng_state(device))
                set_rng_state(device, state)
            casts = dict(step.casts)
            for device_type in {"cpu", *casts, *(tensor.device.type for tensor in tensors)}:
                dtype = casts.get(device_type)
                stack.enter_context(torch.autocast(device_type, dtype, enabled=dtype is not None))
            returned = step.run(self._args, self._kwargs)
        pairs = zip(program.outputs, pytree.tree_leaves(returned), strict=False)
        return {ref.tensor: leaf for ref, leaf in pairs if isinstance(ref, Ref) and isinstance(leaf, Tensor)}

    def _refuse_other(self, again: Mapping[str, Tensor]) -> None:
        """A run that is to stand for the planned one must have its results, as far as anybody has them."""
        has_state = bool(self._states or self._step.captured.program.updates)
        for name, output in self._outputs.items():
            before, now = output(), again.get(name)
            if now is None or (before is None and has_state):
                raise BadUse(
                    f"{_NONE}, and result {name!r} is gone, which a second run has to equal: {_ELSE}"
                )
            if before is not None and not torch.equal(before, now):
                raise BadUse(f"{_NONE}, and a second run makes another result {name!r}: {_ELSE}")
