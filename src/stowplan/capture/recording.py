"""Recording: the events of one training step, from its first op to its gradients, and the names in it.

The recorder runs the step once on stand-ins (forward, loss and backward) under a Watch.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from stowplan.alone import uninterrupted
from stowplan.capture.answers import Check, checked, unchecked
from stowplan.capture.changes import (
    Beside,
    Changes,
    Containers,
    NewEntry,
    Path,
    Place,
    SettersWatched,
    Stores,
    changes_of,
)
from stowplan.capture.composite import is_wrapper, opened_by_name
from stowplan.capture.foreseeing import MOST_FORESEEN
from stowplan.capture.generators import WatchedGenerator, generator_watched
from stowplan.capture.origins import OWN_BACKWARD, Origins, reads_values
from stowplan.capture.program import leaves, written_arguments
from stowplan.capture.stand_ins import (
    Lifetime,
    Spec,
    StandIns,
    StorageView,
    flatten,
    is_constant,
    leaf_names,
    refuse_opaque,
    same_strides,
)
from stowplan.capture.watching import (
    AnswerHere,
    Event,
    Incoming,
    KnownOverwritten,
    ReadsOutsideOps,
    Rehearsal,
    Undecided,
    Watch,
    WentOn,
    followed,
    nodes_below,
)
from stowplan.errors import CaptureError, NotFinite
from stowplan.ir import Kind
from stowplan.torch_private import (
    FakeTensor,
    checkpoints_as_calls,
    gradient_of,
    idle_conversions_skipped,
    own_modes_unseen,
    pytree,
    script_calls_handed_to,
)

if TYPE_CHECKING:
    from stowplan.capture.cuda_calls import CudaCalls, OwnBatchNorms


Loss: TypeAlias = Callable[..., object] | str | int
"""A function of the model's output, or the name or index of the output that is the loss."""


@dataclass(frozen=True, slots=True)
class Step:
    """A training step as the user gives it: `model(*args, **kwargs)`, then a loss function of the result.

    Gradients come in for the outputs at the positions `differentiated`, as the leaves of the result are
    counted. Without them, they come in for the output that `loss` names, with `all_outputs` for every output
    that can have one, or else for the only scalar. With `know_values`, small integer arguments are captured
    with their values. With `cuda`, forward calls other kernels, as those of a CUDA device. `containers` are
    those in which it may leave tensors, by label. Without `records`, forward runs under torch.no_grad(), and
    there is no backward half; nor is there one if no parameter and no argument requires a gradient.
    """

    model: nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    loss: Loss | None
    device: torch.device
    all_outputs: bool = False
    differentiated: tuple[int, ...] | None = None
    know_values: bool = False
    cuda: "CudaCalls | OwnBatchNorms | None" = None
    containers: Mapping[str, Any] = field(default_factory=dict)
    records: bool = True

    def modules(self) -> dict[str, nn.Module]:
        """The modules that hold parameters, by the prefix of their names."""
        return {"": self.model, **({"loss.": self.loss} if isinstance(self.loss, nn.Module) else {})}


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """A tensor that no op of the step makes: its kind and all its names."""

    kind: Kind
    names: tuple[str, ...]
    view: StorageView


@dataclass(frozen=True, slots=True)
class Recording:
    """One step: its events in order (backward from `turn` on), the lifetimes of storages, inputs and outputs.

    `incoming` are the gradients that autograd's nodes received. `inputs` and `outputs` are the leaves of the
    arguments and of the result, tensors as storage views. `attached` outputs are part of autograd's graph;
    `tangents` are the gradients of the differentiated ones. `constants` are other tensors of the user's code.
    `replaced` are parameters and buffers that forward bound to other memory. `literals` are constants written
    in code, as in `torch.tensor([1, 2])`. A step that `looks_at_values` of known integers has branched on
    them; `answers` are what it read. `slices` are the storages, with their bytes, of which the externals are
    a part.
    """

    events: tuple[Event, ...]
    turn: int
    incoming: tuple[Incoming, ...]
    lifetimes: tuple[Lifetime, ...]
    externals: tuple[ExternalTensor, ...]
    constants: Mapping[StorageView, Tensor]
    inputs: tuple[StorageView | None, ...]
    input_spec: Spec
    outputs: tuple[object, ...]
    attached: tuple[bool, ...]
    output_spec: pytree.TreeSpec
    tangents: tuple[StorageView | None, ...]
    gradients: Mapping[StorageView, StorageView]
    replaced: Mapping[StorageView, StorageView]
    literals: frozenset[StorageView]
    looks_at_values: bool
    answers: tuple[AnswerHere, ...] = ()
    slices: Mapping[int, int] = field(default_factory=dict)


