"""The captured step as straight-line code: called like the model, differentiable like it."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from stowplan.capture import Captured, Program, Ref
from stowplan.capture.checks import Checked
from stowplan.plan.decision import Step
from stowplan.run.baseline import baseline_steps
from stowplan.run.cost.machine import device_of
from stowplan.run.step.binding import Binding
from stowplan.run.step.function import Consumer, Run, latch, run_step
from stowplan.run.step.halves import compiled
from stowplan.run.step.incoming import IncomingGradients
from stowplan.run.step.pieces import Piece
from stowplan.run.step.source import source_of
from stowplan.run.step.tier import LiveTier, tier_for
from stowplan.run.step.waiting import Waiting
from stowplan.torch_private import pytree


class StraightStep:
    """Runs the steps with a model's parameters and buffers. `source` is the code, to be read."""

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        *,
        loss: object = None,
        steps: Sequence[Step] | None = None,
        tier: LiveTier | None = None,
        waiting: Waiting | None = None,
        places: Mapping[int, tuple[Any, Any]] = MappingProxyType({}),
        consumer: Consumer | None = None,
    ) -> None:
        """`tier` is the target of Store steps, by default the tier for the step's device.

        `waiting` learns of each forward. `consumer` takes the gradients that the steps consume.
        """
        self._waiting, self._consumer = waiting, consumer
        self._program, self._device = captured.program, device_of(captured.graph)
        steps = steps or baseline_steps(captured.graph)
        source = source_of(captured.graph, captured.program, steps)
        self._incoming = IncomingGradients(captured, steps)
        if source.stored_bytes:
            tier = tier or tier_for(self._device)
            tier.reserve(source.stored_bytes)
        self._halves = compiled(source, tier)
        self._captured, self._loss = captured, loss
        self.bind(model, places)
        self.source = source.annotated()
        self._primals = tuple(_primals_of(piece, captured.program) for piece in source.pieces)
        leaves = zip(captured.program.outputs, captured.program.tangents, strict=True)
        expected = {leaf for leaf, tangent in leaves if isinstance(leaf, Ref) and tangent is not None}
        self._differentiated = tuple(Ref(name) in expected for name in source.outputs)

    def bind(self, model: nn.Module, places: Mapping[int, tuple[Any, Any]] = MappingProxyType({})) -> None:
        """Run from now on with the parameters and buffers of this model, which is like the one captured."""
        self._binding = Binding(self._captured, model, self._loss, places)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The model's results for these arguments, which must look like those of the capture."""
        found = self._binding.tensors(args, kwargs)
        run = self._new_run()
        if self._consumer and any(piece.consumed for piece in self._halves.source.pieces):
            written = [found[name] for name in self._program.updates]
            run.repeat = self._consumer.repeat_for(
                lambda: self._made(self._new_run(), found), found.values(), written
            )
        if self._waiting:
            self._waiting.begins()
            self._waiting.add(run)
        made = self._made(run, found)
        for position, output in enumerate(made):
            if output.requires_grad and output.dim():
                output.register_hook(partial(latch, run, position))  # type: ignore[no-untyped-call]
        outputs = dict(zip(self._halves.source.outputs, made, strict=True))
        returned = pytree.tree_unflatten(self._leaves(outputs), self._program.output_spec)
        return returned.passed() if isinstance(returned, Checked) else returned

    def _new_run(self) -> Run:
        return Run(
            self._halves, self._program, self._primals, self._differentiated, self._incoming, self._consumer
        )

    def _made(self, run: Run, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast(self._device.type, enabled=False):
            return run_step(run, found)

    def _leaves(self, outputs: Mapping[str, Tensor]) -> list[object]:
        """The results for the caller, detached where eager's are."""
        return [
            (outputs[leaf.tensor] if attached else outputs[leaf.tensor].detach())
            if isinstance(leaf, Ref)
            else leaf
            for leaf, attached in zip(self._program.outputs, self._program.attached, strict=True)
        ]


def _primals_of(piece: Piece, program: Program) -> tuple[str, ...]:
    """What a piece differentiates, in the order of the step; what is consumed in the order of the plan."""
    primals = [name for name, gradient in program.gradients.items() if gradient in piece.gradients]
    if piece.consumed:
        primals.sort(key=lambda name: piece.gradients.index(program.gradients[name]))
    return tuple(primals)
