"""Each private name of PyTorch does what stowplan uses it for, and only `torch_private` uses them.

These tests run on every version of docs/compatibility.md, so they need no more than torch and pytest.
"""

import ast
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import stowplan
from stowplan import torch_private as private
from stowplan.errors import TorchTooOld

pytestmark = pytest.mark.torch

SOURCE = Path(stowplan.__file__).parent
ATTRIBUTES = {"_schema", "_cdata", "_version", "_is_view", "_sequence_nr", "_get_backend", "_device_types"}
aten = torch.ops.aten


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0+cu117", "2.0.0a0+git1"])
def test_a_version_that_is_too_old_is_refused(version: str) -> None:
    with pytest.raises(TorchTooOld, match=r"needs 2\.6 or newer.*pip install"):
        private.check_version(version)


def test_a_version_that_was_not_tested_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stowplan"):
        for version in ("2.6.0", "2.13.0+cpu", "2.15.3"):
            private.check_version(version)
        assert not caplog.records
        private.check_version("2.16.0.dev20270101")
    assert [record.getMessage() for record in caplog.records] == [
        "torch 2.16.0.dev20270101 is newer than 2.15, the newest that is tested"
    ]


def _private_uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            names = [name for name in (ast.unparse(node),) if all(map(str.isidentifier, name.split(".")))]
            if node.attr in ATTRIBUTES:
                yield ast.unparse(node)
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "torch" and "ops" not in parts and any(map(_is_private, parts)):
                yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.slow
def test_no_other_module_uses_a_private_name() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {use}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "torch_private.py"
        for use in _private_uses(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "torch._C._get_mkldnn_enabled()",
        "op._schema.name",
    ],
)
def test_the_check_itself_sees_a_private_name(code: str) -> None:
    assert list(_private_uses(ast.parse(code)))


def test_the_schema_of_an_op_names_its_arguments() -> None:
    schema = private.schema_of(aten.add_.Tensor)
    assert schema.name == "aten::add_"
    assert [(a.name, a.kwarg_only) for a in schema.arguments] == [
        ("self", False),
        ("other", False),
        ("alpha", True),
    ]
    written = schema.arguments[0].alias_info
    assert written is not None
    assert written.is_write
    assert schema.arguments[2].default_value == 1
    assert "Tensor" in str(schema.returns[0].type)


def test_ops_and_their_overloads_are_told_apart() -> None:
    assert isinstance(aten.add, private.OpOverloadPacket)
    assert isinstance(aten.add.Tensor, private.OpOverload)
    assert aten.add.Tensor.overloadpacket is aten.add
    assert "Tensor" in aten.add.overloads()


def test_variants_that_write_out_are_known_without_those_that_copy() -> None:
    assert private.writes_out(aten.add.out)
    assert not private.writes_out(aten.add.Tensor)
    assert not private.writes_out(aten.add_.Tensor)
    assert not private.writes_out(aten.native_dropout.out)  # generated: computes aside and copies


