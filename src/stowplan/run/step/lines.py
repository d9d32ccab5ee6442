"""One call as lines of Python: the op itself, with copies before it or an output written over an input."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from stowplan.capture import Argument, Call, Ref
from stowplan.run.step.in_place import overwriting
from stowplan.run.step.literals import keyword_argument, literal, spelled
from stowplan.torch_private import schema_of

aten = torch.ops.aten


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
