"""Projection: the seconds and bytes of a step on a mesh, also on meshes far larger than any at hand.

A roofline gives the seconds of compute and of the copies that collectives make. A message takes a latency and
its bytes over the bandwidth. Sums run in a ring of the workers along their axes, with a latency per doubling
of these. At each collective a worker waits for the slowest that takes part. Nothing is assumed to overlap.
"""

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, log2, prod, sqrt
from statistics import NormalDist
from time import perf_counter

from stowplan.analyse.facts import facts_of
from stowplan.errors import TooManyWorkers
from stowplan.geometry import Rect
from stowplan.ir import Graph, Op
from stowplan.ops.table import shape_of
from stowplan.plan.prices import price_by_roofline
from stowplan.plan.pricing import Machine
from stowplan.techniques.shards.plan.buckets import buckets_of
from stowplan.techniques.shards.plan.mesh import MeshAxes
from stowplan.techniques.shards.plan.parameter_shards import DividedParameters
from stowplan.techniques.shards.plan.plan import RESIDENT, ShardPlan, outline_plan
from stowplan.techniques.shards.plan.propagation import LOOKUPS, ShardingKind
from stowplan.techniques.shards.plan.scale import MeshTraffic, mesh_traffic
from stowplan.techniques.shards.plan.shard import Shard, ShardLevel
from stowplan.techniques.shards.plan.traffic import itemsize_of, summed_by, sums_of, trained_bytes
from stowplan.techniques.shards.plan.weights import PRODUCTS

Seeds = Mapping[str, Sequence[int | None]]


LEAST_SKIPPED = 2**20
"""Random numbers that it takes longer to draw than to skip, on the CPU."""

DRAWN_IN_PARTS = "aten.bernoulli.p"
"""The masks of dropout: a worker draws its part, and the numbers of others are skipped."""


@dataclass(frozen=True, slots=True)
class Network:
    """The price of a message: a latency, and its bytes over the bandwidth of a worker.

    The time of work that takes t seconds alone has a standard deviation of sqrt(jitter_seconds * t).
    """

    latency_seconds: float = 2e-5
    bytes_per_second: float = 1e9
    jitter_seconds: float = 0.0
    workers_per_core: float = 1.0  # workers that share a core compute slower by this factor


@dataclass(frozen=True, slots=True)
class MeshProjection:
    """A step on a mesh, by its slowest and largest worker."""

    mesh: MeshAxes
    compute_seconds: float
    network_seconds: float
    waiting_seconds: float  # for the slowest worker of each collective
    sent_bytes: int  # by the worker that sends most, point to point
    summed_bytes: int  # handed to sums by each worker
    peak_bytes: int
    planning_seconds: float
    planner_bytes: int  # resident in the planning process, at most, by then
    gathered: Mapping[str, str]

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.network_seconds + self.waiting_seconds

    def efficiency(self, alone_seconds: float) -> float:
        """How much of the workers' time the work of one is; all of it where nothing takes time."""
        if not self.step_seconds:
            return 1.0
        return alone_seconds / (self.mesh.size * self.step_seconds)


def project(
    graph: Graph,
    mesh: MeshAxes,
    seeds: Seeds,
    ends: Sequence[str],
    machine: Machine,
    network: Network,
    *,
    shards_parameters: bool = False,
) -> MeshProjection:
    """The step of `graph` on `mesh`; only workers on the axes and in the middle are worked out."""
    started = perf_counter()
    _refuse_idle_workers(graph, mesh, seeds)
    plan = outline_plan(graph, mesh, seeds, ends)
    divided = DividedParameters(graph, mesh.size, plan) if shards_parameters else None
    return projection_of(plan, mesh_traffic(plan), machine, network, started, divided)


def _refuse_idle_workers(graph: Graph, mesh: MeshAxes, seeds: Seeds) -> None:
    """Every worker has a part of every input that is cut."""
    for name, dims in seeds.items():
        shape = shape_of(graph.tensors[name])
        for axis, dim in zip(mesh.axes, dims, strict=True):
            if dim is not None and any(low == high for low, high in pairwise(axis.bounds(shape[dim]))):
                raise TooManyWorkers(
                    f"some of {mesh.size} workers on mesh {mesh} have nothing of {name!r}: the axis"
                    f" {axis.name}={axis.size} cuts a dim of {shape[dim]}; give it fewer workers"
                )


