"""A model fitted at the smallest budget that recomputation reaches."""

import pytest
from torch import nn

from stowplan.errors import BudgetTooSmall
from stowplan.run.fit import fit


def lowest(model: nn.Module, args: tuple[object, ...]) -> nn.Module:
    """The model where it recomputes the most."""
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(model, args, budget=1, allow=("recompute",), moves=50)
    return fit(model, args, budget=refusal.value.minimum_bytes, allow=("recompute",), moves=50)
