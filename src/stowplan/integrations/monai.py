"""MONAI: networks that are called with its MetaTensors, which carry the history of an image."""

from typing import Any, TypeVar

from monai.data.meta_tensor import MetaTensor
from torch import Tensor, nn

from stowplan.run.fit import fit

Network = TypeVar("Network", bound=nn.Module)


def fit_network(network: Network, image: Tensor, budget: int | str, **settings: Any) -> Network:
    """`network` within a budget, for images like this one; `settings` are those of `stowplan.fit`.

    The network returns torch tensors without metadata: it computes on the data of an image only.
    """
    fitted = fit(network, (_plain(image),), budget=budget, **settings)
    fitted.register_forward_pre_hook(lambda _, args: tuple(map(_plain, args)))
    return fitted


def _plain(value: Any) -> Any:
    return value.as_tensor() if isinstance(value, MetaTensor) else value
