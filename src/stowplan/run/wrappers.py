"""Wrappers: data parallelism and sharding go around a planned step, never inside it.

What they do happens in hooks: before and after the modules they wrap, and when a gradient arrives. A planned
step calls no inner module, so hooks there would not run, while those around it do.
"""

from torch import Tensor, nn

from stowplan.errors import BadUse

_PLAIN = (Tensor, nn.Parameter)


def refuse_wrapped(model: nn.Module) -> None:
    """A model that is wrapped already is no step to plan: its wrapper belongs around the result."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            wrapper = type(module).__name__
            raise BadUse(
                f"{path or 'the model'} is wrapped in {wrapper}, whose work cannot be done inside a planned"
                f" step; fit the module within, then wrap what fit returns: {wrapper}(fit(...))"
            )


def refuse_shards(model: nn.Module) -> None:
    """Parameters must be there as a whole while the step runs, which only a wrapper around it can see to."""
    named = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in named:
        if type(tensor) not in _PLAIN:
            raise BadUse(
                f"{name} is a {type(tensor).__name__} of shape {tuple(tensor.shape)} when the step runs: only"
                " a part of it is on this worker. Inner modules are not called in a planned step and do not"
                " gather their parameters; fit first, then shard as one unit: fully_shard(fit(...)), of the"
                " whole model or of each of its blocks"
            )
