"""The judge of a packing, which shares nothing with the packers: do two blocks ever claim the same byte?"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from stowplan.analyse.packing.blocks import Block, Offsets
from stowplan.errors import BadUse

_RUN = 512


class _Claim(NamedTuple):
    """The bytes from `low` until before `high`, taken by a block."""

    low: int
    high: int
    id: str


def overlapping(blocks: Sequence[Block], offsets: Offsets) -> tuple[str, str] | None:
    """Two blocks that share a byte while both are alive, or None if there are none.

    Sweeps over time with the claims of that time sorted by address, so only neighbours need to be compared.
    """
    for block in blocks:
        if offsets.get(block.id, -1) < 0:
            raise BadUse(f"block {block.id!r} has no offset, or one before the arena begins")
    claims = _Claims()
    sized = [block for block in blocks if block.nbytes]
    births = sorted(sized, key=lambda block: block.start)
    deaths = sorted(sized, key=lambda block: block.end)
    dead = 0
    for block in births:
        while deaths[dead].end < block.start:
            claims.remove(_claim_of(deaths[dead], offsets))
            dead += 1
        rival = claims.add(_claim_of(block, offsets))
        if rival is not None:
            return rival, block.id
    return None


def _claim_of(block: Block, offsets: Offsets) -> _Claim:
    return _Claim(offsets[block.id], offsets[block.id] + block.nbytes, block.id)


class _Claims:
    """Disjoint claims in order of address, in short runs so that a change moves few of them."""

    def __init__(self) -> None:
        self._runs: list[list[_Claim]] = [[]]
        self._heads: list[_Claim] = [_Claim(-1, -1, "")]  # no later than each run's first claim

    def add(self, claim: _Claim) -> str | None:
        """File the claim, unless it meets another, whose id is returned."""
        at = self._run_of(claim)
        run = self._runs[at]
        place = bisect_left(run, claim)
        for neighbour in (*run[max(0, place - 1) : place + 1], *self._ends_beside(at)):
            if neighbour.low < claim.high and claim.low < neighbour.high:
                return neighbour.id
        run.insert(place, claim)
        if len(run) > 2 * _RUN:
            self._runs.insert(at + 1, run[_RUN:])
            self._heads.insert(at + 1, run[_RUN])
            del run[_RUN:]
        return None

    def remove(self, claim: _Claim) -> None:
        at = self._run_of(claim)
        run = self._runs[at]
        del run[bisect_left(run, claim)]
        if not run and at:
            del self._runs[at], self._heads[at]

    def _run_of(self, claim: _Claim) -> int:
        return bisect_right(self._heads, claim) - 1

    def _ends_beside(self, at: int) -> list[_Claim]:
        """The last claim of the run before and the first of the run after."""
        before = self._runs[at - 1][-1:] if at else []
        after = self._runs[at + 1][:1] if at + 1 < len(self._runs) else []
        return before + after
