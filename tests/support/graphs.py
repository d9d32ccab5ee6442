"""Graphs and documents for many tests: hypothesis strategies of whole ones."""

from typing import TypeVar

from hypothesis import strategies as st

from stowplan.formats.stow import MOST_SECONDS
from stowplan.geometry import Rect
from stowplan.ir import (
    Allocation,
    Attribute,
    Attributes,
    Document,
    DType,
    Graph,
    Interval,
    Kind,
    Note,
    NoteKind,
    Op,
    Phase,
    Profile,
    RegionLists,
    Role,
    Tensor,
    TensorRegion,
    TileSchedule,
    TileStep,
    Use,
)

OUTSIDE_KINDS = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.CONSTANT)
MADE_KINDS = (Kind.ACTIVATION, Kind.GRADIENT, Kind.MASK, Kind.WORKSPACE)
INPUT_ROLES = (Role.DATA, Role.SAVED, Role.SHAPE, Role.CONTROL)

_TRICKY_WORDS = (
    "x",
    "conv1/W",
    "25",
    "aten::add",
    "gpu:0",
    "held",
    "forward",
    "a b",
    '"',
    "{}",
    "->",
    "#",
    "-",
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_words = st.sampled_from(_TRICKY_WORDS) | texts
_ids = _words.filter(bool)


def attributes() -> st.SearchStrategy[Attributes]:
    """JSON-like values of some depth, infinities and huge integers among them."""
    numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
    leaves: st.SearchStrategy[Attribute] = st.none() | st.booleans() | numbers | texts
    return st.dictionaries(texts, st.recursive(leaves, _nested, max_leaves=4), max_size=3)


def _nested(inner: st.SearchStrategy[Attribute]) -> st.SearchStrategy[Attribute]:
    lists: st.SearchStrategy[Attribute] = st.lists(inner, max_size=3).map(tuple)
    return lists | st.dictionaries(texts | st.sampled_from(["$", "$float"]), inner, max_size=2)


@st.composite
def legal_graphs(draw: st.DrawFn, *, sized: bool = False) -> Graph:
    """Graphs that pass `validate`; with `sized`, every tensor has its bytes."""
    names = draw(st.lists(_ids, unique=True, min_size=1, max_size=6))
    sources = draw(st.integers(1, len(names)))
    tensors = {}
    for index, name in enumerate(names):
        kinds = MADE_KINDS if index >= sources else OUTSIDE_KINDS + MADE_KINDS
        tensors[name] = draw(_tensors(name, kinds, names[:index], sized))
    ops = draw(_op_lists(names[:sources], names[sources:]))
    return Graph(tensors, ops, draw(st.frozensets(st.sampled_from(names))), draw(texts))


@st.composite
def _tensors(draw: st.DrawFn, name: str, kinds: tuple[Kind, ...], earlier: list[str], sized: bool) -> Tensor:
    link = st.none() | st.sampled_from(earlier) if earlier else st.none()
    size = st.integers(0, 2**40)
    return Tensor(
        id=name,
        kind=draw(st.sampled_from(kinds)),
        shape=draw(st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple)),
        dtype=draw(st.none() | st.sampled_from(list(DType))),
        nbytes=draw(size if sized else st.none() | size),
        name=draw(_words),
        layout=draw(_words),
        device=draw(_words),
        gradient_of=draw(link),
        alias_of=draw(link),
    )


@st.composite
def _op_lists(draw: st.DrawFn, known: list[str], unmade: list[str]) -> tuple[Op, ...]:
    """Ops that make every tensor of `unmade`, one each, and read or add into what is there by then."""
    made: list[str] = []
    forward: list[str] = []
    ops = []
    for number, name in enumerate([*unmade, None]):
        phase = draw(st.sampled_from(list(Phase)))
        inputs = draw(
            st.lists(st.builds(Use, st.sampled_from(known + made), st.sampled_from(INPUT_ROLES)), max_size=3)
        )
        added = draw(st.lists(st.sampled_from(made), max_size=1)) if made else []
        results = [Use(tensor, Role.ACCUMULATE) for tensor in added] + ([Use(name)] if name else [])
        ops.append(
            Op(
                id=f"{draw(_words)}#{number}",
                type=draw(_ids),
                phase=phase,
                inputs=tuple(inputs),
                outputs=tuple(results),
                attributes=draw(attributes()),
                device=draw(_words),
                adjoint_of=draw(st.sampled_from(forward)) if forward and phase is Phase.BACKWARD else None,
                scope=draw(_words),
                source=draw(_words),
            )
        )
        made += [name] if name else []
        forward += [ops[-1].id] if phase is Phase.FORWARD else []
    return tuple(ops)


_points = st.tuples(st.integers(-9, 9), st.integers(-9, 9))
_rects = st.builds(Rect, _points, _points)
_seconds = st.floats(-MOST_SECONDS, MOST_SECONDS)
_intervals = st.builds(Interval, _seconds, _seconds, _seconds)
_places = st.tuples(st.integers(0, 2**63), st.integers(0, 2**40))
_regions = st.builds(TensorRegion, st.none() | _rects, st.none() | _rects)
_steps = st.lists(st.builds(TileStep, texts, _rects, _rects, _rects), max_size=2).map(tuple)
_tiles = st.dictionaries(_points, _steps, max_size=2)
_notes = st.lists(st.builds(Note, st.sampled_from(NoteKind), texts, texts), max_size=2).map(tuple)

_Value = TypeVar("_Value")


def _by_name(values: st.SearchStrategy[_Value]) -> st.SearchStrategy[dict[str, _Value]]:
    return st.dictionaries(texts, values, max_size=2)


def documents(*, sized: bool = False) -> st.SearchStrategy[Document]:
    """Documents of any content; with `sized`, of a content that can be analysed."""
    return st.builds(
        Document,
        format=st.just("stow"),
        graph=legal_graphs(sized=sized),
        profile=st.none() | st.builds(Profile, _by_name(_by_name(_intervals)), st.booleans()),
        allocation=st.none() | st.builds(Allocation, _by_name(_places)),
        regions=st.none() | st.builds(RegionLists, _by_name(_regions), _by_name(_by_name(_rects))),
        tiles=st.none() if sized else st.none() | st.builds(TileSchedule, _points, _tiles, _tiles),
        notes=_notes,
        counts=_by_name(st.integers(0, 2**40)),
    )
