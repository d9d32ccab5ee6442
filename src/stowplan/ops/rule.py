"""One door for op types of others: `register_op_rule` fills every table that asks about an op."""

from collections.abc import Callable
from typing import Any

from stowplan.errors import BadUse
from stowplan.ops.effects import Aliasing, Effect, aliasing_of, effect_of, macs_of
from stowplan.ops.regions import Regions
from stowplan.ops.regions.rules import rules
from stowplan.ops.table import Site, Table, registered_types
from stowplan.ops.tiling import PartKernel, Refusal, part_kernels, refusal_rules, whole_dims_stay_whole
from stowplan.ops.workspace import workspace_of


def register_op_rule(
    op_type: str,
    *,
    regions: Callable[[Site], Regions] | None = None,
    kernel: PartKernel | None = None,
    refusal: Callable[[Site], Refusal] | None = None,
    macs: Callable[[Site], int] | None = None,
    workspace: Callable[[Site], int] | None = None,
    aliasing: Callable[[Site], Aliasing] | None = None,
    effect: Callable[[Site], Effect] | None = None,
) -> None:
    """Say what is known about ops of `op_type`, spelled as in a captured graph: `mylib.blur.default`.

    With `regions`, which parts of the inputs a part of the output needs, the op can be tiled. `kernel` makes
    such a part; without it the op is called on the parts of its inputs, which is right if it looks neither
    at their size nor past their border. `refusal` names parts that cannot be made; without it those that cut
    a dim which the op needs whole. Each other answer goes to the table of its name, and what is not given
    keeps the default that the table states. A type that has an answer already raises `BadUse`, and nothing
    is registered.
    """
    if regions is None and (kernel or refusal):
        raise BadUse(f"{op_type}: a kernel on a part needs regions, which say what the part is made from")
    refusal = refusal or (whole_dims_stay_whole if regions else None)
    answers: list[tuple[Table[Any], Callable[[Site], Any] | None]] = [
        (rules, regions),
        (refusal_rules, refusal),
        (macs_of, macs),
        (workspace_of, workspace),
        (aliasing_of, aliasing),
        (effect_of, effect),
    ]
    given = [(table, rule) for table, rule in answers if rule is not None]
    for table, _ in given:
        if op_type in table:
            raise BadUse(f"{table.question}: {op_type!r} has an entry already")
    for table, rule in given:
        table.entry(op_type)(rule)
    if kernel:
        part_kernels[op_type] = kernel
    registered_types.add(op_type)
