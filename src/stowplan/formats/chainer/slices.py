"""The index of a GetItem, which Chainer dumps as Python writes it: parsed by its grammar, never evaluated.

As an attribute it is a tuple with one entry per index: (start, stop, step) for a slice, an integer, None for
a new dim, "..." for the ellipsis.
"""

import re

from stowplan.ir import Attribute

_NUMBER = r"-?[0-9]{1,18}"
_BOUND = rf"(?:None|{_NUMBER})"
_INDEX = rf"slice\({_BOUND}, {_BOUND}, {_BOUND}\)|Ellipsis|{_BOUND}"
_INDICES = re.compile(rf"\((?:(?:{_INDEX})(?:, (?:{_INDEX}))*,?)?\)")


def parse_slices(text: str) -> Attribute:
    """The indices, or `text` itself where it is more than slices and integers (an index array, say)."""
    if _INDICES.fullmatch(text) is None:
        return text
    return tuple(_parsed(index) for index in re.findall(_INDEX, text))


def format_slices(indices: Attribute) -> Attribute:
    """The inverse of `parse_slices`."""
    if not isinstance(indices, tuple):
        return indices
    written = [_written(index) for index in indices]
    return f"({written[0]},)" if len(written) == 1 else f"({', '.join(written)})"


def _parsed(index: str) -> Attribute:
    if index.startswith("slice"):
        return tuple(_bound(bound) for bound in index[len("slice(") : -1].split(", "))
    return "..." if index == "Ellipsis" else _bound(index)


def _bound(text: str) -> int | None:
    return None if text == "None" else int(text)


def _written(index: Attribute) -> str:
    if isinstance(index, tuple):
        return f"slice({', '.join(map(str, index))})"
    return "Ellipsis" if index == "..." else str(index)
