"""The graph of a training step as frozen values. Knows no framework and no file."""

from stowplan.ir.document import Document, Note, NoteKind
from stowplan.ir.facets import Allocation, Interval, Profile, Regions, TensorRegion, TileSchedule, TileStep
from stowplan.ir.graph import (
    Attribute,
    Attributes,
    DType,
    Graph,
    Kind,
    Op,
    Phase,
    Role,
    Shape,
    Tensor,
    Use,
    bytes_of_shape,
)
from stowplan.ir.spec import validate

__all__ = [
    "Allocation",
    "Attribute",
    "Attributes",
    "DType",
    "Document",
    "Graph",
    "Interval",
    "Kind",
    "Note",
    "NoteKind",
    "Op",
    "Phase",
    "Profile",
    "Regions",
    "Role",
    "Shape",
    "Tensor",
    "TensorRegion",
    "TileSchedule",
    "TileStep",
    "Use",
    "bytes_of_shape",
    "validate",
]
