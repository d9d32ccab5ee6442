"""How many multiply-accumulates an op takes. Pointwise work, pooling and copies count as none."""

from stowplan.ops.table import Site, Table


def no_macs(_: Site) -> int:
    """The stated default: an op without a rule multiplies nothing."""
    return 0


macs_of: Table[int] = Table("macs", default=no_macs)
