"""`stowplan simulate X --mesh data=2,space=2x2`: what a step would take on a mesh, without having one."""

import json
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from stowplan import api
from stowplan.errors import BadUse, IllegalPlan, StowplanError, TooManyWorkers
from stowplan.ir import Graph, Phase
from stowplan.ir.text import Labels
from stowplan.plan.pricing import Machine
from stowplan.plan.progress import showing_progress
from stowplan.techniques.shards.plan.choice import choose_mesh
from stowplan.techniques.shards.plan.curves import step_between, strong_scaling, weak_scaling
from stowplan.techniques.shards.plan.mesh import MeshAxes, parse_mesh, refuse_too_many
from stowplan.techniques.shards.plan.plan import shard_plan
from stowplan.techniques.shards.plan.projection import MeshProjection, Network, project
from stowplan.techniques.shards.plan.relayout import choose_layouts
from stowplan.techniques.shards.plan.seeds import seeds_for, step_of_document
from stowplan.techniques.shards.plan.text import load_plan, write_sheet
from stowplan.units import parse_bytes
from stowplan.watch import tell_phase

_KEYS = (
    "[compute] macs_per_second, bytes_per_second, launch_seconds;"
    " [network] latency_seconds, bytes_per_second, jitter_seconds, workers_per_core"
)

_MOST_WRITTEN = 1024  # workers, each with a page of its own
_MOST_SHOWN = 4096  # workers at which curves end, unless a larger mesh is asked for

Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
NotNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


_USUAL, _NEAR = Machine(), Network()


class _Compute(msgspec.Struct, forbid_unknown_fields=True):
    """`Machine` as a file may tell it."""

    macs_per_second: Positive = _USUAL.macs_per_second
    bytes_per_second: Positive = _USUAL.bytes_per_second
    launch_seconds: NotNegative = _USUAL.launch_seconds


class _Network(msgspec.Struct, forbid_unknown_fields=True):
    """`Network` as a file may tell it."""

    latency_seconds: NotNegative = _NEAR.latency_seconds
    bytes_per_second: Positive = _NEAR.bytes_per_second
    jitter_seconds: NotNegative = _NEAR.jitter_seconds
    workers_per_core: Positive = _NEAR.workers_per_core


class _MachineFile(msgspec.Struct, forbid_unknown_fields=True):
    """The tables of the file."""

    compute: _Compute = msgspec.field(default_factory=_Compute)
    network: _Network = msgspec.field(default_factory=_Network)


Graphs: TypeAlias = Callable[[int], Graph]
"""A factor on the batch to the graph of the step."""