def after_loss(output: object, loss: Loss | None) -> object:
    """What a step returns: the model's output, or the result of the loss function for it."""
    return loss(output) if callable(loss) else output


def output_named(output: object, name: str | int) -> Tensor:
    """The output of a model that `loss` names by key, attribute or index."""
    found = _entries(output).get(name)
    if isinstance(found, Tensor):
        return found
    entries = [entry for entry, value in _entries(output).items() if isinstance(value, Tensor)]
    raise CaptureError(
        f"loss is {name!r}, and the model returns no tensor of that name or index",
        advice=f"loss names one of {', '.join(map(repr, entries))}, or is a function of the model's output"
        if entries
        else "leave loss out, or give a function of the model's output",
    )


def output_keys(spec: pytree.TreeSpec) -> list[str | int | None]:
    """The name or index under which each leaf of a model's result is returned; None for the only one.

    A tensor that forward stores in a module is named by module and attribute.
    """
    returned = unchecked(pytree.tree_unflatten(range(spec.num_leaves), spec))
    keys: list[str | int | None] = [None] * spec.num_leaves
    for key, value in _entries(returned).items():
        for leaf in pytree.tree_leaves(value):
            keys[leaf] = key
    if (changes := changes_of(spec)) is not None:
        beside = pytree.tree_unflatten(range(spec.num_leaves), spec).tensors
        for each in changes.stored:
            for number in each.numbers():
                keys[beside[number]] = each.name
    return keys


def _entries(output: object) -> dict[str | int, object]:
    """The values that a model returns together, by name and by index."""
    if isinstance(output, Mapping):
        return dict(enumerate(output.values())) | dict(output)
    if isinstance(output, tuple | list):
        fields: tuple[str, ...] = getattr(output, "_fields", ())
        return dict(enumerate(output)) | dict(zip(fields, output, strict=False))
    return {}


def module_paths(step: Step) -> dict[nn.Module, str]:
    """The path of every module; the first one where it has several."""
    paths: dict[nn.Module, str] = {}
    for prefix, root in step.modules().items():
        for path, module in root.named_modules():
            paths.setdefault(module, f"{prefix}{path}".rstrip("."))
    return paths


def named_tensors(step: Step, what: Literal["parameters", "buffers"]) -> dict[str, Tensor]:
    """Parameters or buffers under every name they have; of sparse ones the parts."""
    named = {
        f"{prefix}{name}": tensor
        for prefix, root in step.modules().items()
        for name, tensor in getattr(root, f"named_{what}")(remove_duplicate=False)
    }
    return opened_by_name(named)


def argument_names(step: Step) -> list[str]:
    """A name per leaf of the arguments: the parameter of `forward` it belongs to, and the path inside it."""
    return leaf_names(step.args, step.kwargs, positional_names(step.model, len(step.args)))


def positional_names(model: nn.Module, count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += (f"{parameter.name}.{index}" for index in range(count - len(names)))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]


_MOST_ATTEMPTS = 64  # recordings of one step: each finds a value that is overwritten, or a check


