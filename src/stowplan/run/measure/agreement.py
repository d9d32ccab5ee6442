"""Agreement: the claim "bitwise" is made only if eager dispatches the ops that were captured.

Capture runs a model on tensors without data, and code can see that: it may skip in eager, after a look at
values, what it computes then. So forward runs once more, in eager, on the user's own tensors, and

1. each op, before it runs, must be the captured one: target, other arguments, and of each tensor the shape,
   strides, offset, dtype, device and which storage it is in (`_Comparison._expect`);
2. each result must look as captured (`_Comparison._meet`).

At the first difference the run ends. So nothing runs but captured ops, and all that these write to is known:

3. parameters, buffers and arguments in storages that the captured step writes to are replaced by copies
   (`Copies`), and draws come from copies of the generators (`_leaving_no_trace`);
4. gradients are enabled, as in training, but autograd keeps nothing (`_keeping_nothing`), so that activations
   end as they do in inference; a call under torch.no_grad() is compared with one under torch.no_grad();
5. before an op that would take memory above the budget the run ends, without a verdict (`_Comparison._room`).

Products of matrices and ops such as softmax take most of the time, and their numbers are not needed. Their
results are made up, as long as that cannot be seen (`_Shortcut`): made-up numbers reach only ops that neither
raise because of values nor make shapes of them, and Python does not read them. Where that does not hold, the
comparison begins again, and every kernel runs. The strides of these results are known without their kernels:
row-major for products, and for row-major operands of some other ops (`row_major_sizes`). Another op on
made-up numbers runs once for each look of its operands, and its strides are compared.

Views that autograd replays after a write are left out where eager makes them without an op
(`_Comparison._replays_next`). `detach` is left out of both: autograd runs it for what it keeps, and it
changes no number. Backward is not compared here: its ops follow from autograd's formulas for those of
forward. A formula that asks for values would follow another way in eager; `capture/value_derivatives.py` has
these functions.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stowplan.capture import Program
from stowplan.capture.changes import AsBefore, Stores
from stowplan.capture.composite import (
    composite_with,
    contents_of,
    dispatched_by_class,
    in_charge,
    is_composite,
    opened,
    opened_by_name,
    parts_of,
)
from stowplan.capture.generators import moves_generator
from stowplan.capture.layouts import call_like, learn, row_major_sizes
from stowplan.capture.program import (
    draws,
    leaves,
    returns_tensors,
    returns_views,
    written_arguments,
    written_names,
)
from stowplan.capture.recording import after_loss
from stowplan.capture.sparse import READ_SPARSE, has_sparse, is_sparse, reading_of
from stowplan.capture.stand_ins import StorageBook, StorageView, contiguous_stride, flatten, with_tensors
from stowplan.capture.watching import TAKING_VALUES, Event
from stowplan.plan.draft import AgainstEager, Draft, Schedule, Verdict
from stowplan.run.planning.planner import Subject
from stowplan.torch_private import (
    OpOverload,
    TorchDispatchMode,
    checkpoints_as_calls,
    own_modes_unseen,
    schema_of,
    storage_id,
)
from stowplan.units import format_bytes
from stowplan.watch import tell_phase

aten = torch.ops.aten
_DETACH = aten.detach.default
# Ops whose results are row-major on the CPU, whatever their operands look like.
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_FLOATS = (torch.float32, torch.float64)
# Ops that do the same whatever floating numbers they read, as pointwise ops do: none raises or branches.
_BLIND = frozenset(
    (
        *_PRODUCTS,
        aten._log_softmax.default,
        aten._native_batch_norm_legit.default,
        aten._safe_softmax.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._softmax.default,
        aten._to_copy.default,
        aten._unsafe_view.default,
        aten.avg_pool2d.default,
        aten.bernoulli_.float,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.convolution.default,
        aten.copy_.default,
        aten.embedding.default,
        aten.empty_like.default,
        aten.fill_.Scalar,
        aten.full_like.default,
        aten.max_pool2d_with_indices.default,
        aten.mean.default,
        aten.mean.dim,
        aten.mse_loss.default,
        aten.native_batch_norm.default,
        aten.native_dropout.default,
        aten.native_group_norm.default,
        aten.native_layer_norm.default,
        aten.new_empty.default,
        aten.new_zeros.default,
        aten.nll_loss_forward.default,
        aten.ones_like.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.zero_.default,
        aten.zeros_like.default,
    )
)


def compared(draft: Draft, subject: Subject) -> Draft:
    """The draft with what one eager forward of its step shows."""
    tell_phase("comparing with an eager forward")
    return replace(draft, against_eager=against_eager(draft, subject))


def against_eager(plan: Schedule, subject: Subject) -> AgainstEager:
    """Compare the captured forward with one in eager, within the plan's budget.

    Raises Relaid where a kernel lays out its result otherwise than was captured: the plan would be wrong.
    """
    captured, given, spec = subject.captured, *flatten(subject.args, subject.kwargs)
    roots = [subject.model, *((subject.loss,) if isinstance(subject.loss, nn.Module) else ())]
    tensors = [*_held_by(roots), *(leaf for leaf in given if isinstance(leaf, Tensor))]
    if any(tensor.is_meta for tensor in tensors):
        return AgainstEager(Verdict.UNCHECKED, "the model or its arguments are on the meta device")
    allowed_bytes = plan.allowed_bytes - torch.get_rng_state().nbytes  # to return to
    for shortcut in (None,) if captured.answers.draws else (_Shortcut(), None):
        copies = Copies(written_tensors(captured.program, roots, given))
        args, kwargs = spec.unflatten([copies.of(leaf) for leaf in given])
        workspace = captured.eager.workspace_of_events(plan.pricing.workspace_bytes)
        comparison = _Comparison(captured.forward, workspace, allowed_bytes, shortcut)
        try:
            with ExitStack() as stack:
                for root in roots:
                    stack.enter_context(with_tensors(root, copies.of))
                paths = {module: path for root in roots for path, module in root.named_modules()}
                stack.callback(Stores(paths, captured.containers).put_back)
                stack.enter_context(AsBefore([*tensors, *captured.program.constants.values()]))
                comparison.enter((*tensors, *map(copies.of, tensors)))
                drawing = any(draws(e.target, e.args, e.kwargs) for e in captured.forward)
                devices = {tensor.device for tensor in tensors} if drawing else set[torch.device]()
                stack.enter_context(_leaving_no_trace(devices))
                stack.enter_context(_keeping_nothing() if captured.records else torch.no_grad())
                stack.enter_context(checkpoints_as_calls())
                stack.enter_context(comparison)
                if shortcut:
                    stack.enter_context(_ReadsOutsideOps(comparison, shortcut))
                    stack.enter_context(own_modes_unseen())
                after_loss(subject.model(*args, **kwargs), subject.loss)
            return comparison.verdict()
        except _Seen:
            continue
        except _Ended as end:
            return end.found
        except _Relaid as found:
            raise RelaidResult(str(found)) from None
        except Exception as error:
            if not shortcut or not shortcut.made_up:
                return AgainstEager(Verdict.UNCHECKED, f"eager raises {type(error).__name__}: {error}")
    raise AssertionError("without a shortcut the comparison ends")


def _held_by(roots: Iterable[nn.Module]) -> Iterator[Tensor]:
    for root in roots:
        yield from opened((*root.parameters(), *root.buffers()))


def written_tensors(
    program: Program, roots: Sequence[nn.Module], given: Sequence[object]
) -> Iterator[Tensor]:
    """The tensors that the captured step writes to."""
    known = {**program.parameters, **program.buffers}
    names = {name for updated in program.updates for name in known.get(updated, ())}
    for prefix, root in zip(("", "loss."), roots, strict=False):
        held = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
        parts = opened_by_name(dict(held)).items()
        yield from (tensor for name, tensor in parts if f"{prefix}{name}" in names)
    for name, leaf in zip(program.inputs, given, strict=True):
        if name in program.updates and isinstance(leaf, Tensor):
            yield leaf


class Copies:
    """Storages are copied whole, so that tensors that share one still do."""

    def __init__(self, written: Iterable[Tensor]) -> None:
        self._copies = {storage_id(tensor.untyped_storage()): _storage_copy(tensor) for tensor in written}
        self._made: dict[int, Tensor] = {}

    def of(self, leaf: Any) -> Any:
        """A tensor in a copied storage as one in the copy; anything else as it is, but sparse tensors.

        These are put together again, so that ops on them are known by their parts.
        """
        if isinstance(leaf, Tensor) and is_composite(leaf):
            parts = {name: self.of(held) for name, held in parts_of(leaf).items()}
            is_copied = any(parts[name] is not held for name, held in parts_of(leaf).items())
            return composite_with({**contents_of(leaf), **parts}) if is_copied or is_sparse(leaf) else leaf
        if not isinstance(leaf, Tensor) or storage_id(leaf.untyped_storage()) not in self._copies:
            return leaf
        return self._made.setdefault(id(leaf), self._copy_of(leaf))

    def _copy_of(self, tensor: Tensor) -> Tensor:
        storage = self._copies[storage_id(tensor.untyped_storage())]
        look = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        with torch.no_grad():
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, *look)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def _storage_copy(tensor: Tensor) -> torch.UntypedStorage:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    with torch.no_grad():
        return flat.set_(tensor.untyped_storage()).clone().untyped_storage()


@contextmanager
def _leaving_no_trace(drawing: Collection[torch.device]) -> Iterator[None]:
    """Draws come from copies of these devices' generators; casts that autocast remembers are forgotten."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng((), enabled=bool(drawing)))
        for device in {device for device in drawing if device.type != "cpu"}:
            stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        yield


