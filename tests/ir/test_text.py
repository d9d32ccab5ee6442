"""The text form gives back the graph it was made of, and refuses what it cannot read with the line."""

import pytest
from hypothesis import given

from stowplan.errors import BadInput
from stowplan.ir import DType, Graph, Kind, Op, Phase, Role, Tensor, Use, validate
from stowplan.ir.text import format_graph, parse_graph
from tests.support.graphs import legal_graphs

TWO_OPS = """\
stowplan graph 1 "two ops"
parameter W: float32[4,4] bytes=64
input x: float32[1,4] bytes=16 device=gpu:0
held activation y: float32[1,4] bytes=16
gradient "x grad": ? gradient_of=x
forward fc: MatMul(x, W) -> (y) device=gpu:0 {"transpose": false, "sizes": [1, [2.0, null]]}
backward fc.b: MatMul(y, W saved, x shape) -> ("x grad") adjoint_of=fc
"""


@given(legal_graphs())
@pytest.mark.slow
def test_every_legal_graph_survives_its_text(graph: Graph) -> None:
    text = format_graph(validate(graph))
    assert parse_graph(text) == graph
    assert text.count("\n") == 1 + len(graph.tensors) + len(graph.ops)


def test_the_text_reads_like_the_graph() -> None:
    graph = Graph(
        tensors={
            "W": Tensor("W", Kind.PARAMETER, (4, 4), DType.FLOAT32, 64),
            "x": Tensor("x", Kind.INPUT, (1, 4), DType.FLOAT32, 16, device="gpu:0"),
            "y": Tensor("y", Kind.ACTIVATION, (1, 4), DType.FLOAT32, 16),
            "x grad": Tensor("x grad", Kind.GRADIENT, gradient_of="x"),
        },
        ops=(
            Op(
                "fc",
                "MatMul",
                Phase.FORWARD,
                (Use("x"), Use("W")),
                (Use("y"),),
                {"transpose": False, "sizes": (1, (2.0, None))},
                device="gpu:0",
            ),
            Op(
                "fc.b",
                "MatMul",
                Phase.BACKWARD,
                (Use("y"), Use("W", Role.SAVED), Use("x", Role.SHAPE)),
                (Use("x grad"),),
                adjoint_of="fc",
            ),
        ),
        held=frozenset({"y"}),
        name="two ops",
    )
    assert format_graph(graph) == TWO_OPS
    assert parse_graph(TWO_OPS) == graph


def test_blank_lines_and_comments_say_nothing() -> None:
    commented = TWO_OPS.replace("\n", "\n\n  # a remark\r\n")
    assert parse_graph(commented) == parse_graph(TWO_OPS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("parameter", "expected an id at the end of the line"),
        ("paramter V: float32", "'paramter' is not a kind: parameter, buffer"),
        ("held forward V: float32", "'forward' is not a kind"),
        ("parameter V float32", "expected ':' before 'float32'"),
        ("parameter V: float33", "'float33' is not a dtype"),
        ("parameter V: float32[4,four]", "expected a size, found 'four'"),
        ("parameter V: float32[4 4]", "expected ',' before '4]'"),
        ("parameter V: float32 bytes=1e9", "expected a number of bytes, found '1e9'"),
        ("parameter V: float32 colour=red", "'colour' comes twice or is not one of name, layout"),
        ("parameter V: float32 name=a name=b", "'name' comes twice"),
        ('parameter V: float32 {"a": 1}', "expected the end of the line before '{"),
        ("parameter W: float32", "tensor 'W' has a line already"),
        ('parameter "V: float32', "expected an id before '\"V: float32'"),
        (r'parameter "\q": float32', "is not a quoted word"),
        ("forward f: Add(x, W", "expected a role, ',' or ')' at the end of the line"),
        ("forward f: Add(x W) -> (y)", "'W' is not a role: data, saved"),
        ("forward f: Add(x, W)", "expected '->' at the end of the line"),
        ('forward f: Add(x) -> (y) {"a": 1, "a": 2}', "key 'a' comes twice"),
        ('forward f: Add(x) -> (y) {"a": }', "the attributes are not a JSON object"),
        ('forward f: Add(x) -> (y) {"a": ' + "[" * 5000, "the attributes are not a JSON object"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_graph(TWO_OPS + line + "\n")
    assert caught.value.where == "line 8"
    assert message in caught.value.what


@pytest.mark.parametrize("text", ["", "graph", "stowplan graph", "stowplan graph 2", "stowplan graph 1 a b"])
def test_another_header_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="line 1"):
        parse_graph(text)
