"""`stowplan simulate X --mesh data=2,space=2x2`: what a step would take on a mesh, without having one."""

import json
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stowplan import api
from stowplan.cli.patience import a_word_after_two_seconds
from stowplan.errors import BadUse
from stowplan.ir import Graph, Phase
from stowplan.plan.pricing import Machine
from stowplan.plan.shards.choice import choose_mesh
from stowplan.plan.shards.mesh import Mesh, parse_mesh
from stowplan.plan.shards.projection import Network, Projection, project, strong_scaling
from stowplan.plan.shards.seeds import seeds_for
from stowplan.units import parse_bytes

_KEYS = (
    "[compute] macs_per_second, bytes_per_second, launch_seconds; [network] latency_seconds, bytes_per_second"
)


def add_arguments(parser: ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("target", metavar="FILE|MODULE:FUNCTION", help=api.TARGET_HELP)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--mesh", help="axes and sizes, such as data=2,space=2x2 or sequence=4")
    wanted.add_argument("--workers", type=int, help="as many, on the mesh that is fastest")
    parser.add_argument("--budget", help="with --workers: what each of them may take, such as 6GiB")
    parser.add_argument("--machine", help="a TOML file with [compute] and [network]; else one like any other")
    parser.add_argument("--up-to", type=int, default=4096, help="workers of the largest mesh of the curves")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: Namespace) -> int:
    """Project and print."""
    machine, network = read_machine(arguments.machine)
    with a_word_after_two_seconds(f"simulating {arguments.target}"):
        graph = _graph(arguments.target)
        wanted = _wanted(graph, arguments, machine, network)
        curve = list(_curve(graph, wanted.mesh, machine, network, arguments.up_to))
    show = _print_json if arguments.json else _print_for_people
    show(arguments.target, wanted, curve)
    return 0


def read_machine(path: str | None) -> tuple[Machine, Network]:
    """`[compute]` and `[network]` of a TOML file; what it leaves out is as on a machine like any other."""
    try:
        told = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        return Machine(**told.pop("compute", {})), Network(**told.pop("network", {}))
    except OSError as fault:
        raise BadUse(f"cannot read the machine {path!r}: {fault.strerror}") from None
    except (tomllib.TOMLDecodeError, TypeError) as fault:
        raise BadUse(f"{path} is no machine: {fault}; it may have {_KEYS}") from None


def _graph(target: str) -> Graph:
    if not api.names_a_function(target):
        return api.read_document(target).graph
    from stowplan.capture import capture
    from stowplan.run.target import load_target

    found = load_target(target)
    return capture(found.model, found.args, loss=found.loss).graph


def _wanted(graph: Graph, arguments: Namespace, machine: Machine, network: Network) -> Projection:
    if arguments.mesh:
        return _project(graph, parse_mesh(arguments.mesh), machine, network)
    allowed = parse_bytes(arguments.budget) if arguments.budget else None
    return choose_mesh(graph, arguments.workers, _ends(graph), machine, network, allowed)


def _ends(graph: Graph) -> tuple[str, ...]:
    """What the forward half makes and nothing in it reads."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    read = {name for op in forward for name in op.reads()}
    return tuple(name for op in forward for name in list(op.writes())[:1] if name not in read)


def _project(graph: Graph, mesh: Mesh, machine: Machine, network: Network) -> Projection:
    return project(graph, mesh, seeds_for(graph, mesh), _ends(graph), machine, network)


def _curve(graph: Graph, mesh: Mesh, machine: Machine, network: Network, most: int) -> Iterator[Projection]:
    """The same step on ever larger meshes."""
    for grown in strong_scaling(mesh, most):
        yield _project(graph, grown, machine, network)


def _print_json(target: str, wanted: Projection, curve: list[Projection]) -> None:
    alone = curve[0].step_seconds
    shown = {"target": target, **_figures(wanted, alone), "curve": [_figures(p, alone) for p in curve]}
    print(json.dumps(shown, indent=2))


def _figures(projection: Projection, alone_seconds: float) -> Mapping[str, Any]:
    return {
        "mesh": str(projection.mesh),
        "workers": projection.mesh.size,
        "step_seconds": projection.step_seconds,
        "compute_seconds": projection.compute_seconds,
        "network_seconds": projection.network_seconds,
        "efficiency": projection.efficiency(alone_seconds),
        "weak_efficiency": projection.compute_seconds / projection.step_seconds,
        "sent_bytes": projection.sent_bytes,
        "summed_bytes": projection.summed_bytes,
        "peak_bytes": projection.peak_bytes,
        "planning_seconds": projection.planning_seconds,
        "gathered": dict(projection.gathered),
    }


def _print_for_people(target: str, wanted: Projection, curve: list[Projection]) -> None:
    from stowplan.report.simulate import show_projection
    from stowplan.report.terminal import console_for_output

    show_projection(target, wanted, curve, console_for_output())
