"""Lightning: a callback that fits the network of a LightningModule when its first batch is there."""

from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from stowplan.errors import BadUse
from stowplan.integrations.batches import Chooser, arguments_of
from stowplan.integrations.metrics import memory_metrics
from stowplan.request import Iteration
from stowplan.run.fit import fit


class FitWithinBudget(Callback):
    """Replaces one submodule, `module`, by its fitted version; parameters, optimizers and checkpoints stay.

    `inputs` selects the parts of a batch that the submodule is called with; `settings` are those of
    `stowplan.fit`, such as `reserve` for memory outside the submodule. Planned memory is logged under
    `memory/`. With `optimizer` the budget is for the whole iteration: the plan has the module's one
    optimizer, and the trainer's gradient accumulation and clipping.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        module: str,
        inputs: Chooser | None = None,
        optimizer: bool = False,
        **settings: Any,
    ) -> None:
        self._budget, self._module, self._inputs, self._settings = budget, module, inputs, settings
        self._with_optimizer = optimizer
        self._clip: int | float | None = None  # the trainer's, while the plan clips
        self._original: nn.Module | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, _batch_idx: int
    ) -> None:
        """At the first batch, which is on its device by now."""
        if self._original is not None:
            return
        network = getattr(pl_module, self._module, None)
        if not isinstance(network, nn.Module):
            raise BadUse(f"{type(pl_module).__name__} has no submodule {self._module!r} to fit")
        args, kwargs = arguments_of(batch, self._inputs)
        loop = {"optimizer": self._iteration_of(trainer, network)} if self._with_optimizer else {}
        settings = loop | self._settings
        with trainer.precision_plugin.forward_context():
            fitted = fit(network, args, kwargs, budget=self._budget, **settings)
        if self._with_optimizer:
            self._clip, trainer.gradient_clip_val = trainer.gradient_clip_val, None
        self._original = network
        setattr(pl_module, self._module, fitted)

    def _iteration_of(self, trainer: Trainer, network: nn.Module) -> Iteration:
        """The trainer's loop."""
        if len(trainer.optimizers) != 1:
            raise BadUse(f"the module has {len(trainer.optimizers)} optimizers, and the plan has one")
        (own,) = trainer.optimizers
        told = Iteration(own, accumulate=trainer.accumulate_grad_batches)
        if not trainer.gradient_clip_val:
            return told
        inside = set(network.parameters())
        if any(p not in inside for group in own.param_groups for p in group["params"]):
            raise BadUse(
                f"gradient_clip_val clips parameters outside of {self._module!r} too, and the plan does not:"
                " fit a submodule that has all of them, or leave out optimizer=True"
            )
        largest = float(trainer.gradient_clip_val)
        if trainer.gradient_clip_algorithm == "value":
            return replace(told, clip_value=largest)
        return replace(told, clip_norm=largest)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, _outputs: Any, _batch: Any, _batch_idx: int
    ) -> None:
        """Log what the plans take."""
        if trainer.logger is not None:
            trainer.logger.log_metrics(memory_metrics(getattr(pl_module, self._module)), trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the original network: its parameters are the trained ones."""
        if self._with_optimizer and self._original is not None:
            trainer.gradient_clip_val = self._clip
        if self._original is not None:
            setattr(pl_module, self._module, self._original)
            self._original = None
