"""PlanCache: plans kept on disk, so that the same step on the same machine starts at once the next time.

A plan is found again by all it depends on: the graph, the budget, the techniques, the machine, and the code
that plans. What is damaged, or from another version, is no error: the step is planned again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

from stowplan import __version__
from stowplan.capture import Captured
from stowplan.errors import IllegalPlan, StowplanError
from stowplan.ir import Graph
from stowplan.ir.text import format_graph
from stowplan.ops.effects import FUSED
from stowplan.ops.table import registered_types
from stowplan.plan.files import plan_file
from stowplan.plan.files.sameness import first_difference, other_ops
from stowplan.plan.judge.verify import verify
from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.plan.planner import refuse_hopeless
from stowplan.plan.problem import slices_last
from stowplan.plan.technique import Socket
from stowplan.plan.watch import limited_to
from stowplan.run.cost.machine import device_of, platform_of
from stowplan.run.cost.probe_cache import replace_file, user_folder
from stowplan.run.planning.planner import plan_step, replayed_bytes, step_planner
from stowplan.run.planning.subject import PlannedStep, Subject
from stowplan.units import format_bytes

RESUMED: Socket[Callable[[Plan, Subject], Captured]] = Socket("run", "tile", "compiled")
"""How a step is captured that a plan from elsewhere is for, where a technique changed its graph."""

_MOST_PLANS = 200
_PLANNING = ("analyse", "ir", "ops", "plan", "run")


@dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans: the user's cache folder, unless another is given."""

    folder: Path | None = None

    def step_for(
        self,
        subject: Subject,
        allowed_bytes: int,
        options: PlanOptions,
    ) -> PlannedStep:
        """The step with the plan that is kept for it, or with one searched for now, which is then kept.

        Plans that offload are not kept, because the free space of a tier changes from day to day, nor are
        plans whose search was ended early.
        """
        graph = subject.captured.graph
        key = _key_of(graph, allowed_bytes, options)
        known = self.read(key, subject, allowed_bytes)
        if known is not None:
            return known
        refuse_hopeless(graph, allowed_bytes, options, lambda: step_planner(subject, options).minimum_bytes)
        with limited_to(options.seconds):
            found = _kept_whole(subject, allowed_bytes, options) or plan_step(subject, allowed_bytes, options)
        if found.plan.pricing.tier is None and not found.plan.cut_short:
            self.add(key, found.plan)
        return found

    def read(self, key: str, subject: Subject, allowed_bytes: int) -> PlannedStep | None:
        """The step with the plan under this key, held to all that a plan from elsewhere is held to."""
        try:
            plan = plan_file.read(self._path(key).read_text(encoding="utf-8"))
            return saved_step(plan, subject, allowed_bytes)
        except (OSError, UnicodeDecodeError, StowplanError):
            return None

    def add(self, key: str, plan: Plan) -> None:
        """Keep a plan; the oldest make room. Where nothing can be written, nothing is."""
        try:
            replace_file(self._path(key), plan_file.write(plan).encode())
            kept = sorted(self._folder.glob("*.plan.json"), key=lambda path: path.stat().st_mtime)
            for path in kept[:-_MOST_PLANS]:
                path.unlink(missing_ok=True)
        except OSError:
            return

    @property
    def _folder(self) -> Path:
        return self.folder or user_folder("plans")

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.plan.json"


USER_PLANS = PlanCache()


def _kept_whole(subject: Subject, allowed_bytes: int, options: PlanOptions) -> PlannedStep | None:
    if subject.captured.eager.peak_bytes() > allowed_bytes:
        return None
    from stowplan.run.planning.unprobed import plan_unprobed  # most fits have a smaller budget

    return plan_unprobed(subject, allowed_bytes, options)


def saved_step(plan: Plan, subject: Subject, allowed_bytes: int) -> PlannedStep:
    """A step with a plan from elsewhere; raises IllegalPlan if that is for another step or budget."""
    captured, plan = subject.captured, replace(plan, arena=None)  # laid out anew where one is asked for
    if plan.tile_maps:
        captured = RESUMED.of("tile")(plan, subject)
    elif any(op.type == FUSED for op in plan.graph.ops):
        captured = RESUMED.of("compiled")(plan, subject)
    difference = first_difference(plan.graph, slices_last(captured.graph))
    if difference is not None and plan.projected_for:
        kinds = other_ops(plan.graph, captured.graph) or "none in number"
        raise IllegalPlan(
            f"the plan was projected for {plan.projected_for}, and the step captured here differs:"
            f" {difference}; ops that differ: {kinds}; make a plan here with `plan`"
        )
    if difference is not None:
        raise IllegalPlan(f"the plan is for another step: {difference}; make one for this step with `plan`")
    taken_bytes = plan.projected_peak_bytes + replayed_bytes(plan)
    if taken_bytes > allowed_bytes:
        raise IllegalPlan(
            f"the plan takes {format_bytes(taken_bytes)}, and {format_bytes(allowed_bytes)} are allowed"
        )
    return PlannedStep(verify(plan), captured)


def _key_of(graph: Graph, allowed_bytes: int, options: PlanOptions) -> str:
    """A file name from everything that a plan depends on."""
    device = device_of(graph)
    settings = (sorted(options.allow), options.prefer, options.moves, options.gap, options.kernels)
    rules = sorted(registered_types & {op.type for op in graph.ops})
    parts = (
        format_graph(graph),
        platform_of(device),
        allowed_bytes,
        *settings,
        rules,
        __version__,
        _code_digest(),
    )
    return sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    """The code that plans: who changes it gets new plans."""
    source = Path(__file__).parents[2]
    files = (path for part in _PLANNING for path in sorted((source / part).rglob("*.py")))
    return sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
