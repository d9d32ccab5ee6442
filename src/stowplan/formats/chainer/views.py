"""The two views of what a backward keeps from the forward half: what its record lists, or what was retained.

The tags are conservative: a convolution lists its bias, GetItem and Concat list inputs of which they need
only the shapes, Dropout lists its input though it needs its mask. The attributes `_input_indexes_to_retain`
and `_output_indexes_to_retain` say what Chainer really held on to; the mask is in neither, and has the bytes
of the output.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from stowplan.errors import BadInput
from stowplan.formats.chainer.records import Record, Tag
from stowplan.formats.chainer.spelling import mask_id
from stowplan.ir import Role, Use

_RANDOM = frozenset({"Dropout"})


class SavedView(StrEnum):
    """Which account of the saved tensors to believe."""

    LISTED = "listed"
    RETAIN = "retain"


def masks_of(forward: Record, view: SavedView) -> tuple[str, ...]:
    """The masks a random op makes for its backward, one per output; the listed view shows none."""
    if view is SavedView.LISTED or forward.type not in _RANDOM:
        return ()
    return tuple(mask_id(output) for output in forward.outputs)


def saved_uses(forward: Record, backward: Record, view: SavedView) -> Iterator[Use]:
    """What the backward keeps from the forward half, in the order of its record, then what that omits."""
    listed = [(name, tag) for name, tag in backward.inputs if tag is not Tag.GRADIENT]
    if view is SavedView.LISTED:
        yield from (Use(name, Role.SAVED) for name, _ in listed)
        return
    retained = _retained(forward)
    unlisted = retained.keys() - set(listed)
    for name, tag in listed:
        yield Use(name, Role.SAVED if (name, tag) in retained else Role.SHAPE)
    yield from (Use(name, Role.SAVED) for name, tag in retained if (name, tag) in unlisted)
    yield from (Use(mask, Role.SAVED) for mask in masks_of(forward, view))


def _retained(forward: Record) -> dict[tuple[str, Tag], None]:
    """The values Chainer held on to, in order and without repeats."""
    inputs = [name for name, _ in forward.inputs]
    return dict.fromkeys(
        [(name, Tag.INPUT) for name in _chosen(forward, "_input_indexes_to_retain", inputs)]
        + [(name, Tag.OUTPUT) for name in _chosen(forward, "_output_indexes_to_retain", forward.outputs)]
    )


def _chosen(record: Record, attribute: str, names: Sequence[str]) -> list[str]:
    indexes = record.attributes.get(attribute)
    if indexes is None:
        return []
    chosen = [index for index in indexes if isinstance(index, int)] if isinstance(indexes, tuple) else []
    if tuple(chosen) != indexes or any(not 0 <= index < len(names) for index in chosen):
        raise BadInput(
            f"{attribute} of {record.type} is {indexes!r}, not a list of positions below {len(names)}",
            where=f"line {record.line}",
        )
    return [names[index] for index in chosen]
