"""What generated code is made of: its text, a line for each step of a plan, and the pieces of backward.

Nothing in that text is the user's. A tensor is named by its kind, or by the op that makes it, and a counter;
a value is spelled by its exact type, and a string in ASCII with escapes. A step is a call, on copies or with
its output written over an input, or a transfer.

Pieces are the stretches of a backward half, each of which ends where gradients leave it. A gradient is final
when no later step reads or writes its storage, nor reads the parameter it is of: from then on hooks and
optimizers may change both. Gradients leave in the order in which eager accumulates them, as soon as they are
final; those that share a storage leave together. Small ones wait until there is enough to be worth an
autograd node. In the plan of a whole iteration, gradients that an update in backward consumes leave where the
plan has that update.
"""

import keyword
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from stowplan.analyse.facts import Storages, storages_of
from stowplan.capture import Argument, Call, Handle, Program, Ref
from stowplan.capture.program import ASKING_FOR_GRADIENTS, IRREGULAR, inputs_of, overloads_of, signature_of
from stowplan.errors import BadUse, MissingRule
from stowplan.ir import Graph, Kind, Op
from stowplan.ops.effects import UPDATE, only_updates_statistics
from stowplan.ops.table import site_of
from stowplan.plan.problem import outdated_tensors
from stowplan.plan.steps import Compute, Free, Load, RecomputeOp, Step, Store
from stowplan.torch_private import OpOverload, OpOverloadPacket, schema_of, writes_out
from stowplan.units import format_bytes

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LETTERS = {Kind.PARAMETER: "p", Kind.BUFFER: "b", Kind.INPUT: "x", Kind.CONSTANT: "c"}


def identifiers_of(graph: Graph, calls: Mapping[str, Call]) -> dict[str, str]:
    """A Python name for each tensor id, no two alike.

    What an op makes is `addmm_3`, its fourth `addmm`; what comes from outside is `p0`, `b0`, `x0`, `c0` or,
    as a gradient, `g0`. Other variables of generated code must not end in `_` and digits, nor be so short.
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    numbers: Counter[str] = Counter()
    for op in graph.ops:
        base = _base_of(calls[op.id].target)
        made = [name for name in op.writes() if name not in names]
        places = [""] if len(made) == 1 else [f"_{place}" for place in range(len(made))]
        while any(f"{base}_{numbers[base]}{place}" in taken for place in places):
            numbers[base] += 1
        for name, place in zip(made, places, strict=True):
            names[name] = f"{base}_{numbers[base]}{place}"
        taken.update(names[name] for name in made)
        numbers[base] += 1
    for name, tensor in graph.tensors.items():
        if name not in names:
            letter = _LETTERS.get(tensor.kind, "g")
            names[name] = f"{letter}{numbers[letter + ' outside']}"
            numbers[letter + " outside"] += 1
    return names


def _base_of(target: OpOverload) -> str:
    """The name of an op of PyTorch's or ours; the names of others are not ours to write."""
    namespace, _, name = schema_of(target).name.partition("::")
    return name if namespace in ("aten", "stowplan") and _IDENTIFIER.fullmatch(name) else "op"


def spelled(target: OpOverload) -> str:
    """The op as an expression."""
    namespace, *path = str(target).split(".")
    if all(map(_is_name, (namespace, *path))):
        return str(target) if namespace == "aten" else f"ops.{target}"
    found = "ops"
    for part in (namespace, *path):
        found = f"getattr({found}, {part!a})"
    return found


def keyword_argument(name: str, value: str) -> str:
    """`name=value`, where `name` may be a word that Python does not take there, such as `from`."""
    return f"{name}={value}" if _is_name(name) else f"**{{{name!a}: {value}}}"


def _is_name(text: str) -> bool:
    return _IDENTIFIER.fullmatch(text) is not None and not keyword.iskeyword(text)


