"""The MegEngine reader on its document: every figure that describes the run, and what it refuses."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from stowplan.analyse import facts_of, liveness_of
from stowplan.errors import BadInput
from stowplan.formats import megengine
from stowplan.ir import Document, Kind, Role
from stowplan.ops.effects import macs_of
from stowplan.ops.shapes import output_shapes_of
from stowplan.ops.table import site_of

CONSTANTS = 102_106_528


@pytest.fixture(scope="module")
def text(dump: Callable[[str], Path]) -> str:
    return dump("megengine").read_text()


@pytest.fixture(scope="module")
def document(text: str) -> Document:
    assert megengine.recognise(text)
    return megengine.read(text)


def dynamic_vars(document: Document) -> set[str]:
    assert document.allocation is not None
    tensors = document.graph.tensors
    return {name for name in document.allocation.places if tensors[name].kind is not Kind.CONSTANT}


def test_counts(document: Document) -> None:
    counts = document.counts
    assert (counts["operators"], counts["executed_operators"]) == (240, 234)
    assert counts["static_inference_operators"] == 6
    assert (counts["vars"], len(document.graph.tensors), counts["input_edges"]) == (299, 299, 257)
    assert (counts["chunks"], counts["chunk_bytes"]) == (104, CONSTANTS)


def test_op_types(document: Document) -> None:
    assert Counter(op.type for op in document.graph.ops) == {
        "ImmutableTensor": 104,
        "Elemwise": 69,
        "ConvolutionForward": 53,
        "PoolingForward": 2,
        "Reduce": 2,
        "MatrixMul": 1,
        "Reshape": 1,
        "InputCallback": 1,
        "OutputCallback": 1,
    }


def test_every_shape_and_size_is_known(document: Document) -> None:
    data = next(tensor for tensor in document.graph.tensors.values() if tensor.name == "data")
    assert (data.kind, data.shape) == (Kind.INPUT, (10, 3, 224, 224))
    assert all(t.shape is not None and t.nbytes is not None for t in document.graph.tensors.values())
    assert any("539" in note.what for note in document.notes if note.where == f"graph_exec.var.{data.id}")


def test_shapes_follow_from_the_op_table(document: Document) -> None:
    sites = [site_of(document.graph, op) for op in document.graph.ops if op.type in output_shapes_of]
    assert len(sites) == 127
    for site in sites:
        assert output_shapes_of(site) == tuple(tensor.shape for tensor in site.outputs)


def test_footprints(document: Document) -> None:
    assert document.counts["footprint_flops"] == 81_954_092_640
    assert document.counts["footprint_bytes"] == 2_551_250_656
    flops = [op.attributes["computation"] for op in document.graph.ops]
    assert sum(value for value in flops if isinstance(value, int)) == 81_954_092_640


def test_macs_agree_with_the_footprints(document: Document) -> None:
    multiplying = [op for op in document.graph.ops if op.type in ("ConvolutionForward", "MatrixMul")]
    for op in multiplying:
        assert 2 * macs_of(site_of(document.graph, op)) == op.attributes["computation"]


def test_peak(document: Document) -> None:
    facts = facts_of(document.graph)
    assert (facts.peak.bytes, facts.peak.op) == (96_337_920, "563")
    assert facts.peak.bytes + facts.bytes_by_kind[Kind.CONSTANT] == 198_444_448


def test_peak_when_elementwise_ops_overwrite_a_dying_input(document: Document) -> None:
    assert facts_of(document.graph, in_place=True).peak.bytes == 72_272_896


def test_addresses(document: Document) -> None:
    assert document.allocation is not None
    places = {name: document.allocation.places[name] for name in dynamic_vars(document)}
    assert (len(places), len({address for address, _ in places.values()})) == (189, 17)
    touched, reach = 0, 0
    for address, size in sorted(places.values()):
        touched += max(0, address + size - max(address, reach))
        reach = max(reach, address + size)
    assert touched == 102_443_008


def test_only_the_alias_overlaps_while_alive(document: Document) -> None:
    assert document.allocation is not None
    places = document.allocation.places
    alive: dict[str, tuple[int, int]] = {}
    for position, op in enumerate(document.graph.ops):
        for name in (*op.reads(), *op.writes()):
            first, _ = alive.get(name, (position, position))
            alive[name] = (first, position)
    names = sorted(dynamic_vars(document))
    overlapping = [
        (one, other)
        for index, one in enumerate(names)
        for other in names[index + 1 :]
        if alive[one][0] <= alive[other][1]
        and alive[other][0] <= alive[one][1]
        and max(places[one][0], places[other][0]) < min(sum(places[one]), sum(places[other]))
    ]
    assert overlapping == [("832", "841")]
    assert document.graph.tensors["841"].alias_of == "832"


def test_an_alias_has_no_storage_of_its_own(document: Document) -> None:
    storages = liveness_of(document.graph).storages
    assert storages.number_of["841"] == storages.number_of["832"]


def test_clocks(document: Document) -> None:
    assert document.profile is not None
    spans = {}
    for clock, ops in document.profile.clocks.items():
        assert len(ops) == 234
        first = min(interval.start_seconds for interval in ops.values())
        spans[clock] = max(interval.end_seconds for interval in ops.values()) - first
    assert spans == {"host": pytest.approx(3.895e-3, abs=5e-7), "device": pytest.approx(22.797e-3, abs=5e-7)}


def test_device_times(document: Document) -> None:
    assert document.profile is not None
    device = document.profile.clocks["device"]
    kernel = {op: (time.end_seconds - time.kernel_seconds) * 1e6 for op, time in device.items()}
    by_type: defaultdict[str, float] = defaultdict(float)
    for op in document.graph.ops:
        by_type[op.type] += kernel[op.id]
    assert {
        name: round(by_type[name], 1)
        for name in ("ConvolutionForward", "Elemwise", "PoolingForward", "MatrixMul")
    } == {
        "ConvolutionForward": 15_390.8,
        "Elemwise": 6_119.5,
        "PoolingForward": 319.5,
        "MatrixMul": 59.4,
    }
    slowest = sorted(kernel, key=lambda op: -kernel[op])[:4]
    assert [(op, round(kernel[op], 1)) for op in slowest] == [
        ("802", 578.6),
        ("819", 576.5),
        ("782", 571.4),
        ("539", 523.3),
    ]


def test_what_comes_from_outside_is_read_not_made(document: Document) -> None:
    handed_over = [op for op in document.graph.ops if op.type in ("ImmutableTensor", "InputCallback")]
    assert not any(op.outputs for op in handed_over)
    reshape = next(op for op in document.graph.ops if op.type == "Reshape")
    assert [use.role for use in reshape.inputs] == [Role.DATA, Role.SHAPE]
    assert document.graph.held == {"858"}


def changed(text: str, path: str, value: object) -> str:
    dump = json.loads(text)
    *parents, last = path.split("/")
    place = dump
    for key in parents:
        place = place[key]
    place[last] = value
    return json.dumps(dump)


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("profiler/device/539/gpu0:0/kern", "soon", "profiler.device.539"),
        ("profiler/device/539/gpu0:0/end", -1.0, "profiler.device.539"),
        ("profiler/host/539", {}, "profiler.host.539"),
        ("graph_exec/var/540/prev_dev_ptr", -1, "graph_exec.var.540.prev_dev_ptr"),
        ("graph_exec/var/540/prev_dev_ptr_end", 10**400, "graph_exec.var.540.prev_dev_ptr_end"),
        ("graph_exec/operator/539/input", ["537", "nowhere"], "graph_exec"),
        ("graph_exec/comp_seq", ["nobody"], "graph_exec.comp_seq"),
        ("graph_exec/comp_seq", ["542", "539"], "graph_exec"),
        ("graph_exec/var/841/mem_readonly_fwd_src", "841", "graph_exec"),
        ("graph_exec/operator/539/type", "\ud800", "graph_exec.operator.539"),
        ("graph_exec/var/540/\ud800", 1, "graph_exec.var.540"),
        ("graph_exec", None, "graph_exec"),
    ],
)
def test_faults_are_told_with_their_key(text: str, path: str, value: object, where: str) -> None:
    with pytest.raises(BadInput) as caught:
        megengine.read(changed(text, path, value))
    assert caught.value.where.startswith(where)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "Expecting value"),
        ('{"profiler": ', "Expecting value"),
        ('{"profiler": 1, "profiler": 2}', "twice"),
        ('{"profiler": NaN}', "NaN"),
        ('{"profiler": ' + "[" * 100_000, "deeper"),
        ('{"profiler": ' + "1" * 5_000 + "}", "digits"),
    ],
)
def test_what_is_not_such_json_is_refused(text: str, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        megengine.read(text)
