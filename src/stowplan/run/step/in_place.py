"""Overwriting: the form of a call that writes its output over an input that is not needed any more."""

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import cache

import torch

from stowplan.capture import Call, Ref
from stowplan.capture.schema import IRREGULAR, overloads_of, signature_of
from stowplan.errors import MissingRule
from stowplan.torch_private import OpOverload, OpOverloadPacket, schema_of, writes_out

_SWEEPS_IN_PLACE = ("stowplan.sweep_.default", "stowplan.sweep_backward_.default")
_IRREGULAR = {pure: writing for writing, pure in IRREGULAR.items()}


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
