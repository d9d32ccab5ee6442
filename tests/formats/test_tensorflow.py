"""TensorFlow's op table: every figure of AlexNet's, edges of other chains, and faults told by line."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stowplan.analyse import facts_of
from stowplan.analyse.layouts import with_fewest_changes, without_layout
from stowplan.errors import BadInput
from stowplan.formats import tensorflow
from stowplan.ir import Document, DType, Graph, Kind, NoteKind, Op, Phase, Role, validate
from tests.support.tensorflow_table import ChainLayer, Table, chain


@pytest.fixture(scope="module")
def text(dump: Callable[[str], Path]) -> str:
    return dump("tensorflow").read_text()


@pytest.fixture(scope="module")
def document(text: str) -> Document:
    return tensorflow.read(text)


@pytest.fixture(scope="module")
def graph(document: Document) -> Graph:
    return document.graph


def ops_of(graph: Graph, phase: Phase) -> list[Op]:
    return [op for op in graph.ops if op.phase is phase]


def made_bytes(graph: Graph, phase: Phase) -> int:
    """Bytes of the storages that the ops of one phase make."""
    made = (graph.tensors[name] for op in ops_of(graph, phase) for name in op.writes())
    return sum(tensor.nbytes or 0 for tensor in made if tensor.alias_of is None)


def test_is_recognised_by_its_first_row(text: str) -> None:
    assert tensorflow.recognise(text)
    assert tensorflow.recognise(text.strip().split("\n")[-1])
    assert not tensorflow.recognise(text[5:].split(", ", 1)[1])
    assert not tensorflow.recognise("")


@pytest.mark.parametrize(
    ("name", "count"),
    {
        "rows": 178,
        "ops": 44,
        "transposes": 18,
        "kernels": 62,
        "variables": 11,
        "reads": 11,
        "retvals": 10,
        "memcpys": 10,
        "shape_constants": 9,
        "permutation_constants": 2,
        "sources": 1,
        "edges": 134,
        "edges_consistent": 134,
        "control_edges": 18,
        "copied_bytes": 9_878_784,
    }.items(),
)
def test_counts_what_the_table_lists(document: Document, name: str, count: int) -> None:
    assert document.counts[name] == count


def test_devices(text: str, graph: Graph) -> None:
    assert Counter(row.split(", ")[-2] for row in text.strip().split("\n")) == {"GPU": 168, "CPU": 10}
    on_host = [tensor for tensor in graph.tensors.values() if tensor.device == "CPU"]
    assert sum(tensor.nbytes or 0 for tensor in on_host) == 9_878_784


def test_op_types(graph: Graph) -> None:
    assert Counter(op.type for op in ops_of(graph, Phase.FORWARD)) == {
        "Identity": 11,
        "Conv2D": 5,
        "BiasAdd": 5,
        "Relu": 5,
        "LRN": 2,
        "MaxPool": 3,
    }
    assert Counter(op.type for op in ops_of(graph, Phase.BACKWARD)) == {
        "ReluGrad": 5,
        "BiasAddGrad": 5,
        "Conv2DBackpropFilter": 5,
        "Conv2DBackpropInput": 4,
        "LRNGrad": 2,
        "MaxPoolGrad": 3,
    }
    assert Counter(op.type for op in ops_of(graph, Phase.LAYOUT)) == {"Transpose": 18}
    assert Counter(op.type for op in ops_of(graph, Phase.TRANSFER)) == {"MEMCPYDtoH": 10}


def test_bytes(graph: Graph) -> None:
    totals = facts_of(graph).bytes_by_kind
    assert totals[Kind.INPUT] == 77_070_336
    assert totals[Kind.PARAMETER] == 9_878_784
    assert made_bytes(graph, Phase.FORWARD) == 975_503_360
    assert made_bytes(graph, Phase.BACKWARD) == 728_710_400
    assert made_bytes(graph, Phase.LAYOUT) == 1_122_598_912
    assert sum(totals.values()) - made_bytes(graph, Phase.TRANSFER) == 2_913_761_968


def test_batch_and_element_type(graph: Graph) -> None:
    image = graph.tensors["Variable"]
    assert (image.shape, image.dtype, image.layout) == ((128, 224, 224, 3), DType.FLOAT32, "NHWC")
    for op in ops_of(graph, Phase.TRANSFER):
        source, copy = (graph.tensors[uses[0].tensor] for uses in (op.inputs, op.outputs))
        assert source.nbytes == copy.nbytes
        assert source.shape == copy.shape


def test_multiply_accumulates(graph: Graph) -> None:
    costs = facts_of(graph).costs
    assert costs.forward_macs == 84_242_595_840
    assert costs.step_macs == 243_402_276_864


def test_peak_with_and_without_layout_transposes(graph: Graph) -> None:
    executed, direct = facts_of(graph).peak, facts_of(validate(without_layout(graph))).peak
    assert executed.bytes == 949_338_368
    assert executed.op == "gradients/conv5/Conv2D_grad/Conv2DBackpropFilter"
    assert direct.bytes == 611_568_384
    assert direct.op == "gradients/lrn2/LRN_grad/LRNGrad"
    assert round(1 - direct.bytes / executed.bytes, 3) == 0.356


def test_in_one_layout_the_step_needs_no_transpose(graph: Graph) -> None:
    relaid = with_fewest_changes(graph)
    peak = facts_of(validate(relaid.graph)).peak
    assert (relaid.changes_before, relaid.changes) == (18, 0)
    assert (relaid.copied_bytes_before, relaid.copied_bytes) == (1_122_598_912, 0)
    assert peak.bytes == 611_568_384
    assert {tensor.layout for tensor in relaid.graph.tensors.values()} == {"", "HWIO", "NHWC"}
    assert [op.id for op in ops_of(relaid.graph, Phase.TRANSFER)] == [
        op.id for op in ops_of(graph, Phase.TRANSFER)
    ]


def test_order_of_the_backward_half(graph: Graph) -> None:
    order = [op.id.removeprefix("gradients/") for op in ops_of(graph, Phase.BACKWARD)]
    assert order[0] == "pool5_grad/MaxPoolGrad"
    for number in range(5, 0, -1):
        name = f"conv{number}"
        gradients = [
            f"{name}_grad/ReluGrad",
            f"{name}/BiasAdd_grad/BiasAddGrad",
            f"{name}/Conv2D_grad/Conv2DBackpropFilter",
            f"{name}/Conv2D_grad/Conv2DBackpropInput",
        ]
        positions = [order.index(gradient) for gradient in gradients if gradient in order]
        assert positions == list(range(positions[0], positions[0] + len(positions)))


def test_transposes_run_just_before_their_first_reader(graph: Graph) -> None:
    for position, op in enumerate(graph.ops):
        if op.phase is Phase.LAYOUT:
            reader = next(later for later in graph.ops[position:] if op.id in later.reads())
            between = graph.ops[position + 1 : graph.ops.index(reader)]
            assert all(other.phase is Phase.LAYOUT or other.type == "Identity" for other in between)


def test_a_prefix_is_not_a_phase(graph: Graph) -> None:
    ops = {op.id: op for op in graph.ops}
    for pool in ("pool1", "pool2"):
        (source,) = ops[pool].reads()
        assert source.startswith("gradients/")
        assert ops[source].phase is Phase.LAYOUT
        assert graph.tensors[source].kind is Kind.ACTIVATION


def test_gradients_name_what_they_differentiate(graph: Graph) -> None:
    forward = {op.id: op for op in ops_of(graph, Phase.FORWARD)}
    of_parameters = []
    for op in ops_of(graph, Phase.BACKWARD):
        assert op.adjoint_of in forward
        made = graph.tensors[op.outputs[0].tensor]
        target = graph.tensors[made.gradient_of or ""]
        assert sorted(target.shape or ()) == sorted(made.shape or ())
        of_parameters += [made.id] if target.kind is Kind.PARAMETER else []
    assert len(of_parameters) == 10
    assert set(of_parameters) <= graph.held
    assert "Variable" in graph.held


def test_layouts_agree_with_shapes(graph: Graph) -> None:
    images = [t for t in graph.tensors.values() if t.shape is not None and len(t.shape) == 4]
    assert {tensor.layout for tensor in images} == {"NHWC", "NCHW", "HWIO"}
    for tensor in images:
        assert tensor.shape is not None
        height, width = tensor.layout.index("H"), tensor.layout.index("W")
        assert tensor.shape[height] == tensor.shape[width]


def test_reads_share_the_storage_of_their_variables(graph: Graph) -> None:
    aliases = {t.id: t.alias_of for t in graph.tensors.values() if t.alias_of is not None}
    assert len(aliases) == 11
    assert all(read == f"{variable}/read" for read, variable in aliases.items())


def test_notes_tell_what_was_inferred(document: Document) -> None:
    assert {note.kind for note in document.notes} == {NoteKind.INFERRED}
    assert any("gradient of 'pool5' is read as 'pool5'" in note.what for note in document.notes)


# Other tables

LAYERS = st.builds(ChainLayer, st.sampled_from([2, 3, 8]), st.booleans(), st.booleans())


@given(st.lists(LAYERS, min_size=1, max_size=6), st.integers(1, 3))
@example([ChainLayer(2, pooled=True)] * 5 + [ChainLayer(3)], 3)  # an image with the sizes of weights
@pytest.mark.slow
def test_edges_of_other_chains(layers: list[ChainLayer], batch: int) -> None:
    table = chain((batch, 96, 96, 3), layers)
    document = tensorflow.read(table.text())
    found = {op.id: [use.tensor for use in op.inputs] for op in document.graph.ops}
    assert found == table.edges
    assert document.counts["edges"] == document.counts["edges_consistent"]


def test_an_input_nobody_makes_is_told_and_stands_for_itself() -> None:
    table = Table()
    table.shapes["nowhere"] = (2, 8, 8, 3)
    table.op("pool", "MaxPool", ["nowhere"], (2, 4, 4, 3))
    document = tensorflow.read(table.text())
    (unknown,) = (tensor for tensor in document.graph.tensors.values() if tensor.kind is Kind.INPUT)
    assert (unknown.id, unknown.shape) == ("pool:input0", (2, 8, 8, 3))
    (note,) = (note for note in document.notes if note.kind is NoteKind.ODD)
    assert note.where == "line 1"
    assert document.counts["edges_consistent"] == 0


# Faults

SMALL = chain((2, 8, 8, 3), [ChainLayer(4)]).text().strip().split("\n")


WHOLE = "(2x8x8x4), (2x8x8x4), GPU"
FAULTS = [
    # a row's beginning, what it becomes, the beginning of the row at fault, what is told
    ("conv1, ", "conv1", "conv1", "a row is"),
    ("conv1, ", f"conv1, {WHOLE}, none", "conv1, ", "not a device and a number"),
    ("conv1, ", "conv1, (2x8xx4), (2x8x8x4), GPU, 0", "conv1, ", "not a shape"),
    ("conv1, ", "conv1, (2x8x8x4), (int5 2x8x8x4), GPU, 0", "conv1, ", "not an element type"),
    ("conv1, ", "conv1, (2x8x8x4), (no output), GPU, 0", "conv1, ", "has no output"),
    ("conv1, ", f"conv1, (2x8x8x4), {WHOLE}, 0", "conv1, ", "a Relu has 1 inputs, not 2"),
    ("conv1, ", f"conv1, ({'9' * 18}x{'9' * 18}), (4x1), GPU, 0", "conv1, ", "more than any machine has"),
    ("conv1, ", f"conv1/Conv2D, {WHOLE}, 0", "conv1/Conv2D, (2x8x8x3)", "has a row already"),
    ("conv1/biases, ", "conv1/elsewhere, (1), (4x1), GPU, 0", "conv1/biases/read, ", "reads no variable"),
    ("conv1/Conv2D:", "other, (1), (4x1), GPU, 0", "conv1/Conv2D, ", "to tell which kernel it ran"),
]


@pytest.mark.parametrize(("start", "replacement", "at", "told"), FAULTS)
def test_a_fault_names_its_line(start: str, replacement: str, at: str, told: str) -> None:
    rows = [replacement if row.startswith(start) else row for row in SMALL]
    with pytest.raises(BadInput) as caught:
        tensorflow.read("\n".join(rows))
    assert told in caught.value.what
    assert caught.value.where == f"line {next(n for n, row in enumerate(rows, 1) if row.startswith(at))}"


def test_a_copy_of_nothing_is_refused() -> None:
    rows = [*SMALL, "edge_1_nothing:MEMCPYDtoH, (no input), (output 4 bytes), GPU, 0"]
    with pytest.raises(BadInput, match=rf"line {len(rows)}: .* copies 'nothing'"):
        tensorflow.read("\n".join(rows))


def test_a_copy_of_other_bytes_is_told() -> None:
    rows = [*SMALL, "edge_1_conv1:MEMCPYDtoH, (no input), (output 4 bytes), GPU, 0"]
    document = tensorflow.read("\n".join(rows))
    assert any("4 bytes are copied of a value that has 2048" in note.what for note in document.notes)


def test_saved_values_and_constants_keep_their_roles(graph: Graph) -> None:
    ops = {op.id: op for op in graph.ops}
    roles = [use.role for use in ops["gradients/conv3/Conv2D_grad/Conv2DBackpropFilter"].inputs]
    assert roles == [Role.SAVED, Role.DATA, Role.DATA]
