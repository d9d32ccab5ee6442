"""A captured step with groups as single ops: its graph by `plan/kernels/rewrite.py`, and its program here."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from stowplan.capture import Captured
from stowplan.ir import Attributes
from stowplan.ops.effects import FUSED
from stowplan.plan.kernels.formation import Group, groups_of
from stowplan.plan.kernels.rewrite import Fused, borders_of, fused_graph, name_of
from stowplan.run.cost.signature import operand_of
from stowplan.run.kernels.kernel import Kernel, fused_call


def groups_in_step(captured: Captured, barred: Collection[str] = ()) -> tuple[Group, ...]:
    """The groups of a step. An op that works on copies, or reads a gradient of unknown layout, is in none."""
    graph, program = captured.graph, captured.program
    incoming = {name for name in program.tangents if name is not None and graph.tensors[name].shape}
    others = {
        op.id
        for op in graph.ops
        if program.calls[op.id].fresh
        or program.calls[op.id].copied
        or any(graph.storage_of(name) in incoming for name in op.reads())
    }
    return groups_of(graph, others.union(barred))


def kernels_of(captured: Captured, groups: Sequence[Group]) -> dict[Group, Kernel]:
    """By group its kernel; groups that are alike share one. A group that nobody reads has none."""
    tensors, calls = captured.graph.tensors, captured.program.calls
    known: dict[str, Kernel] = {}
    found = {}
    for fused in borders_of(captured.graph, groups):
        if fused.outputs:
            operands = {name: operand_of(tensors[name]) for name in fused.inputs}
            results = {name: operand_of(tensors[name]) for name in fused.outputs}
            kernel = Kernel([calls[op] for op in fused.group.ops], operands, results)
            found[fused.group] = known.setdefault(kernel.name, kernel)
    return found


def fused_step(captured: Captured, kernels: Mapping[Group, Kernel]) -> Captured:
    """The step with one op for each group, which its kernel computes; raises InvalidGraph."""

    def described(fused: Fused) -> Attributes:
        kernel = kernels[fused.group]
        return {"name": kernel.name, "exact": kernel.is_exact}

    graph = fused_graph(captured.graph, tuple(kernels), described)
    by_name = {name: kernels[group] for group, name in fused_names(kernels).items()}
    calls = {
        op.id: fused_call(by_name[op.id], tuple(op.reads()), tuple(op.writes()))
        if op.type == FUSED
        else captured.program.calls[op.id]
        for op in graph.ops
    }
    return replace(captured, graph=graph, program=replace(captured.program, calls=calls))


def fused_names(groups: Iterable[Group]) -> dict[Group, str]:
    """By group the op that it becomes."""
    return {group: name_of(number) for number, group in enumerate(groups)}
