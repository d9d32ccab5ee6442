"""The step as a chain of autograd nodes, each of which runs a piece of the backward half.

Halves are the generated source as two functions, ready to be called, with the tier that they store tensors
in. A traceback shows the generated line that an error came from, and a note on the error the module.

The nodes are joined by tokens without contents. Each output has a node of its own, which keeps the gradient
that comes in for it, after all hooks. Autograd then runs the first piece, then what takes the gradients that
it returns, then the next: so a gradient is accumulated, seen by hooks, used by an optimizer and freed while
backward goes on, in the order of `Source.pieces`. Autograd has an order of its own for the gradients that one
node returns: where hooks would see it, each of a piece's gradients gets a node.
"""

import linecache
import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import call
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from stowplan.capture import Program
from stowplan.capture.program import as_in_forward
from stowplan.errors import BadUse, TensorChanged
from stowplan.plan.pricing import Tier
from stowplan.plan.sockets import Socket
from stowplan.run.step.incoming import IncomingGradients, copied, zeros
from stowplan.run.step.source import Source, called
from stowplan.torch_private import (
    ask_no_hooks,
    below_autograd,
    has_hooks,
    hooks_behind,
    hooks_of,
    is_batched,
    is_view,
    keeps_graph,
    node_class,
    running_backward,
    saved_tensors_are_packed,
    storage_id,
    version_of,
)
from stowplan.units import format_bytes

