"""A U-Net step for the command line: `stowplan check examples.unet:step --budget 200MB`."""

from torch import Tensor, nn

from tests.support.nets import NETS


def step() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The U-Net at 252x252, batch 1: `model(*args)` is the loss."""
    return NETS["unet"].build("real", resolution=252)