def record(step: Step) -> Recording:
    """Watch the step run once, without data.

    Where unknown values overwrite known ones, the step is recorded again without these. Where it asks what no
    argument determines, the step is recorded again with each of the two answers. Where neither does nothing
    but raise, it is recorded again with answers that small arguments and buffers determine, and then with the
    numbers that it draws.
    """
    unknown, assumed, foreseeing, drawing = set[str](), list[Check](), False, False
    for _ in range(_MOST_ATTEMPTS):
        how = {"foreseeing": foreseeing, "drawing": drawing}
        try:
            return _Recorder(step, unknown, assumed, **how).record()
        except KnownOverwritten as found:
            if not found.made_at or found.made_at in unknown:
                break
            unknown.add(found.made_at)
        except Undecided as question:
            check = _check_for(step, unknown, assumed, question, **how)
            if check is not None:
                assumed.append(check)
            elif not foreseeing:
                foreseeing, assumed = True, []
            elif drawing:
                raise reads_values(question.origin) from question
            else:
                drawing = True
    return _Recorder(step, knowing=False).record()


def _check_for(
    step: Step,
    unknown: set[str],
    assumed: list[Check],
    question: Undecided,
    *,
    foreseeing: bool,
    drawing: bool,
) -> Check | None:
    """The answer to the next question that does not raise, if the other one does nothing else."""
    errors: dict[bool, Exception] = {}
    for answer in (True, False):
        try:
            how = {"foreseeing": foreseeing, "drawing": drawing}
            _Recorder(step, unknown, assumed, trying=answer, **how).record()
        except WentOn:
            continue
        except Exception as error:
            errors[answer] = error
    if len(errors) == 1:
        ((answer, raised),) = errors.items()
        return Check.of(raised, expected=not answer)
    if errors or question.expected is None:
        return None
    where = f" at {question.origin.source}" if question.origin.source else ""
    words = (
        f"forward asks{where} whether numbers are finite; they are not, and the plan is for the other case"
    )
    return Check(question.expected, NotFinite(words))


def _writes_into(event: Event, view: StorageView) -> bool:
    written = written_arguments(event.target, event.args, event.kwargs)
    storages = (g.storage for g in leaves(tuple(written.values())) if isinstance(g, StorageView))
    return view.storage in storages


@dataclass(frozen=True, slots=True)
class _Held:
    """The stand-in of a tensor of the user's, and how it looked before the step."""

    place: Place
    name: str
    tensor: Tensor
    view: StorageView
    requires_grad: bool


