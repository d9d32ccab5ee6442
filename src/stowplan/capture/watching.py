"""Watching a step: it runs once on stand-ins without data, and every dispatched op is recorded.

Nothing is rewritten, so the recording is what eager runs: the same kernels in the same order, the same
tensors kept by autograd, the same moments at which storages are freed. Small integer tensors that depend on
no stand-in without data are computed for real, because models branch on them; what they read is noted.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import ge, gt, le, lt
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from stowplan.alone import interruptible
from stowplan.capture.answers import Check, IsBelow, Question, contents_of, count_of, shape_of
from stowplan.capture.composite import dispatched_by_class, in_charge, is_wrapper, opened
from stowplan.capture.foreseeing import value_at
from stowplan.capture.generators import WatchedGenerator, moves_generator
from stowplan.capture.layouts import ShapeFunctions, as_made, call_like, run_on_zeros
from stowplan.capture.origins import COMPILE, Origin, Origins
from stowplan.capture.program import (
    FILLING,
    bound_arguments,
    draws,
    extra_bytes,
    fill_value,
    leaves,
    returns_tensors,
    returns_views,
    written_arguments,
    written_names,
)
from stowplan.capture.sparse import READ_SPARSE, has_sparse, reading_of
from stowplan.capture.stand_ins import StorageBook, StorageView, is_small_integer
from stowplan.capture.value_derivatives import differentiated_as_eager
from stowplan.errors import CaptureError
from stowplan.torch_private import (
    PACK_SEQUENCES,
    PAD_SEQUENCES,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    nodes_made,
    running_node,
    schema_of,
    sequence_number,
    without_functions,
)
from stowplan.watch import tell_phase

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_KNOWN_ELEMENTS = 1 << 16
_TOLD_EVERY = 64  # ops
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_OF_ONE_DTYPE = frozenset(
    (
        *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default),
        *(aten.addmv.default, aten.dot.default, aten.convolution.default),
    )
)
_DRAWN_ELEMENTS = 64  # of a list that is drawn, one for each layer
_PACK = aten._pack_padded_sequence.default
_CHOOSING = (aten.index.Tensor, aten.masked_select.default)
_READS = (aten._local_scalar_dense.default, aten.is_nonzero.default)
_ASSERTIONS = (aten._assert_async.default, aten._assert_async.msg)
_ASSERTED = "Expected Tensor with single nonzero value, but got zero"
_UNIFORM = (aten.rand.default, aten.rand.generator, aten.rand_like.default)  # in [0, 1)
_BELOW_ONE = 1 - 2**-53
_COMPARISONS: Mapping[OpOverload, Callable[[Any, Any], bool]] = {
    aten.lt.Scalar: lt,
    aten.le.Scalar: le,
    aten.gt.Scalar: gt,
    aten.ge.Scalar: ge,
}


class KnownOverwritten(Exception):
    """A tensor with known values received unknown values: record again without knowing what was made there.

    `made_at` is the line that made it, or the name of an argument; empty if it is neither.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.made_at = tensor, ""


class Undecided(Exception):
    """Forward asks what no argument determines. `expected` is the answer it expects, if that is clear."""

    def __init__(self, expected: bool | None, origin: Origin) -> None:
        super().__init__()
        self.expected, self.origin = expected, origin


class WentOn(BaseException):
    """An answer that was tried does not make forward raise."""