@contextmanager
def _keeping_nothing() -> Iterator[None]:
    """Autograd records what it would in training, without the tensors that backward would need."""

    def unpack(_: object) -> Tensor:
        raise AssertionError("nothing is differentiated here")

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, unpack):
        yield


class _Ended(BaseException):
    """The run is over before its end. No Exception, which the user's code might take for its own."""

    def __init__(self, verdict: Verdict, note: str) -> None:
        super().__init__(note)
        self.found = AgainstEager(verdict, note)


class RelaidResult(Exception):
    """A kernel lays its result out otherwise than was captured. It is known now: capture the step again."""


class _Relaid(BaseException):
    """The same, on its way through the user's code."""


class _Seen(BaseException):
    """Made-up numbers would be seen: the comparison begins again, and every kernel runs."""


class _Shortcut:
    """Makes up results, and remembers the storages that hold such numbers by eager's number.

    What is made up takes nothing from the generator: a step that asks what it drew takes no shortcut.
    """

    def __init__(self) -> None:
        self.made_up: set[int] = set()
        self._ran: set[object] = set()  # calls whose kernels ran, by how their operands look

    def result_of(
        self,
        event: Event,
        seen: Sequence[StorageView],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """A result that is made up, or None if the kernel is to run. `seen` are operands that are made up.

        Raises _Seen if the op might do something else for other numbers. Integers may be indices.
        """
        target = event.target
        if seen and returns_views(target):
            return None
        if seen:
            wholes = any(not view.dtype.is_floating_point and view.dtype is not torch.bool for view in seen)
            if wholes or (target not in _BLIND and torch.Tag.pointwise not in target.tags):
                raise _Seen
            if torch.Tag.inplace in target.tags and event.args[0] in seen:
                return args[0]  # which stays as it is, made up
        made = [view for view in event.results if view is not None and view.device.type == "cpu"]
        given = {view.storage for view in seen}
        is_fresh = len({view.storage for view in made} - given) == len(event.results)
        if written_names(target) or not made or not is_fresh:
            return None
        sizes = row_major_sizes(target, args, kwargs)
        if target in _PRODUCTS and made[0].dtype in _FLOATS:
            sizes = [made[0].shape]
        if sizes is None or [view.shape for view in made if _is_row_major(view)] != [*map(tuple, sizes)]:
            call = call_like(target, event.args, event.kwargs)
            if not seen or call not in self._ran:
                self._ran.add(call)
                return None
        results = tuple(map(_made_up, made))
        return results[0] if event.single else results


def _made_up(view: StorageView) -> Tensor:
    result = torch.empty_strided(view.shape, view.stride, dtype=view.dtype)
    return result.fill_(True) if view.dtype is torch.bool else result


def _is_row_major(view: StorageView) -> bool:
    return view.stride == contiguous_stride(view.shape)


class _ReadsOutsideOps(TorchFunctionMode):
    """Ends the shortcut where a function reads made-up numbers without an op."""

    def __init__(self, comparison: "_Comparison", shortcut: _Shortcut) -> None:
        super().__init__()
        self._comparison, self._shortcut = comparison, shortcut

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in TAKING_VALUES and not self._comparison.is_running:
            self._comparison.refuse_made_up((args, tuple(given.values())))
        return func(*args, **given)


class _Comparison(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves __init_subclass__ untyped
    """Runs ops as eager does, as long as they are those that were captured."""

    supports_higher_order_operators = True  # so that they come here: none was captured

    def __init__(
        self,
        captured: Sequence[Event],
        workspace_bytes: Sequence[int],
        allowed_bytes: int,
        shortcut: _Shortcut | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so is this
        self._shortcut, self.is_running = shortcut, False
        pairs = zip(captured, workspace_bytes[: len(captured)], strict=True)
        unseen = (event.target is _DETACH or moves_generator(event.target) for event in captured)
        self._captured = [pair for pair, is_unseen in zip(pairs, unseen, strict=True) if not is_unseen]
        self._allowed = allowed_bytes
        self._position = 0
        self._book = StorageBook(lambda: self._position)
        self._storages: dict[int, tuple[int, int]] = {}  # by captured number: eager's, and its extra offset
        self._met: set[StorageView] = set()  # operands and results of the ops so far, as captured

    def enter(self, tensors: Iterable[Tensor]) -> None:
        """Count what is there before."""
        self._book.enter(tensors)

    def verdict(self) -> AgainstEager:
        """When eager has ended."""
        for event, _ in self._captured[self._position + self._replays_next() :]:
            return AgainstEager(Verdict.DIFFERS, f"eager ends before {_place(event)}")
        return AgainstEager(Verdict.SAME)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if isinstance(func, OpOverload) and in_charge(types):
            with self:
                return dispatched_by_class(func, types, args, dict(kwargs or {}))
        self.is_running = True
        try:
            return self._run(func, args, dict(kwargs or {}))
        finally:
            self.is_running = False

    def _run(
        self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if isinstance(func, OpOverload) and has_sparse(leaves((args, tuple(kwargs.values())))):
            reading = reading_of(func, args, kwargs)
            if not reading.args:
                return reading.result
            func, args, kwargs = READ_SPARSE, reading.args, {}
        if isinstance(func, OpOverload) and changes_nothing(func):
            if func is not _DETACH and func.namespace == "aten":
                self.refuse_made_up((args, tuple(kwargs.values())))
            return func(*args, **kwargs)
        event, workspace_bytes = self._expect(func, args, kwargs)
        self._room(event, workspace_bytes)
        result = self._made_up_or_run(event, args, kwargs) if self._shortcut else func(*args, **kwargs)
        self._meet(event, args, kwargs, result)
        self._position += 1
        return result

    def _made_up_or_run(self, event: Event, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        assert self._shortcut is not None
        made_up = self._shortcut.made_up
        given = leaves((event.args, tuple(event.kwargs.values())))
        operands = [leaf for leaf in given if isinstance(leaf, StorageView)]
        seen = [view for view in operands if self._storages[view.storage][0] in made_up]
        result = self._shortcut.result_of(event, seen, args, kwargs)
        is_made_up = result is not None
        if not is_made_up:
            result = event.target(*args, **kwargs)
        if seen or is_made_up:
            written = (args, tuple(kwargs.values())) if written_arguments(event.target, args, kwargs) else ()
            tensors = (leaf for leaf in leaves((result, written)) if isinstance(leaf, Tensor))
            made_up.update(self._book.view_of(tensor).storage for tensor in tensors)
        return result

    def refuse_made_up(self, values: object) -> None:
        """Raise _Seen if a tensor among these has made-up numbers."""
        if self._shortcut and self._shortcut.made_up:
            tensors = [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]
            if any(self._book.view_of(tensor).storage in self._shortcut.made_up for tensor in tensors):
                raise _Seen

    def _expect(
        self, func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Event, int]:
        if self._position == len(self._captured):
            raise _Ended(Verdict.DIFFERS, f"eager goes on with {func}, where the captured forward ends")
        given = (args, *sorted(kwargs.items()))
        upcoming = self._captured[self._position : self._position + self._replays_next() + 1]
        for skipped, (event, workspace_bytes) in enumerate(upcoming):
            expected = (event.args, *sorted(event.kwargs.items()))
            if func is event.target and self._alike(expected, given):
                self._position += skipped
                return event, workspace_bytes
        event, _ = self._captured[self._position]
        if func is not event.target:
            raise _Ended(Verdict.DIFFERS, f"eager runs {func} in place of {_place(event)}")
        raise _Ended(Verdict.DIFFERS, f"eager has other operands for {_place(event)}")

    def _replays_next(self) -> int:
        """How many of the next captured ops make views again that are there.

        Where a view was written to, autograd replays it from its base, by an op if tensors are without data
        and without one in eager. Nobody can tell it from the view that was there.
        """
        count = 0
        for event, _ in self._captured[self._position :]:
            views = [view for view in event.results if view is not None]
            if not returns_views(event.target) or not self._met.issuperset(views):
                break
            count += 1
        return count

    def _room(self, event: Event, workspace_bytes: int) -> None:
        new = {view.storage: view.extent_bytes() for view in event.results if view is not None}
        fresh = sum(nbytes for storage, nbytes in new.items() if storage not in self._storages)
        needed = self._book.living_bytes() + fresh + workspace_bytes
        if needed > self._allowed:
            raise _Ended(
                Verdict.UNCHECKED,
                f"an eager forward takes {format_bytes(needed)} at {_place(event)}, above the budget",
            )

    def _meet(
        self, event: Event, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> None:
        returned = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        returned = returned if schema_of(event.target).returns else ()
        made = tuple(value if isinstance(value, Tensor) else None for value in returned)
        if self._alike(event.results, made):
            given = leaves((event.args, tuple(event.kwargs.values()), event.results))
            self._met.update(leaf for leaf in given if isinstance(leaf, StorageView))
            return
        looks = zip(event.results, made, strict=False)
        if any(c is not None and t is not None and c.stride != t.stride() for c, t in looks):
            learn(event.target, args, kwargs, made)
            raise _Relaid(f"{_place(event)} gives its result another layout than was captured")
        raise _Ended(Verdict.DIFFERS, f"eager makes another result by {_place(event)}")

    def _alike(self, captured: object, eager: object) -> bool:
        """Whether a nest of captured values is the same as one of eager's, tensors by how they look."""
        if isinstance(captured, tuple):
            same_length = isinstance(eager, (tuple, list)) and len(eager) == len(captured)
            return same_length and all(map(self._alike, captured, cast(Sequence[object], eager)))
        if isinstance(captured, StorageView):
            return isinstance(eager, Tensor) and self._same_view(captured, self._book.view_of(eager))
        both_nan = captured != captured and eager != eager
        return type(captured) is type(eager) and (captured == eager or both_nan)

    def _same_view(self, captured: StorageView, eager: StorageView) -> bool:
        """Whether two views are equal; a tensor from outside may begin at another offset of its storage."""
        pair = eager.storage, eager.offset - captured.offset
        storage, further = self._storages.setdefault(captured.storage, pair)
        return replace(captured, storage=storage, offset=captured.offset + further) == eager


def changes_nothing(target: OpOverload) -> bool:
    """Whether an op only looks, or is the `detach` that autograd runs for what it keeps."""
    looks = not returns_tensors(target) and not written_names(target)
    return looks or target is _DETACH


def _place(event: Event) -> str:
    """An op with its module and the user's line, where these are known."""
    where = ", ".join(filter(None, (event.origin.scope, event.origin.source)))
    return f"{event.target} ({where})" if where else str(event.target)
