"""Blocks on a clock: peaks, phases and kinds, against counting moment by moment."""

import random

from stowplan.observe.blocks import (
    BACKWARD,
    BETWEEN,
    EVALUATING,
    FORWARD,
    LOSS,
    BlockOrigin,
    Blocks,
    LiveBlock,
    alive_at,
    most_by_phase,
    peak_of,
)
from stowplan.observe.record import ACTIVATIONS, EVALUATION, OTHER, PARAMETERS, TEMPORARIES


def drawn(seed: int) -> tuple[Blocks, dict[int, int], dict[int, str]]:
    """Blocks drawn at random, the bytes alive at each clock, and the phase there."""
    draw, blocks, alive = random.Random(seed), Blocks(), list[LiveBlock]()
    bytes_at, phase_at = dict[int, int](), dict[int, str]()
    phase = BETWEEN
    for _ in range(200):
        what = draw.random()
        if what < 0.1:
            phase = draw.choice((FORWARD, LOSS, BACKWARD, EVALUATING, BETWEEN))
            blocks.enter(phase)
        elif what < 0.2:
            extra = draw.randrange(1, 2000)
            blocks.within(extra, BlockOrigin(phase), "op")
            bytes_at[blocks.clock - 1], phase_at[blocks.clock - 1] = blocks.alive_bytes + extra, phase
        elif what < 0.6 or not alive:
            alive.append(blocks.begin(draw.randrange(1, 1000), BlockOrigin(phase), "op"))
        else:
            blocks.end(alive.pop(draw.randrange(len(alive))))
        bytes_at[blocks.clock], phase_at[blocks.clock] = blocks.alive_bytes, phase
    return blocks, bytes_at, phase_at


def test_peaks_are_the_most_of_all_moments() -> None:
    for seed in range(50):
        blocks, bytes_at, phase_at = drawn(seed)
        begin, end = blocks.clock // 3, blocks.clock - 5
        inside = {clock: nbytes for clock, nbytes in bytes_at.items() if begin <= clock <= end}
        most, at = peak_of(blocks.spans(begin, end))
        assert most == max(inside.values())
        assert bytes_at[at] == most == alive_at(blocks, at).nbytes
        phases = most_by_phase(blocks, begin, end)
        for phase, nbytes in phases.items():
            moments = [inside[clock] for clock in inside if phase_at[clock] == phase]
            assert nbytes == max(moments, default=nbytes)


def test_kinds_follow_from_phase_and_life() -> None:
    blocks = Blocks()
    old = blocks.begin(8, BlockOrigin("before"), "", is_old=True)
    weight = blocks.begin(8, BlockOrigin("before"), "", PARAMETERS, is_old=True)
    blocks.enter(FORWARD)
    saved = blocks.begin(8, BlockOrigin(FORWARD, call=1), "op")
    passing = blocks.begin(8, BlockOrigin(FORWARD, call=1), "op")
    idle = blocks.begin(8, BlockOrigin(FORWARD, call=2), "op")
    blocks.end(passing)
    blocks.enter(EVALUATING)
    judged = blocks.begin(8, BlockOrigin(EVALUATING), "op")
    blocks.enter(BACKWARD)
    gradient = blocks.begin(8, BlockOrigin(BACKWARD), "op")
    blocks.classify(lambda call: call == 2)
    kinds = [block.kind for block in (old, weight, saved, passing, idle, judged, gradient)]
    assert kinds == [OTHER, PARAMETERS, ACTIVATIONS, TEMPORARIES, EVALUATION, EVALUATION, TEMPORARIES]