class Rehearsal:
    """Runs ops on stand-ins.

    With `knowing`, ops on small integer tensors with values run for real: positions, masks of positions, and
    what follows from integer arguments. Models that branch on them behave as in eager.
    """

    def __init__(self, fakes: FakeTensorMode, *, knowing: bool) -> None:
        self._fakes, self._knowing, self._shapes = fakes, knowing, ShapeFunctions(fakes)
        self._foreseen: dict[object, bool] = {}  # whether the results of a call are small integers

    def run(
        self,
        target: OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        known: bool = True,
    ) -> object:
        """The result of an op, without data unless its values are known. It is unknown without `known`."""
        if known and self._is_known(target, args, kwargs):
            return target(*args, **kwargs)
        if known and self._knowing and target in FILLING:
            with self._fakes:
                foreseen = target(*args, **kwargs)
            if _is_integer_of_size(foreseen) and foreseen.device.type == "cpu":
                value = cast(int, fill_value(target, args, kwargs))
                whole = torch.empty_strided(foreseen.shape, foreseen.stride(), dtype=foreseen.dtype)
                return whole.fill_(value)
        self._refuse_writing_data(target, args, kwargs)
        masks = list(masks_in(args)) if target in _CHOOSING else []
        positions = {id(mask): mask.nonzero().unbind(1) for mask in masks}
        made = self._shapes.result_of(target, args, kwargs, positions)
        return as_made(self._fakes, target, args, kwargs, made)

    def _is_known(self, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        if torch.Tag.nondeterministic_seeded in target.tags:
            return False
        given = list(_tensors_in((args, tuple(kwargs.values()))))
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            return False
        if returns_views(target) and target is not aten.lift_fresh.default:
            return True  # it shares the memory that a write would have to be refused for
        if not self._knowing or not all(map(_is_integer_of_size, given)):
            return False
        if not returns_tensors(target) or depends_on_values(target, args) or target is _PACK:
            return True
        call = torch.get_default_dtype(), call_like(target, args, kwargs)
        if call not in self._foreseen:
            with self._fakes:
                foreseen = target(*args, **kwargs)
            self._foreseen[call] = all(map(_is_integer_of_size, _tensors_in(foreseen)))
        return self._foreseen[call]

    def _refuse_writing_data(
        self, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        for tensor in _tensors_in(tuple(written_arguments(target, args, kwargs).values())):
            if isinstance(tensor, FakeTensor):
                continue
            if self._knowing:
                raise KnownOverwritten(tensor)
            raise CaptureError(
                f"{target} writes into a tensor of shape {tuple(tensor.shape)} that is no buffer",
                advice="make it one with register_buffer",
            )


def depends_on_values(target: OpOverload, args: tuple[object, ...]) -> bool:
    """Whether the shape of the result follows from values: `nonzero`, and indexing by a mask."""
    return torch.Tag.dynamic_output_shape in target.tags and (
        target is not aten.index.Tensor or any(True for _ in masks_in(args))
    )


def masks_in(args: tuple[object, ...]) -> Iterator[Tensor]:
    """The known masks that an op selects elements by, if its other operands are unknown."""
    chosen = args[1] if len(args) > 1 else ()
    for tensor in _tensors_in(chosen):
        if tensor.dtype in (torch.bool, torch.uint8) and not isinstance(tensor, FakeTensor):
            yield tensor


def _detached(value: Any) -> Any:
    """The same without autograd's history of real tensors: a stand-in would copy it, and their gradients."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_detached, value))
    is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
    return value.detach() if is_real and value.requires_grad else value


def _tensors_in(value: object) -> Iterable[Tensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def _short(target: OpOverload) -> str:
    """The name of an op without its namespace and overload."""
    return schema_of(target).name.partition("::")[2]


def _is_integer_of_size(tensor: Tensor) -> bool:
    inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return not inexact and tensor.numel() <= _KNOWN_ELEMENTS


@dataclass(frozen=True, slots=True)
class Event:
    """One op as it was dispatched, its tensors replaced by their storage views.

    `nodes` are the autograd nodes that it created; `node` is the one whose backward it runs in. `merges`
    marks an addition of autograd's engine that sums two gradients of one tensor.
    """

    target: OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    results: tuple[StorageView | None, ...]
    single: bool
    origin: Origin
    nodes: range
    node: int | None
    merges: bool


@dataclass(frozen=True, slots=True)
class Incoming:
    """The gradients that an autograd node receives for the outputs of its op, before event `position`."""

    node: int
    position: int
    gradients: tuple[StorageView | None, ...]


@dataclass(frozen=True, slots=True)
class AnswerHere:
    """What forward asked about known tensors before event `position`, and the answer."""

    position: int
    ask: Callable[..., object]
    views: tuple[StorageView, ...]
    answer: object
    origin: Origin


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves __init_subclass__ untyped
    """Records each op as an Event, and when each storage is allocated and freed."""

    supports_higher_order_operators = True  # so that they arrive here and are refused

    def __init__(
        self,
        rehearsal: Rehearsal,
        origins: Origins,
        unknown: Container[str] = frozenset(),
        assumed: Sequence[Check] = (),
        trying: bool | None = None,
    ) -> None:
        """`assumed` are answers in the order of the questions; `trying` is an answer to the next."""
        super().__init__()  # type: ignore[no-untyped-call]  # so is this
        self.answers: list[AnswerHere] = []
        self.reading = True  # while values that are read are noted
        self.checks: list[tuple[Tensor, Check]] = []  # those that were met, with what was asked
        self.assuming = False  # while answers may be assumed
        self.foreseeing = False  # while answers may be computed ahead
        self._assumed, self._asked, self._trying, self._tried = assumed, 0, trying, False
        self._decided: dict[StorageView, bool] = {}
        self._uniform: set[StorageView] = set()
        self._good: dict[StorageView, bool] = {}  # whether all shall be true, or none
        self.events: list[Event] = []
        self.book = StorageBook(lambda: len(self.events))
        self.constants: dict[int, Tensor] = {}  # by storage number
        self.literals: set[int] = set()  # constants written in code
        self.differentiable: dict[int, tuple[Tensor, str]] = {}  # not of the step, by id(); and the line
        self.looks_at_values = False  # of integers that are known
        self.incoming: list[Incoming] = []
        self.accumulated: list[int] = []  # leaves, by id(), in the order in which autograd comes to them
        self.between_nodes = False  # then ops are the engine's sums of gradients
        self._rehearsal, self._origins, self._unknown = rehearsal, origins, unknown
        self._made_at: dict[int, str] = {}  # by storage: the line, or the name of the argument
        self._nodes_made = nodes_made()
        self._by_classes = False  # while the class of a wrapper does an op
        self.generator: WatchedGenerator | None = None  # while forward runs
        self.drawing = False  # while numbers that are drawn are known
        self._numbers: set[int] = set()  # their storages
        self._literal = False  # while unknown tensors are literals
        self.arguments: dict[StorageView, Tensor] = {}  # small ones, to foresee answers with
        self.buffers: dict[StorageView, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not isinstance(func, OpOverload):
            raise CaptureError(
                f"{func} branches or loops while the step runs",
                advice="branch in Python before the step, or unroll it",
            )
        if in_charge(types):
            return self._by_class(func, types, args, dict(kwargs or {}))
        if func is _DEVICE and isinstance(args[0], Tensor):
            return args[0].device  # asked more often than there are ops
        with without_functions():  # looking at tensors is no call of the user's
            return self._dispatched(func, args, dict(kwargs or {}))

    def _by_class(
        self, func: OpOverload, types: Iterable[type], args: tuple[object, ...], given: dict[str, object]
    ) -> object:
        """An op on wrappers, which their class does by other ops.

        Autograd differentiates the whole. If the class unpacks operands and then does this op, that is what
        the last of its ops is for autograd; else none of them is what autograd differentiates.
        """
        if self._by_classes:
            with self:
                return dispatched_by_class(func, types, args, given)
        first, begun = len(self.events), self._nodes_made
        self._by_classes, self._nodes_made = True, nodes_made()
        nodes = range(begun, self._nodes_made)
        try:
            with self:
                result = dispatched_by_class(func, types, args, given)
        finally:
            self._by_classes = False
        last = self.events[-1] if len(self.events) > first else None
        if last is not None and last.target is func:
            self.events[-1] = replace(last, nodes=nodes)
        return result

    def _dispatched(self, func: OpOverload, args: tuple[object, ...], given: dict[str, object]) -> object:
        interruptible()
        if self._tried and func.namespace == "aten":
            raise WentOn
        if func.namespace in _COLLECTIVES:
            raise CaptureError(
                f"forward calls the collective {_short(func).strip('_')}",
                where=self._origins.here().source,
                advice="a planned step exchanges nothing with other workers: call it outside forward, on what"
                " the model returns, or in a function under @torch.compiler.disable, and plan the parts"
                f" around it: {COMPILE}",
            )
        if has_sparse(leaves((args, tuple(given.values())))):
            reading = reading_of(func, args, given)
            if not reading.args:
                return reading.result
            func, args, given = READ_SPARSE, reading.args, {}
        if func in _OF_ONE_DTYPE:
            self._refuse_dtypes(func, args)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse_own_generator(func, args, given)
        if not returns_tensors(func) and not written_names(func):
            if func in _ASSERTIONS and self.assuming and isinstance(args[0], FakeTensor):
                error = RuntimeError(args[1] if len(args) > 1 else _ASSERTED)
                self.checks.append((args[0], Check(expected=True, error=error)))
                return None
            foreseen = self._foreseen_answer(func, args)
            if foreseen is not None:
                return foreseen
            assumed = self._assumed_answer(func, args)
            if assumed is not None:
                return assumed
            answer = self._rehearsal.run(func, args, given)
            if func.namespace == "aten":  # prim.device and its like read no values
                rest = tuple(value for value in args if not isinstance(value, Tensor))
                self.note_read(Question(func, rest, given) if rest or given else func, args, answer)
            return answer
        if func is torch.ops.aten.lift_fresh.default:
            self.enter_literal(args[0])
        placed = tuple(self._placed(value) for value in args)  # before it runs: it may change their shapes
        placed_by_name = {name: self._placed(value) for name, value in given.items()}
        drawn = self._drawn(func, (args, given), (placed, placed_by_name)) if self.drawing else None
        result = self._run(func, args, given) if drawn is None else drawn
        self._note(func, placed, placed_by_name, result)
        for made in _tensors_in(drawn):
            self._numbers.add(self.book.view_of(made).storage)
        self._note_chosen(func, args, result)
        return result

    def _refuse_dtypes(self, func: OpOverload, args: tuple[object, ...]) -> None:
        """Kernels refuse operands of two dtypes, and shape functions do not look."""
        dtypes = [value.dtype for value in args if isinstance(value, Tensor)]
        if any(dtype is not dtypes[-1] for dtype in dtypes):
            names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
            raise CaptureError(
                f"{_short(func)} is given operands of {names}, and eager refuses that too",
                where=self._origins.here().source,
                advice=f"cast one of them, as in x.to({dtypes[-1]}), or use torch.autocast",
            )

    def _refuse_own_generator(
        self, func: OpOverload, args: tuple[object, ...], given: Mapping[str, object]
    ) -> None:
        if any(isinstance(value, torch.Generator) for value in (*args, *given.values())):
            raise CaptureError(
                f"forward draws from a generator of its own ({_short(func)})",
                where=self._origins.here().source,
                advice="a plan draws from PyTorch's default generator alone: leave generator= out, or draw"
                " outside"
                " forward and pass the tensor in",
            )

    def _run(self, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        line = self._origins.here().source if self._unknown else ""
        if self.differentiable:
            args, kwargs = _detached(args), {name: _detached(value) for name, value in kwargs.items()}
        try:
            return self._rehearsal.run(func, args, kwargs, known=not line or line not in self._unknown)
        except KnownOverwritten as found:
            found.made_at = self._made_at.get(self.book.view_of(found.tensor).storage, "")
            raise

    def _drawn(
        self,
        func: OpOverload,
        given: tuple[tuple[object, ...], Mapping[str, object]],
        placed: tuple[tuple[object, ...], Mapping[str, object]],
    ) -> object | None:
        """A few numbers that forward draws, or the result of an op on nothing but such numbers.

        Other draws are made on zeros: they leave the generator where eager leaves it.
        """
        if written_names(func) and not draws(func, *given):
            return None
        if draws(func, *given):
            if bound_arguments(func, *given).get("generator") is not None:
                raise Undecided(None, self._origins.here())
            made = run_on_zeros(func, *placed)
            is_number = isinstance(made, Tensor) and made.numel() <= _DRAWN_ELEMENTS and made.dim() < 2
            is_number = is_number and not written_names(func)
        else:
            operands = list(_tensors_in((given[0], tuple(given[1].values()))))
            is_number = bool(operands) and all(self._is_number(operand) for operand in operands)
            made = func(*given[0], **given[1]) if is_number else None
        is_number = is_number and self._origins.here().source not in self._unknown
        return made if is_number and isinstance(made, Tensor | list | tuple) else None

    def _is_number(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and self.book.view_of(tensor).storage in self._numbers

    def _foreseen_answer(self, func: OpOverload, args: tuple[object, ...]) -> object:
        """The answer to a question about a tensor that follows from what exists before the step runs.

        Of arguments, yes or no is answered; a number is likely to be another one at the next call.
        """
        tensor = args[0] if args else None
        if func not in _READS or not isinstance(tensor, FakeTensor):
            return None
        if self.assuming and not self.foreseeing and tensor.dtype is not torch.bool:
            raise Undecided(None, self._origins.here())
        if not self.foreseeing:
            return None
        view = self.book.view_of(tensor)
        known = self.buffers | (self.arguments if tensor.dtype is torch.bool else {})
        value = value_at(self.events, view, known)
        if value is None:
            return None
        answer = func(value)
        self.looks_at_values = True
        self.answers.append(AnswerHere(len(self.events), func, (view,), answer, self._origins.here()))
        return answer

    def _assumed_answer(self, func: OpOverload, args: tuple[object, ...]) -> bool | None:
        """The answer to a question whose answer no argument determines, if the step may assume one."""
        tensor = args[0] if args else None
        if not self.assuming or not isinstance(tensor, FakeTensor):
            return None
        if func not in _READS or tensor.dtype is not torch.bool:
            return None
        view = self.book.view_of(tensor)
        if view in self._decided:
            return self._decided[view]
        number = self._asked
        self._asked += 1
        if number < len(self._assumed):
            self.checks.append((tensor, self._assumed[number]))
            return self._assumed[number].expected
        if self._trying is None:
            raise Undecided(self._good.get(view), self._origins.here())
        self._tried = True
        return self._trying

    def note_finite(self, result: Tensor, *, is_good: bool) -> None:
        """A tensor that is True where numbers are finite or, unless `is_good`, where they are not."""
        self._good[self.book.view_of(result)] = is_good

    def _decide(self, event: Event) -> None:
        """Some answers hold for all values: a number drawn from [0, 1) is not below 0.

        A step that asks whether everything is finite expects that it is.
        """
        made = event.results[0] if event.results else None
        source = event.args[0] if event.args else None
        if made is not None and event.target in _UNIFORM:
            self._uniform.add(made)
        if made is None or not isinstance(source, StorageView):
            return
        if source in self._uniform and event.target in _COMPARISONS:
            holds = {_COMPARISONS[event.target](drawn, event.args[1]) for drawn in (0.0, _BELOW_ONE)}
            if len(holds) == 1:
                self._decided[made] = holds.pop()
        wanted = {aten.all.default: True, aten.any.default: False}.get(event.target)
        if wanted is not None and self._good.get(source) is wanted:
            self._good[made] = wanted

    def note_given(self, tensor: Tensor, name: str) -> None:
        """An argument, which may have values."""
        self._made_at.setdefault(self.book.view_of(tensor).storage, name)

    def made_at(self, tensor: Tensor) -> str:
        """The line of the user's that made the memory of a tensor, if an op of the step did."""
        return self._made_at.get(self.book.view_of(tensor).storage, "")

    def note_read(self, ask: Callable[..., object], tensors: Iterable[object], answer: object) -> None:
        """Forward read this of tensors with values."""
        self.looks_at_values = True
        asked = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        if self.reading and not any(isinstance(tensor, FakeTensor) for tensor in asked):
            views = cast(tuple[StorageView, ...], tuple(map(self._placed, asked)))
            self.answers.append(AnswerHere(len(self.events), ask, views, answer, self._origins.here()))

    def _note_chosen(self, func: OpOverload, args: tuple[object, ...], result: object) -> None:
        """The shape of this result holds for other values only if as much is chosen."""
        if not depends_on_values(func, args):
            return
        if isinstance(result, FakeTensor):
            for mask in masks_in(args):
                self.note_read(count_of, (mask,), count_of(mask))
        else:
            for made in _tensors_in(result):
                self.note_read(shape_of, (made,), shape_of(made))

    def enter_node(self, node: int, gradients: Sequence[Tensor | None]) -> None:
        """Autograd is about to differentiate the op of this node."""
        self.between_nodes = False
        wrapped = [g for g in gradients if g is not None and is_wrapper(type(g))]
        with without_functions():
            whole = (None if g is None or is_wrapper(type(g)) else self.book.view_of(g) for g in gradients)
            views = *whole, *map(self.book.view_of, opened(wrapped))
        self.incoming.append(Incoming(node, len(self.events), views))

    def accumulate(self, leaf: int, _gradients: Sequence[Tensor | None]) -> None:
        """Autograd is about to accumulate the gradient of a leaf."""
        self.accumulated.append(leaf)

    def _note(
        self, target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> None:
        now = len(self.events)
        returned = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        returned = returned if schema_of(target).returns else ()
        event = Event(
            target,
            args,
            kwargs,
            tuple(self.book.view_of(v, born=now) if isinstance(v, Tensor) else None for v in returned),
            isinstance(result, Tensor),
            self._origins.here(),
            range(self._nodes_made, nodes_made()),
            running_node(),
            self.between_nodes,
        )
        for view, nbytes in extra_bytes(target, args, kwargs, event.results):
            self.book.lifetimes[view.storage].nbytes += nbytes
        if target is aten.resize_.default and event.results[0] is not None:
            grown = self.book.lifetimes[event.results[0].storage]
            grown.nbytes = max(grown.nbytes, event.results[0].extent_bytes())
        self._nodes_made = event.nodes.stop
        self._note_draw(event)
        self.events.append(event)
        if now % _TOLD_EVERY == 0:
            tell_phase("capturing ops", now)
        self._decide(event)
        for made in event.results:
            if made is not None and self.book.lifetimes[made.storage].born == now:
                self._made_at[made.storage] = event.origin.source

    def _note_draw(self, event: Event) -> None:
        if not draws(event.target, event.args, event.kwargs) or moves_generator(event.target):
            return
        if bound_arguments(event.target, event.args, event.kwargs).get("generator") is not None:
            raise CaptureError(
                f"forward draws from a generator of its own ({event.target})",
                where=event.origin.source,
                advice="draw from PyTorch's own: leave generator= out, and seed with torch.manual_seed before"
                " the call; or draw outside forward and pass the numbers in",
            )
        if self.generator is not None:
            self.generator.drawn()

    @contextmanager
    def writing_literals(self) -> Iterator[None]:
        """Within, tensors that no op was seen to make are made of numbers."""
        was, self._literal = self._literal, True
        try:
            yield
        finally:
            self._literal = was

    def run_script(self, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        """A TorchScript function. Of the tensors that no op makes, those that it is given are no literals."""
        self._placed((args, tuple(kwargs.values())))
        with self.writing_literals():
            result = function(*args, **kwargs)
            self._placed(result)
        return result

    def _placed(self, value: object) -> object:
        if isinstance(value, (tuple, list)):
            return tuple(self._placed(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        if value.requires_grad and not isinstance(value, FakeTensor):
            self.differentiable.setdefault(id(value), (value, self._origins.here().source))
        if not self.book.knows(value):
            if value.requires_grad and isinstance(value, FakeTensor):
                shape = tuple(value.shape)
                raise CaptureError(
                    f"a tensor of shape {shape} requires a gradient, and no op was seen to make it",
                    where=self._origins.here().source,
                    advice="leave what makes it to Python, around what is planned",
                )
            self._enter_constant(value)
            if self._literal:
                self.literals.add(self.book.view_of(value).storage)
        return self.book.view_of(value)

    def enter_literal(self, value: object) -> None:
        """A tensor of numbers that are the same at each call, as those written in code are."""
        if isinstance(value, Tensor) and not self.book.knows(value):
            self._enter_constant(value)
            self.literals.add(self.book.view_of(value).storage)

    def _enter_constant(self, tensor: Tensor) -> None:
        self.constants[self.book.view_of(tensor).storage] = tensor


# Functions that take the values of a tensor without dispatching an op that reads them.
TAKING_VALUES = frozenset(
    (
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__index__,
        Tensor.__deepcopy__,
        Tensor.__reduce_ex__,
        Tensor.data_ptr,
        Tensor.untyped_storage,
        Tensor.storage,
        Tensor.new_tensor,
        Tensor.tensor_split,
        Tensor.hsplit,
        Tensor.vsplit,
        Tensor.dsplit,
        torch.tensor_split,
        torch.hsplit,
        torch.vsplit,
        torch.dsplit,
        torch.tensor,
        torch.as_tensor,
        torch.asarray,
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
        PAD_SEQUENCES,
    )
)
_FINITE = {torch.isfinite: True, Tensor.isfinite: True} | dict.fromkeys(
    (torch.isnan, Tensor.isnan, torch.isinf, Tensor.isinf), False
)


class ReadsOutsideOps(TorchFunctionMode):
    """Notes what functions read of known tensors without an op that a Watch would see.

    `one_hot` reads the largest class, and what matters of it is that it is below the number of classes.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _FINITE:
            result = func(*args, **given)
            self._watch.note_finite(result, is_good=_FINITE[func])
            return result
        if func is PACK_SEQUENCES:
            return self._pack(*args, **given)
        if func is PAD_SEQUENCES:
            return self._pad(*args, **given)
        if func in TAKING_VALUES:
            self._note_all((args, tuple(given.values())), is_copy=func in (torch.as_tensor, torch.asarray))
        if (reduced := differentiated_as_eager(func, args, given)) is not None:
            return reduced
        if func is torch.nn.functional.one_hot:
            return self._one_hot(*args, **given)
        if func is torch.nn.functional.ctc_loss:
            return self._ctc_loss(*args, **given)
        return func(*args, **given)

    def _pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """The lengths become a guard, and how many sequences have each position a constant of the step."""
        self._note_all(lengths)
        data, counts = PACK_SEQUENCES(x, lengths, batch_first)
        return data, self._constant(counts)

    def _pad(
        self, data: Tensor, counts: Tensor, batch_first: bool, padding: float, total: int
    ) -> tuple[Tensor, Tensor]:
        """It writes the lengths into memory of the process, without an op."""
        self._note_all(counts)
        padded, lengths = PAD_SEQUENCES(data, counts, batch_first, padding, total)
        return padded, self._constant(lengths)

    def _constant(self, known: Tensor) -> Tensor:
        """A copy, made without an op that eager would not run."""
        made = torch.frombuffer(bytearray(known.numpy().tobytes()), dtype=known.dtype)
        self._watch.enter_literal(made)
        return made

    def _ctc_loss(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        """On the CPU it takes the lengths as numbers, and its mean makes a tensor of them without an op."""
        lengths = [input_lengths, target_lengths]
        for place, length in enumerate(lengths):
            is_known = isinstance(length, Tensor) and not isinstance(length, FakeTensor)
            if is_known and log_probs.device.type == "cpu":
                self._note_all(length)
                lengths[place] = tuple(length.tolist())
        own_mean = reduction == "mean" and isinstance(lengths[1], tuple)
        how = blank, "none" if own_mean else reduction, zero_infinity
        losses: Tensor = torch.nn.functional.ctc_loss(log_probs, targets, lengths[0], lengths[1], *how)
        if not own_mean:
            return losses
        counts = torch.tensor(lengths[1], dtype=losses.dtype, device=losses.device)
        return (losses / counts.clamp_min(1)).mean()

    def _note_all(self, values: object, *, is_copy: bool = False) -> None:
        if is_copy and isinstance(values, tuple) and values[0] and isinstance(values[0][0], Tensor):
            return
        for tensor in _tensors_in(values):
            if not isinstance(tensor, FakeTensor) and is_small_integer(tensor):
                self._watch.note_read(contents_of, (tensor,), contents_of(tensor))

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes <= 0 or isinstance(tensor, FakeTensor):
            return torch.nn.functional.one_hot(tensor, num_classes)
        self._watch.reading = False
        try:
            result = torch.nn.functional.one_hot(tensor, num_classes)
        finally:
            self._watch.reading = True
        self._watch.note_read(IsBelow(num_classes), (tensor,), True)
        return result


@contextmanager
def followed(watch: Watch, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Within, `watch` learns when autograd enters a node, with which gradients, and when it leaves it."""

    def leave(_inputs: object, _outputs: object) -> None:
        watch.between_nodes = True

    for node in nodes_below(outputs):
        node.register_prehook(partial(watch.enter_node, sequence_number(node)))
        node.register_hook(leave)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            node.register_prehook(partial(watch.accumulate, id(leaf)))
    yield
    watch.between_nodes = False


def nodes_below(outputs: Sequence[Tensor]) -> Iterator[Node]:
    """The nodes of autograd that backward from these tensors may run."""
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
