"""From words to names: those that are right up to confusable shapes and blanks, and those that must be there.

Which layers the network has is read off the names themselves; the grammar then makes the lexicon.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stowplan.formats.regiongraph.grammar import Entry, Sort, lexicon_of
from stowplan.formats.regiongraph.page import Words
from stowplan.formats.regiongraph.remarks import Remarks
from stowplan.formats.regiongraph.spelling import as_digits, key_of, swaps_letters

LONGEST_RUN = 4  # words that one name was torn into
NUMBER = r"([0-9OoQlI|!]{1,3})"
_LAYER = re.compile(rf"L{NUMBER}\.filter(?:A|NL)?(?:\.output)?")
_LINEAR = re.compile(rf"classifier\.(?:linear|weights){NUMBER}(?:\.output)?")


@dataclass(frozen=True, slots=True)
class Sighting:
    """A name on the page: how it is spelled there, its place in reading order, and whether it is readable."""

    entry: Entry
    id: str
    line: int
    at: tuple[int, ...]
    is_readable: bool = True


@dataclass(frozen=True, slots=True)
class Rest:
    """Words that are no name as they stand; `at` counts runs on the page, then words in the run."""

    line: int
    at: tuple[int, int]
    words: tuple[str, ...]


@dataclass(slots=True)
class Names:
    """The names seen so far, by their spelling in the grammar, with what was repaired to read them."""

    lexicon: dict[str, Entry]
    found: dict[str, Sighting] = field(default_factory=dict)
    remarks: Remarks = field(default_factory=Remarks)

    def claim(self, entry: Entry, read: str, line: int, at: tuple[int, ...]) -> None:
        """Take `entry` as seen at its first place. A name that was misspelled in the drawing stays so."""
        if entry.name in self.found:
            return self.remarks.odd(line, f"{read!r} stands here again; left aside")
        slip = swaps_letters(read, entry.name)
        if slip:
            self.remarks.odd(line, f"{read!r} stands where {entry.name!r} is meant; kept")
        elif read != entry.name:
            self.remarks.repaired(line, "name", read, entry.name)
        self.found[entry.name] = Sighting(entry, read if slip else entry.name, line, at)
        return None

    def where(self, name: str) -> str:
        """Where on the page a name that was found stands."""
        return f"line {self.found[name].line}"

    def complete(self) -> None:
        """Add what every page has, readable or not: a gradient's set_zero, a trained parameter's update."""
        for entry in self.lexicon.values():
            gradient = self.found.get(entry.stem)
            if entry.sort in (Sort.SET_ZERO, Sort.UPDATE) and gradient and entry.name not in self.found:
                *run, word = gradient.at
                at = (*run, word, 1) if entry.sort is Sort.UPDATE else (*run, word - 1, 1)
                self.found[entry.name] = Sighting(entry, entry.name, gradient.line, at, is_readable=False)
                what = f"{entry.name!r} is not readable, but every page with {entry.stem!r} has it"
                self.remarks.inferred(gradient.line, what)


def exact_names(page: Sequence[Words]) -> tuple[Names, list[Rest]]:
    """The names that need no guess, in the lexicon of the layers the page shows; and the words left."""
    names = Names(lexicon_of(_numbers(page, _LAYER), _numbers(page, _LINEAR)))
    by_key = {key_of(name): entry for name, entry in names.lexicon.items()}
    rests = [rest for index, run in enumerate(page) for rest in _claim_exact(names, by_key, index, run)]
    return names, rests


def _numbers(page: Iterable[Words], pattern: re.Pattern[str]) -> list[int]:
    """The numbers of layers that at least two names of their forward half agree on."""
    seen: dict[str, set[str]] = defaultdict(set)
    for word in (word for run in page for word in run.words):
        match = pattern.fullmatch(word)
        if match is not None:
            seen[as_digits(match[1])].add(key_of(word))
    return [int(n) for n, words in seen.items() if len(words) > 1 and str(int(n)) == n]


def _claim_exact(names: Names, by_key: dict[str, Entry], index: int, run: Words) -> Iterator[Rest]:
    keys = [key_of(word) for word in run.words]
    start = rest = 0
    while start < len(run.words):
        length, entry = _longest_name(keys[start : start + LONGEST_RUN], by_key)
        if entry is not None:
            names.claim(entry, " ".join(run.words[start : start + length]), run.line, (index, start))
            if rest < start:
                yield Rest(run.line, (index, rest), run.words[rest:start])
            rest = start + length
        start += length
    if rest < start:
        yield Rest(run.line, (index, rest), run.words[rest:])


def _longest_name(keys: Sequence[str], by_key: dict[str, Entry]) -> tuple[int, Entry | None]:
    for length in range(len(keys), 0, -1):
        entry = by_key.get("".join(keys[:length]))
        if entry is not None:
            return length, entry
    return 1, None
