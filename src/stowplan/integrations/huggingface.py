"""Hugging Face's Trainer: its model replaced by one that trains within a budget, before `train()`."""

from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from stowplan.errors import BadUse
from stowplan.request import Iteration
from stowplan.run.fit import fit


def fit_trainer(trainer: Trainer, budget: int | str, *, optimizer: bool = False, **settings: Any) -> Trainer:
    """`trainer` itself, its model fitted to calls like the one for its first batch.

    `settings` are those of `stowplan.fit`, such as `reserve` for the optimizer's state. Every new shape of a
    batch is planned when it comes: pad to one length and drop the last, smaller batch. With `optimizer` the
    budget is for the whole iteration: the plan has the trainer's optimizer, gradient accumulation and
    clipping. The norm of the gradients is then not logged.
    """
    model = trainer.model
    if model is None:
        raise BadUse("the trainer has no model yet: give it one, not a model_init")
    was_training = model.training
    if optimizer:
        settings = {"optimizer": _iteration_of(trainer)} | settings
    if isinstance(model, PreTrainedModel):  # as the first checkpoint writes it, else a change
        model.config.architectures = [type(model).__name__]
        model.config.dtype = str(model.dtype).removeprefix("torch.")
    args, kwargs = _first_call(trainer)
    with trainer.accelerator.autocast():
        fitted = fit(model.train(), args, kwargs, budget=budget, **settings)
    trainer.model = trainer.model_wrapped = fitted.train(was_training)
    return trainer


def _iteration_of(trainer: Trainer) -> Iteration:
    """The trainer's loop. The trainer itself no longer clips."""
    told = trainer.args
    clip_norm = told.max_grad_norm if told.max_grad_norm and told.max_grad_norm > 0 else None

    def clip_in_plan(_: object, max_norm: float, *__: object) -> None:
        if max_norm not in (clip_norm, float("inf")):  # infinite to see the norm alone
            raise BadUse(
                f"the trainer clips to {max_norm}, and the plan to {clip_norm}: set max_grad_norm before"
            )

    accelerator: Any = trainer.accelerator
    accelerator.clip_grad_norm_ = clip_in_plan
    own = trainer.create_optimizer()
    return Iteration(own, clip_norm=clip_norm, accumulate=told.gradient_accumulation_steps)


class _Called(Exception):
    """Carries the arguments of a call to the caller."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = args, kwargs


class _Asked(nn.Module):
    """Takes the model's place to learn how it is called."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Called(args, kwargs)


def _first_call(trainer: Trainer) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the trainer will call its model, as its own `compute_loss` does it."""
    with torch.random.fork_rng(devices=[]):  # looking at a batch shall not change which come later
        batches = iter(trainer.get_train_dataloader())
        (batch,), count = trainer.get_batch_samples(batches, 1, trainer.args.device)
    try:
        trainer.compute_loss(_Asked(), trainer._prepare_inputs(batch), num_items_in_batch=count)
    except _Called as made:
        return made.call
    raise BadUse("compute_loss of this trainer does not call its model: fit the model itself")