def literal(value: Argument, names: Mapping[str, str]) -> str:
    """`value` as an expression. Of a subclass, the value is written that it has as its base type."""
    match value:
        case Ref(tensor):
            return names[tensor]
        case Handle():
            return ascii(value.key)
        case tuple():
            return "[" + ", ".join(literal(item, names) for item in value) + "]"
        case None | True | False:
            return str(value)
        case int():
            return int.__repr__(value)
        case float() if not math.isfinite(value):
            return f"float('{float.__repr__(value)}')"
        case float():
            return float.__repr__(value)
        case complex():
            return f"complex({literal(value.real, names)}, {literal(value.imag, names)})"
        case str():
            return ascii(str.__str__(value))
        case torch.device():
            return f"torch.device({str(value)!a})"
        case torch.Generator():
            raise BadUse(
                "a random op with a generator of its own cannot be written as source; use the default one"
            )
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case _:
            raise BadUse(
                f"an op is called with a {type(value).__name__}, which cannot be written as source;"
                " pass a number, a string or a tensor"
            )


aten = torch.ops.aten
_SWEEPS_IN_PLACE = ("stowplan.sweep_.default", "stowplan.sweep_backward_.default")
_IRREGULAR = {pure: writing for writing, pure in IRREGULAR.items()}
_IRREGULAR[aten.mul.Scalar] = aten.mul_.Tensor  # mul_.Scalar rounds the number to 16 bits


