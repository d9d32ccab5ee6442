"""Last uses: which names can be let go of behind each of some steps that follow each other."""

from collections.abc import Container, Iterable, Sequence


def let_go_after(uses: Sequence[Iterable[str]], kept: Container[str]) -> tuple[tuple[str, ...], ...]:
    """By step the names that no later one uses, but for those that are kept."""
    last = {name: number for number, names in enumerate(uses) for name in names}
    gone: list[list[str]] = [[] for _ in uses]
    for name, number in last.items():
        if name not in kept:
            gone[number].append(name)
    return tuple(map(tuple, gone))
