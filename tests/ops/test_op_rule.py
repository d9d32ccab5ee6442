"""`register_op_rule` fills all tables or none; the page on op rules trains in tiles with it."""

from collections.abc import Iterator
from typing import Any

import pytest

from stowplan.errors import BadUse
from stowplan.geometry import Rect
from stowplan.ir import Kind, Op, Phase, Tensor, Use
from stowplan.ops.effects import macs_of
from stowplan.ops.regions import Need, Regions, Relation, pull, regions_of
from stowplan.ops.regions.rules import along, identity, rules
from stowplan.ops.rule import register_op_rule
from stowplan.ops.table import Site, Table, registered_types, shape_of
from stowplan.ops.tiling import Part, refusal_of, refusal_rules
from stowplan.ops.windows import Window

BLUR = "mylib.blur.default"
PART = Rect((0, 0), (2, 10))


@pytest.fixture(autouse=True)
def _tables_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tables: tuple[Table[Any], ...] = (rules, refusal_rules, macs_of)
    for table in tables:
        monkeypatch.setattr(table, "_rules", dict(table._rules))
    yield
    registered_types.discard(BLUR)


@pytest.fixture
def site() -> Site:
    signal, blurred = (Tensor(name, Kind.ACTIVATION, (2, 100)) for name in ("signal", "blurred"))
    return Site(Op("blur", BLUR, Phase.FORWARD, (Use("signal"),), (Use("blurred"),)), (signal,), (blurred,))


def blur(site: Site) -> Regions:
    rows, columns = shape_of(site.inputs[0])
    dims = (*identity((rows,)), *along([1], [columns], [Window(3, before=1, after=1)]))
    return Regions((Relation(shape_of(site.outputs[0]), (Need(dims),)),))


def test_one_call_makes_a_barrier_an_op_that_tiles(site: Site) -> None:
    assert regions_of(site).barrier
    register_op_rule(BLUR, regions=blur, macs=lambda _: 600)
    assert pull(site, PART) == (Rect((0, -1), (2, 11)),)
    assert refusal_of(site)(Part(0, PART, pull(site, PART))) == ""
    assert macs_of(site) == 600


def test_regions_alone_do_not_tile_an_op_of_pytorch(site: Site) -> None:
    """What the door adds: the table of regions alone leaves the op refused."""
    rules.entry(BLUR)(blur)
    assert "has no kernel for a part" in refusal_of(site)(Part(0, PART, pull(site, PART)))


def test_a_second_answer_raises_and_leaves_no_half() -> None:
    macs_of.entry(BLUR)(lambda _: 1)
    with pytest.raises(BadUse, match=r"macs: 'mylib\.blur\.default' has an entry already"):
        register_op_rule(BLUR, regions=blur, macs=lambda _: 2)
    assert BLUR not in rules
    assert BLUR not in refusal_rules
    assert BLUR not in registered_types


def test_a_kernel_without_regions_is_refused() -> None:
    with pytest.raises(BadUse, match="needs regions"):
        register_op_rule(BLUR, kernel=lambda _, given: given["signal"])
