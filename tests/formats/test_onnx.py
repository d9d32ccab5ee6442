"""ONNX models as PyTorch exports them: shapes, kinds, and the training step that adjoints make of them."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from stowplan import api
from stowplan.errors import BadInput, BadUse, MissingRule
from stowplan.formats.door import read_document
from stowplan.formats.onnx import read
from stowplan.ir import Graph, Kind, Phase, Role
from tests.support.audit import AUDIT

SAMPLES = Path(__file__).parent / "samples"

pytestmark = pytest.mark.torch


def convolutional() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2, stride=2),
        nn.Sigmoid(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(6, 6, 3, groups=3),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(54, 5),
    )
    return model, torch.randn(2, 3, 18, 18)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.embed(tokens))
        weights = torch.softmax(hidden @ hidden.transpose(1, 2) * 0.35, dim=-1)
        result: Tensor = self.out(torch.tanh(weights @ hidden)).squeeze(0)
        return result


def attention() -> tuple[nn.Module, Tensor]:
    return Attention(), torch.zeros(1, 7, dtype=torch.long)


MODELS: list[Callable[[], tuple[nn.Module, Tensor]]] = [convolutional, attention]
each_model = pytest.mark.parametrize("build", MODELS)


def exported(model: nn.Module, sample: Tensor, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter tells of its own age
        torch.onnx.export(
            model,
            (sample,),
            str(path),
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
        )
    return path


@each_model
def test_shapes_are_those_of_onnx(build: Callable[[], tuple[nn.Module, Tensor]], tmp_path: Path) -> None:
    path = exported(*build(), tmp_path / "model")
    graph = read_document(path).graph
    inferred = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True)
    values = [*inferred.graph.value_info, *inferred.graph.output]
    assert len(values) > 10
    for value in values:
        if value.name in graph.tensors:
            told = value.type.tensor_type
            tensor = graph.tensors[value.name]
            assert tensor.shape == tuple(dim.dim_value for dim in told.shape.dim), value.name
            assert str(tensor.dtype) == onnx.TensorProto.DataType.Name(told.elem_type).lower().replace(
                "float", "float32"
            )


@each_model
def test_kinds_are_those_of_the_model(build: Callable[[], tuple[nn.Module, Tensor]], tmp_path: Path) -> None:
    model, sample = build()
    graph = read_document(exported(model, sample, tmp_path / "model")).graph
    sizes = {kind: sum(t.nbytes or 0 for t in graph.tensors.values() if t.kind is kind) for kind in Kind}
    assert sizes[Kind.PARAMETER] == sum(parameter.nbytes for parameter in model.parameters())
    assert sizes[Kind.BUFFER] == sum(b.nbytes for b in model.buffers() if b.is_floating_point())
    assert sizes[Kind.INPUT] == sample.nbytes


def saved_bytes_of(graph: Graph) -> int:
    """The activations that the backward half keeps, each storage once, views of parameters left out."""
    owners = set()
    for op in graph.ops:
        for use in op.inputs:
            tensor = graph.tensors[use.tensor]
            while tensor.alias_of is not None:
                tensor = graph.tensors[tensor.alias_of]
            if use.role is Role.SAVED and tensor.kind in (Kind.ACTIVATION, Kind.MASK):
                owners.add(tensor.id)
    return sum(graph.tensors[name].nbytes or 0 for name in owners)


def test_the_derived_step_saves_what_autograd_saves(tmp_path: Path) -> None:
    model, sample = convolutional()
    graph = api.inspect(exported(model, sample, tmp_path / "model"), training=True).document.graph
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), sample)}
    saved: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned and tensor.dim() > 1:  # without statistics, which are not counted
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(sample)
    assert saved_bytes_of(graph) == sum(saved.values())


@each_model
def test_the_derived_step_has_a_gradient_for_each_parameter(
    build: Callable[[], tuple[nn.Module, Tensor]], tmp_path: Path
) -> None:
    inspection = api.inspect(exported(*build(), tmp_path / "model"), training=True)
    graph = inspection.document.graph
    parameters = {name for name, tensor in graph.tensors.items() if tensor.kind is Kind.PARAMETER}
    held = {graph.tensors[name].gradient_of for name in graph.held}
    assert parameters <= held
    assert {op.adjoint_of for op in graph.ops if op.phase is Phase.BACKWARD} - {None}
    assert inspection.facts.costs.step_macs > 2 * inspection.facts.costs.forward_macs


@pytest.mark.slow
def test_a_derived_step_can_be_planned(tmp_path: Path) -> None:
    path = exported(*convolutional(), tmp_path / "model")
    planner = api.planner_for(path, training=True)
    roomy, tight = planner.plan(10**9), planner.plan(planner.minimum_bytes)
    assert roomy.minimum_bytes is None
    assert tight.projected_peak_bytes <= planner.minimum_bytes < roomy.plain_peak_bytes


def test_a_step_is_not_derived_twice() -> None:
    with pytest.raises(BadUse, match="already has a backward half"):
        api.inspect(SAMPLES / "chainer.txt", training=True)


def model_of(
    *nodes: onnx.NodeProto, shape: Sequence[str | int] = (2, 3), weights: Sequence[TensorProto] = ()
) -> bytes:
    """The file of a graph from "x" to "y"."""
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(list(nodes), "g", [image], [result], initializer=weights)
    data: bytes = helper.make_model(graph).SerializeToString()
    return data


def test_sizes_with_a_name_are_taken_to_be_one() -> None:
    document = read(model_of(helper.make_node("Relu", ["x"], ["y"]), shape=("batch", 3)))
    assert document.graph.tensors["y"].shape == (1, 3)
    assert any("'batch' is taken to be 1" in note.what for note in document.notes)


def test_an_op_without_a_shape_rule_is_refused_with_advice() -> None:
    with pytest.raises(BadInput, match=r"infer_shapes") as caught:
        read(model_of(helper.make_node("Einsum", ["x"], ["y"], equation="ij->ji")))
    assert caught.value.where == "graph.node[0]"


def test_an_op_without_an_adjoint_is_refused_by_name(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, (3, 3), [0.0] * 9)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Hardmax", ["h"], ["y"])]
    (tmp_path / "model").write_bytes(model_of(*nodes, weights=[weight]))
    with pytest.raises(MissingRule, match=r"onnx\.Hardmax"):
        api.inspect(tmp_path / "model", training=True)


def test_control_flow_is_refused() -> None:
    branch = helper.make_graph([], "b", [], [])
    with pytest.raises(BadInput, match="no fixed order"):
        read(model_of(helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)))


def test_weights_elsewhere_are_not_opened(tmp_path: Path) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=(3, 3))
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../../etc/passwd"), ("offset", "0")):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    path = tmp_path / "model"
    path.write_bytes(model_of(helper.make_node("MatMul", ["x", "w"], ["y"]), weights=[weight]))
    with AUDIT.on() as touched:
        document = read_document(path)
    assert [(event, str(what[0])) for event, what in touched] == [("open", str(path))]
    assert document.graph.tensors["w"].nbytes == 36
    assert any("etc/passwd" in note.what and "not opened" in note.what for note in document.notes)


def test_element_types_are_those_of_onnx() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Greater", ["x", "x"], ["larger"]),
        helper.make_node("Where", ["larger", "whole", "whole"], ["chosen"]),
        helper.make_node("MaxPool", ["x"], ["pooled", "places"], kernel_shape=[2, 2]),
        helper.make_node("Relu", ["pooled"], ["y"]),
    ]
    data = model_of(*nodes, shape=(1, 2, 4, 4))
    tensors = read(data).graph.tensors
    inferred = onnx.shape_inference.infer_shapes(onnx.load_from_string(data), strict_mode=True).graph
    told = {value.name: value.type.tensor_type.elem_type for value in inferred.value_info}
    assert told.keys() == {"whole", "sizes", "larger", "chosen", "pooled", "places"}
    spelled = {TensorProto.FLOAT: "float32", TensorProto.INT64: "int64", TensorProto.BOOL: "bool"}
    assert {name: str(tensors[name].dtype) for name in told} == {
        name: spelled[element] for name, element in told.items()
    }


def test_constants_may_be_nodes() -> None:
    nodes = [
        helper.make_node("Constant", [], ["shape"], value_ints=[3, -1]),
        helper.make_node("Constant", [], ["half"], value_float=0.5),
        helper.make_node("Reshape", ["x", "shape"], ["turned"]),
        helper.make_node("Mul", ["turned", "half"], ["y"]),
    ]
    graph = read(model_of(*nodes)).graph
    assert graph.tensors["y"].shape == (3, 2)
    assert [graph.tensors[name].kind for name in ("shape", "half")] == [Kind.CONSTANT] * 2
    assert [op.type for op in graph.ops] == ["onnx.Reshape", "onnx.Mul"]


def test_more_outputs_than_an_op_makes_are_refused() -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, (3, 3), [0.0] * 9)
    with pytest.raises(BadInput, match="makes 1 outputs, not 2"):
        read(model_of(helper.make_node("Gemm", ["x", "w"], ["y", "z"]), weights=[weight]))


def test_functions_of_its_own_are_refused() -> None:
    model = onnx.load_from_string(model_of(helper.make_node("Relu", ["x"], ["y"])))
    node = helper.make_node("Relu", ["a"], ["b"])
    model.functions.append(helper.make_function("own", "Twice", ["a"], ["b"], [node], model.opset_import))
    with pytest.raises(BadInput, match="export with them inlined"):
        read(model.SerializeToString())


def test_a_graph_without_parameters_has_nothing_to_train(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(model_of(helper.make_node("Relu", ["x"], ["y"])))
    with pytest.raises(BadUse, match="nothing to train"):
        api.inspect(tmp_path / "model", training=True)
