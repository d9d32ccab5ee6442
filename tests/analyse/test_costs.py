"""Multiply-accumulates and bytes moved, summed without losing a digit."""

import pytest

from stowplan.analyse import costs_of
from stowplan.errors import InvalidGraph
from stowplan.ir.text import parse_graph


def convolutions(side: int, count: int) -> str:
    """A text of `count` convolutions, each of 4 side^2 multiplications."""
    lines = [f"input x: ?[1,1,{side},{side}] bytes=8", "parameter w: ?[1,1,2,2] bytes=16"]
    for number in range(count):
        lines.append(f"activation y{number}: ?[1,1,{side},{side}] bytes=8")
        lines.append(f"forward f{number}: ConvolutionForward(x, w) -> (y{number})")
    return "\n".join(["stowplan graph 1", *lines]) + "\n"


def test_totals_do_not_wrap_around() -> None:
    costs = costs_of(parse_graph(convolutions(2**30, 5)))
    assert costs.step_macs == costs.forward_macs == 5 * 2**62
    assert costs.macs.tolist() == [2**62] * 5
    assert costs.traffic_bytes.tolist() == [32] * 5


def test_an_op_beyond_counting_is_named() -> None:
    with pytest.raises(InvalidGraph, match=r"op 'f0' would take 4\.15e\+19"):
        costs_of(parse_graph(convolutions(2**31 + 2**30, 1)))