def _attribute_chains(tree: ast.AST) -> Iterator[list[str]]:
    """Overloads of aten ops that a module names: aten.op.overload, torch.ops.aten.op.overload."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = ast.unparse(node).removeprefix("torch.ops.").split(".")
            if parts[0] == "aten" and len(parts) == 3 and parts[1].isidentifier():
                yield parts


@pytest.mark.slow
def test_every_op_that_is_named_exists() -> None:
    """Except where the code asks first, with `hasattr`."""
    sources = [path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")]
    asked_for = {op for source in sources for op in re.findall(r'hasattr\(aten, "(\w+)"\)', source)}
    named = {(parts[1], parts[2]) for source in sources for parts in _attribute_chains(ast.parse(source))}
    assert len(named) > 50
    missing = [
        f"aten.{op}.{overload}"
        for op, overload in sorted(named)
        if op not in asked_for and not _exists(op, overload)
    ]
    assert not missing


def _exists(op: str, overload: str) -> bool:
    return overload == "overloads" or hasattr(getattr(aten, op, None), overload)


def test_tensors_without_data_behave_as_those_with() -> None:
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        made = torch.empty(3, 4) @ torch.empty(4, 5)
    assert isinstance(made, private.FakeTensor)
    assert made.shape == (3, 5)
    assert private.storage_id(made.untyped_storage()) != 0


def test_a_kernel_shapes_its_result_without_data() -> None:
    fakes = private.FakeTensorMode()
    x = fakes.from_tensor(torch.rand(4, 6).t())
    made = private.shaped_by_kernel(fakes, aten.add.Tensor, (x, 1.0), {}, x.device)
    assert isinstance(made, private.FakeTensor)
    assert (made.shape, made.stride(), made.device) == (x.shape, x.stride(), x.device)
    parts = private.shaped_by_kernel(fakes, aten.split.Tensor, (x, 3), {}, x.device)
    assert [each.storage_offset() for each in parts] == [0, 3]


@pytest.mark.parametrize(
    ("op", "error"),
    [
        (lambda x: x.sum().item(), private.DataDependentOutputException),
        (torch.nonzero, private.DynamicOutputShapeException),
    ],
)
def test_tensors_without_data_refuse_what_reads_it(op: object, error: type[Exception]) -> None:
    assert callable(op)
    with private.FakeTensorMode(), pytest.raises(error):
        op(torch.empty(3))


def test_an_op_without_a_fake_implementation_is_refused() -> None:
    torch.library.define("stowplan_tests::unknown", "(Tensor x) -> Tensor")
    torch.library.impl("stowplan_tests::unknown", "CPU", torch.clone)
    with private.FakeTensorMode(), pytest.raises(private.UnsupportedOperatorException):
        torch.ops.stowplan_tests.unknown(torch.empty(3))


def test_failures_on_tensors_without_data_are_logged_where_capture_silences_them() -> None:
    assert private.fake_tensor_logger.name == private.FakeTensorMode.__module__


def test_a_dispatch_mode_sees_ops_below_autograd() -> None:
    seen: list[str] = []

    def dispatch(
        _: object, func: Any, __: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        seen.append(str(func))
        return func(*args, **(kwargs or {}))

    with type("Watching", (private.TorchDispatchMode,), {"__torch_dispatch__": dispatch})():
        nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3, requires_grad=True))
    assert "aten.mm.default" in seen


def test_nests_are_flattened_in_one_order() -> None:
    value = {"a": (torch.ones(1), [2, None]), "b": 3}
    leaves, spec = private.pytree.tree_flatten(value)
    assert leaves[1:] == [2, None, 3]
    assert isinstance(spec, private.TreeSpec)
    assert private.pytree.tree_unflatten([1, 2, None, 3], spec) == {"a": (1, [2, None]), "b": 3}
    assert private.pytree.tree_leaves(value)[1:] == [2, None, 3]
    assert private.pytree.tree_map(str, (1, [2])) == ("1", ["2"])
    assert private.pytree.tree_map_only(int, str, [1, None]) == ["1", None]
    paths = [private.pytree.keystr(path) for path, _ in private.pytree.tree_flatten_with_path(value)[0]]
    assert paths == ["['a'][0]", "['a'][1][0]", "['a'][1][1]", "['b']"]


def test_storages_are_told_apart_while_they_live() -> None:
    tensor, other = torch.ones(4), torch.ones(4)
    assert private.storage_id(tensor.untyped_storage()) == private.storage_id(tensor[1:].untyped_storage())
    assert private.storage_id(tensor.untyped_storage()) != private.storage_id(other.untyped_storage())


def test_writes_in_place_are_counted() -> None:
    tensor = torch.ones(4)
    before = private.version_of(tensor)
    tensor[1:].add_(1)
    assert before == 0
    assert private.version_of(tensor) == 1
    with torch.inference_mode():
        assert private.version_of(torch.ones(1)) is None


def test_views_are_known() -> None:
    assert private.is_view(torch.ones(4)[1:])
    assert not private.is_view(torch.ones(4))


def test_guards_compare_shapes_strides_dtypes_and_gradients() -> None:
    tensor = torch.ones(2, 3)
    guards = private.tensor_guards([tensor])
    assert guards.check(torch.zeros(2, 3))
    others = (torch.ones(3, 2), torch.ones(3, 2).t(), tensor.double(), torch.ones(2, 3, requires_grad=True))
    assert not any(guards.check(other) for other in others)
    parameters = private.tensor_guards([nn.Parameter(tensor)])
    assert not parameters.check(torch.ones(2, 3, requires_grad=True))


def test_autograd_nodes_are_numbered_in_order() -> None:
    x = torch.ones(2, requires_grad=True)
    before = private.nodes_made()
    made = x.exp()
    assert made.grad_fn is not None
    assert private.sequence_number(made.grad_fn) == before
    assert private.nodes_made() == before + 1
    running: list[int | None] = []
    made.grad_fn.register_prehook(lambda _: running.append(private.running_node()))
    torch.autograd.backward(made.sum())
    assert private.running_node() is None
    assert before in running


def test_calls_of_backward_are_told_apart_and_say_when_they_end() -> None:
    x = torch.ones(2, requires_grad=True)
    running, ended = list[int](), list[int]()

    def seen(_: object) -> None:
        running.append(private.running_backward())
        private.after_backward(lambda: ended.append(len(running)))

    untyped: Any = x
    untyped.register_post_accumulate_grad_hook(seen)
    for _ in range(2):
        torch.autograd.backward(x.sum())
    assert private.running_backward() == -1
    assert len({*running, -1}) == 3
    assert ended == [1, 2]


def test_a_backward_that_returns_gradients_accumulates_none() -> None:
    x, found = torch.ones(2, requires_grad=True), list[bool]()
    for through in (lambda loss: torch.autograd.backward(loss), lambda loss: torch.autograd.grad(loss, x)):
        made = x.exp()
        untyped: Any = made
        untyped.register_hook(lambda _: found.append(private.will_accumulate(x)))
        through(made.sum())
    assert found == [True, False]


def test_below_autograd_nothing_is_recorded_while_gradients_count_as_enabled() -> None:
    x = torch.ones(2, requires_grad=True)
    with private.below_autograd(), torch.enable_grad():
        made = aten.exp.default(x)
        assert torch.is_grad_enabled()
    assert not made.requires_grad


def test_autograd_can_be_switched_on_in_kernels() -> None:
    found: list[bool] = []

    @torch.library.custom_op(
        "stowplan_tests::kernel", mutates_args=(), schema="(Tensor x, Tensor[] others) -> Tensor[]"
    )
    def kernel(x: torch.Tensor, others: list[torch.Tensor]) -> list[torch.Tensor]:
        del others
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            found.append(leaf.exp().requires_grad)
            with private.autograd_in_kernels():
                found.append(leaf.exp().requires_grad)
            found.append(leaf.exp().requires_grad)
        return [x.clone()]

    kernel(torch.ones(2), [])
    assert found == [False, True, False]


def test_hooks_of_tensors_are_seen() -> None:
    plain: Any
    hooked: Any
    followed: Any  # PyTorch leaves their methods untyped
    plain, hooked, followed = (torch.ones(1, requires_grad=True) for _ in range(3))
    hooked.register_hook(lambda gradient: gradient)
    followed.register_post_accumulate_grad_hook(lambda _: None)
    assert [private.has_hooks(tensor) for tensor in (plain, hooked, followed)] == [False, True, True]


class _Nothing(torch.autograd.Function):
    """Has no gradient for a tensor whose hooks shall not be asked."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.tensor = tensor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        private.ask_no_hooks(ctx.tensor)


