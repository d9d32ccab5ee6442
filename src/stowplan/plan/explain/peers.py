"""Peers: peak and time of other memory-saving methods on the same step, read from a benchmark file."""

import msgspec

from stowplan.formats.checked import bad_input_of


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One method on one step: its peak, and its seconds over those of eager."""

    name: str
    peak_bytes: int
    time_ratio: float


class _File(msgspec.Struct, frozen=True):
    """The part of a benchmark file that is about peers; it may say more."""

    peers: tuple[Peer, ...]


def read_peers(text: str) -> tuple[Peer, ...]:
    """The peers of a benchmark file; BadInput if it lists none."""
    try:
        return msgspec.json.decode(text, type=_File).peers
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as fault:
        raise bad_input_of(fault) from fault
