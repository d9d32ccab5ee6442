"""Chainer's training step: every figure of the U-Net's file, and faults told by their line."""

from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

from stowplan.analyse import facts_of
from stowplan.errors import BadInput
from stowplan.formats import chainer
from stowplan.formats.chainer import SavedView
from stowplan.ir import Document, DType, Graph, Kind, NoteKind, Phase, Role
from stowplan.ops.effects import Effect, effect_of
from stowplan.ops.table import site_of
from tests.support.chainer_dump import Call, dump

BOTH_VIEWS = pytest.mark.parametrize("view", list(SavedView))


@pytest.fixture(scope="module")
def text(dump: Callable[[str], Path]) -> str:
    return dump("chainer").read_text()


@pytest.fixture(scope="module")
def documents(text: str) -> dict[SavedView, Document]:
    return {view: chainer.read(text, view) for view in SavedView}


@pytest.fixture(scope="module")
def listed(documents: dict[SavedView, Document]) -> Graph:
    return documents[SavedView.LISTED].graph


@pytest.fixture(scope="module")
def retained(documents: dict[SavedView, Document]) -> Graph:
    return documents[SavedView.RETAIN].graph


def test_is_recognised_by_its_beginning(text: str) -> None:
    assert chainer.recognise(text)
    assert not chainer.recognise(text[10:])
    assert not chainer.recognise("")


@pytest.mark.parametrize(
    ("name", "count"),
    {
        "variables": 108,
        "shapes": 108,
        "records": 120,
        "adjoint_pairs": 60,
        "forward_inputs": 111,
        "forward_outputs": 60,
        "backward_inputs": 175,
        "backward_gradient_tags": 60,
        "backward_input_tags": 89,
        "backward_output_tags": 26,
        "backward_outputs": 111,
        "gradients_with_two_producers": 4,
        "forward_edges": 63,
        "forward_edges_out_of_file_order": 25,
        "backward_edges": 63,
        "backward_edges_out_of_file_order": 38,
    }.items(),
)
def test_counts_what_the_file_lists(documents: dict[SavedView, Document], name: str, count: int) -> None:
    assert [document.counts[name] for document in documents.values()] == [count, count]


def test_op_types_and_kinds(listed: Graph) -> None:
    forward = {
        "ReLU": 22,
        "Convolution2DFunction": 19,
        "MaxPooling2D": 4,
        "Deconvolution2DFunction": 4,
        "GetItem": 4,
        "Concat": 4,
        "Dropout": 2,
        "SoftmaxCrossEntropy": 1,
    }
    backward = {f"{name}.backward": count for name, count in forward.items()}
    assert Counter(op.type for op in listed.ops) == forward | backward
    assert Counter(op.phase for op in listed.ops) == {Phase.FORWARD: 60, Phase.BACKWARD: 60}
    kinds = Counter(tensor.kind for tensor in listed.tensors.values())
    assert kinds == {Kind.PARAMETER: 46, Kind.INPUT: 2, Kind.ACTIVATION: 60, Kind.GRADIENT: 106}
    names = [tensor.name for tensor in listed.tensors.values() if tensor.kind is Kind.PARAMETER]
    assert Counter(name[-1] for name in names) == {"W": 23, "b": 23}


def test_bytes_by_kind(retained: Graph) -> None:
    totals = facts_of(retained).bytes_by_kind
    assert totals[Kind.PARAMETER] == 124_401_416
    assert totals[Kind.ACTIVATION] == 11_781_604_356
    assert totals[Kind.MASK] == 67_108_864 + 25_690_112


@BOTH_VIEWS
def test_multiply_accumulates(documents: dict[SavedView, Document], view: SavedView) -> None:
    costs = facts_of(documents[view].graph).costs
    assert costs.forward_macs == 1_258_354_034_688
    assert costs.step_macs == 3_773_564_964_864


@pytest.mark.parametrize(
    ("view", "peak", "bound"),
    [
        (SavedView.LISTED, 7_938_850_064, 2_956_736_264),
        (SavedView.RETAIN, 7_413_120_272, 2_324_568_072),
    ],
)
def test_peak_and_lower_bound(
    documents: dict[SavedView, Document], view: SavedView, peak: int, bound: int
) -> None:
    graph = documents[view].graph
    facts = facts_of(graph)
    assert facts.peak.bytes == peak
    assert facts.lower_bound_bytes == bound
    (op,) = (op for op in graph.ops if op.id == facts.peak.op)
    assert (op.phase, op.attributes["rank"], op.scope) == (Phase.BACKWARD, 50, "conv_u0b_c")


def test_peak_of_the_forward_half_alone(listed: Graph) -> None:
    forward = tuple(op for op in listed.ops if op.phase is Phase.FORWARD)
    values = {name: tensor for name, tensor in listed.tensors.items() if tensor.kind is not Kind.GRADIENT}
    assert facts_of(Graph(values, forward)).peak.bytes == 2_017_442_056


def test_shapes_from_bytes(listed: Graph) -> None:
    image, label, scores = listed.tensors["53"], listed.tensors["37"], listed.tensors["103"]
    assert (image.shape, image.dtype) == ((8, 1, 572, 572), DType.FLOAT32)
    assert (label.shape, label.dtype) == ((8, 388, 388), DType.INT32)
    assert scores.shape == (8, 2, 388, 388)
    assert listed.tensors["47"].shape == (64, 1, 3, 3)
    assert listed.tensors["40"].shape == (1024, 512, 2, 2)
    assert listed.tensors["4"].shape == ()
    for tensor in listed.tensors.values():
        assert tensor.shape is not None
        assert prod(tensor.shape) * 4 == tensor.nbytes


