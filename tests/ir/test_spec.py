"""Every rule of a legal graph refuses a graph that breaks it, by name and with its neighbourhood."""

import pytest
from hypothesis import given

from stowplan.errors import InvalidGraph
from stowplan.ir import Graph, Kind, Op, Phase, Tensor, Use, validate
from stowplan.ir.graph import RULES
from stowplan.ir.text import parse_graph
from tests.support.graphs import legal_graphs

HEAD = """\
stowplan graph 1
parameter W: ?
input x: ?
activation y: ?
activation z: ?
"""
BROKEN = {
    "ids_match_keys": [
        "forward f: F() -> ()\nforward f: F() -> ()",
        'input "": ?',
    ],
    "sizes_are_possible": [
        "input big: ? bytes=4611686018427387904",
        "input negative: ? bytes=-1",
        "input negative: ?[2,-1]",
        "input vast: ?[2147483648,2147483648]",
        f"input long: ?[{','.join('1' * 65)}]",
        "input one: ? bytes=4611686018427387903\ninput more: ? bytes=1",
    ],
    "attributes_are_modest": [
        f'forward f: F() -> () {{"a": {"[" * 34 + "]" * 34}}}',
        f'forward f: F() -> () {{"a": [{2**129}]}}',
    ],
    "uses_name_tensors": [
        "forward f: F(nothing) -> ()",
        "forward f: F(x) -> (nothing)",
        "forward f: F(x accumulate) -> (y)",
        "forward f: F(x) -> (y saved)",
    ],
    "links_name_things": [
        "gradient g: ? gradient_of=nothing",
        "activation v: ? alias_of=nothing",
        "activation v: ? alias_of=w\nactivation w: ? alias_of=v",
        "activation v: ? alias_of=v",
        "\n".join(f"activation v{i}: ? alias_of={f'v{i + 1}' if i < 300 else 'x'}" for i in range(301)),
        "backward b: F() -> () adjoint_of=nothing",
        "backward a: F() -> ()\nbackward b: F() -> () adjoint_of=a",
    ],
    "makers_fit_kinds": [
        "forward f: F(x) -> (W)",
        "forward f: F(W) -> (x)",
    ],
    "order_is_executable": [
        "forward f: F(y) -> (z)\nforward g: G(x) -> (y)",
        "forward f: F(x) -> (y)\nforward g: G(x) -> (y)",
        "forward f: F(x) -> (y accumulate)",
    ],
}


@given(legal_graphs())
@pytest.mark.slow
def test_a_legal_graph_passes_as_itself(graph: Graph) -> None:
    assert validate(graph) is graph


def test_every_rule_has_a_graph_that_breaks_it() -> None:
    assert set(BROKEN) == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    ("rule", "lines"), [(rule, lines) for rule, cases in BROKEN.items() for lines in cases]
)
def test_a_broken_rule_is_named(rule: str, lines: str) -> None:
    with pytest.raises(InvalidGraph, match=f"^{rule}: "):
        validate(parse_graph(HEAD + lines))


@pytest.mark.parametrize(
    "lines",
    [
        "forward f: F(y shape, x) -> (z)\nforward g: G(z) -> (y)",
        "forward f: F(x) -> (y)\nbackward b: B(x) -> (y accumulate)",
        "activation v: ? alias_of=y\nforward f: F(x) -> (y, v)",
        "parameter V: ? alias_of=W\nforward f: F(x) -> (V)",
    ],
)
def test_what_the_rules_allow(lines: str) -> None:
    validate(parse_graph(HEAD + lines))


def test_a_tensor_filed_under_another_name_is_found() -> None:
    with pytest.raises(InvalidGraph, match="tensor 'x' is filed under 'y'"):
        validate(Graph({"y": Tensor("x", Kind.INPUT)}, ()))
    with pytest.raises(InvalidGraph, match="held tensor 'y' is unknown"):
        validate(Graph({}, (), frozenset({"y"})))


def test_a_fault_shows_its_neighbourhood() -> None:
    chain = [Op(f"f{i}", "F", Phase.FORWARD, (Use(f"t{i}"),), (Use(f"t{i + 1}"),)) for i in range(9)]
    chain[4], chain[5] = chain[5], chain[4]
    tensors = {name: Tensor(name, Kind.ACTIVATION) for name in (f"t{i}" for i in range(10))}
    with pytest.raises(InvalidGraph) as caught:
        validate(Graph(tensors, tuple(chain)))
    assert str(caught.value).splitlines() == [
        "order_is_executable: op 'f5' reads 't5' before it is made",
        "  2: t3 = F(t2)  # f2",
        "  3: t4 = F(t3)  # f3",
        "> 4: t6 = F(t5)  # f5",
        "  5: t5 = F(t4)  # f4",
        "  6: t7 = F(t6)  # f6",
    ]