def projection_of(
    plan: ShardPlan,
    traffic: MeshTraffic,
    machine: Machine,
    network: Network,
    started: float,
    divided: DividedParameters | None = None,
) -> MeshProjection:
    """The projection of a plan; `started` is when its planning began.

    With `divided` parameters, gradients are sent and not handed to sums.
    """
    graph, mesh = plan.graph, plan.mesh
    summed, sums = summed_by(plan, 0)
    sum_seconds = _sum_seconds(plan, network)
    workers = _Workers(plan)
    parts = [workers.local_graph(worker) for worker in workers.alike({0, mesh.middle})]
    if divided is None:
        waits = sums - len(buckets_of(graph)) + 1  # buckets are summed meanwhile, and waited for once
        peak = max(facts_of(part).peak.bytes for part in parts)
        sum_seconds += _ring_seconds(mesh.size, trained_bytes(plan), len(buckets_of(graph)), network)
    else:
        own = divided.traffic()
        summed, sums = summed - trained_bytes(plan), sums - len(buckets_of(graph))
        waits = sums + own.collectives
        messages = own.collectives * (mesh.size - 1)
        traffic = MeshTraffic(traffic.sent_bytes + own.sent_bytes, traffic.messages + messages)
        peak = max(map(divided.peak_bytes, parts))
    whole = price_by_roofline(graph, machine).seconds
    seconds = network.latency_seconds * traffic.messages + traffic.sent_bytes / network.bytes_per_second
    compute = workers.slowest_seconds(whole, machine) * network.workers_per_core
    return MeshProjection(
        mesh,
        compute_seconds=compute,
        network_seconds=float(seconds.max()) + sum_seconds,
        waiting_seconds=_waiting_seconds(plan, compute, waits, network),
        sent_bytes=int(traffic.sent_bytes.max()),
        summed_bytes=summed,
        peak_bytes=peak,
        planning_seconds=perf_counter() - started,
        planner_bytes=_resident_peak_bytes(),
        gathered=plan.gathered,
    )


def _resident_peak_bytes() -> int:
    """The most memory that this process had so far; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    from resource import RUSAGE_SELF, getrusage

    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def slowest_seconds(plan: ShardPlan, whole: Mapping[str, float], machine: Machine) -> float:
    """Compute of the worker that has most to do, if ops take `whole` seconds on one."""
    return _Workers(plan).slowest_seconds(whole, machine)


class _Workers:
    """The workers of a plan. Those with parts of the same sizes take as long, and are worked out once."""

    def __init__(self, plan: ShardPlan) -> None:
        self._plan, self._masks = plan, _masks_of(plan.graph)
        self._elements = {name: max(1, prod(layout.cells.sizes)) for name, layout in plan.layouts.items()}
        self._flows = list(_flows_of(plan.graph))
        self._trained_bytes = trained_bytes(plan)
        self._sizes = {worker: _sizes_of(shard) for worker, shard in plan.shards.items()}
        self._shares: dict[Hashable, dict[str, float]] = {}

    def alike(self, workers: Iterable[int]) -> list[int]:
        """One of these workers for all whose parts have the same sizes."""
        return list({self._sizes[worker]: worker for worker in workers}.values())

    def slowest_seconds(self, whole: Mapping[str, float], machine: Machine) -> float:
        """Compute of the worker that has most to do."""
        workers = self.alike(self._plan.shards)
        return max(self._compute_seconds(worker, whole, machine) for worker in workers)

    def local_graph(self, worker: int) -> Graph:
        """The graph with tensors as large as a worker's part of them."""
        tensors = dict(self._plan.graph.tensors)
        for name, share in self._shares_of_tensors(worker).items():
            nbytes = ceil((tensors[name].nbytes or 0) * share)
            if nbytes != tensors[name].nbytes:
                tensors[name] = replace(tensors[name], nbytes=nbytes)
        return replace(self._plan.graph, tensors=tensors)

    def _shares_of_tensors(self, worker: int) -> dict[str, float]:
        """By tensor the share of it that a worker has: a gradient's is that of its tensor.

        What else there is in the backward half is as large, in proportion, as what it is made from.
        """
        sizes = self._sizes[worker]
        if sizes in self._shares:
            return self._shares[sizes]
        shard = self._plan.shards[worker]
        found = {name: self._share_held(shard, name) for name in {**shard.held, **shard.made}}
        for read, made in self._flows:
            for name, source, is_resident in made:
                if name not in found:
                    if is_resident:
                        found[name] = 1.0
                    elif source in found:
                        found[name] = found[source]
                    else:
                        found[name] = max((found[source] for source in read if source in found), default=1.0)
        self._shares[sizes] = found
        return found

    def _share_held(self, shard: Shard, name: str) -> float:
        if self._plan.graph.tensors[name].kind in RESIDENT:
            return 1.0
        mask = self._masks.get(name)
        rects = (shard.held.get(name), shard.made.get(name)) if mask is None else (shard.held.get(mask),)
        return max((rect.volume for rect in rects if rect is not None), default=0) / self._elements[name]

    def _compute_seconds(self, worker: int, whole: Mapping[str, float], machine: Machine) -> float:
        """Each op takes its share of what it would take whole, and a backward op that of its forward op."""
        shard, shares = self._plan.shards[worker], self._shares_of_tensors(worker)
        done = {
            level.sharding.op.id: _share_drawn(level.made, shard.held.get(self._masks[level.name]))
            if level.name in self._masks
            else self._share_done(level)
            for level in shard.levels
        }

        def share(op: Op) -> float:
            first = shares.get(op.outputs[0].tensor, 1.0) if op.outputs else 1.0
            return done.get(op.adjoint_of or op.id, first)

        start = machine.launch_seconds
        computed = sum((whole[op.id] - start) * share(op) + start for op in self._plan.graph.ops)
        return computed + self._copied_bytes(shard) / machine.bytes_per_second

    def _share_done(self, level: ShardLevel) -> float:
        """The share of an op that a worker does: of what it makes, or of what it adds up."""
        name, rect = level.name, level.made
        op = level.sharding.op
        if level.sharding.kind is ShardingKind.SUMS and op.type not in LOOKUPS:
            number = PRODUCTS[op.type].left if op.type in PRODUCTS else 0
            need = level.needs[number]
            if need is not None:
                name, rect = op.inputs[number].tensor, need
        return rect.volume / self._elements[name]

    def _copied_bytes(self, shard: Shard) -> int:
        """Bytes that collectives copy: shares into held parts, and gradients into buckets and out of them."""
        plan = self._plan
        if plan.mesh.size == 1:
            return 0
        tensors = (name for name in plan.exchanged if name in shard.held)
        held = (
            shard.held[name].volume * itemsize_of(plan.graph, name) * (1 + (name in plan.differentiated))
            for name in tensors
        )
        return 2 * sum(held) + 4 * self._trained_bytes


