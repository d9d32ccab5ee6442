"""Damaged names: each becomes the nearest name of the lexicon that was not seen elsewhere.

What a name is called apart from its layer is found first. Which layer is then a matter of what is readable of
it, and of position: the one drawn closest to its neighbour is meant.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from stowplan.errors import BadInput
from stowplan.formats.regiongraph.grammar import Entry
from stowplan.formats.regiongraph.names import LONGEST_RUN, NUMBER, Names, Rest
from stowplan.formats.regiongraph.page import Words
from stowplan.formats.regiongraph.spelling import ANY, Pattern, key_of, nearest

_SHORTEST_KEY = 6  # shorter keys are too near to each other to be told apart once damaged
_WORST = 0.35  # edits per readable character beyond which a word is debris
_MOST_GUESSES = 250
_LAYER = re.compile(rf"(?:update_)?(L{NUMBER})\b")


def claim_damaged(names: Names, rests: Sequence[Rest]) -> list[Words]:
    """Claim the names that `rests` can be read as; returns the words that are none."""
    if sum(len(key_of(word)) >= _SHORTEST_KEY for rest in rests for word in rest.words) > _MOST_GUESSES:
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
    readable = _LAYER.match(read)
    layer = None if readable is None else Pattern.of(key_of(readable[1]))

    def strangeness(entry: Entry) -> tuple[float, float, tuple[int, ...]]:
        misread = 0 if layer is None else layer.distance(key_of(entry.layer))
        neighbour = names.found.get(entry.near)
        if neighbour is None:
            return misread, float("inf"), ()
        return misread, abs(neighbour.line - line), neighbour.at

    return min(candidates, key=strangeness)
