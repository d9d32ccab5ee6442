"""Lightning: a callback that fits the network of a LightningModule when its first batch is there."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from stowplan.errors import BadUse
from stowplan.integrations.batches import Chooser, arguments_of
from stowplan.integrations.metrics import memory_metrics
from stowplan.run.fit import fit


class FitWithinBudget(Callback):
    """Replaces one submodule, `module`, by its fitted version; parameters, optimizers and checkpoints stay.

    `inputs` selects the parts of a batch that the submodule is called with; `settings` are those of
    `stowplan.fit`, such as `reserve` for memory outside the submodule. Planned memory is logged under
    `memory/`.
    """

    def __init__(
        self, budget: int | str, *, module: str, inputs: Chooser | None = None, **settings: Any
    ) -> None:
        self._budget, self._module, self._inputs, self._settings = budget, module, inputs, settings
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
        with trainer.precision_plugin.forward_context():
            fitted = fit(network, args, kwargs, budget=self._budget, **self._settings)
        self._original = network
        setattr(pl_module, self._module, fitted)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, _outputs: Any, _batch: Any, _batch_idx: int
    ) -> None:
        """Log what the plans take."""
        if trainer.logger is not None:
            trainer.logger.log_metrics(memory_metrics(getattr(pl_module, self._module)), trainer.global_step)

    def on_train_end(self, _trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the original network: its parameters are the trained ones."""
        if self._original is not None:
            setattr(pl_module, self._module, self._original)
            self._original = None