def call_lines(call: Call, overwrites: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """The statements that run `call`; `overwrites` pairs outputs with the inputs whose place they take."""
    if call.fresh:
        return _on_copies(call, overwrites, names)
    if overwrites and call.target is aten.as_strided_scatter.default:
        return _into_part(call, names[next(iter(overwrites))], names)
    if overwrites:
        call = overwriting(call, overwrites)
    return [f"{_assigned(call.outputs, call.single, names)}{expression(call, names)}"]


def expression(call: Call, names: Mapping[str, str]) -> str:
    """The call alone; a name may stand for any expression."""
    given = [literal(value, names) for value in call.args]
    given += (keyword_argument(name, literal(value, names)) for name, value in call.kwargs.items())
    if call.target in ASKING_FOR_GRADIENTS:
        return f"as_in_forward({', '.join([spelled(call.target), *given])})"
    return f"{spelled(call.target)}({', '.join(given)}){'.clone()' if call.copied else ''}"


def _assigned(outputs: tuple[str | None, ...], single: bool, names: Mapping[str, str]) -> str:
    if not outputs:
        return ""
    bound = ["_" if output is None else names[output] for output in outputs]
    return f"{bound[0]} = " if single else f"[{', '.join(bound)}] = "


def _into_part(call: Call, output: str, names: Mapping[str, str]) -> list[str]:
    """Write a part of a tensor where it is."""
    whole, part, *look = (literal(value, names) for value in call.args)
    return [f"aten.as_strided.default({whole}, {', '.join(look)}).copy_({part})", f"{output} = {whole}"]


def _on_copies(call: Call, overwrites: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """Run an op that writes into its arguments on copies; an argument without a later use is not copied."""
    results = call.outputs[: len(call.outputs) - len(call.fresh)]
    order = [argument.name for argument in schema_of(call.target).arguments]
    args, kwargs, lines = list(call.args), dict(call.kwargs), []
    for name, output in zip(call.fresh, call.outputs[len(results) :], strict=True):
        position = order.index(name)
        given: Argument = args[position] if position < len(args) else kwargs[name]
        source = literal(given, names)
        if isinstance(output, str):
            copied = source if output in overwrites else f"aten.clone.default({source})"
            lines.append(f"{names[output]} = {copied}")
            if position < len(args):
                args[position] = Ref(output)
            else:
                kwargs[name] = Ref(output)
    made = replace(call, args=tuple(args), kwargs=kwargs, outputs=results, fresh=())
    return [*lines, f"{_assigned(results, call.single, names)}{expression(made, names)}"]


def overwriting(call: Call, overwrites: Mapping[str, str]) -> Call:
    """`call` with outputs written over arguments, as `overwrites` pairs them."""
    target = in_place_target(call.target)
    if target is not None and str(target) in _SWEEPS_IN_PLACE:
        return _overwriting_some(call, target, overwrites)
    (victim,) = overwrites.values()
    if target is not None and call.args[:1] == (Ref(victim),):
        return replace(call, target=target)
    target = out_target(call.target)
    if target is not None:
        return replace(call, target=target, kwargs={**call.kwargs, out_name(target): Ref(victim)})
    raise MissingRule(f"{call.target} has no variant that overwrites {victim!r}")


def _overwriting_some(call: Call, target: OpOverload, outputs: Container[str]) -> Call:
    """The call of a sweep, with the outputs that overwrite an input."""
    over = call.arguments()["over"]
    assert isinstance(over, tuple)
    pairs = zip(call.outputs, over, strict=True)
    chosen = tuple(place if output in outputs else -1 for output, place in pairs)
    return replace(call.replacing({"over": chosen}), target=target)


@cache
def in_place_target(target: OpOverload) -> OpOverload | None:
    """`relu_` for `relu`, `bernoulli_.float` for `bernoulli.p`."""
    if target in _IRREGULAR:
        return _IRREGULAR[target]
    namespace, _, name = schema_of(target).name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    wanted = signature_of(target)
    return next((op for op in overloads_of(packet) if signature_of(op) == wanted), None)


@cache
def out_target(target: OpOverload) -> OpOverload | None:
    """`add.out` for `add.Tensor`: the same arguments and one more, which is written to."""
    wanted = signature_of(target)
    return next(
        (
            op
            for op in overloads_of(target.overloadpacket)
            if writes_out(op) and signature_of(op)[:-1] == wanted
        ),
        None,
    )


def out_name(target: OpOverload) -> str:
    """The argument that is written to."""
    return str(schema_of(target).arguments[-1].name)


class Moves:
    """Goes along with the steps of both halves. `handles` are the variables of all stores so far."""

    def __init__(self, names: Mapping[str, str], graph: Graph) -> None:
        self._names, self._graph = names, graph
        self.handles: list[str] = []
        self.stored_bytes: list[int] = []
        self._stored: dict[tuple[str, ...], str] = {}  # handles by all names of a storage
        self._handle_of: dict[str, str] = {}  # the handle that last moved a tensor
        self._under_way: set[str] = set()

    def store(self, tensors: tuple[str, ...]) -> str:
        """The line that begins to write a storage."""
        handle = f"away{len(self.handles)}"
        self.handles.append(handle)
        self._stored[tensors] = handle
        self._begin(handle, tensors)
        self.stored_bytes.append(self._bytes(tensors[0]))
        return f"{handle} = tier.store({self._list(tensors)})  # {format_bytes(self.stored_bytes[-1])}"

    def load(self, tensors: tuple[str, ...]) -> str:
        """The line that begins to read it back."""
        handle = self._stored[tensors]
        self._begin(handle, tensors)
        return f"[{self._list(tensors)}] = {handle}.load()"

    def _begin(self, handle: str, tensors: Iterable[str]) -> None:
        self._handle_of.update(dict.fromkeys(tensors, handle))
        self._under_way.add(handle)

    def wait_for(self, tensors: Iterable[str]) -> list[str]:
        """Lines that wait until none of the tensors is on its way out or back."""
        handles = dict.fromkeys(self._handle_of[name] for name in tensors if name in self._handle_of)
        waiting = [handle for handle in handles if handle in self._under_way]
        self._under_way.difference_update(waiting)
        return [f"{handle}.wait()" for handle in waiting]

    def _list(self, tensors: Sequence[str]) -> str:
        return ", ".join(self._names[name] for name in tensors)

    def _bytes(self, name: str) -> int:
        return self._graph.tensors[self._graph.storage_of(name)].nbytes or 0


_SHARE = 64  # no piece but the last hands on less than this part of the bytes of all gradients


@dataclass(frozen=True, slots=True)
class Piece:
    """`read` are the tensors from outside the step whose contents the piece relies on.

    They are paired with whether something is recomputed from them that eager would have kept. The gradients
    may be `consumed`: they are freed before the next piece.
    """

    gradients: tuple[str, ...]
    read: Mapping[str, bool]
    consumed: bool = False


class End(NamedTuple):
    """A piece ends after a step of the backward half, and gradients leave it there."""

    step: int
    gradients: tuple[str, ...]
    consumed: bool = False


def ends_of_pieces(graph: Graph, program: Program, steps: Sequence[Step]) -> list[End]:
    """Where pieces end among the `steps` of the backward half; the last one does with the last step.

    If the last gradients are consumed, nothing is left to do behind that.
    """
    consumed = list(_consumed(graph, program, steps))
    gone = {gradient for end in consumed for gradient in end.gradients}
    storages = storages_of(graph)
    final = _last_touches(graph, program, steps, storages)
    wanted: dict[int, list[str]] = {}  # by storage
    for gradient in dict.fromkeys(program.gradients.values()):
        if gradient not in gone:
            wanted.setdefault(storages.number_of[gradient], []).append(gradient)
    last: dict[int, int] = {}
    for name, gradient in program.gradients.items():
        number = storages.number_of[gradient]
        ends = (final.get(storages.number_of[name], -1), final.get(number, -1))
        if number in wanted:
            last[number] = max(last.get(number, -1), *ends)
    latest = -1
    for number in wanted:  # in eager's order, which hooks rely on
        latest = last[number] = max(latest, last[number])
    nbytes = {number: int(storages.nbytes[number]) for number in wanted}
    others = (
        End(step, tuple(gradient for number in numbers for gradient in wanted[number]))
        for step, numbers in grouped(last, nbytes)
    )
    found = sorted([*consumed, *others], key=lambda end: end.step)
    return found if found[-1].consumed else [*found[:-1], found[-1]._replace(step=len(steps) - 1)]


def _consumed(graph: Graph, program: Program, steps: Sequence[Step]) -> Iterator[End]:
    """Where updates in backward take their gradients."""
    updates = {op.id for op in graph.ops if is_in_backward(op)}
    for position, step in enumerate(steps):
        if isinstance(step, Compute) and step.op in updates:
            gradients = program.calls[step.op].args[0]
            assert isinstance(gradients, tuple)
            yield End(position, tuple(ref.tensor for ref in gradients if isinstance(ref, Ref)), consumed=True)


def is_in_backward(op: Op) -> bool:
    """Whether an op is an update, or an addition, to which backward hands gradients on."""
    return op.type == UPDATE and op.attributes["when"] in ("in backward", "later")


def grouped(last: Mapping[int, int], nbytes: Mapping[int, int]) -> Iterator[tuple[int, list[int]]]:
    """Storages that leave together, in order, after which step: enough of them, but for the last group.

    `last` has the step by which each may leave.
    """
    enough, gathered, group = sum(nbytes.values()) / _SHARE, 0, list[int]()
    order = sorted(last, key=lambda number: last[number])
    for number, following in zip(order, [*order[1:], None], strict=True):
        group.append(number)
        gathered += nbytes[number]
        if following is None or (gathered >= enough and last[following] > last[number]):
            yield last[number], group
            group, gathered = [], 0


def _last_touches(
    graph: Graph, program: Program, steps: Sequence[Step], storages: Storages
) -> dict[int, int]:
    """The last of the steps that reads, writes or moves each storage."""
    ops = {op.id: op for op in graph.ops}
    return {
        storages.number_of[name]: position
        for position, step in enumerate(steps)
        for name in _touched(ops, program, step)
    }


def _touched(ops: Mapping[str, Op], program: Program, step: Step) -> Iterable[str]:
    match step:
        case Compute(op) if ops[op].type == UPDATE:
            return ()
        case Compute(op) | RecomputeOp(op):
            return *inputs_of(program.calls[op]), *ops[op].writes()
        case Store(tensors) | Load(tensors):
            return tensors
        case Free():
            return ()


class Outside:
    """Which tensors that others can change an op relies on."""

    def __init__(self, graph: Graph, program: Program, outputs: Iterable[str]) -> None:
        self._graph, self._calls, self._outdated = graph, program.calls, outdated_tensors(graph)
        self._storages = storages_of(graph)
        made = {name for op in graph.ops for name in op.writes()}
        own = {name for name in program.tangents if name is not None}
        names = [*(name for name in graph.tensors if name not in made | own), *outputs]
        self._seen_as: dict[int, str] = {}  # by storage: the name under which others hold it
        for name in names:
            self._seen_as.setdefault(self._storages.number_of[name], name)

    def read_by(self, op: Op) -> Iterator[str]:
        """Not the running statistics of a norm that does not normalise by them."""
        ignored = self._outdated if only_updates_statistics(site_of(self._graph, op)) else ()
        reads = (name for name in inputs_of(self._calls[op.id]) if name not in ignored)
        numbers = (self._storages.number_of[name] for name in reads)
        return (self._seen_as[number] for number in numbers if number in self._seen_as)

    def sharing(self, tensors: Iterable[str], among: Iterable[str]) -> Iterator[str]:
        """Those that share a storage with one of `tensors`."""
        numbers = {self._storages.number_of[name] for name in tensors}
        return (name for name in sorted(among) if self._storages.number_of[name] in numbers)
