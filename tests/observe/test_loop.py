"""The automaton: which rows of tokens have a period, and which have none."""

from collections.abc import Iterable

import pytest

from stowplan.observe.loop import LIMIT, Loop, Token, described, in_order


def read(tokens: Iterable[str], optimizers: Iterable[str] = ("S 0",), used: bool = True) -> tuple[Loop, int]:
    """The loop until it has a period, and the period; calls are used unless they end with `?`."""
    loop = Loop()
    for number, text in enumerate(tokens):
        call = number if text.startswith("F") else -1
        if call >= 0 and used and not text.endswith("?"):
            loop.use({call})
        if loop.add(Token(text.rstrip("?"), number, call)) and (period := loop.period(set(optimizers))):
            return loop, period
        if loop.is_over:
            return loop, 0
    return loop, 0


def row(text: str, times: int) -> list[str]:
    """`text` has tokens without the number of an optimizer's blank: S0 is `S 0`, FD is `F D`."""
    words = [f"{word[0]} {word[1:]}" if word[0] in "FS" else word for word in text.split()]
    return words * times


@pytest.mark.parametrize(
    ("tokens", "optimizers", "period", "segments"),
    [
        ("FG B S0", ["S 0"], 1, 3),
        ("FG B FG B S0", ["S 0"], 1, 3),
        ("FD B FG? FD B S0 FD B S1", ["S 0", "S 1"], 2, 5),
        ("FG? FD g B S0 " * 5 + "FG FD B S1", ["S 0", "S 1"], 6, 13),
        ("FG B S0 " * 15 + "FD B S1", ["S 0", "S 1"], 16, 33),
        ("FG? FG B S0", ["S 0"], 1, 3),
        ("FA FC B S0", ["S 0"], 1, 3),
    ],
)
def test_a_period_is_found_once_it_came_twice(
    tokens: str, optimizers: list[str], period: int, segments: int
) -> None:
    loop, found = read(row(tokens, 40), optimizers)
    assert (found, len(loop.segments)) == (period, segments)


def test_an_optimizer_that_exists_is_waited_for() -> None:
    """Five steps of the critic look like a period of one until the generator steps."""
    tokens = row("FG? FD g B S0", 5) + row("FG FD B S1", 1)
    assert read(tokens * 40, ["S 0"])[1] == 1
    assert read(tokens * 40, ["S 0", "S 1"])[1] == 6


def test_an_optimizer_that_never_steps_is_waited_for_to_the_end_alone() -> None:
    loop, found = read(row("FG B S0", 100), ["S 0", "S 1"])
    assert (found, len(loop.segments)) == (1, LIMIT)


def test_no_period_is_no_period() -> None:
    irregular = [text for number in range(60) for text in row("FG B " + "FD B " * (number % 7 > 3) + "S0", 1)]
    loop, found = read(irregular)
    assert found == 0 or loop.segments[-found:] == loop.segments[-2 * found : -found]
    growing = [t for n in range(60) for t in (*row("FG FD B", 1), *(f"F X{i}" for i in range(n)), "B", "S 0")]
    loop, found = read(growing)
    assert (found, len(loop.segments)) == (0, LIMIT)


def test_accumulation_of_another_length_is_the_same_iteration() -> None:
    tokens = [text for count in (4, 4, 3) for text in [*row("FG B", count), "S 0"]]
    assert read(tokens)[1] == 1


def test_a_loop_by_hand_ends_where_forward_follows_backward() -> None:
    loop, found = read(row("FG B", 12), [])
    assert (found, loop.raw[-1]) == (1, ("F G", "B"))
    loop, found = read(row("FG FH B", 14), [])
    assert (found, loop.raw[-1]) == (1, ("F G", "F H", "B"))


def test_a_loop_is_described_from_its_own_beginning() -> None:
    loop, period = read(row("FD B FG? FD B S0 FD B S1", 9), ["S 0", "S 1"])
    text = described(in_order(loop.raw, period), ["Adam", "SGD"])
    assert text == "2 x (D forward, backward), Adam step, D forward, backward, SGD step"
