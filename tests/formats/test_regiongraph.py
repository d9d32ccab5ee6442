"""The region graph reader on its document, on other networks through OCR, and on what it must refuse."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from random import Random

import pytest

from stowplan.errors import BadInput, BadUse
from stowplan.formats import regiongraph
from stowplan.geometry import Rect
from stowplan.ir import Document, Kind, NoteKind, Phase, RegionLists, TensorRegion
from stowplan.ops.effects import Effect, effect_of, macs_of
from stowplan.ops.shapes import output_shapes_of
from stowplan.ops.table import site_of
from tests.support.drawn_graphs import Net, read_by_ocr

SMALL = Net(batch=8, channels=3, size=20, layers=((10, 5), (12, 3), (16, 7)), classes=101)
DEEP = Net(batch=2, channels=1, size=30, layers=((4, 2),) * 12, classes=10)


@pytest.fixture(scope="module")
def text(dump: Callable[[str], Path]) -> str:
    return dump("regiongraph").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def document(text: str) -> Document:
    assert regiongraph.recognise(text)
    return regiongraph.read(text)


def test_nodes(document: Document) -> None:
    graph = document.graph
    assert Counter(tensor.kind for tensor in graph.tensors.values()) == {
        Kind.PARAMETER: 7,
        Kind.ACTIVATION: 12,
        Kind.GRADIENT: 15,
    }
    zeroing = sum(op.type == "set_zero" for op in graph.ops)
    phases = Counter(op.phase for op in graph.ops)
    assert (len(graph.ops), zeroing) == (41, 15)
    assert (phases[Phase.FORWARD], phases[Phase.BACKWARD] - zeroing, phases[Phase.UPDATE]) == (11, 8, 7)


def test_rects_dims_and_edges(document: Document) -> None:
    assert document.counts == {
        "rects": 96,
        "none_rects": 7,
        "read_rect": 36,
        "write_rect": 36,
        "dist_result": 23,
        "dist_input": 4,
        "dist_filters": 4,
        "dims": 58,
        "edges": 98,
        "edge_labels": 88,
    }
    assert sum(len(op.inputs) + len(op.outputs) for op in document.graph.ops) == 98


def test_sizes(document: Document) -> None:
    tensors = document.graph.tensors.values()
    parameters = [tensor for tensor in tensors if tensor.kind is Kind.PARAMETER]
    assert sum(prod(tensor.shape or ()) for tensor in parameters) == 293_629_250
    assert sum(tensor.nbytes or 0 for tensor in tensors) == 3_074_943_528


def test_multiplications(document: Document) -> None:
    graph = document.graph
    macs = {op.id: macs_of(site_of(graph, op)) for op in graph.ops}
    forward = {op.id for op in graph.ops if op.phase is Phase.FORWARD}
    assert sum(macs[op] for op in forward) == 75_139_301_376
    assert macs["L1.filter.grad"] == 2 * macs["L1.filter"]
    assert macs["L0.filter.grad"] == macs["L0.filter"], "the images get no gradient"


def test_every_shape_rule_agrees_with_the_page(document: Document) -> None:
    graph = document.graph
    checked = 0
    for op in graph.ops:
        if op.type in output_shapes_of:
            shapes = tuple(graph.tensors[name].shape for name in op.writes())
            assert output_shapes_of(site_of(graph, op)) == shapes, op.id
            checked += 1
    assert checked == 16


def test_updates_and_data_are_not_run_twice(document: Document) -> None:
    effects = {op.id: effect_of(site_of(document.graph, op)) for op in document.graph.ops}
    assert {name for name, effect in effects.items() if effect is Effect.BUFFER_UPDATE} == {
        f"update_{name}" for name in ("L0.W", "L0.a", "L0.b", "L1.W", "L1.a", "L1.b", "W1")
    }
    assert effects["data"] is Effect.OUTSIDE


def test_every_gradient_is_zeroed_then_added_to(document: Document) -> None:
    graph = document.graph
    first = {name: op for op in reversed(graph.ops) for name in op.writes()}
    for tensor in graph.tensors.values():
        if tensor.kind is Kind.GRADIENT:
            assert first[tensor.id].id == f"{tensor.id}.set_zero"
            assert tensor.shape == graph.tensors[tensor.gradient_of or ""].shape


def test_regions(document: Document) -> None:
    regions = document.regions
    assert regions is not None
    for name, tensor in document.graph.tensors.items():
        region, whole = regions.tensors[name], Rect.of_shape(tensor.shape or ())
        is_odd = name == "classifier.softmax.output.grad"
        assert region.read == (Rect.of_shape((0, 0, 0, 0)) if is_odd else whole)
        assert region.write == (None if tensor.kind is Kind.PARAMETER else whole)
    assert regions.ops["L1.filter"]["filters"] == Rect.of_shape((64, 1, 1, 64, 7, 7, 27, 27))
    assert regions.ops["classifier.linear1"].keys() == {"read", "write"}


def test_every_repair_is_told_with_its_line(document: Document, text: str) -> None:
    lines = text.split("\n")
    for note in document.notes:
        match = re.fullmatch(r"line (\d+)", note.where)
        assert match is not None
        if note.kind is NoteKind.REPAIRED:
            told = re.search(r"read '(.*?)', became '(.+?)'", note.what)
            assert told is not None
            assert "".join(told[1].split()) in "".join(lines[int(match[1]) - 1].split())
    repaired = Counter(note.what.split()[0].rstrip(":") for note in document.notes if "became" in note.what)
    assert repaired == {
        "name": 60,
        "dim": 8,
        "result_dim": 5,
        "dist_result": 3,
        "write_rect": 2,
        "read_rect": 1,
    }


def test_oddities_are_kept(document: Document) -> None:
    odd = {note.where: note.what for note in document.notes if note.kind is NoteKind.ODD}
    assert "'classifier.evaluate.ouptut'" in odd["line 96"]
    assert odd["line 99"].startswith("read_rect of classifier.softmax.output.grad is empty")
    assert "[1 1 1 1] beside a rect up to [256 3034 1 1]" in odd["line 103"]
    assert "classifier.evaluate.ouptut" in document.graph.tensors
    softmax = next(op for op in document.graph.ops if op.id == "classifier.softmax.grad")
    assert softmax.attributes["result_dim"] == (1, 1, 1, 1)


def test_writes_what_it_reads(document: Document) -> None:
    text = regiongraph.write(document)
    same = regiongraph.read(text)
    assert regiongraph.recognise(text)
    assert (same.graph, same.regions) == (document.graph, document.regions)
    assert same.counts == {**document.counts, "edge_labels": 98}
    assert not [note for note in same.notes if note.kind is NoteKind.REPAIRED]
    assert regiongraph.write(same) == text


@pytest.mark.parametrize("net", [SMALL, DEEP])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.slow
def test_reads_other_networks_through_ocr(net: Net, seed: int) -> None:
    clean = regiongraph.read(net.text())
    noisy = regiongraph.read(read_by_ocr(regiongraph.write(clean), Random(seed)))
    assert (noisy.graph, noisy.regions) == (clean.graph, clean.regions)
    assert any(note.kind is NoteKind.REPAIRED for note in noisy.notes)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.slow
def test_reads_one_worker_of_many_through_ocr(seed: int) -> None:
    """A worker that owns half of the batch and reads a halo of one row beyond its rows."""
    clean = regiongraph.read(SMALL.text())
    assert clean.regions is not None
    halves = {
        name: TensorRegion(region.read, region.write and _lower_half(region.write))
        for name, region in clean.regions.tensors.items()
    }
    worker = replace(clean, regions=RegionLists(halves, clean.regions.ops))
    noisy = regiongraph.read(read_by_ocr(regiongraph.write(worker), Random(seed)))
    assert (noisy.graph, noisy.regions) == (worker.graph, worker.regions)


def _lower_half(rect: Rect) -> Rect:
    return Rect(rect.lo, (max(1, rect.hi[0] // 2), *rect.hi[1:]))


def test_reads_a_network_that_is_not_trained() -> None:
    graph = regiongraph.read(SMALL.text(trained=False)).graph
    assert {op.phase for op in graph.ops} == {Phase.FORWARD}
    assert not any(tensor.kind is Kind.GRADIENT for tensor in graph.tensors.values())


def test_what_every_page_has_is_added() -> None:
    text = SMALL.text().replace("L1.a.grad.set_zero\n", "").replace("update_L2.a\n", "")
    document = regiongraph.read(text)
    assert document.graph == regiongraph.read(SMALL.text()).graph
    added = {note.what.split()[0] for note in document.notes if "every page with" in note.what}
    assert added == {"'L1.a.grad.set_zero'", "'update_L2.a'"}


@pytest.mark.parametrize(
    ("old", "new", "where", "what"),
    [
        ("array([8, 3, 20, 20], dtype=int32))", "array([8, 3, 20", 3, "a rect that does not end"),
        ("dim=[8 3 20 20]", "dim=[-8 3 20 20]", 2, "is negative"),
        ("array([8, 3, 20, 20]", "array([8, 3, 20, 2000000000000]", 3, "does not fit int32"),
        ("array([8, 3, 20, 20]", f"array([8, 3, 20, {10**320}]", 3, "does not fit int32"),
        ("array([8, 3, 20, 20]", "array([8, 3, 20]", 3, "4 low and 3 high bounds"),
        ("array([8, 3, 20, 20]", f"array([{'1, ' * 40}1]", 3, "41 dims"),
        ("L1.filter\n", "\n", 73, "belongs to no box"),
        ("\nL1.filterA\nresult_dim", "\nclassifier.linear1\nresult_dim", 96, "belongs to no box"),
        ("L1.W\n", "unreadable\n", 67, "belongs to no box"),
    ],
)
def test_refuses(old: str, new: str, where: int, what: str) -> None:
    text = regiongraph.write(regiongraph.read(SMALL.text()))
    with pytest.raises(BadInput, match=re.escape(what)) as caught:
        regiongraph.read(text.replace(old, new, 1))
    assert caught.value.where == f"line {where}"


def test_refuses_a_page_without_its_first_ops() -> None:
    headless = "\n\n".join(SMALL.text().split("\n\n")[3:])
    with pytest.raises(BadInput, match=r"L0\.filter has no op before it"):
        regiongraph.read(headless)


def test_refuses_to_write_what_its_names_cannot_say(document: Document) -> None:
    with pytest.raises(BadUse, match="no regions"):
        regiongraph.write(replace(document, regions=None))
    reordered = replace(document.graph, ops=document.graph.ops[:-2] + document.graph.ops[:-3:-1])
    foreign = replace(document.graph, ops=(replace(document.graph.ops[0], type="conv2d"),))
    regiongraph.write(replace(document, graph=reordered))
    with pytest.raises(BadUse, match="no type 'conv2d'"):
        regiongraph.write(replace(document, graph=foreign))
    renamed = replace(document.graph, held=frozenset({"L0.W"}))
    with pytest.raises(BadUse, match="another graph"):
        regiongraph.write(replace(document, graph=renamed))
