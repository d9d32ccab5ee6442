"""What the dump says beside the graph: times per op on two clocks, an address per var, its own counts."""

from collections.abc import Mapping

from stowplan.errors import BadInput
from stowplan.formats.megengine.records import Dump, Times, Var
from stowplan.ir import Allocation, Interval, Profile


def profile_of(dump: Dump) -> Profile:
    """Times by clock. The host's and the device's clock are not aligned."""
    return Profile(
        {
            clock: {op: _interval(nodes, f"profiler.{clock}.{op}") for op, nodes in ops.items()}
            for clock, ops in dump.clocks.items()
        }
    )


def _interval(nodes: Mapping[str, Times], where: str) -> Interval:
    """From the first start to the last end over the compute nodes an op ran on."""
    if not nodes:
        raise BadInput("no compute node has a time", where=where)
    spans = nodes.values()
    first, last = min(t.start for t in spans), max(t.end for t in spans)
    if last < first:
        raise BadInput(f"ends at {last} s, before it starts at {first} s", where=where)
    return Interval(first, min(t.kern for t in spans), last)


def allocation_of(dump: Dump) -> Allocation:
    """Address and bytes of every var of the run; a var that took no memory sits at address 0."""
    executed = [dump.operators[op] for op in dump.comp_seq if op in dump.operators]
    made = {var for operator in executed for var in operator.output}
    return Allocation({name: place_of(var) for name, var in dump.vars.items() if name in made})


def place_of(var: Var) -> tuple[int, int]:
    """Where the var sat and how many bytes it took there; (0, 0) where the dump knows no place."""
    if not var.prev_dev_ptr or var.prev_dev_ptr_end is None:
        return (0, 0)
    start = var.prev_dev_ptr if var.dev_ptr is None else var.dev_ptr
    return (start, max(0, var.prev_dev_ptr_end - var.prev_dev_ptr))


def counts_of(dump: Dump) -> dict[str, int]:
    """The figures of the file itself."""
    footprints = dump.footprints.values()
    return {
        "operators": len(dump.operators),
        "executed_operators": len(dump.comp_seq),
        "static_inference_operators": len(dump.operators.keys() - set(dump.comp_seq)),
        "vars": len(dump.vars),
        "input_edges": sum(len(operator.input) for operator in dump.operators.values()),
        "chunks": len(dump.chunks),
        "chunk_bytes": sum(chunk.size for chunk in dump.chunks.values()),
        "footprint_flops": sum(footprint.computation or 0 for footprint in footprints),
        "footprint_bytes": sum(footprint.memory for footprint in footprints),
    }