@dataclass(frozen=True, slots=True)
class MeshSimulation:
    """The mesh that was asked for, the same step on ever more workers, and ever larger batches on them."""

    target: str
    wanted: MeshProjection
    strong: Sequence[MeshProjection]  # as far as everyone has something to do
    weak: Sequence[MeshProjection]  # none of a file, whose batch is what it is
    stages: Mapping[str, str]  # by first op of a stage how it is cut, if that was to be chosen
    labels: Labels  # of the step's ops


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("target", metavar="FILE|MODULE:FUNCTION", help=api.TARGET_HELP)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--mesh", help="axes and sizes, such as data=2,space=2x2 or sequence=4,model=2")
    wanted.add_argument("--workers", type=int, help="this number of workers, on the fastest mesh")
    parser.add_argument(
        "--budget", help="with --workers or --layouts: the budget of each worker, such as 6GiB"
    )
    parser.add_argument(
        "--parameters",
        choices=("replicate", "shard"),
        default="replicate",
        help="with --mesh: whole parameters on every worker, or its rows of them (default replicate)",
    )
    parser.add_argument(
        "--layouts", action="store_true", help="for convolutional nets: choose how each stage is cut"
    )
    parser.add_argument(
        "--regions",
        metavar="FILE",
        help="write which part of each tensor every worker reads and writes",
    )
    parser.add_argument(
        "--machine", help="speeds of a worker and of the network: a TOML file with [compute] and [network]"
    )
    parser.add_argument(
        "--up-to",
        type=int,
        help="number of workers at which the curves end (default 4096, or those of the mesh)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: Namespace) -> int:
    """Project and print."""
    with showing_progress(f"simulating {arguments.target}"):
        found = _simulated(arguments)
    if arguments.json:
        print(json.dumps(_as_json(found), indent=2))
    else:
        _show(found)
    return 0


def _simulated(arguments: Namespace) -> MeshSimulation:
    if arguments.up_to is not None and arguments.up_to < 1:
        raise BadUse(f"--up-to is {arguments.up_to}; it is a number of workers, at least 1")
    machine, network = read_machine(arguments.machine)
    shards = arguments.parameters == "shard"
    if shards and (arguments.layouts or not arguments.mesh):
        raise BadUse("--parameters shard is for a mesh such as --mesh data=4, and not for a chosen division")
    graphs = _graphs(arguments.target)
    graph = graphs(1)
    wanted = _wanted(graph, arguments, machine, network)
    most = arguments.up_to or max(_MOST_SHOWN, wanted.mesh.size)
    stages: Mapping[str, str] = {}
    if arguments.regions:
        _write_regions(graph, wanted.mesh, arguments)
    if arguments.layouts:
        wanted, stages = _relaid(graph, wanted.mesh, arguments, machine, network)
    known = [] if arguments.layouts else [wanted]
    meshes = strong_scaling(wanted.mesh, most)
    strong = list(_curve(lambda _: graph, meshes, machine, network, shards, known))
    weak: list[MeshProjection] = []
    if api.names_a_function(arguments.target):
        most = arguments.up_to or _MOST_SHOWN  # its batches grow out of all bounds
        larger = list(weak_scaling(wanted.mesh, most))
        grown = _grown(graphs, max((mesh.size for mesh in larger), default=1))
        weak = list(_curve(grown, larger, machine, network, shards))
    return MeshSimulation(arguments.target, wanted, strong, weak, stages, Labels(graph))


def _write_regions(graph: Graph, mesh: MeshAxes, arguments: Namespace) -> None:
    """The parts of every worker as region text, which must read back into the same plan."""
    if arguments.layouts or mesh.size > _MOST_WRITTEN:
        raise BadUse(f"--regions is for at most {_MOST_WRITTEN:,} workers, and not for chosen layouts")
    plan = shard_plan(graph, mesh, seeds_for(graph, mesh), _ends(graph))
    text = write_sheet(plan)
    if load_plan(text, graph, _ends(graph)) != plan:
        raise IllegalPlan(f"the regions of mesh {mesh} do not read back")
    try:
        Path(arguments.regions).write_text(text, encoding="utf-8")
    except OSError as fault:
        raise BadUse(f"cannot write {arguments.regions!r}: {fault.strerror}") from None


def _relaid(
    graph: Graph, mesh: MeshAxes, arguments: Namespace, machine: Machine, network: Network
) -> tuple[MeshProjection, Mapping[str, str]]:
    allowed = parse_bytes(arguments.budget, "--budget") if arguments.budget else None
    found = choose_layouts(graph, mesh, seeds_for(graph, mesh), _ends(graph), machine, network, allowed)
    return found.projection, found.states


def _curve(
    graphs: Graphs,
    meshes: Iterable[MeshAxes],
    machine: Machine,
    network: Network,
    shards: bool,
    known: Iterable[MeshProjection] = (),
) -> Iterator[MeshProjection]:
    """Projections up to the first mesh with idle workers; some may be known."""
    found = {projection.mesh: projection for projection in known}
    with suppress(TooManyWorkers):
        for mesh in meshes:
            yield found.get(mesh) or _project(graphs(mesh.size), mesh, machine, network, shards)


def read_machine(path: str | None) -> tuple[Machine, Network]:
    """`[compute]` and `[network]` of a TOML file; missing keys have the defaults of the two types."""
    try:
        given = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        found = msgspec.convert(given, _MachineFile)
    except OSError as fault:
        raise BadUse(f"cannot read the machine {path!r}: {fault.strerror}") from None
    except UnicodeDecodeError:
        raise BadUse(f"{path} is no machine, and no text; a machine may have {_KEYS}") from None
    except (ValueError, RecursionError, msgspec.ValidationError) as fault:
        raise BadUse(f"{path} is no machine: {fault}; it may have {_KEYS}") from None
    return Machine(**msgspec.structs.asdict(found.compute)), Network(**msgspec.structs.asdict(found.network))


def _graphs(target: str) -> Graphs:
    if not api.names_a_function(target):
        graph = step_of_document(api.read_document(target).graph)
        return lambda _: graph
    from stowplan.run.target import load_target, subject_of, with_batches

    found = load_target(target)
    return cache(lambda times: subject_of(with_batches(found, times)).captured.graph)


def _grown(graphs: Graphs, most: int) -> Graphs:
    """The same up to `most` times the batch; between that and the batch itself, from the graphs of both."""

    def found(times: int) -> Graph:
        between = None
        if 1 < times < most:
            with suppress(StowplanError):  # of the largest batch, which the curve may not come to
                between = step_between(graphs(1), graphs(most), most, times)
        return between or graphs(times)

    return found


def _wanted(graph: Graph, arguments: Namespace, machine: Machine, network: Network) -> MeshProjection:
    if arguments.mesh:
        if arguments.budget and not arguments.layouts:
            raise BadUse("--budget is for --workers or --layouts, which choose: drop it for one mesh")
        shards = arguments.parameters == "shard"
        return _project(graph, parse_mesh(arguments.mesh), machine, network, shards)
    allowed = parse_bytes(arguments.budget, "--budget") if arguments.budget else None
    if arguments.workers < 1:
        raise BadUse(f"--workers is {arguments.workers}; it is a number of workers, at least 1")
    refuse_too_many(arguments.workers)
    return choose_mesh(graph, arguments.workers, _ends(graph), machine, network, allowed)


def _ends(graph: Graph) -> tuple[str, ...]:
    """The tensors that the forward half makes and does not read."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    read = {name for op in forward for name in op.reads()}
    return tuple(name for op in forward for name in list(op.writes())[:1] if name not in read)


def _project(
    graph: Graph, mesh: MeshAxes, machine: Machine, network: Network, shards: bool
) -> MeshProjection:
    tell_phase(f"projecting {mesh.size:,} workers")
    seeds, ends = seeds_for(graph, mesh), _ends(graph)
    return project(graph, mesh, seeds, ends, machine, network, shards_parameters=shards)


def _as_json(found: MeshSimulation) -> Mapping[str, Any]:
    alone = found.strong[0].step_seconds
    return {
        "target": found.target,
        **_figures(found.wanted, found.wanted.efficiency(alone)),
        "gathered": dict(found.wanted.gathered),
        "stages": dict(found.stages),
        "strong": [_figures(p, p.efficiency(alone)) for p in found.strong],
        "weak": [_figures(p, found.weak[0].step_seconds / (p.step_seconds or 1.0)) for p in found.weak],
    }


def _figures(projection: MeshProjection, efficiency: float) -> Mapping[str, Any]:
    return {
        "mesh": str(projection.mesh),
        "workers": projection.mesh.size,
        "step_seconds": projection.step_seconds,
        "compute_seconds": projection.compute_seconds,
        "network_seconds": projection.network_seconds,
        "waiting_seconds": projection.waiting_seconds,
        "efficiency": efficiency,
        "sent_bytes": projection.sent_bytes,
        "summed_bytes": projection.summed_bytes,
        "peak_bytes": projection.peak_bytes,
        "planning_seconds": projection.planning_seconds,
        "planner_bytes": projection.planner_bytes,
    }


def _show(found: MeshSimulation) -> None:
    from stowplan.report.simulate import show_projections
    from stowplan.report.terminal import console_for_output

    stages = {found.labels.op(op): state for op, state in found.stages.items()}
    gathered = {found.labels.op(op): why for op, why in found.wanted.gathered.items()}
    wanted = replace(found.wanted, gathered=gathered)
    show_projections(found.target, wanted, found.strong, found.weak, stages, console_for_output())
