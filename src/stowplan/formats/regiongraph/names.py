"""From words to names: names that match up to confusable shapes and blanks, damaged names, implied names.

The names show which layers the network has; the grammar then makes the lexicon. A damaged name becomes the
nearest name of the lexicon that the page does not show elsewhere: first its form without the layer, then the
layer, by what is readable and by the distance to the name drawn next to it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.grammar import Entry, Sort, lexicon_of
from stowplan.formats.regiongraph.page import Remarks, Words
from stowplan.formats.regiongraph.spelling import ANY, Pattern, as_digits, key_of, nearest, swaps_letters

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


_SHORTEST_KEY = 6  # shorter keys are too near to each other to be told apart once damaged
_WORST = 0.35  # edits per readable character beyond which a word is debris
_MOST_GUESSES, _MOST_WORDS = 250, 600  # long words, and all: short ones may be parts of a name
_READ_LAYER = re.compile(rf"(?:update_)?(L{NUMBER})\b")


def claim_damaged(names: Names, rests: Sequence[Rest]) -> list[Words]:
    """Claim the names that `rests` can be read as; returns the words that are none."""
    unread = [word for rest in rests for word in rest.words]
    long = sum(len(key_of(word)) >= _SHORTEST_KEY for word in unread)
    if long > _MOST_GUESSES or len(unread) > _MOST_WORDS:
        where = f"line {rests[0].line}"
        raise BadInput(f"more than {_MOST_GUESSES} words from here on are unreadable", where=where)
    if not rests:
        return []
    unseen: dict[str, list[Entry]] = defaultdict(list)
    for entry in names.lexicon.values():
        if entry.name not in names.found:
            unseen[key_of(entry.form)].append(entry)
    patterns = {key: Pattern.of(key) for key in unseen}
    left = []
    for rest in rests:
        for start, words, keys in _guesses(rest.words, patterns):
            if not keys:
                left.append(Words(rest.line, words))
                continue
            entry = _meant(names, [entry for key in keys for entry in unseen[key]], words[0], rest.line)
            names.claim(entry, " ".join(words), rest.line, (rest.at[0], rest.at[1] + start))
            unseen[key_of(entry.form)].remove(entry)
            if not unseen[key_of(entry.form)]:
                del patterns[key_of(entry.form)]
    return left


def _guesses(
    words: tuple[str, ...], patterns: dict[str, Pattern]
) -> Iterator[tuple[int, tuple[str, ...], list[str]]]:
    """`words` cut into runs, each with its start and the keys of the forms it is near to, if any."""
    start = 0
    while start < len(words):
        length, keys = _nearest_run(words[start : start + LONGEST_RUN], patterns)
        yield start, words[start : start + length], keys
        start += length


def _nearest_run(words: Sequence[str], patterns: dict[str, Pattern]) -> tuple[int, list[str]]:
    """How many words to take as one name so that it is nearest to some form, and the keys of those forms."""
    best, best_length, best_keys = _WORST, 1, list[str]()
    for length in range(1, len(words) + 1):
        key = key_of("".join(words[:length]))
        readable = len(key) - key.count(ANY)
        if readable >= _SHORTEST_KEY:
            distance, near = nearest(key, patterns.values(), int(best * readable))
            if near:
                best, best_length = distance / readable, length
                best_keys = [pattern.key for pattern in near]
    return best_length, best_keys


def _meant(names: Names, candidates: Sequence[Entry], read: str, line: int) -> Entry:
    """The candidate of the most readable layer, then the one whose neighbour is drawn closest to `line`."""
    readable = _READ_LAYER.match(read)
    layer = None if readable is None else Pattern.of(key_of(readable[1]))

    def strangeness(entry: Entry) -> tuple[float, float, tuple[int, ...]]:
        misread = 0 if layer is None else layer.distance(key_of(entry.layer))
        neighbour = names.found.get(entry.near)
        if neighbour is None:
            return misread, float("inf"), ()
        return misread, abs(neighbour.line - line), neighbour.at

    return min(candidates, key=strangeness)