def _sizes_of(shard: Shard) -> Hashable:
    """What a worker's seconds and bytes depend on: the sizes of its parts, wherever these lie."""
    added = [n for level in shard.levels if level.sharding.kind is ShardingKind.SUMS for n in level.needs]
    parts = (*shard.held.values(), *shard.made.values(), *added)
    shapes = tuple([None if part is None else part.shape for part in parts])
    return tuple(shard.held), tuple(shard.made), shapes


def _flows_of(graph: Graph) -> Iterator[tuple[Sequence[str], Sequence[tuple[str, str, bool]]]]:
    """By op, what it reads of the step's own, and what it makes.

    With each made tensor comes the tensor whose gradient it is, or "", and whether every worker has it whole.
    """
    tensors = graph.tensors
    for op in graph.ops:
        sources = [(name, tensors[name].gradient_of or "") for name in op.writes()]
        made = [(name, source, tensors[source or name].kind in RESIDENT) for name, source in sources]
        yield [name for name in op.reads() if tensors[name].kind not in RESIDENT], made


def _masks_of(graph: Graph) -> dict[str, str]:
    """By mask that is drawn in parts, and by blank tensor that it is drawn in, the mask."""
    draws = [op for op in graph.ops if op.type == DRAWN_IN_PARTS]
    return {name: op.outputs[0].tensor for op in draws for name in (*op.reads(), *op.writes())}


def _share_drawn(whole: Rect, part: Rect | None) -> float:
    """The share of a mask that a worker draws for its part. A few numbers between two rows are drawn too."""
    share = 1.0
    for dim, size in enumerate(whole.shape):
        own = 0 if part is None else part.shape[dim]
        if (size - own) * prod(whole.shape[dim + 1 :]) >= LEAST_SKIPPED:
            share *= own / size
    return share


def _waiting_seconds(plan: ShardPlan, compute: float, waits: int, network: Network) -> float:
    """Compute time between two collectives differs from worker to worker; all wait for the slowest."""
    exchanges = sum(1 + (name in plan.differentiated) for name in plan.exchanged)
    if not exchanges + waits:
        return 0.0
    neighbours = min(plan.mesh.size, 1 + 2 * sum(axis.size > 1 for axis in plan.mesh.axes))
    slowest = exchanges * expected_most(neighbours) + waits * expected_most(plan.mesh.size)
    return slowest * sqrt(network.jitter_seconds * compute / (exchanges + waits))


def expected_most(count: int) -> float:
    """The expected largest of `count` numbers of a normal distribution (Blom)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def _sum_seconds(plan: ShardPlan, network: Network) -> float:
    """The sums over workers but for those of parameters' gradients, each among the workers along its axes."""
    axes = plan.mesh.axes
    return sum(
        _ring_seconds(prod(axes[number].size for number in along), nbytes, 1, network)
        for along, nbytes in sums_of(plan, 0)
    )


def _ring_seconds(workers: int, nbytes: int, sums: int, network: Network) -> float:
    if workers == 1:
        return 0.0
    ring = 2 * (workers - 1) / workers * nbytes / network.bytes_per_second
    return ring + 2 * ceil(log2(workers)) * network.latency_seconds * sums
