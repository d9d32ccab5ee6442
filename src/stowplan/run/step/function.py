"""The step as a chain of autograd nodes, each of which runs a piece of the backward half.

Halves are the generated source as two functions, ready to be called, with the tier that they store tensors
in. A traceback shows the generated line that an error came from, and a note on the error the module.

The nodes are joined by tokens without contents. Autograd runs the first, then what takes the gradients that
it returns, then the next: so a gradient is accumulated, seen by hooks, used by an optimizer and freed while
backward goes on, in the order of `Source.pieces`. Autograd has an order of its own for the gradients that one
node returns: where hooks would see it, each of a piece's gradients gets a node.

Incoming gradients: a plan takes a layout other than the captured one as it is, with eager's bits, if the
captured calls run on it and no op then writes over an operand that is laid out otherwise than eager's result.
Others are copied into the captured layout, which gives the gradients of eager for the copy: those for the
original within rounding.
"""

import linecache
import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from stowplan.capture import Captured, Program, Ref
from stowplan.capture.layouts import swayed_ops
from stowplan.capture.program import as_in_forward
from stowplan.capture.recording import output_keys
from stowplan.capture.stand_ins import same_strides, stride_of
from stowplan.errors import BadUse, TensorChanged
from stowplan.plan.options import Socket
from stowplan.plan.plan import Compute, RecomputeOp, Step, Tier
from stowplan.run.step.source import Source, called
from stowplan.torch_private import below_autograd, has_hooks, is_view, storage_id, version_of
from stowplan.units import format_bytes


class Away(Protocol):
    """One storage that was given to a tier, under all the names it had."""

    def wait(self) -> None:
        """Return when the last transfer begun is done; raises TierFailed if it could not be."""

    def load(self) -> tuple[Tensor, ...]:
        """Begin to read it back; the tensors are there at once, their contents after `wait`."""


class LiveTier(Protocol):
    """A tier as generated code sees it."""

    def store(self, *tensors: Tensor) -> Away:
        """Begin to write the storage that all of `tensors` are in."""

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make room for storages of these bytes before a step needs it; raises TierFull."""

    def described(self) -> Tier:
        """The tier as a planner sees it, with rates that were measured."""


TIERS: Socket[Callable[[torch.device], LiveTier]] = Socket("run", "offload")
"""Which tier a device's tensors go to."""

DISKS: Socket[Callable[[], tuple[str, Tier]]] = Socket("run", "offload")
"""The folder of spill files and its disk as a tier."""


def tier_for(device: torch.device) -> LiveTier:
    """The tier for a device, one for all steps of the process."""
    return TIERS.of("offload")(device)


Forward: TypeAlias = Callable[[Sequence[Tensor]], tuple[tuple[Tensor, ...], list[Tensor]]]
Backward: TypeAlias = Callable[
    [Sequence[Tensor], list[Tensor], list[Tensor], list[Tensor]], Generator[None, None, None]
]

_numbers = count()  # of the steps compiled in this process


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Halves:
    """The functions that `source` defines."""

    source: Source
    forward: Forward
    backward: Backward


