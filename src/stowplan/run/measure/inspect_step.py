"""Inspecting a training step of PyTorch: the projected memory of its eager run, and one measured run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from torch.optim import Optimizer

from stowplan.analyse.facts import estimated_workspaces
from stowplan.analyse.inspection import Inspection, inspection_of
from stowplan.capture import Captured, capture
from stowplan.ir import Document, Graph, Kind, Note, NoteKind, Phase, Profile
from stowplan.ops.regions import regions_of
from stowplan.ops.table import site_of
from stowplan.run.cost.probe import probe
from stowplan.run.measure.check import eager_peak_bytes
from stowplan.run.optimizers import OptimizerShare, optimizer_share, training_peak_bytes
from stowplan.run.target import Target
from stowplan.units import format_bytes


class Category(StrEnum):
    """The categories in which people ask where the memory went."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    GRADIENTS = "gradients of parameters"
    SAVED = "activations saved for backward"
    TEMPORARIES = "temporaries"


@dataclass(frozen=True, slots=True)
class StepInspection:
    """The graph's inspection and the eager step's memory. `estimated`: no op was probed for its workspace."""

    inspection: Inspection
    projected_peak_bytes: int
    bytes_at_peak: Mapping[Category, int]
    estimated: bool
    measured_peak_bytes: int | None = None
    optimizer: OptimizerShare | None = None
    training_peak_bytes: int | None = None  # projected, with the optimizer's state and step
    measured_training_peak_bytes: int | None = None


def inspect_step(
    target: Target,
    *,
    tried: bool = True,
    measured: bool = False,
    optimizer: Optimizer | None = None,
) -> StepInspection:
    """Capture a step and project its peak; `tried` probes each distinct op, `measured` runs the whole step.

    With an `optimizer` of the model the result includes its memory. `measured` then trains the model.
    """
    captured = capture(target.model, target.args, target.kwargs, loss=target.loss, know_values=True)
    probed = probe(captured) if tried else None
    workspace = probed.workspace_bytes if probed else estimated_workspaces(captured.graph)
    share = optimizer_share(optimizer) if optimizer else None
    found = inspection_of_step(captured, workspace, share, profile=probed.profile if probed else None)
    if not measured:
        return found
    return replace(
        found,
        measured_peak_bytes=eager_peak_bytes(target),
        measured_training_peak_bytes=eager_peak_bytes(target, optimizer) if optimizer else None,
    )


def inspection_of_step(
    captured: Captured,
    workspace: Mapping[str, int],
    share: OptimizerShare | None,
    *,
    profile: Profile | None = None,
) -> StepInspection:
    """The inspection of a captured step with these workspaces; without a `profile` they are estimated."""
    document = Document("torch", captured.graph, profile=profile, notes=tuple(_notes(captured)))
    return StepInspection(
        inspection=inspection_of(document),
        projected_peak_bytes=captured.eager.peak_bytes(workspace),
        bytes_at_peak=_bytes_at_peak(captured, workspace),
        estimated=profile is None,
        optimizer=share,
        training_peak_bytes=training_peak_bytes(captured, share, workspace) if share else None,
    )


def _notes(captured: Captured) -> Iterator[Note]:
    """Slices of larger storages, and op types that region rules do not know: such ops are computed whole."""
    graph, seen = captured.graph, set[str]()
    for name, whole_bytes in captured.slices.items():
        read, whole = format_bytes(graph.tensors[name].nbytes or 0), format_bytes(whole_bytes)
        yield Note(NoteKind.ODD, name, f"a view of a storage of {whole}: the step counts the {read} it reads")
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.type not in seen and regions_of(site_of(graph, op)).barrier:
            seen.add(op.type)
            yield Note(NoteKind.ODD, op.id, f"{op.type}: {regions_of(site_of(graph, op)).barrier}")


def _bytes_at_peak(captured: Captured, workspace: Mapping[str, int]) -> dict[Category, int]:
    """The eager step's storages at its peak, by what they are; what no tensor owns is temporary."""
    curve = captured.eager.curve_bytes(workspace)
    peak = int(np.argmax(curve))
    saved = _read_in_backward(captured.graph)
    found = dict.fromkeys(Category, 0)
    for span in captured.eager.spans:
        if span.first <= peak <= span.last:
            found[_category(captured, span.tensor, saved)] += span.nbytes
    found[Category.TEMPORARIES] += int(curve[peak]) - sum(found.values())
    return found


def _read_in_backward(graph: Graph) -> frozenset[str]:
    """Tensors that a backward op reads, or reads a view of."""
    read = (name for op in graph.ops if op.phase is Phase.BACKWARD for name in op.reads())
    return frozenset(map(graph.storage_of, read))


def _category(captured: Captured, name: str, saved: frozenset[str]) -> Category:
    tensor = captured.graph.tensors.get(name)
    if tensor is None:
        return Category.TEMPORARIES
    if tensor.kind in _BY_KIND:
        return _BY_KIND[tensor.kind]
    if name in captured.program.gradients.values():
        return Category.GRADIENTS
    is_saved = name in saved and tensor.kind is not Kind.GRADIENT
    return Category.SAVED if is_saved else Category.TEMPORARIES


_BY_KIND = {
    Kind.PARAMETER: Category.PARAMETERS,
    Kind.BUFFER: Category.BUFFERS,
    Kind.INPUT: Category.INPUTS,
}
