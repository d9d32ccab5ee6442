"""Graph.storage_of follows aliases to the tensor that owns the memory."""

from dataclasses import replace

from stowplan.ir import Graph, Kind, Tensor


def chain() -> Graph:
    """`c` is a view of `b`, which is a view of `a`; the views come first."""
    tensors = (
        Tensor("c", Kind.ACTIVATION, alias_of="b"),
        Tensor("b", Kind.ACTIVATION, alias_of="a"),
        Tensor("a", Kind.ACTIVATION),
    )
    return Graph({tensor.id: tensor for tensor in tensors}, ())


def test_views_of_views_share_the_storage_of_the_first() -> None:
    graph = chain()
    assert [graph.storage_of(name) for name in "abc"] == ["a", "a", "a"]


def test_a_copy_with_other_tensors_forgets_what_was_found() -> None:
    graph = chain()
    assert graph.storage_of("c") == "a"
    cut = replace(graph, tensors={**graph.tensors, "b": Tensor("b", Kind.ACTIVATION)})
    assert cut.storage_of("c") == "b"
    assert graph == chain()
