"""Sparse tensors: opened into their indices and values, which are tensors like any other.

A plan knows dense tensors alone. A sparse argument or buffer counts as its parts: those tell where its bytes
lie, and are read anew at each call. Layout, size and number of elements belong to the form of the call.

While a step is captured, a sparse tensor is a stand-in without data that remembers its parts. An op that
reads it and gives a dense tensor becomes one op on the parts, `read_sparse`, which puts the sparse tensor
together and calls what eager calls. Where forward or autograd transposes a sparse tensor or changes its
dtype, that op does so first. Ops that give other sparse tensors, and gradients for sparse tensors, are
refused.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from stowplan.errors import CaptureError
from stowplan.torch_private import FakeTensor, OpOverload

aten = torch.ops.aten

_PARTS: Mapping[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}
_LAYOUTS = {str(layout): layout for layout in _PARTS}
_FORM = "_stowplan_form"  # of sparse tensors that are put together here
_NO_NEW_CONTENTS = (
    *(aten.t.default, aten.transpose.int, aten.detach.default, aten.alias.default, aten.clone.default),
    aten._to_copy.default,
)
# The ops on sparse tensors that a plan has, and dense ops with results of the same shape.
_DENSE: Mapping[OpOverload, Callable[..., Tensor]] = {
    aten.mm.default: aten.mm.default,
    aten.mv.default: aten.mv.default,
    aten.addmm.default: aten.addmm.default,
    aten._sparse_addmm.default: aten.addmm.default,
    aten._to_dense.default: aten.clone.default,
    aten.sum.default: aten.sum.default,
}
_ABOUT_THE_FORM = (
    *(aten._nnz.default, aten.is_coalesced.default, aten.sparse_dim.default, aten.dense_dim.default),
    *(aten._dimI.default, aten._dimV.default, torch.ops.prim.device.default),
)


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor has one of the layouts that are opened."""
    return tensor.layout in _PARTS


def contents_of_sparse(tensor: Tensor) -> dict[str, object]:
    """Its form and its parts, by name; the parts of a stand-in are stand-ins."""
    form = getattr(tensor, _FORM, None)
    if isinstance(form, _Making):
        return dict(form.contents())
    if tensor.requires_grad:
        raise CaptureError(
            f"a sparse tensor of {'x'.join(map(str, tensor.shape))} requires a gradient",
            advice="plans have gradients for dense tensors alone: give x.to_dense(), or x.detach()",
        )
    is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    about = {"layout": tensor.layout, "size": tuple(tensor.shape), "coalesced": is_coalesced}
    return about | {name.strip("_"): getattr(tensor, name)().detach() for name in _PARTS[tensor.layout]}


def sparse_with(contents: Mapping[str, Any]) -> Tensor:
    """The sparse tensor of this form with these parts; without data if one of them is."""
    layout: torch.layout = contents["layout"]
    parts = tuple(contents[name.strip("_")] for name in _PARTS[layout])
    form = _Making(str(layout), contents["size"], contents["coalesced"], parts)
    fake = next((part for part in parts if isinstance(part, FakeTensor)), None)
    if fake is None:
        made = form.together(parts)
    else:
        looks = [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for p in parts]
        made = FakeTensor(fake.fake_mode, form.together(looks), parts[-1].device)
    setattr(made, _FORM, form)
    return made


@dataclass(frozen=True, slots=True)
class _Making:
    """How parts make a sparse tensor: put together, then changed by ops that give it no new contents."""

    layout: str
    size: tuple[int, ...]
    is_coalesced: bool
    parts: tuple[Tensor, ...]
    then: tuple[tuple[str, tuple[object, ...], tuple[tuple[str, str], ...]], ...] = ()

    def contents(self) -> Iterator[tuple[str, object]]:
        if self.then:
            raise CaptureError(
                "forward keeps a sparse tensor that it made",
                advice="make it outside forward, and register it with register_buffer",
            )
        yield from (("layout", _LAYOUTS[self.layout]), ("size", self.size), ("coalesced", self.is_coalesced))
        names = (name.strip("_") for name in _PARTS[_LAYOUTS[self.layout]])
        yield from zip(names, self.parts, strict=True)

    def together(self, parts: Iterable[Tensor]) -> Tensor:
        """The tensor of these parts, as it is read."""
        layout, (*indices, values) = _LAYOUTS[self.layout], parts
        how: dict[str, Any] = {"check_invariants": False}
        if layout is torch.sparse_coo:
            how["is_coalesced"] = self.is_coalesced
            made = torch.sparse_coo_tensor(indices[0], values, self.size, **how)
        else:
            make: Callable[..., Tensor] = torch.sparse_compressed_tensor
            made = make(*indices, values, self.size, layout=layout, **how)
        for name, rest, said in self.then:
            made = _op_named(name)(made, *rest, **_dtypes_in(said))
        return made


