"""Memory as dashboards know it: torchtitan's names for what was measured, our own for what was planned."""

import torch
from torch import nn

from stowplan.run.fit import plans_of

_GIB = 2**30


def memory_metrics(fitted: nn.Module) -> dict[str, float]:
    """GiB by name. Measured values need an accelerator, whose allocator counts; a CPU has none."""
    plans = plans_of(fitted)
    found = {
        "memory/allowed(GiB)": max(plan.allowed_bytes for plan in plans) / _GIB,
        "memory/projected_peak(GiB)": max(plan.projected_peak_bytes for plan in plans) / _GIB,
    }
    device = next((parameter.device for parameter in fitted.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        found["memory/max_active(GiB)"] = torch.accelerator.max_memory_allocated(device) / _GIB
        found["memory/max_reserved(GiB)"] = torch.accelerator.max_memory_reserved(device) / _GIB
    return found