def test_a_hook_is_not_asked_where_there_is_no_gradient_and_stays() -> None:
    leaf: Any = torch.ones(1, requires_grad=True)
    seen: list[Tensor] = []
    leaf.register_hook(seen.append)
    nothing: Any = _Nothing.apply
    for _ in range(2):
        nothing(leaf).backward()
        assert seen == []
        assert private.hooks_of(leaf) == [seen.append]
    leaf.exp().backward()
    assert len(seen) == 1


def test_a_hook_is_behind_its_handle_until_it_is_removed() -> None:
    leaf: Any = torch.ones(1, requires_grad=True)
    made = leaf.exp()
    handle = made.grad_fn.register_prehook(print)
    assert private.hooks_behind(handle) == [print]
    handle.remove()
    assert private.hooks_behind(handle) == []


def test_nodes_of_a_function_have_a_class_of_their_own() -> None:
    class Own(Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:  # noqa: ARG004
            return given.clone()

    call: Any = Own.apply
    made = call(torch.ones(1, requires_grad=True))
    assert type(made.grad_fn) is private.node_class(Own)


def test_hooks_of_modules_are_found_in_their_tables() -> None:
    module = nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    assert [len(getattr(module, name)) for name in private.HOOKS] == [1, 1, 1, 1]
    registered = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert list(map(len, private.GLOBAL_HOOKS)) == [0, 1, 0, 0]
    finally:
        registered.remove()
    assert {"_parameters", "_buffers", "_modules"} <= vars(module).keys()


def test_checkpoints_of_other_threads_stay_checkpoints() -> None:
    before = [getattr(torch.utils.checkpoint, name) for name in private._VARIANTS]
    ran: list[int] = []

    def step(x: Tensor) -> Tensor:
        ran.append(1)
        return x.sin().sin()

    def train() -> None:
        x = torch.ones(3, requires_grad=True)
        for reentrant in (False, True):
            torch.autograd.backward(checkpoint(step, x, use_reentrant=reentrant).sum())

    with private.checkpoints_as_calls():
        thread = Thread(target=train)
        thread.start()
        thread.join()
        assert len(ran) == 4
        train()
        assert len(ran) == 6
    train()
    assert len(ran) == 10
    assert [getattr(torch.utils.checkpoint, name) for name in private._VARIANTS] == before


def test_a_group_has_a_store_and_a_timeout(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    patience = timedelta(seconds=7)
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1, timeout=patience)
    try:
        group = dist.group.WORLD
        assert group is not None
        store = private.store_of(group)
        store.set("said", "here")
        assert store.check(["said"])
        assert store.delete_key("said")
        assert private.timeout_of(group) == patience
        with suppress(RuntimeError):  # gloo has nothing to give up
            private.abort(group)
    finally:
        dist.destroy_process_group()


def test_the_profiler_tells_of_allocations_and_frees() -> None:
    def step() -> int:
        made = torch.empty(1000)
        return made.data_ptr()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        address = step()
    seen = sorted(private.allocations_seen(profiler))
    sizes = [nbytes for _, where, nbytes in seen if where == address]
    assert sizes == [4000, -4000]


def test_allocations_of_one_thread_are_seen_beside_a_profiler_of_another() -> None:
    def step() -> None:
        torch.empty(1000).clone()

    assert private.allocations_within(step) == (None, [4000, 4000, -4000, -4000])
    seen: list[object] = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert private.is_profiled()
        thread = Thread(target=lambda: seen.extend((private.is_profiled(), private.allocations_within(step))))
        thread.start()
        thread.join()
        torch.ones(3)
    assert seen == [False, (None, [4000, 4000, -4000, -4000])]
    assert any(event.name == "aten::ones" for event in profiler.events())


def test_packed_sequences_take_lengths_without_reading_them_by_an_op() -> None:
    class Ops(private.TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        def __torch_dispatch__(
            self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            assert func is not aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    pack, pad = private.PACK_SEQUENCES, private.PAD_SEQUENCES
    padded = torch.arange(6.0).reshape(3, 2, 1)
    with Ops():  # type: ignore[no-untyped-call]
        data, sizes = pack(padded, torch.tensor([3, 2]), False)
        again, lengths = pad(data, sizes, False, 0.0, 3)
    assert sizes.tolist() == [2, 2, 1]
    assert lengths.tolist() == [3, 2]
    assert again[:2].equal(padded[:2])


def test_a_function_without_its_cover_lets_a_mode_see_what_it_calls() -> None:
    class Seen(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    dropout: Any = nn.functional.dropout
    with Seen() as seen:
        covered = nn.functional.dropout(torch.ones(2), 0.0)
        made = private.uncovered(dropout)(torch.ones(2), 0.0)
    assert torch.equal(made, covered)
    assert [name for name in seen.names if name == "dropout"] == ["dropout", "dropout"]
    assert private.uncovered(dropout)(torch.ones(2), p=0.0).sum() == 2


def test_a_function_that_chooses_between_two_is_uncovered_with_both() -> None:
    pool: Any = nn.functional.max_pool1d

    class Uncovering(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            if func is pool:
                with self:
                    return private.uncovered(pool)(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    numbers = torch.arange(4.0).view(1, 4)
    with Uncovering():
        found = nn.functional.max_pool1d(numbers, 2)
        _, places = nn.functional.max_pool1d(numbers, 2, return_indices=True)
    assert found.tolist() == [[1.0, 3.0]]
    assert places.tolist() == [[1, 3]]


@pytest.mark.slow
@pytest.mark.skipif(not private.cpp_compiler(), reason="inductor needs a C++ compiler, and there is none")
def test_inductor_compiles_a_function_of_a_list_and_keeps_strides() -> None:
    def function(given: list[Tensor]) -> list[Tensor]:
        one, other = given
        return [aten.relu.default(one), aten.clone.default(other)]

    compiled = private.compiled_by_inductor(function, [((8, 4), (1, 8), torch.float32)] * 2)
    given = [torch.randn(4, 8).t() for _ in range(2)]
    boxed = list(given)
    made = compiled(boxed)
    assert not boxed
    assert all(map(torch.equal, made, function(given)))
    assert [tensor.stride() for tensor in made] == [(1, 8), (1, 8)]
    assert {tensor.data_ptr() for tensor in made}.isdisjoint(tensor.data_ptr() for tensor in given)


def test_exporting_is_told_from_running() -> None:
    class Asking(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if private.is_exporting() else x - 1

    x = torch.zeros(2)
    assert not private.is_exporting()
    if hasattr(torch.compiler, "is_exporting"):
        assert torch.export.export(Asking(), (x,), strict=False).module()(x).tolist() == [1, 1]


def test_a_stand_in_becomes_a_parameter() -> None:
    made = private.as_parameter(private.FakeTensorMode().from_tensor(torch.rand(2)), requires_grad=True)
    assert isinstance(made, nn.Parameter)
    assert made.requires_grad
    assert made.is_leaf


def test_no_function_mode_is_asked_within() -> None:
    class Counting(TorchFunctionMode):
        asked = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.asked += 1
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        with private.without_functions():
            torch.rand(2).stride()
        assert not mode.asked
        torch.rand(2)
    assert mode.asked


def test_a_removed_hook_of_all_modules_leaves_nothing() -> None:
    from torch.nn.modules import module as modules

    handle = modules.register_module_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    tables = modules._global_forward_hooks, modules._global_forward_hooks_with_kwargs
    assert all(tables)
    private.remove_hook_of_all(handle)
    assert not any(tables)


def test_modes_are_listed_from_the_outside_in() -> None:
    class Mode(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
        pass

    assert private.dispatch_modes() == []
    with Mode() as outer, Mode() as inner:  # type: ignore[no-untyped-call]
        assert private.dispatch_modes() == [outer, inner]
    assert private.dispatch_modes() == []


def test_a_call_of_a_module_has_its_frame() -> None:
    class Looks(nn.Module):
        def forward(self) -> int:
            frame, calls = sys._getframe(), 0
            while frame.f_back is not None:
                frame = frame.f_back
                calls += frame.f_code is private.MODULE_CALL
            return calls

    assert Looks()() == 1
