"""The records of a MegEngine dump, typed. An error names the key path: `graph_exec.var.539.name`."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from stowplan.errors import BadInput

Name: TypeAlias = Annotated[str, Meta(max_length=10_000, pattern=r"^[^\x00-\x1f\ud800-\udfff]*$")]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Seconds: TypeAlias = Annotated[float, Meta(ge=-1e15, le=1e15)]
Sizes: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=16)]
Scalar: TypeAlias = bool | int | float | Name | None
Section: TypeAlias = dict[Name, Any]

_PLACE = re.compile(r" - at (?:`key` in )?`\$(.*)`")  # how msgspec says where a fault is
_THE_LINE = "line 1"  # a dump is one line; some faults have no finer place


class Times(Struct, frozen=True):
    """One op on one clock, in seconds: issued, kernel began, ended."""

    start: Seconds
    kern: Seconds
    end: Seconds


class Footprint(Struct, frozen=True):
    """One run of an op: its parameters, shapes, bytes moved and floating-point operations."""

    param: dict[Name, Scalar]
    in_shapes: tuple[Sizes, ...]
    out_shapes: tuple[Sizes, ...]
    memory: Count
    computation: Count | None


class InferredShape(Struct, frozen=True):
    """The result of MegEngine's static shape inference; None where it had none."""

    inferred_result: Sizes | None


class InferTags(Struct, frozen=True):
    """The result of static inference for a var."""

    SHAPE: InferredShape


class MemoryLayout(Struct, frozen=True):
    """The layout of a persistent var in its chunk."""

    dtype: Name


class MemoryPlan(Struct, frozen=True):
    """The place of a persistent var: its chunk and layout."""

    layout: MemoryLayout
    mem_chunk_id: Name


class Var(Struct, frozen=True):
    """A tensor. Its address is `dev_ptr` or, if that is null, where it was in the last run."""

    name: Name
    comp_node: Name
    static_infer_tags: InferTags
    prev_dev_ptr: Count
    prev_dev_ptr_end: Count | None = None
    dev_ptr: Count | None = None
    mem_plan: MemoryPlan | None = None
    mem_readonly_fwd_src: Name | None = None


class Operator(Struct, frozen=True):
    """An op with the vars it reads and writes."""

    type: Name
    name: Name
    input: tuple[Name, ...]
    output: tuple[Name, ...]


class Chunk(Struct, frozen=True):
    """Memory that stays for the life of the program."""

    size: Count
    owner_var: Name


class Dump(Struct, frozen=True):
    """The whole file, every entry typed."""

    comp_seq: tuple[str, ...]
    chunks: Mapping[str, Chunk]
    vars: Mapping[str, Var]
    operators: Mapping[str, Operator]
    footprints: Mapping[str, Footprint]
    clocks: Mapping[str, Mapping[str, Mapping[str, Times]]]


class _Profiler(Struct):
    host: Section
    device: Section
    opr_footprint: Section


class _GraphExec(Struct):
    comp_seq: tuple[Name, ...]
    mem_chunk: Section
    var: Section
    operator: Section


class _File(Struct):
    profiler: _Profiler
    graph_exec: _GraphExec


def parse(text: str) -> Dump:
    """The dump in `text`, or BadInput at the first malformed entry."""
    file = _typed(_json(text), _File, "")
    graph, profiler = file.graph_exec, file.profiler
    return Dump(
        comp_seq=graph.comp_seq,
        chunks=_entries(graph.mem_chunk, Chunk, "graph_exec.mem_chunk"),
        vars=_entries(graph.var, Var, "graph_exec.var"),
        operators=_entries(graph.operator, Operator, "graph_exec.operator"),
        footprints=_entries(profiler.opr_footprint, Footprint, "profiler.opr_footprint"),
        clocks={
            "host": _entries(profiler.host, dict[Name, Times], "profiler.host"),
            "device": _entries(profiler.device, dict[Name, Times], "profiler.device"),
        },
    )


Record = TypeVar("Record")


def _entries(section: Section, kind: type[Record], where: str) -> dict[str, Record]:
    return {key: _typed(value, kind, f"{where}.{key}") for key, value in section.items()}


def _typed(value: object, kind: type[Record], where: str) -> Record:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, *path = _PLACE.split(str(error))
        raise BadInput(what, where="".join((where, *path)).lstrip(".") or "top level") from None
    except UnicodeEncodeError as error:
        what = f"half of a surrogate pair is not text: {error.reason}"
        raise BadInput(what, where=where or "top level") from None


def _json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_not_a_number)
    except json.JSONDecodeError as error:
        raise BadInput(error.msg, where=f"line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise BadInput("nested deeper than any dump", where=_THE_LINE) from None
    except ValueError as error:  # an integer of thousands of digits
        raise BadInput(str(error), where=_THE_LINE) from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        again, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise BadInput("the key is given twice in one object", where=repr(again))
    return entries


def _not_a_number(word: str) -> NoReturn:
    raise BadInput(f"{word} is not a JSON number", where=_THE_LINE)