def compiled(
    source: Source,
    tier: LiveTier | None = None,
    new_arena: Callable[[], object] | None = None,
    holding: object = None,
) -> Halves:
    """Run the text that defines the two functions. It is generated here, from ops of PyTorch and a tier."""
    scope: dict[str, object] = {"torch": torch, "ops": torch.ops, "aten": torch.ops.aten, "tier": tier}
    scope |= {"as_in_forward": as_in_forward, "new_arena": new_arena, "holding": holding}
    file = f"<stowplan step {next(_numbers)}>"
    code = compile(source.text, file, "exec")
    exec(code, scope)  # noqa: S102 -- the text is stowplan's own, made from op names, literals and its own counters
    forward, backward = cast(Forward, scope["forward"]), cast(Backward, scope["backward"])
    places = _Places(file, source)

    def run_forward(primals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """As kernels run in eager: some ask whether gradients are enabled, but none records anything."""
        with places.noted(), below_autograd(), torch.enable_grad():
            return forward(primals)

    def run_backward(
        primals: Sequence[Tensor], saved: list[Tensor], tangents: list[Tensor], handed: list[Tensor]
    ) -> Generator[None, None, None]:
        kinds = {each.device.type for each in (*primals, *tangents)}
        pieces = backward(primals, saved, tangents, handed)
        del primals, saved, tangents
        for _ in source.pieces:
            with places.noted(), _casting_nothing(kinds):
                next(pieces)
            yield

    halves = Halves(source, run_forward, run_backward)
    weakref.finalize(halves, linecache.cache.pop, file, None).atexit = False
    return halves


@contextmanager
def _casting_nothing(kinds: Iterable[str]) -> Iterator[None]:
    """The ops have the casts of forward in them: autocast around backward must add none."""
    with ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _Places:
    """Where the lines of a compiled text came from."""

    def __init__(self, file: str, source: Source) -> None:
        self._file, self._places = file, source.places
        linecache.cache[file] = len(source.text), None, source.text.splitlines(keepends=True), file

    @contextmanager
    def noted(self) -> Iterator[None]:
        """An error that comes from the text says which module's op was running."""
        try:
            yield
        except BaseException as fault:
            place = self._places.get(self._line(fault.__traceback__), "")
            if place:
                fault.add_note(f"In the planned step: {ascii(place)[1:-1]}")
            raise

    def _line(self, trace: TracebackType | None) -> int:
        found = 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file:
                found = trace.tb_lineno
            trace = trace.tb_next
        return found


_log = logging.getLogger("stowplan")
_Strides = tuple[tuple[int, ...], ...]


class IncomingGradients:
    """Of one step: `suited` makes gradients that come in ready for its backward half."""

    def __init__(self, captured: Captured, steps: Sequence[Step]) -> None:
        self._captured = captured
        self._names = [name for name in captured.program.tangents if name is not None]
        tensors = (captured.graph.tensors[name] for name in self._names)
        self._expected: _Strides = tuple(map(stride_of, tensors))
        runs = (step for step in steps if isinstance(step, (Compute, RecomputeOp)))
        self._overwriting = frozenset(step.op for step in runs if step.overwrites)
        self._taken: dict[_Strides, bool] = {}

    def suited(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients in the order of the step's tangents; the list is emptied of what is copied."""
        strides = tuple(gradient.stride() for gradient in gradients)
        if strides == self._expected or self._takes(strides):
            return gradients
        for number, expected in enumerate(self._expected):
            gradients[number] = _laid_out(gradients[number], expected)
        return gradients

    def _takes(self, strides: _Strides) -> bool:
        if strides not in self._taken:
            captured, given = self._captured, dict(zip(self._names, strides, strict=True))
            swayed = swayed_ops(captured.graph, captured.program, given)
            self._taken[strides] = swayed is not None and self._overwriting.isdisjoint(swayed)
            if not self._taken[strides]:
                _log.warning(
                    "gradients come in with strides %s, and the step was captured for %s: they are copied,"
                    " and the gradients of parameters are those of eager within rounding",
                    *(", ".join(map(str, each)) for each in (strides, self._expected)),
                )
        return self._taken[strides]


def _laid_out(gradient: Tensor, stride: tuple[int, ...]) -> Tensor:
    if same_strides(tuple(gradient.shape), gradient.stride(), stride):
        return gradient
    copy = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device)
    return copy.copy_(gradient)


Zeros: TypeAlias = Callable[[], Tensor]
Repeat: TypeAlias = Callable[[Sequence[Tensor | None]], None]  # takes the incoming gradients


class Leaving(NamedTuple):
    """The tensors whose gradients are about to leave a step, and those of them to be consumed at once.

    `repeat` runs the step and its backward a second time.
    """

    differentiated: Sequence[Tensor]
    consumed: Sequence[Tensor]
    repeat: Callable[[], None] | None


class Consumer(Protocol):
    """Takes gradients that leave a step, and updates their parameters with them."""

    def repeat_for(
        self, run: Callable[[], Sequence[Tensor]], given: Iterable[Tensor], written: Iterable[Tensor]
    ) -> Repeat | None:
        """How to run a step, whose gradients are consumed, a second time, if that is wanted.

        Called before forward. `run` is the forward, `given` are its tensors, and it changes `written`.
        """

    def begins(self, leaving: Leaving) -> None:
        """Called within backward, before the first gradient leaves."""

    def fails(self, fault: BaseException) -> None:
        """The step's backward ended in between."""


class Before:
    """The buffers that a step changes, as they were, to put back if the step fails.

    Entered for the forward half and again for the backward half. What someone else has changed between the
    two is left as it is.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._kept = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._versions: list[int | None] | None = None  # of the buffers after the forward half

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = [version_of(buffer) for buffer, _ in self._kept]
        if fault is None:
            self._versions = now
            return
        for (buffer, kept), version, expected in zip(self._kept, now, self._versions or now, strict=True):
            if version == expected:
                buffer.copy_(kept)


class _Part(NamedTuple):
    """Gradients of a piece that one autograd node returns: all, or one of them."""

    piece: int
    primals: tuple[str, ...]


class _Watched(NamedTuple):
    """A tensor that others can change, and its version when the forward half was done."""

    tensor: Tensor
    version: int | None


@dataclass(slots=True, weakref_slot=True, eq=False)
class Run:
    """One forward half and its backward half. `primals` are, by piece, the ids of what it differentiates."""

    halves: Halves
    program: Program
    primals: tuple[tuple[str, ...], ...]
    differentiated: tuple[bool, ...]  # by output of the source
    incoming: IncomingGradients
    consumer: Consumer | None = None
    repeat: Repeat | None = None
    latched: dict[int, Tensor] = field(default_factory=dict)  # incoming gradients by output
    saved: list[Tensor] | None = None  # between the halves
    _given: list[Tensor] = field(default_factory=list)
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _zeros: tuple[Zeros, ...] = ()
    _before: Before | None = None
    _backward: Generator[None, None, None] | None = None
    _handed: list[Tensor] = field(default_factory=list)
    _made: dict[str, Tensor] = field(default_factory=dict)  # gradients of the last piece, by id
    _leaving: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))

    def forward(self, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs, none of which is a tensor that came in."""
        source, given = self.halves.source, dict(found)
        self._before = Before(given[name] for name in source.updated) if source.stored_bytes else None
        with self._before or nullcontext():
            made, saved = self.halves.forward([given[name] for name in source.forward_primals])
        externals = set(map(id, given.values()))
        outputs = tuple(output.detach() if id(output) in externals else _alone(output) for output in made)
        # Detached, so that what waits for backward does not hold on to the node that it waits in.
        given.update((name, o.detach()) for name, o in zip(source.outputs, outputs, strict=True))
        self.saved, self._given = saved, [given[name] for name in source.backward_primals]
        read = dict.fromkeys(name for piece in source.pieces for name in piece.read)
        self._watched = {name: _Watched(given[name], version_of(given[name])) for name in read}
        self._zeros = tuple(map(_zeros_for, outputs))
        if self.consumer:
            pieces = list(zip(source.pieces, self.primals, strict=True))
            every = [found[name] for _, names in pieces for name in names]
            self._leaving = every, [found[n] for piece, names in pieces if piece.consumed for n in names]
        return outputs

    @property
    def held_bytes(self) -> int:
        """Of tensors that wait for backward."""
        kept = (tensor.untyped_storage() for tensor in self.saved or () if isinstance(tensor, Tensor))
        return sum({storage_id(storage): storage.nbytes() for storage in kept}.values())

    def begin_backward(self, incoming: tuple[Tensor | None, ...]) -> None:
        """Called once, with the gradients that come in for the outputs."""
        if self.saved is None:
            raise BadUse(
                "backward ran a second time; what it needs is freed by the first (retain_graph is not kept)"
            )
        if self.consumer:
            repeat = partial(self.repeat, incoming) if self.repeat else None
            self.consumer.begins(Leaving(*self._leaving, repeat))
        tangents = _tangents(self, incoming, self._zeros)
        self._backward = self.halves.backward(self._given, self.saved, tangents, self._handed)
        self.saved, self._given = None, []

    def parts(self, found: Mapping[str, Tensor]) -> list[_Part]:
        """What each node of the chain returns; hooks on its gradients divide a piece among several nodes."""
        return [
            _Part(number, primals)
            for number, names in enumerate(self.primals)
            for primals in (zip(names, strict=True) if self._is_ordered(number, found) else (names,))
        ]

    def _is_ordered(self, number: int, found: Mapping[str, Tensor]) -> bool:
        names = self.primals[number]
        shared = self.halves.source.pieces[number].consumed or len(names) < 2
        return not shared and any(has_hooks(found[name]) for name in names)

    def leave(self, part: _Part) -> tuple[Tensor, ...]:
        """The gradients that a node returns."""
        piece = self.primals[part.piece]
        if part.primals[0] == piece[0]:
            self._resume(part.piece)
        gradients = tuple(self._made[self.program.gradients[name]] for name in part.primals)
        if part.primals[-1] == piece[-1]:
            self._made.clear()
        return gradients

    def _resume(self, number: int) -> None:
        pieces, backward = self.halves.source.pieces, self._backward
        if backward is None:
            raise BadUse("a part of backward ran a second time; what it needs is freed by the first")
        try:
            with self._before or nullcontext():
                self._check_versions(number)
                next(backward)
        except BaseException as fault:
            self._end(backward)
            if number:
                left = sum(map(len, self.primals[:number]))
                fault.add_note(
                    f"{left} of {sum(map(len, self.primals))} gradients had left the step when its backward"
                    " failed, as in eager: clear .grad before the step is repeated"
                )
            if self.consumer:
                self.consumer.fails(fault)
            raise
        self._made = dict(zip(pieces[number].gradients, self._handed, strict=True))
        self._handed.clear()
        if number == len(pieces) - 1:
            self._end(backward)

    def _end(self, backward: Generator[None, None, None]) -> None:
        self._backward = self._before = None
        self._watched.clear()
        self._handed.clear()
        backward.close()

    def _check_versions(self, number: int) -> None:
        """As autograd does for what it saves: nobody may have changed what the gradients depend on."""
        for name, recomputes in self.halves.source.pieces[number].read.items():
            tensor, version = self._watched[name]
            if version_of(tensor) != version:
                raise TensorChanged(
                    f"{called(self.program, name)!r}, {tensor.dtype} of shape {tuple(tensor.shape)}, has been"
                    f" modified by an inplace operation since forward (version {version_of(tensor)},"
                    f" expected {version}), and backward needs it as it was"
                    f"{': the plan recomputes from it' if recomputes else ''}; change it after backward, or"
                    " work on a copy"
                )


class StepFunction(torch.autograd.Function):
    """The forward half on call, the first piece of the backward half on backward."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, part: _Part, found: Mapping[str, Tensor], token: Tensor | None, *primals: Tensor
    ) -> tuple[Tensor, ...]:
        del token, primals  # autograd joins the node to where these came from
        ctx.run, ctx.part, outputs = run, part, run.forward(found)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output in outputs if not _is_differentiable(output)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Else what is made of these gradients would be differentiated as constant.
            raise BadUse(
                "create_graph=True asks for gradients that can be differentiated again; a plan has no second"
                " derivatives, so call the model that is not planned for this"
            )
        ctx.run.begin_backward(incoming)
        return None, None, None, None, *ctx.run.leave(ctx.part)


class PieceFunction(torch.autograd.Function):
    """One of the later nodes; runs nothing when it is called."""

    @staticmethod
    def forward(ctx: Any, run: Run, part: _Part, token: Tensor | None, *primals: Tensor) -> Tensor:
        ctx.run, ctx.part = run, part
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=primals[0].device if token is None else token.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.run.leave(ctx.part)


_call_step: Callable[..., tuple[Tensor, ...]] = StepFunction.apply
_call_piece: Callable[..., Tensor] = PieceFunction.apply


def run_step(run: Run, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The outputs, attached to the chain, whose end is made first. `found` are all tensors by id."""
    token: Tensor | None = None
    first, *others = run.parts(found)
    for part in reversed(others):
        token = _call_piece(run, part, token, *(found[name] for name in part.primals))
    return _call_step(run, first, found, token, *(found[name] for name in first.primals))


def ends_of_chain(outputs: Sequence[Tensor]) -> tuple[Node, Node]:
    """The node that a step's backward begins with, below those that follow it, and the one it ends with."""
    first = next(output.grad_fn for output in outputs if output.grad_fn is not None)
    while first.name() != "StepFunctionBackward":
        first = next(below for below, _ in first.next_functions if below is not None)
    last = first
    while (below := last.next_functions[0][0]) is not None and below.name() == "PieceFunctionBackward":
        last = below
    return first, last


def _is_differentiable(output: Tensor) -> bool:
    return output.is_floating_point() or output.is_complex()


def _alone(output: Tensor) -> Tensor:
    """Some losses leave their sum in the block that held its terms: it would stay to the end of backward."""
    oversized = output.dim() == 0 and output.untyped_storage().nbytes() > output.element_size()
    return output.clone() if oversized and not is_view(output) else output


def _zeros_for(output: Tensor) -> Zeros:
    """Makes the gradient of an output that the loss does not depend on. Keeps nothing of it meanwhile."""
    look = output.shape, output.stride()
    return partial(torch.empty_strided, *look, dtype=output.dtype, device=output.device)


def _tangents(run: Run, incoming: tuple[Tensor | None, ...], zeros: tuple[Zeros, ...]) -> list[Tensor]:
    tangents = []
    for position, (gradient, expected) in enumerate(zip(incoming, run.differentiated, strict=True)):
        if expected and gradient is None:
            gradient = zeros[position]().zero_()
        if gradient is not None and not expected:
            raise BadUse(_unplanned(run.program, run.halves.source.outputs[position]))
        if gradient is not None:
            tangents.append(run.latched.pop(position, gradient))
    return run.incoming.suited(tangents)


def _unplanned(program: Program, output: str) -> str:
    """Why a gradient for this output is refused, and what to do."""
    keys = output_keys(program.output_spec)
    key = keys[program.outputs.index(Ref(output))]
    pairs = zip(keys, program.tangents, strict=True)
    planned = ", ".join(repr(known) for known, tangent in pairs if tangent is not None)
    return (
        f"a gradient came in for output {key!r}, but the step is planned for a gradient of output {planned}"
        f' alone; use fit(..., outputs="all") for gradients of all outputs, or fit(..., loss={key!r}) if that'
        " is the loss"
    )


def latch(run: Run, position: int, gradient: Tensor | None) -> Tensor | None:
    """Keep a gradient that comes in for the step, and pass one without memory in its place.

    While a function runs, autograd holds on to the gradients it calls it with. This one is the step's alone.
    """
    if gradient is None:
        return None
    run.latched[position] = gradient
    return gradient.new_empty(()).expand(gradient.shape)


class Waiting:
    """Says once that a forward began while others of the model wait, or hold what they left."""

    def __init__(self, name: str) -> None:
        self._name, self._runs, self._said = name, WeakSet[Run](), False
        self._said_held = False

    def begins(self) -> None:
        """A forward is about to run."""
        held = sum(run.held_bytes for run in list(self._runs))
        if held and not self._said:
            self._said = True
            _log.warning(
                "a forward of %s began while an earlier one waits for its backward and holds %s: the budget"
                " is for one forward and its backward. Call backward after each forward, or put both into one"
                " module and fit that. This is said once.",
                self._name,
                format_bytes(held),
            )

    def held_by_others(self, nbytes: int) -> None:
        """Somebody holds tensors of an arena whose step is done."""
        if not self._said_held:
            self._said_held = True
            _log.warning(
                "a forward of %s began while views of gradients of an earlier step keep its arena of %s: the"
                " budget is for one arena. Clone gradients that you keep. This is said once.",
                self._name,
                format_bytes(nbytes),
            )

    def add(self, run: Run) -> None:
        """The run waits from now on, until its backward is done or nobody can call it any more."""
        self._runs.add(run)


_OF_MODEL: WeakKeyDictionary[nn.Module, Waiting] = WeakKeyDictionary()


def waiting_of(model: nn.Module) -> Waiting:
    """The same for all steps that are bound to a model."""
    return _OF_MODEL.setdefault(model, Waiting(type(model).__name__))
