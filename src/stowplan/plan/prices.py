"""Prices of ops where nothing may run: from a file's profile, a model of a machine, or arithmetic alone."""

from collections.abc import Mapping

from stowplan.analyse.facts import costs_of
from stowplan.errors import BadUse
from stowplan.ir import Graph, Profile
from stowplan.plan.pricing import Basis, Machine, Pricing

_BYTES_PER_MAC = 1000  # moving bytes only breaks ties where multiply-accumulates are what counts


def price_by_macs(graph: Graph) -> Pricing:
    """For graphs of unknown machines: arithmetic is what counts, traffic breaks ties."""
    costs = costs_of(graph)
    seconds = costs.macs + costs.traffic_bytes / _BYTES_PER_MAC
    return Pricing({op.id: float(s) for op, s in zip(graph.ops, seconds, strict=True)}, Basis.MACS)


def price_by_roofline(graph: Graph, machine: Machine) -> Pricing:
    """An estimate where nothing may run: the slower of arithmetic and traffic, op by op."""
    costs = costs_of(graph)
    seconds = {
        op.id: machine.launch_seconds
        + max(float(macs) / machine.macs_per_second, float(traffic) / machine.bytes_per_second)
        for op, macs, traffic in zip(graph.ops, costs.macs, costs.traffic_bytes, strict=True)
    }
    return Pricing(seconds, Basis.ROOFLINE)


def price_by_profile(graph: Graph, profile: Profile, workspace_bytes: Mapping[str, int]) -> Pricing:
    """Seconds of the profile's only or its device clock."""
    name = "device" if "device" in profile.clocks else next(iter(profile.clocks), "")
    clock = profile.clocks.get(name, {})
    missing = [op.id for op in graph.ops if op.id not in clock]
    if missing:
        raise BadUse(f"the profile has no time for {len(missing)} ops, the first is {missing[0]!r}")
    seconds = {op.id: clock[op.id].end_seconds - clock[op.id].kernel_seconds for op in graph.ops}
    if reversed_ops := [name for name, took in seconds.items() if took < 0]:
        raise BadUse(f"the profile lets op {reversed_ops[0]!r} end before its kernel begins")
    basis = Basis.ROOFLINE if profile.estimated else Basis.MEASURED
    return Pricing(seconds, basis, workspace_bytes)
