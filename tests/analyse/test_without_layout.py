"""Bypassing layout transposes: chains vanish, held results move, a transpose that others add into stays."""

from dataclasses import replace

from stowplan.analyse.inspection import without_layout
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
