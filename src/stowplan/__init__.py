"""Train a PyTorch model within a memory budget in bytes: where, when and how long each tensor lives."""

from importlib import import_module
from typing import TYPE_CHECKING

from stowplan.errors import (
    BadInput,
    BadUse,
    BudgetTooSmall,
    CaptureError,
    IllegalPlan,
    InvalidGraph,
    MalformedOp,
    MissingRule,
    NotFinite,
    NotTileable,
    OutOfDeviceMemory,
    PlanOfAnotherStep,
    PlanTooSlow,
    StowplanError,
    TensorChanged,
    TierDamaged,
    TierFailed,
    TierFull,
    TooManyWorkers,
    TorchTooOld,
    WorkerLost,
)

if TYPE_CHECKING:
    from stowplan.api import check, convert, explain, inspect, load_plan, planner_for, read_document
    from stowplan.plan.options import Execution, PlanOptions, Search
    from stowplan.plan.plan import Plan
    from stowplan.request import Iteration, Mesh, Shapes
    from stowplan.run.fit import fit, plans_of
    from stowplan.run.in_place import Installed, install
    from stowplan.run.project import project
    from stowplan.run.shape_costs import scan, shape_costs
    from stowplan.techniques.shards.run.checkpoints import Checkpoints
    from stowplan.techniques.shards.run.fit import choices_of, shards_of

__version__ = "0.2.0"

__all__ = [
    "BadInput",
    "BadUse",
    "BudgetTooSmall",
    "CaptureError",
    "Checkpoints",
    "Execution",
    "IllegalPlan",
    "Installed",
    "InvalidGraph",
    "Iteration",
    "MalformedOp",
    "Mesh",
    "MissingRule",
    "NotFinite",
    "NotTileable",
    "OutOfDeviceMemory",
    "Plan",
    "PlanOfAnotherStep",
    "PlanOptions",
    "PlanTooSlow",
    "Search",
    "Shapes",
    "StowplanError",
    "TensorChanged",
    "TierDamaged",
    "TierFailed",
    "TierFull",
    "TooManyWorkers",
    "TorchTooOld",
    "WorkerLost",
    "__version__",
    "check",
    "choices_of",
    "convert",
    "explain",
    "fit",
    "inspect",
    "install",
    "load_plan",
    "planner_for",
    "plans_of",
    "project",
    "read_document",
    "scan",
    "shape_costs",
    "shards_of",
]

# Looked up when first asked for: importing stowplan is quick, and only what runs models brings torch.
_HOMES = {
    "Execution": "stowplan.plan.options",
    "Installed": "stowplan.run.in_place",
    "Iteration": "stowplan.request",
    "Mesh": "stowplan.request",
    "Plan": "stowplan.plan.plan",
    "PlanOptions": "stowplan.plan.options",
    "Search": "stowplan.plan.options",
    "Shapes": "stowplan.request",
    "fit": "stowplan.run.fit",
    "install": "stowplan.run.in_place",
    "plans_of": "stowplan.run.fit",
    "project": "stowplan.run.project",
    "Checkpoints": "stowplan.techniques.shards.run.checkpoints",
    "choices_of": "stowplan.techniques.shards.run.fit",
    "scan": "stowplan.run.shape_costs",
    "shape_costs": "stowplan.run.shape_costs",
    "shards_of": "stowplan.techniques.shards.run.fit",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'stowplan' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "stowplan.api")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
