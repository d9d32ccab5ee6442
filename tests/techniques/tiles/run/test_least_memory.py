"""What a step in tiles needs at least is known before it is captured, and is never more than it needs."""

import pytest

from stowplan.capture import capture
from stowplan.plan.options import PlanOptions
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine
from stowplan.plan.select import Baseline, Refusals
from stowplan.run.planning.planner import Subject
from stowplan.techniques.tiles.run.candidates import TiledCandidate, tiled_candidates
from tests.support.nets import NETS

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def test_a_bound_without_a_capture_is_one() -> None:
    """Of stages in tiles, and of sweeps that rematerialise inputs."""
    model, args = NETS["resnet50"].build("tiny", resolution=256, batch=1, layers=(2,))
    subject = Subject(capture(model, args), model, args, {})
    pricing = price_by_roofline(subject.captured.graph, Machine())
    found = list(tiled_candidates(subject, pricing, Baseline(1.0, 2**30), PlanOptions(), Refusals()))
    for each in found[::7]:
        assert isinstance(each, TiledCandidate)
        assert 0.9 * each.floor_bytes < each.least_bytes <= each.floor_bytes
