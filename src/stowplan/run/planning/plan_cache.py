"""PlanCache finds a plan again by all it depends on: graph, budget, options, machine, the code that plans.

What is damaged, or from another version, is no error: the step is planned again.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from stowplan import __version__
from stowplan.errors import BudgetTooSmall, StowplanError
from stowplan.ir import Graph
from stowplan.ir.text import format_graph
from stowplan.ops.table import registered_types
from stowplan.plan.draft import Draft
from stowplan.plan.files import plan_file
from stowplan.plan.options import PlanOptions
from stowplan.plan.planner import refuse_hopeless
from stowplan.run.cost.machine import device_of, platform_of, replace_file, user_folder
from stowplan.watch import limited_to

if TYPE_CHECKING:
    pass
from stowplan.run.planning.planner import DraftedStep, Subject, draft_step, step_planner
from stowplan.run.planning.saved import saved_step
from stowplan.run.planning.unprobed import plan_unprobed

_MOST_PLANS = 200
_PLANNING = ("analyse", "ir", "ops", "plan", "run", "techniques")


@dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans: the user's cache folder, unless another is given."""

    folder: Path | None = None

    def step_for(
        self,
        subject: Subject,
        allowed_bytes: int,
        options: PlanOptions,
    ) -> DraftedStep:
        """The step with the draft that is kept for it, or with one searched for now, which is then kept.

        Drafts that offload are not kept, because the free space of a tier changes from day to day, nor are
        those whose search was ended early.
        """
        graph = subject.captured.graph
        key = _key_of(graph, allowed_bytes, options)
        known = self.read(key, subject, allowed_bytes)
        if known is not None:
            return known
        refuse_hopeless(graph, allowed_bytes, options, lambda: step_planner(subject, options).smallest)
        with limited_to(options.search.time_limit):
            found = _kept_whole(subject, allowed_bytes, options) or draft_step(
                subject, allowed_bytes, options
            )
        if found.draft.pricing.tier is None and not found.draft.cut_short:
            self.add(key, found.draft)
        return found

    def first_step_for(
        self, subject: Subject, allowed_bytes: int, options: PlanOptions
    ) -> DraftedStep | None:
        """The best step that is kept, or a first one without tiles; None if that takes a longer search.

        Plans that were waited for are better than others. A first plan is not kept before the search for a
        better one is over.
        """
        graph, soon = subject.captured.graph, replace(options, is_first=True)
        key, own_key = (_key_of(graph, allowed_bytes, each) for each in (options, soon))
        known = self.read(key, subject, allowed_bytes) or self.read(own_key, subject, allowed_bytes)
        if known is not None:
            return known
        refuse_hopeless(graph, allowed_bytes, options, lambda: step_planner(subject, options).smallest)
        with limited_to(options.search.time_limit):
            if (whole := _kept_whole(subject, allowed_bytes, options)) is not None:
                self.add(key, whole.draft)
                return whole
            try:
                first = draft_step(subject, allowed_bytes, replace(soon, allow=("recompute",)))
            except BudgetTooSmall:
                return None
        keep = partial(self.add, own_key)
        if first.draft.gap > options.search.gap and not first.draft.cut_short:
            return replace(first, keep=keep)
        keep(first.draft)
        return first

    def read(self, key: str, subject: Subject, allowed_bytes: int) -> DraftedStep | None:
        """The step with the draft under this key, held to all that a plan from elsewhere is held to."""
        try:
            plan = plan_file.read(self._path(key).read_text(encoding="utf-8"))
            return saved_step(plan, subject, allowed_bytes)
        except (OSError, UnicodeDecodeError, StowplanError):
            return None

    def add(self, key: str, draft: Draft) -> None:
        """Keep a draft; the oldest make room. Where nothing can be written, nothing is."""
        try:
            replace_file(self._path(key), plan_file.write(draft).encode())
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


def _kept_whole(subject: Subject, allowed_bytes: int, options: PlanOptions) -> DraftedStep | None:
    if subject.captured.eager.peak_bytes() > allowed_bytes:
        return None
    return plan_unprobed(subject, allowed_bytes, options)


def _key_of(graph: Graph, allowed_bytes: int, options: PlanOptions) -> str:
    """A file name from everything that a plan depends on."""
    device = device_of(graph)
    choices = sorted(options.allow), options.prefer, options.execution.kernels
    limits = options.search.moves, options.search.gap, options.slowest, options.is_first
    rules = sorted(registered_types & {op.type for op in graph.ops})
    parts = (
        format_graph(graph),
        platform_of(device),
        allowed_bytes,
        *choices,
        *limits,
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