def test_rank_is_the_longest_path_from_the_inputs(listed: Graph) -> None:
    depth: dict[str, int] = {}
    for op in listed.ops:
        if op.phase is Phase.FORWARD:
            rank = max((depth.get(name, -1) for name in op.reads()), default=-1) + 1
            assert op.attributes["rank"] == rank
            depth.update(dict.fromkeys(op.writes(), rank))


@BOTH_VIEWS
def test_adjoints_pair_with_their_forward_ops(documents: dict[SavedView, Document], view: SavedView) -> None:
    ops = {op.id: op for op in documents[view].graph.ops}
    for op in ops.values():
        if op.adjoint_of is not None:
            forward = ops[op.adjoint_of]
            assert op.type == f"{forward.type}.backward"
            assert {name.removesuffix(".grad") for name in op.writes()} <= set(forward.reads())


def test_second_contributions_accumulate_and_inputs_get_no_gradient(listed: Graph) -> None:
    uses = [use for op in listed.ops for use in op.outputs]
    accumulated = {use.tensor for use in uses if use.role is Role.ACCUMULATE}
    assert accumulated == {"25.grad", "49.grad", "71.grad", "88.grad"}
    assert not {"53.grad", "37.grad"} & listed.tensors.keys()
    assert len(listed.held) == 46


def test_retain_view_keeps_shapes_only_of_what_chainer_dropped(retained: Graph) -> None:
    ops = {op.id: op for op in retained.ops}
    convolution = ops["conv_u0b_c.90.backward"]
    assert [use.role for use in convolution.inputs] == [Role.DATA, Role.SAVED, Role.SAVED, Role.SHAPE]
    for op in retained.ops:
        if op.type in ("GetItem.backward", "Concat.backward"):
            assert {use.role for use in op.inputs} == {Role.DATA, Role.SHAPE}
    masks = {tensor.id for tensor in retained.tensors.values() if tensor.kind is Kind.MASK}
    assert masks == {"48.mask", "25.mask"}
    assert set(ops["Dropout.48"].writes()) == {"48", "48.mask"}
    assert list(ops["Dropout.48.backward"].reads()) == ["48.grad", "48.mask"]


def test_only_the_dropout_itself_is_random(retained: Graph) -> None:
    random = [op.id for op in retained.ops if effect_of(site_of(retained, op)) is Effect.RANDOM]
    assert random == ["Dropout.25", "Dropout.48"]


def test_notes_tell_what_was_inferred(documents: dict[SavedView, Document]) -> None:
    told = " / ".join(note.what for note in documents[SavedView.RETAIN].notes)
    for part in ("float32", "batch 8", "'53' is 8x1x572x572 and the kernel 3x3", "108 of 108", "48.mask"):
        assert part in told
    assert all(note.kind is NoteKind.INFERRED for note in documents[SavedView.RETAIN].notes)


SMALL = dump(
    {"0": (16, "0"), "1": (64, "/fc/W"), "2": (8, "_"), "3": (8, "_")},
    [Call("LinearFunction", ["0", "1"], ["2"]), Call("ReLU", ["2"], ["3"])],
)


FAULTS = [
    # the line to replace, by what, where the fault shows, what is told
    (1, "many few", 1, "header"),
    (1, "999999999 4", 6, "'forward' is not a variable"),
    (1, "4 999999999", 37, "the file ends"),
    (1, "4 3", 29, "something follows the 3 records"),
    (2, "0 16", 2, "a variable"),
    (2, "0 -16 0", 2, "a variable"),
    (2, "0 16 name", 2, "a variable"),
    (2, "1.grad 16 0", 2, "ends like"),
    (3, "0 64 /fc/W", 3, "twice"),
    (4, "2 999999999999999999999 _", 4, "a variable"),
    (6, "sideways", 6, "forward"),
    (7, "2", 7, "numbers of inputs"),
    (7, "999999999 1", 10, "an input"),
    (8, "0 input", 8, "cannot be tagged"),
    (9, "7 _", 9, "no variable"),
    (10, "7", 10, "no variable"),
    (12, "{", 12, "JSON"),
    (12, "[]", 12, "JSON"),
    (12, '{"rank": NaN}', 12, "JSON"),
    (12, '{"rank": "0"}', 12, "rank"),
    (12, '{"rank": 0, "deep": ' + "[" * 100_000, 12, "nested"),
    (12, '{"rank": 5}', 13, "before it is made"),
    (17, "Concat.backward", 17, "ends like"),
    (17, "SoftmaxCrossEntropy", 13, "has 1 inputs"),
    (21, "3 gradient", 19, "not the adjoint of the record on line 6"),
    (35, "Dropout", 29, "not the adjoint of the record on line 13"),
]


@pytest.mark.parametrize(("line", "replacement", "where", "told"), FAULTS)
def test_a_fault_names_its_line(line: int, replacement: str, where: int, told: str) -> None:
    lines = SMALL.split("\n")
    lines[line - 1] = replacement
    with pytest.raises(BadInput) as caught:
        chainer.read("\n".join(lines))
    assert told in caught.value.what
    assert caught.value.where == f"line {where}"


def test_a_missing_record_is_told_at_the_end() -> None:
    with pytest.raises(BadInput) as caught:
        chainer.read(SMALL[: SMALL.index("backward")])
    assert caught.value.where == f"line {SMALL[: SMALL.index('backward')].count(chr(10)) + 1}"


def test_retained_indexes_must_exist() -> None:
    text = dump(
        {"0": (4, "0"), "1": (4, "_")}, [Call("ReLU", ["0"], ["1"], {"_input_indexes_to_retain": [3]})]
    )
    with pytest.raises(BadInput, match=r"line 4: _input_indexes_to_retain .* below 1"):
        chainer.read(text, SavedView.RETAIN)
    assert chainer.read(text, SavedView.LISTED).counts["records"] == 2
