"""The road from a captured step to its draft, for all who need one: `fit`, commands, checks.

A saved plan is taken as it is. Else the decisions of another size are carried over, or the cache has a draft,
or one is searched. What was chosen for the execution is brought within the budget around all of these.
"""

from collections.abc import Callable

from stowplan.plan.options import PlanOptions
from stowplan.plan.plan import Plan
from stowplan.run.planning.constraint import Constraint, constraint_of, within
from stowplan.run.planning.plan_cache import USER_PLANS, PlanCache
from stowplan.run.planning.planner import DraftedStep, Subject
from stowplan.run.planning.saved import saved_step


def draft_for(
    subject: Subject,
    allowed_bytes: int,
    options: PlanOptions,
    *,
    given: Plan | None = None,
    unsearched: Callable[[Subject, int], DraftedStep | None] | None = None,
    cache: PlanCache = USER_PLANS,
    constraint: Constraint | None = None,
) -> DraftedStep:
    """The best draft of a step within the budget; raises BudgetTooSmall with the smallest that was found.

    A plan that is `given` has to be one of this step. `unsearched` returns a draft that needs no search, such
    as one with decisions of another size, or None. A `constraint` of the budget replaces those of the
    execution.
    """

    def drafted(room: int) -> DraftedStep:
        if given is not None:
            return saved_step(given, subject, room)
        known = unsearched(subject, room) if unsearched else None
        return known or cache.step_for(subject, room, options)

    constraint = constraint or constraint_of(options.execution)
    if constraint is None:
        return drafted(allowed_bytes)
    return within(constraint, allowed_bytes, drafted, is_given=given is not None)
