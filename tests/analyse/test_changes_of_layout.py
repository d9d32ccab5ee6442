"""Changes of layout: a step without them, and one with as few as its ops need."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from stowplan.analyse.layouts import with_fewest_changes, without_layout
from stowplan.ir import Graph, Kind, Op, Phase, Role, Tensor, Use, validate


def turn(source: str, target: str) -> Op:
    return Op(f"turn_{target}", "Transpose", Phase.LAYOUT, (Use(source), Use("how")), (Use(target),))


def graph_of(*ops: Op, held: frozenset[str] = frozenset()) -> Graph:
    names = dict.fromkeys(use.tensor for op in ops for use in (*op.inputs, *op.outputs))
    kinds = {"x": Kind.INPUT, "how": Kind.CONSTANT}
    tensors = {name: Tensor(name, kinds.get(name, Kind.ACTIVATION), nbytes=8) for name in names}
    return validate(Graph(tensors, ops, held))


def forward(name: str, source: str, target: Use) -> Op:
    return Op(name, name, Phase.FORWARD, (Use(source, Role.DATA),), (target,))


def test_a_chain_of_transposes_is_read_at_its_start() -> None:
    graph = graph_of(turn("x", "a"), turn("a", "b"), forward("relu", "b", Use("y")))
    direct = validate(without_layout(graph))
    assert [(op.id, list(op.reads())) for op in direct.ops] == [("relu", ["x"])]
    assert direct.tensors.keys() == {"x", "y"}


def test_a_held_transpose_leaves_its_source_held() -> None:
    graph = graph_of(forward("relu", "x", Use("y")), turn("y", "z"), held=frozenset({"z"}))
    assert without_layout(graph).held == {"y"}


def test_links_to_a_transpose_lead_to_its_source() -> None:
    graph = graph_of(forward("relu", "x", Use("y")), turn("y", "z"), forward("view", "z", Use("w")))
    view = replace(graph.tensors["w"], alias_of="z", gradient_of="z")
    direct = validate(without_layout(replace(graph, tensors={**graph.tensors, "w": view})))
    assert (direct.tensors["w"].alias_of, direct.tensors["w"].gradient_of) == ("y", "y")


def test_a_transpose_that_others_add_into_stays() -> None:
    graph = graph_of(
        turn("x", "a"), forward("add", "x", Use("a", Role.ACCUMULATE)), forward("use", "a", Use("y"))
    )
    assert without_layout(graph) == graph


def test_a_graph_in_one_layout_is_left_alone() -> None:
    graph = graph_of(forward("relu", "x", Use("y")))
    assert without_layout(graph) == graph


SHAPES = {"NCHW": (2, 3, 4, 5), "NHWC": (2, 4, 5, 3)}


def images(
    types: Sequence[str], reads: Sequence[Sequence[int]], layouts: Sequence[str], sizes: Sequence[int]
) -> Graph:
    """A step of these ops, the images they read by number (0 is the input), with the changes that this takes.

    `layouts` and `sizes` are those of the input and of what each op makes. The last image is a result.
    """
    tensors = {"0": Tensor("0", Kind.INPUT, SHAPES[layouts[0]], nbytes=sizes[0], layout=layouts[0])}
    ops: list[Op] = []
    for at, (kind, sources) in enumerate(zip(types, reads, strict=True), 1):
        inputs = []
        for source in sources:
            name = str(source) if layouts[source] == layouts[at] else f"{source} turned"
            if name not in tensors:
                turned = replace(tensors[str(source)], id=name, kind=Kind.ACTIVATION, layout=layouts[at])
                tensors[name] = replace(turned, shape=SHAPES[layouts[at]])
                ops.append(Op(f"turn {source}", "Transpose", Phase.LAYOUT, (Use(str(source)),), (Use(name),)))
            inputs.append(Use(name))
        shape = SHAPES[layouts[at]]
        tensors[str(at)] = Tensor(str(at), Kind.ACTIVATION, shape, nbytes=sizes[at], layout=layouts[at])
        ops.append(Op(f"op {at}", kind, Phase.FORWARD, tuple(inputs), (Use(str(at)),)))
    return validate(Graph(tensors, tuple(ops), frozenset({str(len(types))})))


@pytest.mark.parametrize("seed", range(60))
def test_no_other_layouts_copy_fewer_bytes(seed: int) -> None:
    random = Random(seed)
    count = random.randint(2, 6)
    types = [random.choice(("Relu", "Conv2D", "LRN")) for _ in range(count)]
    reads = [sorted({random.randrange(at), random.randrange(at)}) for at in range(1, count + 1)]
    layouts = [random.choice(("NCHW", "NHWC")) for _ in range(count + 1)]
    sizes = [random.randint(1_000, 9_000) for _ in range(count + 1)]
    graph = images(types, reads, layouts, sizes)
    relaid = with_fewest_changes(graph)
    validate(relaid.graph)
    free = [at for at in range(1, count) if types[at - 1] != "LRN"]  # the last makes the result
    least = min(
        _copied(reads, _with(layouts, free, chosen), sizes) for chosen in product(SHAPES, repeat=len(free))
    )
    assert relaid.copied_bytes == _written(relaid.graph) == least
    assert _work(relaid.graph) == _work(graph)


def _with(layouts: Sequence[str], places: Sequence[int], chosen: Sequence[str]) -> list[str]:
    changed = dict(zip(places, chosen, strict=True))
    return [changed.get(at, layout) for at, layout in enumerate(layouts)]


def _copied(reads: Sequence[Sequence[int]], layouts: Sequence[str], sizes: Sequence[int]) -> int:
    turned = {
        (s, layouts[at]) for at, sources in enumerate(reads, 1) for s in sources if layouts[s] != layouts[at]
    }
    return sum(sizes[source] for source, _ in turned)


def _written(graph: Graph) -> int:
    """The bytes that changes of layout write; each op reads and writes its images in one layout."""
    for op in graph.ops:
        used = {graph.tensors[use.tensor].layout for use in (*op.inputs, *op.outputs)}
        assert len(used) == (2 if op.phase is Phase.LAYOUT else 1)
        for use in op.outputs:
            tensor = graph.tensors[use.tensor]
            assert tensor.shape == SHAPES[tensor.layout]
    turned = (op.outputs[0].tensor for op in graph.ops if op.phase is Phase.LAYOUT)
    return sum(graph.tensors[name].nbytes or 0 for name in turned)


def _work(graph: Graph) -> list[tuple[str, list[str]]]:
    """The ops and what they read, whichever its layout."""
    direct = without_layout(graph)
    return [(op.id, list(op.reads())) for op in direct.ops]


def test_views_and_what_they_view_keep_their_layout() -> None:
    graph = images(
        ("Relu", "Relu", "LRN"), ((0,), (1,), (2,)), ("NHWC", "NCHW", "NCHW", "NHWC"), (8, 8, 8, 8)
    )
    assert with_fewest_changes(graph).changes == 0
    view = replace(graph.tensors["2"], alias_of="1")
    viewed = replace(graph, tensors={**graph.tensors, "2": view})
    assert with_fewest_changes(viewed).graph.tensors["1"].layout == "NCHW"


def test_a_third_layout_leaves_the_step_as_it_is() -> None:
    graph = images(("Relu", "LRN"), ((0,), (1,)), ("NHWC", "NCHW", "NHWC"), (8, 8, 8))
    odd = replace(graph.tensors["0"], layout="CHWN", shape=(3, 4, 5, 2))
    several = replace(graph, tensors={**graph.tensors, "0": odd})
    assert with_fewest_changes(several).graph == several