def _dtypes_in(said: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {name: getattr(torch, value.removeprefix("torch.")) for name, value in said}


@cache
def _op_named(name: str) -> OpOverload:
    packet, _, overload = name.removeprefix("aten.").rpartition(".")
    return cast(OpOverload, getattr(getattr(aten, packet), overload))


def has_sparse(values: Iterable[object]) -> bool:
    """Whether an op is given a sparse tensor."""
    return any(isinstance(value, Tensor) and is_sparse(value) for value in values)


@dataclass(frozen=True, slots=True)
class Reading:
    """An op on sparse tensors as `read_sparse` on their parts; or its `result`, if no op is needed."""

    args: tuple[object, ...] = ()
    result: object = None


def reading_of(target: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Reading:
    """How a captured step does this op; raises CaptureError if it cannot."""
    if target in _ABOUT_THE_FORM:
        return Reading(result=target(*args, **kwargs))
    first = args[0] if args else None
    form = _form_of(first) if isinstance(first, Tensor) and is_sparse(first) else None
    name = str(target).removeprefix("aten.").removesuffix(".default")
    if form is not None and name in _PARTS[_LAYOUTS[form.layout]] + ("indices", "values"):
        contents = dict(form.contents())
        return Reading(result=aten.alias.default(contents[name.strip("_")]))
    if form is not None and target in _NO_NEW_CONTENTS and _said(kwargs).keys() <= {"dtype"}:
        made = cast(Tensor, target(*args, **kwargs))
        said = tuple((name, str(value)) for name, value in _said(kwargs).items())
        then = (*form.then, (str(target), tuple(args[1:]), said))
        setattr(made, _FORM, replace(form, then=then))
        return Reading(result=made)
    if target not in _DENSE:
        raise CaptureError(
            f"forward calls {target} on a sparse tensor, and plans have its products with dense ones alone",
            advice="do that outside forward, as coalesce() and changes of dtype, or give x.to_dense()",
        )
    parts = list[Tensor]()
    how = repr((str(target), _told(args, parts), _told(_said(kwargs), parts)))
    return Reading((how, parts))


def _form_of(tensor: Tensor) -> _Making:
    form = getattr(tensor, _FORM, None)
    if not isinstance(form, _Making):
        size = "x".join(map(str, tensor.shape))
        raise CaptureError(
            f"forward reads a sparse tensor of {size} that is neither an argument nor a buffer",
            advice="register it with register_buffer, or pass it in",
        )
    return form


def _told(value: object, parts: list[Tensor]) -> object:
    """An argument in literals; its tensors are numbers of those that are added to `parts`."""
    if isinstance(value, Tensor) and is_sparse(value):
        form = _form_of(value)
        begin = len(parts)
        parts += form.parts
        return ("sparse", form.layout, form.size, form.is_coalesced, form.then, begin, len(parts))
    if isinstance(value, Tensor):
        parts.append(value)
        return "tensor", len(parts) - 1
    if isinstance(value, (tuple, list)):
        return "list", *(_told(item, parts) for item in value)
    if isinstance(value, dict):
        return {name: _told(item, parts) for name, item in value.items()}
    return "value", value


def _said(kwargs: Mapping[str, object]) -> dict[str, object]:
    """Without what is None: only `to_dense` takes it, for the dtype that the tensor has."""
    return {name: value for name, value in kwargs.items() if value is not None}


torch.library.define("stowplan::read_sparse", "(str how, Tensor[] tensors) -> Tensor")


@torch.library.impl("stowplan::read_sparse", "CompositeExplicitAutograd")
def _read_sparse(how: str, tensors: list[Tensor]) -> Tensor:
    """What eager's op gives for the sparse tensors that are made of these parts."""
    target, args, kwargs = _parsed(how)
    found = {name: _given(value, tensors) for name, value in kwargs.items()}
    return cast(Tensor, target(*(_given(value, tensors) for value in args), **found))


@torch.library.register_fake("stowplan::read_sparse")  # type: ignore[untyped-decorator]
def _like_read(how: str, tensors: list[Tensor]) -> Tensor:
    """A row-major result, as all of these kernels make; sparse operands have dense ones in their place."""
    target, args, kwargs = _parsed(how)
    found = {name: _dense(value, tensors) for name, value in kwargs.items()}
    return _DENSE[target](*(_dense(value, tensors) for value in args), **found).contiguous()


READ_SPARSE: OpOverload = torch.ops.stowplan.read_sparse.default


@cache
def _parsed(how: str) -> tuple[OpOverload, tuple[Any, ...], Mapping[str, Any]]:
    name, (_, *args), kwargs = ast.literal_eval(how)
    return _op_named(name), tuple(args), kwargs


def _given(value: tuple[Any, ...], tensors: list[Tensor]) -> object:
    match value:
        case "sparse", layout, size, is_coalesced, then, begin, end:
            return _Making(layout, size, is_coalesced, (), then).together(tensors[begin:end])
        case "tensor", number:
            return tensors[number]
        case "list", *items:
            return [_given(item, tensors) for item in items]
        case _, plain:
            return plain
    raise AssertionError(value)


def _dense(value: tuple[Any, ...], tensors: list[Tensor]) -> Any:
    """An argument, with a tensor of the same size for a sparse one."""
    if value[0] != "sparse":
        return _given(value, tensors)
    _, _, size, _, then, _, end = value
    made = tensors[end - 1].new_empty(size)
    for name, rest, said in then:
        made = _op_named(name)(made, *rest, **_dtypes_in(said))
    return made


def fill_pointers(how: str, tensors: list[Tensor]) -> None:
    """Make operands of `read_sparse` legal: compressed rows or columns divide the values among them."""
    _, args, kwargs = _parsed(how)
    for value in (*args, *kwargs.values()):
        if value[0] == "sparse" and value[1] != str(torch.sparse_coo):
            begins, values = tensors[value[5]], tensors[value[6] - 1]
            begins.copy_(torch.arange(len(begins)) * len(values) // max(1, len(begins) - 1))
