"""Every op that the aliasing table lets write over an input does so, and gives the same bits."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

import stowplan
from stowplan.capture import Argument, Call, Ref
from stowplan.ops import aten
from stowplan.run.step.literals import call_lines

pytestmark = pytest.mark.torch

SHAPE = (4, 6)
OPTIONAL: dict[str, tuple[Argument, ...]] = {
    "aten.clamp.default": (0.2, 0.8)
}  # arguments it cannot do without
BOOLEAN = ("logical_not", "logical_and", "logical_or")


def target_of(name: str) -> OpOverload:
    packet, overload = name.removeprefix("aten.").rsplit(".", 1)
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
    return found


def sample(
    target: OpOverload, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Call, dict[str, Tensor]]:
    """A call of `target` on random tensors in (0, 1), by its schema, and a number that two bytes round."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    args: list[Argument] = []
    boolean = target._schema.name.removeprefix("aten::") in BOOLEAN
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only or argument.has_default_value():
            break
        if kind == "Tensor":
            shape = () if argument.name == "value" else SHAPE
            tensors[argument.name] = torch.rand(shape, generator=generator).to(dtype)
            if boolean or argument.name in ("condition", "mask"):
                tensors[argument.name] = tensors[argument.name] > 0.5
            args.append(Ref(argument.name))
        else:
            literals = {"bool": False, "int": 1, "number": 0.3, "float": 0.3}
            args.append(dtype if argument.name == "input_dtype" else literals[kind])
    args += OPTIONAL.get(str(target), ())
    return Call(target, tuple(args), {}, ("out",), single=True), tensors


def victims() -> Iterator[tuple[str, str]]:
    """Every op of the table with each input that it may write over."""
    for name in aten.POINTWISE:
        yield from ((name, tensor) for tensor in sample(target_of(name), 0)[1] if tensor != "condition")
    for name in (*aten.POINTWISE_FIRST, *aten.ROWWISE, *aten.FILLS):
        yield name, next(iter(sample(target_of(name), 0)[1]))


def run(call: Call, tensors: dict[str, Tensor], overwrites: dict[str, str]) -> Tensor:
    """The call's output by the lines that generated code would have."""
    scope: dict[str, object] = {"torch": torch, "aten": torch.ops.aten, **tensors}
    names = {name: name for name in (*tensors, "out")}
    torch.manual_seed(3)
    exec("\n".join(call_lines(call, overwrites, names)), scope)  # noqa: S102 -- the lines are what is tested
    out = scope["out"]
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "victim"), list(victims()))
def test_writing_over_an_input_gives_the_same_bits(name: str, victim: str, dtype: torch.dtype) -> None:
    target = target_of(name)
    call, tensors = sample(target, 1, dtype)
    expected = run(call, tensors, {})
    _, fresh = sample(target, 1, dtype)
    place = fresh[victim].data_ptr()
    found = run(call, fresh, {"out": victim})
    assert torch.equal(expected, found)
    assert found.data_ptr() == place


class _Turned(nn.Module):
    """Its backward multiplies complex numbers of two layouts, which rounds otherwise in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(torch.polar(x.abs() + 1, x)).sum(-1)
        return (turned * self.weight).square().mean()


@pytest.mark.usefixtures("one_thread")
def test_products_of_complex_numbers_have_the_bits_of_eager() -> None:
    torch.manual_seed(0)
    model, x = _Turned(), torch.rand(8, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    gradients = list[Tensor]()
    for step in (model, stowplan.fit(model, (x.requires_grad_(),), budget="1GiB")):
        x.grad = None
        step(x).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


class _Scaled(nn.Module):
    """An op that PyTorch rounds otherwise in place, in place or as the last reader of its operand."""

    def __init__(self, op: OpOverload) -> None:
        super().__init__()
        self.weight, self.op = nn.Parameter(torch.rand(8, 8).bfloat16()), op

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.op(self.weight * x, 0.2)
        return scaled.float().square().sum()


@pytest.mark.parametrize("op", [torch.ops.aten.mul.Scalar, torch.ops.aten.mul_.Scalar], ids=str)
@pytest.mark.usefixtures("one_thread")
def test_products_of_sixteen_bits_with_a_number_have_the_bits_of_eager(op: OpOverload) -> None:
    torch.manual_seed(0)
    model, x = _Scaled(op), torch.rand(8, 8).bfloat16()
    seen = list[Tensor]()
    for step in (model, stowplan.fit(model, (x,), budget="1GiB")):
        model.weight.grad = None
        loss = step(x)
        loss.backward()
        assert model.weight.grad is not None
        seen += loss, model.weight.grad
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax_over_any_dim_and_its_adjoint(name: str, dim: int) -> None:
    x, gradient = torch.randn(5, 37, 9), torch.randn(5, 37, 9)
    forward, backward = target_of(f"aten.{name}.default"), target_of(f"aten.{name}_backward_data.default")
    result = forward(x, dim, False)
    call = Call(forward, (Ref("x"), dim, False), {}, ("out",), single=True)
    assert torch.equal(run(call, {"x": x.clone()}, {"out": "x"}), result)
    adjoint = Call(backward, (Ref("g"), Ref("y"), dim, torch.float32), {}, ("out",), single=True)
    expected = backward(gradient, result, dim, torch.float32)
    assert torch.equal(run(adjoint, {"g": gradient.clone(), "y": result}, {"out": "g"}), expected)


def test_scatters_write_where_they_are() -> None:
    base, index, source = torch.randn(5, 3), torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.randn(2, 3)
    target = target_of("aten.scatter_add.default")
    call = Call(target, (Ref("base"), 0, Ref("index"), Ref("source")), {}, ("out",), single=True)
    expected = target(base, 0, index, source)
    found = run(call, {"base": base.clone(), "index": index, "source": source}, {"out": "base"})
    assert torch.equal(found, expected)


def test_a_part_is_written_without_copying_the_whole() -> None:
    target = target_of("aten.as_strided_scatter.default")
    base, part = torch.zeros(4, 6), torch.ones(2, 3)
    look: tuple[Argument, ...] = ((2, 3), (12, 2), 1)
    call = Call(target, (Ref("base"), Ref("part"), *look), {}, ("out",), single=True)
    expected = target(base, part, (2, 3), (12, 2), 1)
    place = base.data_ptr()
    found = run(call, {"base": base, "part": part}, {"out": "base"})
    assert torch.equal(found, expected)
    assert found.data_ptr() == place
