"""The shapes an op's outputs have, from its inputs' shapes and its attributes. No rule, no answer."""

from stowplan.ir import Shape
from stowplan.ops.table import Table

output_shapes_of: Table[tuple[Shape, ...]] = Table("output shapes")
