"""The candidate with compiled kernels: the fused step, with the groups that are faster compiled.

Groups are formed, compiled, compared with their ops and priced. Those that are not faster than their ops are
left out. The borders of others may change with that, for what an eager op reads has to be there, so the rest
is judged again.

A captured step with groups as single ops: its graph by `plan/rewrite.py` beside, and its program here.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from stowplan.capture import Captured
from stowplan.errors import BadUse, IllegalPlan, InvalidGraph
from stowplan.ir import Attributes
from stowplan.ops.effects import FUSED, RELAID
from stowplan.plan.draft import Draft, Exactness
from stowplan.plan.options import PlanOptions
from stowplan.plan.pricing import Pricing
from stowplan.plan.select import Baseline, Tradeoff, tradeoffs_of
from stowplan.run.cost.probe import operand_of
from stowplan.run.planning.planner import COMPILED, CapturedCandidate, Subject, price_captured
from stowplan.run.planning.saved import RESUMED
from stowplan.techniques.kernels.plan.formation import Group, groups_of
from stowplan.techniques.kernels.plan.rewrite import Fused, borders_of, fused_graph, groups_in, name_of
from stowplan.techniques.kernels.run.adopt import NO_ROOM, adopt, reuse
from stowplan.techniques.kernels.run.channels_last import fault_of_layout, in_channels_last, reductions
from stowplan.techniques.kernels.run.compiling import compile_all
from stowplan.techniques.kernels.run.kernel import Kernel, fused_call
from stowplan.techniques.kernels.run.known import KernelVerdict, read_finding, write_finding
from stowplan.torch_private import cpp_compiler
from stowplan.watch import tell_phase


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


_ROUNDS = 4  # of leaving groups out; after that none is left
_WORTH = 0.97  # of the seconds of its ops: a group that takes longer stays eager
_LEAST_SECONDS, _LEAST_SHARE = 2e-5, 1e-4  # of a group's ops, in seconds and as a share of the step
_LOGGER = logging.getLogger("stowplan")


class FusedCandidate(CapturedCandidate):
    """The fused step. Its plans are compared with the eager step."""

    def __init__(
        self, captured: Captured, pricing: Pricing, baseline: Baseline, options: PlanOptions
    ) -> None:
        super().__init__(captured, pricing, baseline, options)
        ops = captured.graph.ops
        fused = (op for op in ops if op.type == FUSED)
        is_exact = all(op.attributes["exact"] is True for op in fused)
        is_exact = is_exact and not any(op.attributes.get(RELAID) for op in ops)
        self._exactness = Exactness.BITWISE if is_exact else Exactness.ROUNDING

    def draft(self, allowed_bytes: int) -> Draft:
        return replace(super().draft(allowed_bytes), plain_seconds=self.baseline.seconds)

    def tradeoffs(self) -> tuple[Tradeoff, ...]:
        return tradeoffs_of(self.planner, self._exactness)


@COMPILED.register("compiled")
def fused_candidate(
    subject: Subject, pricing: Pricing, baseline: Baseline, options: PlanOptions
) -> CapturedCandidate | None:
    """The step with compiled kernels where they are faster; None if they are nowhere.

    Convolutions are in channels-last layout if the ops of the step are faster so.
    """
    refuse_without_compiler()
    captured, relaid = subject.as_run(), in_channels_last(subject)
    fused = _relaid(relaid, pricing, options) if relaid is not None else None
    fused = fused or _fused(captured, pricing, options)
    return fused and FusedCandidate(*fused, baseline, options)


def _seconds(pricing: Pricing) -> float:
    return sum(pricing.seconds.values())


def _relaid(captured: Captured, usual: Pricing, options: PlanOptions) -> tuple[Captured, Pricing] | None:
    """A step in another layout, fused; None unless it is faster than with `usual` prices and as exact."""
    pricing = price_captured(captured, options)
    if _seconds(pricing) > _WORTH * _seconds(usual):
        return None
    fused = _fused(captured, pricing, options, reductions(captured.graph)) or (captured, pricing)
    if fault := fault_of_layout(fused[0]):
        _LOGGER.info("convolutions stay in the layout that they have: %s", fault)
        return None
    return fused


def _fused(
    captured: Captured, pricing: Pricing, options: PlanOptions, needed: Collection[str] = ()
) -> tuple[Captured, Pricing] | None:
    """The step with groups that are faster compiled, or have an op that is `needed`; None without groups."""
    judge = _Judge(captured, pricing, options, frozenset(needed))
    groups = judge.worth_a_compile(groups_in_step(captured))
    for _ in range(_ROUNDS):
        try:
            kept = judge.faster(groups)
        except InvalidGraph as fault:
            _LOGGER.warning("the step stays eager: %s", fault)
            return None
        if not kept:
            return None
        if len(kept) == len(groups):
            return judge.priced
        groups = kept
    return None


def refuse_without_compiler() -> None:
    """BadUse where nothing can be compiled."""
    if not cpp_compiler():
        raise BadUse(
            'kernels="compiled" needs a C++ compiler, and there is none: install g++, name one in CXX, or'
            ' leave it at kernels="eager"'
        )


class _Judge:
    """Compiles and prices the groups of one step; a kernel is compiled once."""

    def __init__(
        self, captured: Captured, pricing: Pricing, options: PlanOptions, needed: frozenset[str]
    ) -> None:
        self._captured, self._pricing, self._options = captured, pricing, options
        self._needed = needed  # ops whose groups are taken whatever their time
        self._known: dict[str, Kernel] = {}
        self.priced: tuple[Captured, Pricing] = (captured, pricing)

    def worth_a_compile(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups that take a share of the step worth a compiler's seconds."""
        least = max(_LEAST_SECONDS, _LEAST_SHARE * _seconds(self._pricing))
        return tuple(g for g in groups if self._eager_seconds(g) >= least or self._is_needed(g))

    def _is_needed(self, group: Group) -> bool:
        return not self._needed.isdisjoint(group.own)

    def _eager_seconds(self, group: Group) -> float:
        return sum(self._pricing.seconds[op] for op in group.own)

    def faster(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups whose kernels take less time than their ops; `priced` is the step with all `groups`."""
        dearest_first = sorted(groups, key=self._eager_seconds, reverse=True)
        kernels = compiled(kernels_of(self._captured, dearest_first), self._known)
        fused = fused_step(self._captured, kernels)
        pricing = price_captured(fused, self._options)
        workspaces = {**self._pricing.workspace_bytes, **pricing.workspace_bytes}
        self.priced = fused, replace(pricing, workspace_bytes=workspaces)
        names = fused_names(kernels)
        return tuple(
            group
            for group, name in names.items()
            if pricing.seconds[name] <= _WORTH * self._eager_seconds(group) or self._is_needed(group)
        )


def compiled(kernels: Mapping[Group, Kernel], known: dict[str, Kernel]) -> dict[Group, Kernel]:
    """The groups whose kernels may run compiled, with kernels that do; `known` has those tried before."""
    new = {kernel.name: kernel for kernel in kernels.values() if kernel.name not in known}
    waiting = [kernel for kernel in new.values() if not reuse(kernel)]
    findings = {kernel.name: read_finding(kernel.name) for kernel in waiting}
    late = compile_all([kernel for kernel in waiting if findings[kernel.name] is None])
    waiting = [kernel for kernel in waiting if kernel not in late]
    for number, kernel in enumerate(waiting):
        tell_phase("loading kernels", number, len(waiting))
        if fault := _adopted(kernel, findings[kernel.name]):
            _LOGGER.info("a kernel stays eager: %s", fault)
    known.update(new)
    return {
        group: known[kernel.name]
        for group, kernel in kernels.items()
        if known[kernel.name].compiled is not None
    }


def _adopted(kernel: Kernel, known: KernelVerdict | None) -> str:
    """Let the kernel run what inductor compiled; if it may not, the reason why."""
    if known is not None and known.fault:
        return known.fault
    try:
        fault = adopt(kernel, kernel.compile(), known)
    except Exception as error:  # inductor raises whatever its compiler meets
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
    if known is None and fault != NO_ROOM:
        write_finding(kernel.name, KernelVerdict(fault, kernel.is_exact))
    return fault


@RESUMED.register("compiled")
def resumed(draft: Draft, subject: Subject) -> Captured:
    """The fused step of a draft from elsewhere; IllegalPlan if its groups are not those of this step."""
    refuse_without_compiler()
    captured = in_channels_last(subject) if draft.relaid else subject.as_run()
    if captured is None:
        raise IllegalPlan(
            "the plan is for another step: its convolutions cannot be in channels-last layout here"
        )
    groups, formed = groups_in(draft.graph), set(groups_in_step(captured))
    if not formed.issuperset(groups):
        raise IllegalPlan("the plan is for another step: its compiled kernels compute other ops")
    kernels = kernels_of(captured, groups)
    found = compiled(kernels, {})
    if len(found) < len(groups):
        raise IllegalPlan("the plan has kernels that cannot be compiled here; make one for this machine")
    return fused_step(captured, found)
