"""Instances: the objects of some types among all of the process, while other threads run.

`gc.get_objects()` also lists tuples that another thread is building, and Python cannot go on building a tuple
that somebody else holds. So that list comes and goes within one call of C, in which no other thread runs:
what it is made into is composed beforehand.
"""

import gc
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, compress, islice, repeat
from typing import Any


def instances_of(kinds: Iterable[type]) -> list[Any]:
    """All objects whose type is one of these, of those that Python's collector tracks."""
    is_wanted = frozenset(kinds).__contains__
    flags = bytearray()  # one for each object
    twice = chain.from_iterable(map(partial(repeat, times=2), map(gc.get_objects, (None,))))
    types = map(partial(map, type), islice(twice, 1))
    noted = map(flags.extend, map(partial(map, is_wanted), types))
    wanted = compress(chain.from_iterable(islice(twice, 1)), flags)
    collects = gc.isenabled()
    gc.disable()  # a collection would run Python code
    try:
        return list(chain(filter(None, noted), wanted, twice))  # at its end the last one drops the list
    finally:
        if collects:
            gc.enable()


def with_subclasses(kind: type) -> Iterator[type]:
    """The type itself and all that are derived from it; one that is derived in two ways comes twice."""
    yield kind
    found: list[type] = type.__subclasses__(kind)
    for derived in found:
        yield from with_subclasses(derived)