Prehook: TypeAlias = Callable[[tuple[Tensor, ...]], object]


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
Gradients: TypeAlias = list[Tensor | None]  # None where there is none
Looks: TypeAlias = Mapping[int, Callable[[Tensor | None], None]]  # by position of the output
Backward: TypeAlias = Callable[
    [Sequence[Tensor], list[Tensor], Gradients, Gradients, Looks], Generator[None, None, None]
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
    placing: object = None,
    *,
    records: bool = True,
) -> Halves:
    """Run the text that defines the two functions. It is generated here, from ops of PyTorch and a tier.

    Kernels of forward find gradients enabled if the step `records`.
    """
    scope: dict[str, object] = {"torch": torch, "ops": torch.ops, "aten": torch.ops.aten, "tier": tier}
    scope |= {"as_in_forward": as_in_forward if records else call, "placing": placing}
    scope |= {"copied": copied, "zeros": zeros}
    file = f"<stowplan step {next(_numbers)}>"
    code = compile(source.text, file, "exec")
    exec(code, scope)  # noqa: S102 -- the text is stowplan's own, made from op names, literals and its own counters
    forward, backward = cast(Forward, scope["forward"]), cast("Backward | None", scope.get("backward"))
    places = _Places(file, source)

    def run_forward(primals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """As kernels run in eager: some ask whether gradients are enabled, but none records anything."""
        with places.noted(), below_autograd(), torch.set_grad_enabled(records):
            return forward(primals)

    def run_backward(
        primals: Sequence[Tensor],
        saved: list[Tensor],
        tangents: Gradients,
        handed: Gradients,
        looks: Looks,
    ) -> Generator[None, None, None]:
        assert backward is not None, "nothing was differentiated"
        kinds = {each.device.type for each in (*primals, *tangents) if each is not None}
        pieces = backward(primals, saved, tangents, handed, looks)
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


class BuffersBefore:
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
    """One forward half and its backward half. `primals` are, by piece, the ids of what it differentiates.

    With `retain_graph`, a backward half leaves what it needs for another one.
    """

    halves: Halves
    program: Program
    primals: tuple[tuple[str, ...], ...]
    attached: tuple[bool, ...]  # by output of the source: whether gradients come in for it
    incoming: IncomingGradients
    consumer: Consumer | None = None
    waiting: "WaitingRuns | None" = None
    repeat: Repeat | None = None
    as_it_is: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor | None]] | None = None  # differentiable
    saved: list[Tensor] | None = None  # from the forward half until no other backward can come
    is_packed: bool = False  # autograd has the tensors among them, for hooks that take what it saves
    of_several: dict[str, "weakref.ref[Tensor]"] = field(default_factory=dict)  # what may have no gradient
    _inner: dict[int, "weakref.ref[Tensor]"] = field(default_factory=dict)  # outputs that others depend on
    _prehooks: dict[int, list[RemovableHandle]] = field(default_factory=dict)  # of nodes of outputs
    _beside: list[Tensor] = field(default_factory=list)  # what is saved and not packed
    _task: int = -1  # the call of backward that gradients come in from
    _gradients: Gradients = field(default_factory=list)  # those that came in, by output
    _reaches: Mapping[str, bool] = field(default_factory=dict)  # whether a primal has a gradient from them
    _given: list[Tensor] = field(default_factory=list)
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _before: BuffersBefore | None = None
    _backward: Generator[None, None, None] | None = None
    _handed: Gradients = field(default_factory=list)
    _made: dict[str, Tensor | None] = field(default_factory=dict)  # gradients of the last piece, by id
    _leaving: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    _again: Mapping[str, Tensor | None] | None = None  # gradients of a backward that is differentiated itself
    _is_ahead: bool = True  # of the end of its forward half

    @property
    def is_under_way(self) -> bool:
        """Whether its forward or backward half runs, or a backward can still come."""
        return self._is_ahead or self.saved is not None or self._backward is not None

    def forward(self, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs, none of which is a tensor that came in."""
        source, given = self.halves.source, dict(found)
        self._before = BuffersBefore(given[name] for name in source.updated) if source.stored_bytes else None
        with self._before or nullcontext():
            made, saved = self.halves.forward([given[name] for name in source.forward_primals])
        externals = set(map(id, given.values()))
        outputs = tuple(output.detach() if id(output) in externals else _alone(output) for output in made)
        # Detached, so that what waits for backward does not hold on to the node that it waits in.
        given.update((name, o.detach()) for name, o in zip(source.outputs, outputs, strict=True))
        self.saved, self._given = saved, [given[name] for name in source.backward_primals]
        self._is_ahead = False
        read = dict.fromkeys(name for piece in source.pieces for name in piece.read)
        self._watched = {name: _Watched(given[name], version_of(given[name])) for name in read}
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

    def pack(self) -> tuple[Tensor, ...]:
        """Tensors for autograd to save, if a checkpoint or another hook takes what it saves; else none."""
        self.is_packed = saved_tensors_are_packed()
        if not self.is_packed or self.saved is None:
            return ()
        count = len(self.halves.source.saved)
        packed, self._beside, self.saved = self.saved[:count], self.saved[count:], []
        return torch.empty(
            0
        ), *packed  # the first is for a checkpoint, which recomputes if something is saved

    def unpack(self, saved: Sequence[Tensor]) -> None:
        """Take them back, before the first piece runs."""
        self.saved = [*saved[1:], *self._beside]

    def keep(self, position: int, gradient: Tensor | None) -> None:
        """Take the gradient that comes in for an output. While backward runs, it is this step's alone."""
        if self._task != running_backward():
            self._task, self._gradients = running_backward(), [None] * len(self.attached)
        self._gradients[position] = gradient

    @property
    def came(self) -> tuple[bool, ...]:
        """By output: whether a gradient came in for it; to be asked before the first piece runs."""
        return tuple(gradient is not None for gradient in self._gradients)

    def _begin(self) -> None:
        """All gradients have come in that this backward brings."""
        gradients, self._gradients, self._again = self._gradients, [None] * len(self.attached), None
        came = self.incoming.came(gradients)
        self._reaches = self.incoming.reaches(came)
        if not came:
            return
        if torch.is_grad_enabled():
            # Else what is made of these gradients would be differentiated as constant.
            self._again = self._differentiated_again(gradients)
            return
        if self.saved is None:
            raise BadUse(
                "backward ran a second time through one call of a fitted module, and the first freed what it"
                " needs: give the first retain_graph=True, add up the losses before backward, or call the"
                " module once for each backward"
            )
        saved, is_retained = self.saved, keeps_graph()
        if is_retained:
            saved = self._for_one_of_several(saved)
        if self.consumer:
            repeat = partial(self.repeat, tuple(gradients)) if self.repeat else None
            self.consumer.begins(Leaving(*self._leaving, repeat))
        looks = dict(self._looks(gradients))
        tangents = self.incoming.suited(gradients)
        self._backward = self.halves.backward(self._given, saved, tangents, self._handed, looks)
        if not is_retained:
            self.saved, self._given, self.as_it_is = None, [], None

    def _differentiated_again(self, gradients: Gradients) -> Mapping[str, Tensor | None]:
        """The gradients with a graph of their own, of a run without a plan."""
        if self.as_it_is is None or dict(self._looks(gradients)):
            raise BadUse(
                "create_graph=True asks for gradients that can be differentiated again; a plan has no second"
                " derivatives, so call the model that you gave to fit for this"
            )
        pairs = zip(self.halves.source.outputs, gradients, strict=True)
        return self.as_it_is({name: gradient for name, gradient in pairs if gradient is not None})

    def _looks(self, gradients: Gradients) -> Iterator[tuple[int, Callable[[Tensor | None], None]]]:
        """Who looks at the gradients of outputs that other outputs are made of."""
        source = self.halves.source
        for position, output in self._inner.items():
            tensor = output()
            if tensor is not None and getattr(tensor.grad_fn, "run", None) is not self:
                continue  # it was changed in place since
            prehooks = [hook for handle in self._prehooks.get(position, ()) for hook in hooks_behind(handle)]
            if not prehooks and not (tensor is not None and (tensor.retains_grad or hooks_of(tensor))):
                continue
            name = called(self.program, source.outputs[position])
            if gradients[position] is not None or not source.inner[position]:
                raise BadUse(
                    f"a hook or retain_grad() is on output {name!r}, which other outputs of the step depend"
                    " on, and its gradient is not in one place: a part comes from outside of the step, or the"
                    " plan computes it in tiles. Fit a module that also computes what is made of the output,"
                    " without tiles (allow=('recompute',))"
                )
            yield position, partial(_show, tensor, prehooks, name)

    def look_at(self, position: int, output: Tensor) -> None:
        """Remember an output that others are made of: somebody may ask for its gradient."""
        if position in self.halves.source.inner:
            self._inner[position] = weakref.ref(output)

    def note_prehook(self, position: int, handle: RemovableHandle) -> None:
        """Remember a prehook of an output's node, which autograd may not come to."""
        self._prehooks.setdefault(position, []).append(handle)

    def _for_one_of_several(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """What a backward half may use up; the rest is shared with those that follow."""
        source = self.halves.source
        if source.only_one_backward:
            raise BadUse(f"retain_graph=True keeps what backward needs, and {source.only_one_backward}")
        if self.waiting:
            self.waiting.retains(self.held_bytes)
        names = [*source.saved, *("" for _ in saved[len(source.saved) :])]
        pairs = zip(names, saved, strict=True)
        return [kept.clone() if name in source.overwritten else kept for name, kept in pairs]

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

    def is_first(self, part: _Part) -> bool:
        """Whether backward begins with this part."""
        return part.piece == 0 and part.primals[0] == self.primals[0][0]

    def leave(self, part: _Part) -> tuple[Tensor | None, ...]:
        """The gradients that a node returns: None for what no output that is used depends on."""
        piece = self.primals[part.piece]
        if self.is_first(part):
            self._begin()
        for name in part.primals if self.of_several else ():
            tensor = None if self._reaches[name] else self.of_several[name]()
            if tensor is not None:
                ask_no_hooks(tensor)
        if not any(self._reaches.values()):
            return (None,) * len(part.primals)
        if self._again is not None:
            return tuple(self._again.get(name) for name in part.primals)
        if part.primals[0] == piece[0]:
            self._resume(part.piece)
        gradients = tuple(
            self._made[self.program.gradients[name]] if self._reaches[name] else None for name in part.primals
        )
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
        self._backward = None
        if self.saved is None:
            self._before = None
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


class StepOutput(torch.autograd.Function):
    """The node of one output: hooks on the output are hooks on this node."""

    @staticmethod
    def forward(ctx: Any, run: Run, position: int, made: list[Tensor], token: Tensor) -> Tensor:
        del token  # autograd joins the node to where it came from
        ctx.run, ctx.position = run, position
        ctx.set_materialize_grads(False)
        return made[position]

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[None, ...]:
        if any(gradient is not None and is_batched(gradient) for gradient in incoming):
            raise BadUse(
                "backward is asked for several gradients at a time (is_grads_batched, or jacobian with"
                " vectorize=True), and a plan has the ops of one: ask for one after the other, or call the"
                " model that is not planned for this"
            )
        ctx.run.keep(ctx.position, *incoming)
        return None, None, None, None


class StepPiece(torch.autograd.Function):
    """The node of a piece of the backward half, or of one gradient; runs nothing when it is called."""

    @staticmethod
    def forward(ctx: Any, run: Run, part: _Part, token: Tensor | None, *primals: Tensor) -> Tensor:
        ctx.run, ctx.part = run, part
        ctx.set_materialize_grads(False)
        if run.is_first(part):
            ctx.save_for_backward(*run.pack())
        return torch.empty(0, device=primals[0].device if token is None else token.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.run.is_packed and ctx.run.is_first(ctx.part):
            ctx.run.unpack(ctx.saved_tensors)
        return None, None, None, *ctx.run.leave(ctx.part)


def _register_prehook(node: Any, hook: Prehook) -> RemovableHandle:
    handle: RemovableHandle = _plain_register_prehook(node, hook)
    node.run.note_prehook(node.position, handle)
    return handle


_OutputNode: Any = node_class(StepOutput)
_plain_register_prehook = _OutputNode.register_prehook
_OutputNode.register_prehook = _register_prehook
_call_output: Callable[..., Tensor] = StepOutput.apply
_call_piece: Callable[..., Tensor] = StepPiece.apply


def run_step(run: Run, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The outputs, attached to the chain, whose end is made first. `found` are all tensors by id."""
    made = list(run.forward(found))
    token: Tensor | None = None
    if sum(run.attached) > 1:
        run.of_several = {name: weakref.ref(found[name]) for names in run.primals for name in names}
    for part in reversed(run.parts(found)):
        token = _call_piece(run, part, token, *(found[name] for name in part.primals))
    for position, is_attached in enumerate(run.attached):
        if is_attached:
            made[position] = _call_output(run, position, made, token)
            run.look_at(position, made[position])
    return tuple(made)


def ends_of_chain(outputs: Sequence[Tensor]) -> tuple[Node, Node, Run]:
    """The nodes that a step's backward begins and ends with, below those of its outputs, and its run."""
    first: Any = next(output.grad_fn for output in outputs if output.grad_fn is not None)
    while first.name() != "StepPieceBackward":
        first = next(below for below, _ in first.next_functions if below is not None)
    last = first
    while (below := last.next_functions[0][0]) is not None and below.name() == "StepPieceBackward":
        last = below
    return first, last, first.run


def _show(output: Tensor | None, prehooks: Sequence[Prehook], name: str, gradient: Tensor | None) -> None:
    """Call the hooks of an output with a gradient from inside the step; they may keep it, not change it."""
    if gradient is None:
        return
    on_tensor = [] if output is None else hooks_of(output)
    on_node = [lambda gradient, hook=hook: hook((gradient,)) for hook in prehooks]
    for hook in (*on_tensor, *on_node):
        if hook(gradient.clone()) is not None:
            raise BadUse(
                f"a hook on output {name!r} returns another gradient, and other outputs of the step depend"
                " on that output: the plan has no place for it. Let the hook return None, or call the model"
                " that you gave to fit"
            )
    if output is not None and output.retains_grad:
        output.grad = gradient.clone() if output.grad is None else output.grad + gradient


def _alone(output: Tensor) -> Tensor:
    """Some losses leave their sum in the block that held its terms: it would stay to the end of backward."""
    oversized = output.dim() == 0 and output.untyped_storage().nbytes() > output.element_size()
    return output.clone() if oversized and not is_view(output) else output


class WaitingRuns:
    """Says once that a forward began while others of the model wait, or hold what they left."""

    def __init__(self, name: str) -> None:
        self._name, self._runs, self._said = name, WeakSet[Run](), False
        self._said_other = self._said_retained = False
        self.are_counted = False  # by whoever gave the step its budget

    def held_bytes(self) -> list[int]:
        """What each of them holds."""
        return [held for run in list(self._runs) if (held := run.held_bytes)]

    def begins(self) -> None:
        """A forward is about to run."""
        held = 0 if self.are_counted else sum(self.held_bytes())
        if held and not self._said:
            self._said = True
            _log.warning(
                "a forward of %s began while an earlier one waits for its backward and holds %s: the budget"
                " is for one forward and its backward. Call backward after each forward, or put both into one"
                " module and fit that. This is said once.",
                self._name,
                format_bytes(held),
            )

    def say_once(self, what: str) -> None:
        """Warn that a forward began while `what`, for the first such thing."""
        if not self._said_other:
            self._said_other = True
            _log.warning("a forward of %s began while %s. This is said once.", self._name, what)

    def retains(self, nbytes: int) -> None:
        """A backward keeps what it needs for another one."""
        if not self._said_retained:
            self._said_retained = True
            _log.warning(
                "retain_graph=True keeps what the backward of %s needs beyond the end of that backward: up to"
                " %s beside the planned peak. This is said once.",
                self._name,
                format_bytes(nbytes),
            )

    @property
    def are_done(self) -> bool:
        """Whether no forward or backward of the model is under way in any thread, and none waits."""
        return not any(run.is_under_way for run in list(self._runs))

    def add(self, run: Run) -> None:
        """The run waits from now on, until its backward is done or nobody can call it any more."""
        self._runs.add(run)


_OF_MODEL: WeakKeyDictionary[nn.Module, WaitingRuns] = WeakKeyDictionary()


def waiting_of(model: nn.Module) -> WaitingRuns:
    """The same for all steps that are bound to a model."""
    return _OF_MODEL.setdefault(model, WaitingRuns(type(model).__name__))
