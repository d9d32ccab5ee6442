"""Last uses: the names that die after each step of a sequence."""

from collections.abc import Container, Iterable, Sequence


def last_uses(uses: Sequence[Iterable[str]], kept: Container[str]) -> tuple[tuple[str, ...], ...]:
    """For each step, the names that no later step uses, except those that are kept."""
    last = {name: number for number, names in enumerate(uses) for name in names}
    gone: list[list[str]] = [[] for _ in uses]
    for name, number in last.items():
        if name not in kept:
            gone[number].append(name)
    return tuple(map(tuple, gone))
