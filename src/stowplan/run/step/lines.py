"""Steps as lines of Python: a call, on copies or with its output written over an input, and transfers."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch

from stowplan.capture import Argument, Call, Ref
from stowplan.capture.schema import ASKING_FOR_GRADIENTS, IRREGULAR, overloads_of, signature_of
from stowplan.errors import MissingRule
from stowplan.ir import Graph
from stowplan.run.step.literals import keyword_argument, literal, spelled
from stowplan.torch_private import OpOverload, OpOverloadPacket, schema_of, writes_out
from stowplan.units import format_bytes

aten = torch.ops.aten
_SWEEPS_IN_PLACE = ("stowplan.sweep_.default", "stowplan.sweep_backward_.default")
_IRREGULAR = {pure: writing for writing, pure in IRREGULAR.items()}


def call_lines(call: Call, overwrites: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """The statements that run `call`; `overwrites` pairs outputs with the inputs whose place they take."""
    if call.fresh:
        return _on_copies(call, overwrites, names)
    if overwrites and call.target is aten.as_strided_scatter.default:
        return _into_part(call, names[next(iter(overwrites))], names)
    if overwrites:
        call = overwriting(call, overwrites)
    return [f"{_assigned(call.outputs, call.single, names)}{_expression(call, names)}"]


def _expression(call: Call, names: Mapping[str, str]) -> str:
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
    return [*lines, f"{_assigned(results, call.single, names)}{_expression(made, names)}"]


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
        return replace(call, target=target, kwargs={**call.kwargs, _out_name(target): Ref(victim)})
    raise MissingRule(f"{call.target} has no variant that overwrites {victim!r}")


def _overwriting_some(call: Call, target: OpOverload, outputs: Container[str]) -> Call:
    """The call of a sweep, with the outputs that overwrite an input."""
    *given, over, name = call.args
    assert isinstance(over, tuple)
    chosen = (place if output in outputs else -1 for output, place in zip(call.outputs, over, strict=True))
    return replace(call, target=target, args=(*given, tuple(chosen), name))


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


def _out_name(target: OpOverload) -> str:
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
