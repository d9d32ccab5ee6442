"""A captured graph says what the step does: its ops, names, phases, aliases and buffers."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverloadPacket

from stowplan.capture import Captured, capture
from stowplan.capture.program import overloads_of
from stowplan.ir import Graph, Kind, Op, Phase, Role, validate
from stowplan.ops.aten import RANDOM
from stowplan.ops.effects import Effect, effect_of
from stowplan.ops.table import site_of
from tests.support.models import Normed, Rewriting, Tied, images
from tests.support.nets import NETS

pytestmark = pytest.mark.torch
IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd


def op_of_type(graph: Graph, op_type: str) -> Op:
    """The only op of this type."""
    (found,) = (op for op in graph.ops if op.type == op_type)
    return found


def captured_normed() -> Captured:
    return capture(Normed(), (images(2, 3, 8, 8),))


def test_ops_carry_types_attributes_scopes_and_sources() -> None:
    convolution = op_of_type(captured_normed().graph, "aten.convolution.default")
    assert [use.tensor for use in convolution.inputs] == ["x", "conv.weight", "conv.bias"]
    assert convolution.attributes["padding"] == (1, 1)
    assert convolution.attributes["groups"] == 1
    assert convolution.scope == "conv"
    assert convolution.source.partition(":")[0].endswith("tests/support/models.py")


def test_missing_tensors_and_defaults_are_attributes() -> None:
    model = nn.Conv2d(1, 1, 1, bias=False)
    graph = capture(model, (images(1, 1, 2, 2),), loss=torch.sum).graph
    assert op_of_type(graph, "aten.convolution.default").attributes["bias"] is None
    pooled = capture(nn.Linear(2, 2), (images(2, 2),), loss=lambda y: y.amax(0).sum()).graph
    assert op_of_type(pooled, "aten.amax.default").attributes["keepdim"] is False


def test_lists_with_gaps_show_where_tensors_stand() -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))

        def forward(self, index: Tensor) -> Tensor:
            return self.weight[:, index].sum()

    graph = capture(Picking(), (torch.tensor([0, 2]),)).graph
    index = op_of_type(graph, "aten.index.Tensor")
    assert index.attributes["indices"] == (None, 1)
    assert [use.tensor for use in index.inputs] == ["weight", "index"]


def test_backward_ops_name_the_forward_op_they_differentiate() -> None:
    graph = captured_normed().graph
    types = {op.id: op.type for op in graph.ops}
    pairs = {op.type: types[op.adjoint_of] for op in graph.ops if op.adjoint_of is not None}
    assert pairs["aten.convolution_backward.default"] == "aten.convolution.default"
    assert pairs["aten.threshold_backward.default"] == "aten.relu.default"
    assert pairs["aten.native_batch_norm_backward.default"].startswith("aten._native_batch_norm")
    scopes = {op.type: op.scope for op in graph.ops if op.phase is Phase.BACKWARD}
    assert scopes["aten.convolution_backward.default"] == "conv"


def test_sums_of_gradients_are_nobodys_adjoint() -> None:
    class Forked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y.sin() + y.cos()).sum()

    graph = capture(Forked(3, 3), (images(2, 3),)).graph
    sums = [op for op in graph.ops if op.phase is Phase.BACKWARD and op.type == "aten.add.Tensor"]
    assert [op.adjoint_of for op in sums] == [None]


def test_gradients_of_forward_tensors_are_those_autograd_has() -> None:
    class Forked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y.sin() + y.cos()).sum()

    captured = capture(Forked(3, 3), (images(2, 3),))
    maker = {name: op for op in captured.graph.ops for name in op.writes()}
    whole = captured.gradients["addmm"]
    assert maker[whole].type == "aten.add.Tensor"
    assert captured.graph.tensors[whole].gradient_of == "addmm"
    # a sum hands its gradient on as it is, to both that it adds up
    assert captured.gradients["add"] == captured.gradients["sin"] == captured.gradients["cos"]
    assert captured.graph.tensors[captured.gradients["add"]].gradient_of == "add"


@pytest.mark.parametrize("name", ["unet", "resnet50", "swin", "llama", "hf_t5"])
@pytest.mark.slow
def test_whatever_is_differentiated_has_a_gradient_of_its_shape(name: str) -> None:
    captured = capture(*NETS[name].build("tiny"))
    graph, gradients = captured.graph, captured.gradients
    made = {op.id: set(op.writes()) for op in graph.ops}
    for op in graph.ops:
        if op.adjoint_of is not None:
            assert made[op.adjoint_of] & gradients.keys(), f"{op.id} differentiates {op.adjoint_of}"
    for tensor, gradient in gradients.items():
        assert graph.tensors[tensor].shape == graph.tensors[gradient].shape
        assert graph.tensors[gradient].kind is Kind.GRADIENT


def test_what_forward_made_is_saved_to_backward_and_nothing_else() -> None:
    graph = captured_normed().graph
    made = {name for op in graph.ops if op.phase is Phase.FORWARD for name in op.writes()}
    for op in graph.ops:
        for use in op.inputs:
            saved = op.phase is Phase.BACKWARD and use.tensor in made
            assert (use.role is Role.SAVED) == saved, (op.id, use)


def test_gradients_belong_to_parameters_and_are_held() -> None:
    captured = captured_normed()
    names = {"conv.weight", "conv.bias", "norm.weight", "norm.bias"}
    assert captured.program.gradients.keys() == names
    for wanted, gradient in captured.program.gradients.items():
        tensor = captured.graph.tensors[gradient]
        assert (tensor.kind, tensor.gradient_of) == (Kind.GRADIENT, wanted)
        assert gradient in captured.graph.held


def test_tied_weights_are_one_parameter_with_one_gradient() -> None:
    captured = capture(Tied(), (torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])))
    assert captured.program.parameters["embed.weight"] == ("embed.weight", "head.weight")
    assert "head.weight" not in captured.graph.tensors
    assert set(captured.program.gradients) == {"embed.weight", "mix.weight", "mix.bias"}


def test_buffers_are_updated_once_by_ops_of_their_own() -> None:
    captured = captured_normed()
    updates = [op for op in captured.graph.ops if op.phase is Phase.UPDATE]
    assert {op.type for op in updates} == {"stowplan.update_buffer"}
    aliases = {captured.graph.tensors[name].alias_of for op in updates for name in op.writes()}
    assert aliases == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert aliases == set(captured.program.updates)
    assert all(effect_of(site_of(captured.graph, op)) is Effect.BUFFER_UPDATE for op in updates)


def test_a_buffer_that_is_bound_anew_is_updated_too() -> None:
    captured = capture(Rewriting(), (images(3, 4),))
    assert set(captured.program.updates) == {"calls", "highest"}


def test_random_ops_are_known_as_such() -> None:
    graph = captured_normed().graph
    drawn = [op.type for op in graph.ops if effect_of(site_of(graph, op)) & Effect.RANDOM]
    assert drawn == ["aten.bernoulli.p"]


def test_every_op_that_pytorch_calls_random_has_an_effect() -> None:
    for name in ("rand_like", "randn_like", "bernoulli"):
        model = _Noisy(name)
        graph = capture(model, ()).graph
        assert any(effect_of(site_of(graph, op)) & Effect.RANDOM for op in graph.ops), name


def test_every_op_that_pytorch_tags_as_random_is_known_as_such() -> None:
    """Not those with an `out` or made of others, which are never captured, nor RNNs and attention."""
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    packets = (getattr(torch.ops.aten, name, None) for name in sorted(names))
    ops = [op for packet in packets if isinstance(packet, OpOverloadPacket) for op in overloads_of(packet)]
    seeded = (op for op in ops if torch.Tag.nondeterministic_seeded in op.tags)
    captured = (op for op in seeded if not any(a.is_out for a in op._schema.arguments))
    drawn = {str(op) for op in captured if not op.has_kernel_for_dispatch_key(IMPLICIT)}
    argued = {
        name for name in drawn if re.search(r"attention|rnn|lstm|_cudnn|_mem_eff_|_sdp_|_nested_", name)
    }
    assert drawn - argued - set(RANDOM) == set()


class _Noisy(nn.Module):
    def __init__(self, draw: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 0.5))
        self.draw = getattr(torch, draw)

    def forward(self) -> Tensor:
        noise: Tensor = self.draw(self.weight.detach())
        return (self.weight * noise).sum()


def test_views_share_the_storage_of_what_they_view() -> None:
    graph = capture(nn.Linear(4, 4), (images(2, 3, 4),), loss=torch.sum).graph
    view = next(op for op in graph.ops if op.type == "aten.t.default").outputs[0].tensor
    assert graph.tensors[view].alias_of == "weight"
    assert graph.tensors[view].layout == "(1, 4)"


def test_a_loss_outside_leaves_the_gradients_of_outputs_as_inputs() -> None:
    captured = capture(nn.Linear(4, 2), (images(3, 4),))
    tangent = captured.graph.tensors["tangents.0"]
    assert (tangent.kind, tangent.shape) == (Kind.GRADIENT, (3, 2))
    assert all("tangents.0" not in op.writes() for op in captured.graph.ops)


def test_a_loss_given_is_captured_with_its_parameters() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, y: Tensor) -> Tensor:
            return (y * self.weight).square().mean()

    captured = capture(nn.Linear(4, 2), (images(3, 4),), loss=Weighted())
    assert set(captured.program.gradients) == {"weight", "bias", "loss.weight"}
    assert captured.graph.tensors["tangents.0"].shape == ()


def test_the_loss_among_other_outputs_is_the_one_differentiated() -> None:
    class Both(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # on purpose
            y = super().forward(x)
            return y, F.mse_loss(y, x)

    captured = capture(Both(4, 4), (images(3, 4),))
    assert captured.program.tangents[0] is None
    assert captured.program.tangents[1] is not None


def test_what_nobody_reads_is_left_out() -> None:
    class Wasteful(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            (y.exp() + 1).mean()
            return y.sum()

    assert all(op.type != "aten.exp.default" for op in capture(Wasteful(2, 2), (images(2, 2),)).graph.ops)


def test_the_graph_is_legal_and_the_same_every_time() -> None:
    first, second = captured_normed(), captured_normed()
    validate(first.graph)
    assert first.graph == second.graph
    assert first.eager == second.eager
