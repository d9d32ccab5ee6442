"""Faults planted in the search's rules: the judges refuse what comes of them, or count other bytes.

Each fault is one change to the source of one module of the search. The search with the fault, in modules of
its own, makes schedules for small random steps. A machine that follows values says which of them are wrong,
and the judges, who share nothing with the search, must refuse exactly these.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

import pytest

from stowplan.errors import IllegalPlan
from stowplan.plan.judge.verify import check_steps
from tests.hunt import plans
from tests.support.values import Wrong, curve_of, reference_of

STEPS = 400  # tried for each fault
ENOUGH = 3  # wrong schedules

PROBLEM, LEDGER = "stowplan.plan.problem", "stowplan.plan.ledger"
IDLE = "stowplan.techniques.offload.plan.idle_intervals"
INSERT = "stowplan.techniques.offload.plan.insert_transfers"
SEARCH = (PROBLEM, LEDGER, IDLE, INSERT, "tests.hunt.plans")
"""In the order in which they import each other; the last calls the others."""


class Fault(NamedTuple):
    """In one module, one text in place of another."""

    what: str
    module: str
    right: str
    wrong: str


FAULTS = (
    # what may be recomputed
    Fault(
        "recomputes what happens once",
        PROBLEM,
        "if effect_of(site) & ONCE:",
        "if False:",
    ),
    Fault(
        "recomputes what others take part in",
        PROBLEM,
        "if effect_of(site) & ONCE:",
        'if effect_of(site) & ONCE and "token" not in site.op.type:',
    ),
    Fault(
        "recomputes from changed buffers",
        PROBLEM,
        "return outdated.isdisjoint(op.reads()) or only_updates_statistics(site)",
        "return True",
    ),
    Fault(
        "takes every norm for one in training",
        PROBLEM,
        "or only_updates_statistics(site)",
        'or "norm" in op.type',
    ),
    Fault(
        "forgets views of changed buffers",
        PROBLEM,
        "for op in graph.ops if outdated else ():",
        "for op in ():",
    ),
    Fault(
        "knows the updated name and not the buffer",
        PROBLEM,
        "graph.tensors[name].alias_of or name\n",
        "name\n",
    ),
    Fault(
        "finds no updates of buffers",
        PROBLEM,
        "if op.phase is Phase.UPDATE\n        for name in op.writes()",
        "if op.phase is Phase.BACKWARD\n        for name in op.writes()",
    ),
    Fault(
        "recomputes new contents of buffers",
        PROBLEM,
        "not in held | booked | sums",
        "not in held | sums",
    ),
    Fault(
        "recomputes what the caller has",
        PROBLEM,
        "not in held | booked | sums",
        "not in booked | sums",
    ),
    Fault(
        "recomputes sums",
        PROBLEM,
        "not in held | booked | sums",
        "not in held | booked",
    ),
    Fault(
        "recomputes from sums",
        PROBLEM,
        " and summed.isdisjoint(op.reads())",
        "",
    ),
    Fault(
        "sums of the backward half alone",
        PROBLEM,
        "graph.ops[:turn])\n",
        "graph.ops[turn:])\n",
    ),
    Fault(
        "recomputes any forward op",
        PROBLEM,
        "len(graph.ops) and again[op] and value",
        "len(graph.ops) and value",
    ),
    Fault(
        "knows the caller's tensors by their owners",
        PROBLEM,
        "held = {values.number_of(name) for name in graph.held}",
        "held = {values.number_of(n) for n in graph.held if graph.tensors[n].alias_of is None}",
    ),
    Fault(
        "takes the last writer for the maker",
        PROBLEM,
        "for use in op.outputs\n            if use.role is Role.DATA\n        }",
        "for use in op.outputs\n        }",
    ),
    # what may be written over
    Fault(
        "writes over a part of a storage",
        PROBLEM,
        "whole = owner.nbytes == victim.nbytes == target.nbytes",
        "whole = True",
    ),
    Fault(
        "writes over another layout",
        PROBLEM,
        "t.dtype, t.layout, t.device",
        "t.dtype, t.device",
    ),
    Fault(
        "writes over another device",
        PROBLEM,
        "t.dtype, t.layout, t.device",
        "t.dtype, t.layout",
    ),
    Fault(
        "writes over the caller's tensors",
        PROBLEM,
        " and owner.id in made",
        "",
    ),
    Fault(
        "writes over what is read later",
        LEDGER,
        "left = ending - {homes",
        "left = set(homes.values()) - {homes",
    ),
    Fault(
        "writes over for nobody",
        LEDGER,
        "if output in run.makes and home in left:",
        "if home in left:",
    ),
    Fault(
        "writes over one step too early",
        LEDGER,
        "ending[index].add(home)",
        "ending[max(0, index - 1)].add(home)",
    ),
    # bytes
    Fault(
        "forgets the term that is added",
        PROBLEM,
        "return () if added and",
        "return () if True or added and",
    ),
    Fault(
        "forgets workspace",
        PROBLEM,
        "return workspace_bytes.get(op.id, 0) + sum",
        "return sum",
    ),
    Fault(
        "forgets buffers",
        PROBLEM,
        "if is_resident(tensor)\n",
        "if is_resident(tensor) and tensor.kind != 'buffer'\n",
    ),
    Fault(
        "counts no inputs",
        PROBLEM,
        "is not Kind.CONSTANT\n        )",
        "not in (Kind.CONSTANT, Kind.INPUT)\n        )",
    ),
    Fault(
        "forgets second outputs",
        PROBLEM,
        "for use in op.outputs\n            if use.role is Role.DATA and",
        "for use in op.outputs[:1]\n            if use.role is Role.DATA and",
    ),
    Fault(
        "forgets what is added into",
        PROBLEM,
        "self._numbers((*op.reads(), *op.writes()))",
        "self._numbers(op.reads())",
    ),
    Fault(
        "forgets the owners of views",
        PROBLEM,
        "self._numbers((*op.reads(), *op.writes()))",
        ("self._numbers(n for n in (*op.reads(), *op.writes()) if self._graph.tensors[n].alias_of is None)"),
    ),
    Fault(
        "forgets what is temporary",
        LEDGER,
        "here = level + problem.temporary_bytes[running]",
        "here = level",
    ),
    Fault(
        "forgets what nobody asked for",
        LEDGER,
        "change[index] += problem.nbytes[value]\n                    ",
        "change[index] += 0\n                    ",
    ),
    Fault(
        "writes over what lives on",
        LEDGER,
        ("if target in made and any(victim in dying and last[victim] == index for victim in victims):"),
        "if target in made:",
    ),
    Fault(
        "lets everything end at its op",
        LEDGER,
        "return end > op\n",
        "return False\n",
    ),
    Fault(
        "lets everything outlive its op",
        LEDGER,
        "return end > op\n",
        "return True\n",
    ),
    Fault(
        "forgets who holds a value",
        LEDGER,
        "end = len(problem.reads) if problem.held[value] else max",
        "end = max",
    ),
    Fault(
        "forgets chains that need a value",
        LEDGER,
        "else max(uses[-1], latest)\n",
        "else uses[-1]\n",
    ),
    Fault(
        "forgets chains after the last use",
        LEDGER,
        "if place + 1 < len(uses) else latest\n",
        "if place + 1 < len(uses) else uses[-1]\n",
    ),
    Fault(
        "holds from one op later",
        LEDGER,
        "return self._remade[gap]\n",
        "return self._remade[gap] + 1\n",
    ),
    Fault(
        "counts from one op later",
        LEDGER,
        "for start, end in spans:\n            self._through[start + 1 :",
        "for start, end in spans:\n            self._through[start + 2 :",
    ),
    Fault(
        "takes held values for ready",
        LEDGER,
        "(state is State.HOLD and _NEVER < self._remade[gap] < op)",
        "state is State.HOLD",
    ),
    Fault(
        "recomputes one op and not its inputs",
        LEDGER,
        "                    demanded.add(value)\n                    missing.append(value)\n",
        "                    pass\n",
    ),
    Fault(
        "forgets what a chain reads",
        LEDGER,
        "                    ready.add(value)\n",
        "                    pass\n",
    ),
    Fault(
        "forgets what stands",
        LEDGER,
        " + self.problem.standing_bytes",
        "",
    ),
    Fault(
        "looks at no later op",
        LEDGER,
        "queue = self._touched(gap, self.gaps.start(gap))",
        "queue = []",
    ),
    Fault(
        "looks at the next reader alone",
        LEDGER,
        "return [reader, *(op for op in self._via[value] if after < op < reader)]",
        "return [reader]",
    ),
    Fault(
        "takes back a change by half",
        LEDGER,
        "                    self._local[op] = nbytes\n\n    def load",
        "                    pass\n\n    def load",
    ),
    Fault(
        "takes back no spans",
        LEDGER,
        "                    self._enter_spans(value, spans)\n",
        "                    pass\n",
    ),
    Fault(
        "takes back no chain",
        LEDGER,
        "                case _Chain():\n                    self._enter_chain(change)\n",
        "                case _Chain():\n                    pass\n",
    ),
    Fault(
        "enters nothing ahead",
        LEDGER,
        (
            "            (self._ahead[reader - 1].add if state is State.AHEAD else "
            "self._ahead[reader - 1].discard)(value)"
        ),
        "            pass",
    ),
    # steps
    Fault(
        "frees before the op",
        LEDGER,
        "        if run.again:\n            steps.append(Re",
        (
            "        if run.ends:\n            steps.append(Free(tuple(name for name, _ in "
            "run.ends)))\n            run.ends.clear()\n        if run.again:\n            "
            "steps.append(Re"
        ),
    ),
    Fault(
        "recomputes as if for the first time",
        LEDGER,
        "        if run.again:\n",
        "        if False:\n",
    ),
    Fault(
        "recomputes in reverse",
        LEDGER,
        "sorted(wanted, key=self._position.__getitem__)",
        "sorted(wanted, key=self._position.__getitem__, reverse=True)",
    ),
    Fault(
        "recomputes one op of a chain",
        LEDGER,
        "                    seen.add(read)\n                    missing.append(read)\n",
        "                    seen.add(read)\n",
    ),
    Fault(
        "asks for one output",
        LEDGER,
        "self._position[again]], sorted(wanted[again]))",
        "self._position[again]], sorted(wanted[again])[:1])",
    ),
    Fault(
        "takes copies for one",
        LEDGER,
        "copy = (name, self._copies[name][1] + 1)",
        "copy = (name, 1)",
    ),
    Fault(
        "forgets that a view is an alias",
        LEDGER,
        "if graph.tensors[name].alias_of is None:\n                homes",
        "if True:\n                homes",
    ),
    Fault(
        "asks nobody who reads",
        LEDGER,
        "for copy in (*run.reads.values(), *run.makes.values()):",
        "for copy in run.makes.values():",
    ),
    Fault(
        "frees what the caller gets",
        LEDGER,
        "return is_resident(graph.tensors[name]) or (name in graph.held and newest[name] == copy)",
        "return is_resident(graph.tensors[name])",
    ),
    Fault(
        "frees parameters",
        LEDGER,
        "return is_resident(graph.tensors[name]) or (name",
        "return (name",
    ),
    Fault(
        "ends a storage with its owner",
        LEDGER,
        ("storage_last[homes[copy]] = max(storage_last.get(homes[copy], 0), len(runs) if stays else index)"),
        "storage_last[copy] = max(storage_last.get(copy, 0), len(runs) if stays else index)",
    ),
    Fault(
        "ends a storage with any of its names",
        LEDGER,
        "max(storage_last.get(homes[copy], 0), len(runs) if stays else index)",
        "min(storage_last.get(homes[copy], len(runs)), len(runs) if stays else index)",
    ),
    Fault(
        "frees one run too early",
        LEDGER,
        "runs[index].ends.append(copy)",
        "runs[index - 1].ends.append(copy)",
    ),
    Fault(
        "frees sums before the last term",
        LEDGER,
        "for name in (*op.reads(), *added_by(op))}",
        "for name in op.reads()}",
    ),
    Fault(
        "makes sums anew",
        LEDGER,
        "            if name not in added_by(op):\n",
        "            if True:\n",
    ),
    Fault(
        "updates last",
        LEDGER,
        "for position, op in enumerate(self._graph.ops):\n            remade",
        (
            "for position, op in sorted(enumerate(self._graph.ops), key=lambda each: each[1].phase "
            "== 'update'):\n            remade"
        ),
    ),
    Fault(
        "updates first",
        LEDGER,
        "for position, op in enumerate(self._graph.ops):\n            remade",
        (
            "for position, op in sorted(enumerate(self._graph.ops), key=lambda each: each[1].phase "
            "!= 'update'):\n            remade"
        ),
    ),
    Fault(
        "draws in another order",
        LEDGER,
        "for position, op in enumerate(self._graph.ops):\n            remade",
        (
            "for position, op in sorted(enumerate(self._graph.ops), key=lambda each: 'dropout' not "
            "in each[1].type or each[0] > 4):\n            remade"
        ),
    ),
    Fault(
        "adds in reverse",
        LEDGER,
        "for position, op in enumerate(self._graph.ops):\n            remade",
        (
            "for position, op in sorted(enumerate(self._graph.ops), key=lambda each: "
            "bool(added_by(each[1]))):\n            remade"
        ),
    ),
    Fault(
        "leaves an op out",
        LEDGER,
        "            self._run(op, [use.tensor for use in op.outputs], again=False)",
        (
            "            if op.type != 'stowplan.update_buffer':\n                self._run(op, "
            "[use.tensor for use in op.outputs], again=False)"
        ),
    ),
    Fault(
        "drops what is kept",
        LEDGER,
        "return state is State.KEEP or ahead or (",
        "return ahead or (",
    ),
    Fault(
        "drops what is held for others",
        LEDGER,
        " or (made_for_others and state is State.HOLD)",
        "",
    ),
    # transfers
    Fault(
        "moves what the caller has",
        IDLE,
        "        if storage in self._held:\n",
        "        if False:\n",
    ),
    Fault(
        "moves what is given",
        IDLE,
        "place.number in self._given or ",
        "",
    ),
    Fault(
        "stores once for all contents",
        IDLE,
        "contents = (place.number, place.writes)",
        "contents = (place.number, 0)",
    ),
    Fault(
        "is back too late",
        INSERT,
        "loads[move.back].append",
        "loads[move.interval.before + 1].append",
    ),
    Fault(
        "is away too early",
        INSERT,
        "frees[move.out].append",
        "frees[move.interval.after - 1].append",
    ),
    Fault(
        "does not store",
        INSERT,
        "        if key not in stored:\n",
        "        if key in stored:\n",
    ),
    Fault(
        "does not come back",
        INSERT,
        "        loads[move.back].append(Load(move.interval.tensors))\n",
        "        pass\n",
    ),
    Fault(
        "is there twice",
        INSERT,
        "        frees[move.out].append(Free(move.interval.tensors))\n",
        "",
    ),
)


class _Loader(SourceFileLoader):
    """A module from its source, with the fault if it is the one that has it."""

    fault: Fault

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        if fullname == self.fault.module:
            assert source.count(self.fault.right) == 1, "the fault names one place in the source"
            source = source.replace(self.fault.right, self.fault.wrong)
        return self.source_to_code(source, self.path)


@contextmanager
def planted(fault: Fault) -> Iterator[ModuleType]:
    """The search with the fault, in modules of its own; the other modules do not see it."""
    before = {name: sys.modules[name] for name in SEARCH}
    try:
        for name in SEARCH:
            loader = _Loader(name, str(before[name].__file__))
            loader.fault = fault
            spec = spec_from_file_location(name, loader.path, loader=loader)
            assert spec is not None
            sys.modules[name] = module_from_spec(spec)
            loader.exec_module(sys.modules[name])
        yield sys.modules[SEARCH[-1]]
    finally:
        sys.modules.update(before)


def outcome(schedule: plans.Schedule) -> tuple[bool, bool]:
    """Whether a schedule is wrong, or not as large as the search says; and whether the judges say so."""
    graph, steps, pricing, said = schedule.graph, schedule.steps, schedule.pricing, schedule.peak_bytes
    try:
        curve = curve_of(graph, reference_of(graph), steps, pricing)
        is_wrong = said is not None and max((level[""] for level in curve), default=0) != said
    except Wrong:
        is_wrong = True
    try:
        peak = check_steps(graph, steps, pricing).peak_bytes
        return is_wrong, said is not None and peak != said
    except IllegalPlan:
        return is_wrong, True


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_judges_refuse_what_a_planted_fault_makes(fault: Fault) -> None:
    wrong = 0
    with planted(fault) as search:
        for seed in range(STEPS):
            try:
                schedule = search.schedule_of(seed)
            except (LookupError, ValueError, AssertionError, TypeError):
                continue  # the search itself stops at its fault
            is_wrong, is_refused = outcome(schedule)
            assert is_refused == is_wrong, f"step {seed}"
            wrong += is_wrong
            if wrong == ENOUGH:
                return
    assert wrong, "no step shows the fault"


def test_without_a_fault_the_same_modules_make_right_schedules() -> None:
    with planted(Fault("none", PROBLEM, "Problem: a graph", "Problem: a graph")) as search:
        for seed in range(30):
            assert outcome(search.schedule_of(seed)) == (False, False)
        assert search.case is not plans.case
    assert sys.modules["tests.hunt.plans"] is plans
