"""The true optimum of small problems, by shortest path: shows how far the fast path is from it.

A state is how many ops of the order have run, and which forward values are in memory. From it one may run the
next op of the order, run a forward op again, or free a value. Runs cost their seconds, and none may pass the
budget. The number of states doubles with every value, so this is for a dozen of them. Nothing is overwritten
in place here.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from stowplan.plan.problem import Problem

_State = tuple[int, frozenset[int]]


def least_extra_seconds(problem: Problem, allowed_bytes: int) -> float | None:
    """Extra seconds of the fastest schedule in this order within the budget; None if there is none."""
    room = allowed_bytes - problem.standing_bytes
    fixed = _fixed_bytes(problem)
    start: _State = (0, frozenset())
    reached = {start: 0.0}
    queue: list[tuple[float, int, _State]] = [(0.0, 0, start)]
    entries = 0
    while queue:
        seconds, _, state = heappop(queue)
        if seconds > reached[state]:
            continue
        if state[0] == len(problem.reads):
            return seconds
        for step_seconds, following in _moves(problem, state, room, fixed):
            total = seconds + step_seconds
            if total < reached.get(following, float("inf")):
                reached[following] = total
                entries += 1
                heappush(queue, (total, entries, following))
    return None


def _moves(problem: Problem, state: _State, room: int, fixed: list[int]) -> Iterator[tuple[float, _State]]:
    position, there = state
    live = sum(problem.nbytes[value] for value in there)
    own = sum(problem.nbytes[v] for v in problem.writes[position])
    if (
        _can_run(problem, position, there)
        and live + fixed[position] + own + problem.temporary_bytes[position] <= room
    ):
        made = frozenset(v for v in problem.writes[position] if problem.droppable[v])
        yield 0.0, (position + 1, there | made)
    before = fixed[position]
    for op in range(min(position, problem.turn)):
        fresh = frozenset(problem.writes[op]) - there
        needs = sum(problem.nbytes[v] for v in problem.writes[op]) + problem.temporary_bytes[op]
        if fresh and _can_run(problem, op, there) and live + before + needs <= room:
            yield problem.seconds[op], (position, there | frozenset(v for v in fresh if problem.droppable[v]))
    for value in there:
        yield 0.0, (position, there - {value})


def _can_run(problem: Problem, op: int, there: frozenset[int]) -> bool:
    return all(value in there for value in problem.reads[op] if problem.droppable[value])


def _fixed_bytes(problem: Problem) -> list[int]:
    """By op: the bytes of values that may not be dropped and are in memory before it in every schedule."""
    ops = len(problem.reads)
    last = list(problem.producer)
    for op, values in enumerate(problem.reads):
        for value in values:
            last[value] = op
    fixed = [0] * (ops + 1)
    for value, nbytes in enumerate(problem.nbytes):
        if not problem.droppable[value]:
            end = ops if problem.held[value] else last[value]
            for op in range(problem.producer[value] + 1, end + 1):
                fixed[op] += nbytes
    return fixed
