"""Damaged copies of a text: cut, flipped, spliced, repeated, nested, with numbers no one would write.

Every mutant is a function of its texts and of a source of random numbers, so that it can be made again.
"""

import re
from collections.abc import Callable, Sequence
from random import Random

_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_STRANGE_NUMBERS = (
    *(
        "0",
        "-1",
        "1",
        "2",
        "3",
        "-7",
        "00",
        "1e308",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "0.5",
        "1_000",
        "٣",
    ),
    *(str(sign * 2**bits + off) for bits in (31, 32, 62, 63, 64, 200) for sign in (1, -1) for off in (0, -1)),
    *("9" * 30, "1" + "0" * 400, "8" * 5000, "0x10"),
)
_STRANGE_WORDS = (
    "",
    " ",
    "\n",
    "\0",
    "\t",
    "\ufeff",
    "\ud800",
    "\u2028",
    "\u0660",
    "🜁",
    "None",
    "null",
    "{}",
    "[]",
)
_BRACKETS = ("[", "{", "(", '{"a":', "[[", "array([", "Rect(", '"', "\\", "slice(", "<:::")
_PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"

Mutation = Callable[[str, Sequence[str], Random], str]


def mutant(text: str, others: Sequence[str], random: Random) -> str:
    """`text`, damaged up to three times; `others` lend foreign pieces."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        text = random.choice(MUTATIONS)(text, others, random)
    return text


def truncated(text: str, _: Sequence[str], random: Random) -> str:
    """The beginning, or the end."""
    at = random.randrange(len(text) + 1)
    return text[:at] if random.random() < 0.8 else text[at:]


def with_characters_flipped(text: str, _: Sequence[str], random: Random) -> str:
    """A few characters replaced by others."""
    for at in random.choices(range(len(text)), k=random.choice((1, 1, 2, 10)) if text else 0):
        text = text[:at] + random.choice(_PRINTABLE) + text[at + 1 :]
    return text


def with_a_bit_flipped(text: str, _: Sequence[str], random: Random) -> str:
    """One bit of one character."""
    if not text:
        return text
    at = random.randrange(len(text))
    return text[:at] + chr(ord(text[at]) ^ 1 << random.randrange(7)) + text[at + 1 :]


def without_a_piece(text: str, _: Sequence[str], random: Random) -> str:
    """Some characters lost."""
    start, stop = _span(text, random)
    return text[:start] + text[stop:]


def spliced(text: str, others: Sequence[str], random: Random) -> str:
    """A piece of this or of another document, put elsewhere."""
    source = random.choice((text, *others))
    start, stop = _span(source, random)
    at = random.randrange(len(text) + 1)
    return text[:at] + source[start:stop] + text[at if random.random() < 0.5 else at + stop - start :]


def with_lines_rearranged(text: str, _: Sequence[str], random: Random) -> str:
    """Lines repeated, dropped or swapped."""
    lines = text.split("\n")
    here, there = random.randrange(len(lines)), random.randrange(len(lines))
    match random.randrange(4):
        case 0:
            lines[here:here] = [lines[there]] * random.choice((1, 1, 2, 50))
        case 1:
            del lines[here]
        case 2:
            lines[here], lines[there] = lines[there], lines[here]
        case _:
            lines[here:here] = lines[min(here, there) : max(here, there)]
    return "\n".join(lines)


def with_another_number(text: str, _: Sequence[str], random: Random) -> str:
    """One number, or all that are the same, replaced by a huge, negative, tiny or malformed one."""
    found = list(_NUMBER.finditer(text))
    if not found:
        return text
    chosen, strange = random.choice(found), random.choice(_STRANGE_NUMBERS)
    if random.random() < 0.2:
        return re.sub(rf"\b{re.escape(chosen[0])}\b", strange, text)
    return text[: chosen.start()] + strange + text[chosen.end() :]


def with_numbers_swapped(text: str, _: Sequence[str], random: Random) -> str:
    """One number replaced by another of the text: references that go astray."""
    found = list(_NUMBER.finditer(text))
    if not found:
        return text
    chosen, other = random.choice(found), random.choice(found)
    return text[: chosen.start()] + other[0] + text[chosen.end() :]


def with_a_strange_word(text: str, _: Sequence[str], random: Random) -> str:
    """A NUL, a byte-order mark, half a surrogate pair, an empty object and the like."""
    at = random.randrange(len(text) + 1)
    stop = at if random.random() < 0.5 else at + random.randrange(8)
    return text[:at] + random.choice(_STRANGE_WORDS) + text[stop:]


def nested_deeply(text: str, _: Sequence[str], random: Random) -> str:
    """Thousands of opening brackets."""
    at = random.randrange(len(text) + 1)
    return text[:at] + random.choice(_BRACKETS) * random.choice((1, 3, 100, 3000)) + text[at:]


def with_a_piece_repeated(text: str, _: Sequence[str], random: Random) -> str:
    """A short piece many times over: very long words, lists and lines."""
    start, stop = _span(text, random)
    times = 5000 if random.random() < 0.02 else random.choice((2, 30, 300))
    return text[:start] + text[start : min(stop, start + 40)] * times + text[stop:]


def _span(text: str, random: Random) -> tuple[int, int]:
    """A piece of any length, mostly short."""
    start = random.randrange(len(text) + 1)
    return start, min(len(text), start + random.choice((1, 5, 30, 200, len(text))))


MUTATIONS: tuple[Mutation, ...] = (
    truncated,
    with_characters_flipped,
    with_a_bit_flipped,
    without_a_piece,
    spliced,
    with_lines_rearranged,
    with_another_number,
    with_another_number,
    with_numbers_swapped,
    with_a_strange_word,
    nested_deeply,
    with_a_piece_repeated,
)