class _Recorder:
    """One attempt at a recording. Holds the stand-ins, as the caller of an eager step holds the originals."""

    def __init__(
        self,
        step: Step,
        unknown: Collection[str] = (),
        assumed: Sequence[Check] = (),
        *,
        knowing: bool = True,
        trying: bool | None = None,
        foreseeing: bool = False,
        drawing: bool = False,
    ) -> None:
        self._step, self._drawing = step, drawing
        flat, self._input_spec = flatten(step.args, step.kwargs)
        refuse_opaque(flat, argument_names(step))
        held = (named_tensors(step, "parameters"), named_tensors(step, "buffers"))
        given = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        names = [n for n, leaf in zip(argument_names(step), flat, strict=True) if isinstance(leaf, Tensor)]
        knowing_given = knowing and step.know_values
        known = [t for n, t in zip(names, given, strict=True) if knowing_given and n not in unknown]
        everything = (*given, *(t for table in held for t in table.values()))
        self._stand_ins = StandIns(step.device, everything, known)
        self._origins = Origins(module_paths(step))
        rehearsal = Rehearsal(self._stand_ins.fakes, knowing=knowing)
        self._watch = Watch(rehearsal, self._origins, unknown, assumed, trying)
        self._watch.assuming = knowing_given
        self._externals: dict[StorageView, ExternalTensor] = {}
        self._entered: dict[StorageView, Tensor] = {}  # their stand-ins
        self._slices: dict[int, int] = {}
        self._wanted: list[Tensor] = []  # the leaves that gradients are for; at last in eager's order
        self._inputs = [self._stand_in(leaf) for leaf in flat]
        self._held: dict[int, _Held] = {}  # by identity of the stand-in
        self._setters = SettersWatched({}, self._is_made, self._origins)
        self._parameters: Mapping[str, Tensor] = {}
        self._stores = Stores({})
        self._foreseeing = foreseeing
        self._existing = list(zip(flat, self._inputs, strict=True)), held[1]

    def record(self) -> Recording:
        with ExitStack() as swapped:
            if self._drawing:
                swapped.enter_context(torch.random.fork_rng(()))
            for module in self._step.modules().values():
                swapped.enter_context(self._stand_ins.inside(module))
            self._stores = Stores(module_paths(self._step), self._step.containers)
            swapped.callback(self._stores.put_back)
            return self._recorded(buffers=self._enter_externals())

    def _stand_in(self, leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return self._stand_ins.of(leaf)
        return set(leaf) if isinstance(leaf, set) else leaf  # forward may change it

    def _recorded(self, buffers: Mapping[str, Tensor]) -> Recording:
        returned = self._forward()
        self._refuse_new_history()
        self._refuse_own_backward()
        replaced, turn = self._replaced(buffers), len(self._watch.events)
        outputs, output_spec = pytree.tree_flatten(returned)
        self._refuse_wrappers(outputs)
        self._refuse_sharing(replaced, outputs)
        tangents: list[Tensor | None] = [None] * len(outputs)
        if self._step.records and self._wanted:
            tangents = self._backward(outputs, self._differentiated(returned, outputs))
            self._refuse_no_gradient(tangents)
        elif isinstance(self._step.loss, str | int):
            output_named(unchecked(returned), self._step.loss)  # refuses a name that is none
        self._refuse_changed_wrapper()
        if all(tangent is None for tangent in tangents):
            self._refuse_opaque_results(outputs)
        constants = self._watch.constants
        named = [(f"constants.{number}", tensor) for number, tensor in enumerate(constants.values())]
        self._enter(Kind.CONSTANT, named)
        return Recording(
            events=tuple(self._watch.events),
            turn=turn,
            incoming=tuple(self._watch.incoming),
            lifetimes=tuple(self._watch.book.lifetimes),
            externals=tuple(self._externals.values()),
            constants={self._view(tensor): tensor for tensor in constants.values()},
            inputs=tuple(
                self._held[id(leaf)].view if isinstance(leaf, Tensor) else None for leaf in self._inputs
            ),
            input_spec=self._input_spec,
            outputs=tuple(self._view(leaf) if isinstance(leaf, Tensor) else leaf for leaf in outputs),
            attached=tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in outputs),
            output_spec=output_spec,
            tangents=tuple(None if tangent is None else self._view(tangent) for tangent in tangents),
            gradients={
                self._entry(leaf): self._view(gradient)
                for leaf in self._wanted
                if (gradient := self._stand_ins.gradient_of(leaf)) is not None
            },
            replaced=replaced,
            literals=frozenset(self._view(constants[number]) for number in self._watch.literals),
            looks_at_values=self._watch.looks_at_values,
            answers=tuple(self._watch.answers),
            slices=self._slices,
        )

    def _view(self, tensor: Tensor) -> StorageView:
        return self._watch.book.view_of(tensor)

    def _enter_externals(self) -> dict[str, Tensor]:
        """Register parameters, buffers and inputs; returns the buffers by name."""
        parameters, buffers = named_tensors(self._step, "parameters"), named_tensors(self._step, "buffers")
        self._parameters = parameters
        self._enter(Kind.PARAMETER, list(parameters.items()))
        self._enter(Kind.BUFFER, list(buffers.items()))
        names = zip(argument_names(self._step), self._inputs, strict=True)
        given = [(name, leaf) for name, leaf in names if isinstance(leaf, Tensor)]
        self._enter(Kind.INPUT, given)
        self._slices = self._watch.book.enter(self._entered.values())
        for name, leaf in given:
            self._watch.note_given(leaf, name)
        for name, held in (*parameters.items(), *buffers.items()):
            self._hold(name, name, held)
        for place, (name, value) in enumerate(zip(argument_names(self._step), self._inputs, strict=True)):
            if isinstance(value, Tensor):
                self._hold(place, name, value)
        arguments, real = self._existing
        self._foresee(arguments, self._watch.arguments)
        self._foresee([(real[name], stand_in) for name, stand_in in buffers.items()], self._watch.buffers)
        return buffers

    def _foresee(self, pairs: Iterable[tuple[object, object]], known: dict[StorageView, Tensor]) -> None:
        """Small tensors that exist before the step, by their stand-ins."""
        for tensor, stand_in in pairs:
            if not isinstance(tensor, Tensor) or not isinstance(stand_in, Tensor) or tensor.is_meta:
                continue
            if tensor.numel() <= MOST_FORESEEN:
                known[self._view(stand_in)] = tensor

    def _entry(self, leaf: Tensor) -> StorageView:
        """The storage view of a tensor before the step, which may have bound it to other memory."""
        return self._held[id(leaf)].view if id(leaf) in self._held else self._view(leaf)

    def _hold(self, place: Place, name: str, tensor: Tensor) -> None:
        """Remember how a tensor of the user's looks before the step."""
        held = _Held(place, name, tensor, self._view(tensor), tensor.requires_grad)
        self._held.setdefault(id(tensor), held)

    def _enter(self, kind: Kind, named: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            view = self._view(tensor)
            if view in self._externals:
                known = self._externals[view]
                self._refuse_twin(known.names[0], self._entered[view], name, tensor)
                self._externals[view] = replace(known, names=(*known.names, name))
                continue
            self._externals[view], self._entered[view] = ExternalTensor(kind, (name,), view), tensor
            if tensor.requires_grad and kind is not Kind.CONSTANT:
                self._wanted.append(tensor)

    def _refuse_twin(self, known: str, tensor: Tensor, name: str, other: Tensor) -> None:
        """Two tensors with one storage view are one value, but have two gradients."""
        if tensor is not other and (tensor.requires_grad or other.requires_grad):
            raise CaptureError(
                f"{known} and {name} are two tensors at the same memory, and one requires a gradient",
                advice=f"pass one tensor for both, or {name}.clone()",
            )

    def _refuse_new_history(self) -> None:
        """Refuse a write into an argument that an op made: eager differentiates it, a planned step cannot."""
        for view, tensor in self._entered.items():
            if self._stand_ins.has_new_history(tensor):
                written = (event for event in self._watch.events if _writes_into(event, view))
                where = next((event.origin.source for event in written), "")
                raise CaptureError(
                    f"forward writes into {self._externals[view].names[0]}, which requires a gradient",
                    where=where,
                    advice="write into a copy of it, made with clone()",
                )

    def _refuse_changed_wrapper(self) -> None:
        """Refuse what Python does to an object of a wrapper subclass: a planned step runs no such code."""
        if (changed := self._stand_ins.changed_wrapper()) is not None:
            wrapper, what = changed
            raise CaptureError(
                f"the step changes {what} of a {type(wrapper).__name__} of shape {tuple(wrapper.shape)}",
                advice="write into the tensors inside it, in place, or change it outside of the step",
            )

    def _refuse_wrappers(self, outputs: Sequence[object]) -> None:
        """Refuse results that a planned step would have to make objects of a class of."""
        for leaf in outputs:
            if isinstance(leaf, Tensor) and is_wrapper(type(leaf)):
                raise CaptureError(
                    f"forward returns or stores a {type(leaf).__name__} of shape {tuple(leaf.shape)}",
                    advice="return what it unpacks to, a plain tensor",
                )

    def _refuse_own_backward(self) -> None:
        """Refuse a forward that accumulates gradients: a planned step would not add them again."""
        if any(self._stand_ins.gradient_of(leaf) is not None for leaf in self._wanted):
            raise CaptureError(OWN_BACKWARD[0], advice=OWN_BACKWARD[1])

    def _refuse_no_gradient(self, tangents: Sequence[Tensor | None]) -> None:
        """Refuse a backward that ends before it comes to a leaf: it leaves nothing that could be planned."""
        came = any(self._stand_ins.gradient_of(leaf) is not None for leaf in self._wanted)
        if not came and any(tangent is not None for tangent in tangents):
            raise CaptureError(
                "backward reaches no parameter and no input that requires a gradient",
                advice="check that the loss depends on them, and through operands that are not empty",
            )

    def _refuse_opaque_results(self, outputs: Sequence[object]) -> None:
        """Refuse results inside of objects, such as a cache of keys: a plan returns tensors of each call."""
        for leaf in outputs:
            if not isinstance(leaf, Tensor) and not is_constant(leaf):
                raise CaptureError(
                    f"forward returns a {type(leaf).__name__}, whose contents may be tensors of this call",
                    advice="return its tensors, or leave it out, as with use_cache=False",
                )

    def _forward(self) -> object:
        args, kwargs = self._input_spec.unflatten(self._inputs)
        containers, outside = Containers(args, kwargs), ReadsOutsideOps(self._watch)
        names = {number: held.name for number, held in self._held.items()}
        real, buffers = self._existing[1], named_tensors(self._step, "buffers")
        idle = {id(b) for n, b in buffers.items() if not b.requires_grad and gradient_of(real[n]) is None}
        setters = self._setters = SettersWatched(names, self._is_made, self._origins, idle)
        cuda = nullcontext() if self._step.cuda is None else self._step.cuda.anew()
        scripts = script_calls_handed_to(self._watch.run_script)
        following = self._origins.following()
        others = "branches on numbers that it draws" if self._drawing else ""
        if self._step.device.type != "cpu":
            others = f"runs on {self._step.device}, which has a generator of its own"
        generator = WatchedGenerator(self._origins, others)
        with (
            generator_watched(generator),
            following,
            checkpoints_as_calls(),
            idle_conversions_skipped(),
            scripts,
            self._watch,
            cuda,
            outside,
            setters,
            nullcontext() if self._step.records else torch.no_grad(),
            own_modes_unseen(),
        ):
            self._watch.drawing, self._watch.generator = self._drawing, generator
            self._watch.foreseeing = self._foreseeing
            returned = after_loss(self._step.model(*args, **kwargs), self._step.loss)
        self._watch.assuming, self._watch.drawing, self._watch.generator = False, False, None
        self._watch.foreseeing = False
        returned = checked(returned, self._watch.checks)
        changes, tensors = self._changes(containers)
        return Beside(returned, tensors, changes) if changes != Changes() else returned

    def _is_made(self, tensor: Tensor) -> bool:
        book = self._watch.book
        return book.knows(tensor) and book.lifetimes[book.view_of(tensor).storage].born >= 0

    def _changes(self, containers: Containers) -> tuple[Changes, tuple[Tensor, ...]]:
        """What forward did to tensors and containers of the user's beside writing into them."""
        flags, bound, tensors = list[tuple[Place, bool]](), list[tuple[Place, int]](), list[Tensor]()
        for held in self._held.values():
            now = self._view(held.tensor)
            if now != held.view:
                self._refuse_other_look(held, now)
                if isinstance(held.place, int):
                    bound.append((held.place, len(tensors)))
                    tensors.append(held.tensor.data)
            if held.tensor.requires_grad != held.requires_grad:
                if not held.tensor.is_leaf or held.tensor in self._stand_ins.results:
                    raise CaptureError(f"forward detaches {held.name} in place", where=self._line_of(held))
                flags.append((held.place, held.tensor.requires_grad))
                if held.tensor.requires_grad:
                    for other in self._held.values():
                        if other.view == held.view:
                            self._refuse_twin(held.name, held.tensor, other.name, other.tensor)
                    self._wanted.append(held.tensor)

        def result_of(tensor: Tensor, name: str) -> NewEntry:
            if id(tensor) in self._held:
                raise CaptureError(
                    f"forward puts {self._held[id(tensor)].name} itself into {name}",
                    advice="put a clone() of it there",
                )
            tensors.append(tensor)
            return NewEntry(len(tensors) - 1)

        def name_of(path: Path) -> str:
            side, key, *inner = path
            first = positional_names(self._step.model, len(self._step.args))[key] if side == 0 else key
            return ".".join(map(str, (first, *inner)))

        rewritten = tuple(containers.rewritten(result_of, name_of))
        cleared = tuple(self._held[number].place for number in self._setters.cleared)
        stored = tuple(self._stores.stored(lambda value, name: containers.told(value, result_of, name)))
        return Changes(tuple(flags), cleared, tuple(bound), rewritten, stored), tuple(tensors)

    def _line_of(self, held: "_Held") -> str:
        """Where forward changed a tensor other than by writing into it."""
        if id(held.tensor) in self._setters.lines:
            return self._setters.lines[id(held.tensor)]
        shaped = (e for e in self._watch.events if torch.Tag.inplace_view in e.target.tags)
        known = next((event.origin.source for event in shaped if held.view in event.args), "")
        now = self._parameters_and_buffers().get(held.name, held.tensor)
        return known or self._watch.made_at(now)

    def _parameters_and_buffers(self) -> dict[str, Tensor]:
        return named_tensors(self._step, "parameters") | named_tensors(self._step, "buffers")

    def _refuse_other_look(self, held: "_Held", now: StorageView) -> None:
        was = held.view
        place = replace(now, storage=was.storage, offset=was.offset, stride=was.stride)
        alike = place == was and same_strides(was.shape, was.stride, now.stride)
        if alike and (now.storage != was.storage or now.offset == was.offset):
            return
        what = (
            "the shape"
            if now.shape != was.shape
            else "the dtype"
            if now.dtype != was.dtype
            else "the strides"
        )
        raise CaptureError(
            f"forward changes {what} of {held.name}, which would be another tensor at the next call",
            where=self._line_of(held),
            advice="compute a new tensor instead, and return it",
        )

    def _replaced(self, before: Mapping[str, Tensor]) -> dict[StorageView, StorageView]:
        """Parameters and buffers that forward bound to other memory, or to another tensor."""
        moved = {
            held.view: now
            for held in self._held.values()
            if isinstance(held.place, str) and (now := self._view(held.tensor)) != held.view
        }
        bound = self._refuse_other_names(before)
        for held, tensor in bound:
            self._refuse_other_look(held, self._view(tensor))
        return moved | {held.view: self._view(tensor) for held, tensor in bound}

    def _refuse_other_names(self, buffers: Mapping[str, Tensor]) -> list[tuple["_Held", Tensor]]:
        """The buffers that are other tensors now; adding, removing and replacing anything else is refused."""
        tables = {"buffer": buffers, "parameter": self._parameters}
        bound: list[tuple[_Held, Tensor]] = []
        for kind, before in tables.items():
            now = named_tensors(self._step, "buffers" if kind == "buffer" else "parameters")
            for name in dict.fromkeys((*before, *now)):
                if now.get(name) is before.get(name):
                    continue
                both = name in now and name in before
                twins = [other for other in before if both and before[other] is before[name]]
                if both and kind == "buffer" and all(now.get(twin) is now[name] for twin in twins):
                    bound.append((self._held[id(before[name])], now[name]))
                    continue
                what = "replaces" if both else "adds" if name in now else "removes"
                made = self._watch.made_at(now[name]) if name in now else ""
                raise CaptureError(
                    f"forward {what} the {kind} {name}",
                    where=made,
                    advice=f"write into the {kind} that is there, under torch.no_grad() with copy_()"
                    if what == "replaces"
                    else "do that outside forward, before fit",
                )
        return bound

    def _refuse_sharing(self, replaced: Mapping[StorageView, StorageView], outputs: Sequence[object]) -> None:
        """Refuse what a write into the tensor's own memory would not be: others share the old or the new."""
        held = {each.view: each for each in self._held.values()}
        ends = {view: replaced.get(view, view) for view in held}
        returned = {
            self._view(o).storage for o in outputs if isinstance(o, Tensor) and id(o) not in self._held
        }
        for view, now in replaced.items():
            mine, others = held[view], [each for each in held.values() if each.view != view]
            old = next((each.name for each in others if each.view.storage == view.storage), None)
            new = next((each.name for each in others if ends[each.view].storage == now.storage), None)
            if new is None and now.storage in returned and self._view(mine.tensor) == now:
                new = "a result"
            if old or new:
                words = "shares its" if old else "then shares its"
                raise CaptureError(
                    f"forward binds {mine.name} to other memory, and it {words} memory with {old or new}",
                    where=self._line_of(mine),
                    advice=f"write into it instead: {mine.name.rpartition('.')[2]}.copy_(...)",
                )

    def _backward(
        self, outputs: Sequence[object], differentiated: Mapping[int, Tensor]
    ) -> list[Tensor | None]:
        """Differentiate, and return the gradients that came in for the outputs."""
        tangents = [
            self._tangent(differentiated[position]) if position in differentiated else None
            for position in range(len(outputs))
        ]
        self._enter(Kind.GRADIENT, [(f"tangents.{p}", t) for p, t in enumerate(tangents) if t is not None])
        torch.clear_autocast_cache()  # as on leaving the autocast region, which belongs around forward only
        roots = tuple(differentiated.values())
        self._refuse_gradient_of_others(roots)
        with ExitStack() as stack:
            for device in {root.device.type for root in roots}:
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(followed(self._watch, roots))
            stack.enter_context(self._watch)
            stack.enter_context(self._noting_the_line())
            stack.enter_context(uninterrupted())
            torch.autograd.backward(roots, tuple(tangent for tangent in tangents if tangent is not None))
        place = {leaf: position for position, leaf in enumerate(self._watch.accumulated)}
        self._wanted.sort(key=lambda leaf: place.get(id(leaf), len(place)))
        return tangents

    def _refuse_gradient_of_others(self, roots: Sequence[Tensor]) -> None:
        """Refuse to differentiate what is none of the step's; what no gradient comes to may require one."""
        nodes = set(nodes_below(roots))
        ends = [*roots, *(getattr(node, "variable", None) for node in nodes)]
        others = {id(e): e for e in ends if isinstance(e, Tensor) and not isinstance(e, FakeTensor)}
        for origin in self._stand_ins.origins:
            others.pop(id(origin), None)
        if not others:
            return
        read = [
            (tensor, line)
            for tensor, line in self._watch.differentiable.values()
            if id(tensor) in others or tensor.grad_fn in nodes
        ]
        tensor, line = (*read, (next(iter(others.values())), ""))[0]
        raise CaptureError(
            f"a tensor of shape {tuple(tensor.shape)} requires a gradient but is no parameter or input",
            where=line,
            advice="register it as a parameter of the model or pass it in; if it shall get no gradient, read"
            " it under torch.no_grad()",
        )

    @contextmanager
    def _noting_the_line(self) -> Iterator[None]:
        """A failure in backward has no line of the user's code: use that of the op being differentiated."""
        try:
            yield
        except Exception as error:
            node = self._watch.incoming[-1].node if self._watch.incoming else None
            for event in self._watch.events:
                if node in event.nodes:
                    error.add_note(event.origin.source)
            raise

    def _tangent(self, output: Tensor) -> Tensor:
        with self._stand_ins.fakes:
            return torch.empty_strided(
                output.shape, output.stride(), dtype=output.dtype, device=output.device
            )

    def _differentiated(self, returned: object, outputs: Sequence[object]) -> dict[int, Tensor]:
        """The outputs that receive gradients, by position: see `Step`.

        A tensor that is returned twice is one output: its gradient comes in once.
        """
        able: dict[StorageView, tuple[int, Tensor]] = {}
        for position, leaf in enumerate(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                able.setdefault(self._view(leaf), (position, leaf))
        if not able:
            raise CaptureError(
                "no output depends on a parameter that requires a gradient",
                advice="check requires_grad, torch.no_grad and what the model returns",
            )
        if self._step.differentiated is not None:
            given = set(self._step.differentiated)
            return {position: leaf for position, leaf in able.values() if position in given}
        if isinstance(self._step.loss, str | int):
            named = output_named(unchecked(returned), self._step.loss)
            if not named.requires_grad:
                raise CaptureError(
                    f"loss is {self._step.loss!r}, and no gradient can be computed for that output: it"
                    " depends on no parameter and no input that requires one"
                )
            return dict([able[self._view(named)]])
        own = pytree.tree_structure(unchecked(returned)).num_leaves  # before those of checks and changes
        losses = {position: leaf for position, leaf in able.values() if leaf.dim() == 0 and position < own}
        return losses if len(losses) == 1 and not self._step.all_outputs else dict(able.values())
