"""The captured step as straight-line code: called like the model, differentiable like it.

A binding says which living tensor each parameter, buffer, input and constant of a program is.

The baseline: every op once, in the graph's order, each tensor freed after its last reader.

If an input dies with an op and the op can overwrite it, it does: the baseline then needs no more memory than
eager, whose in-place ops capture has functionalised.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from stowplan.analyse.facts import Storages, is_resident, storages_of
from stowplan.capture import Captured, Program, Ref
from stowplan.capture.answers import Checked
from stowplan.capture.changes import Beside, Changes, Place, Stored, changes_of
from stowplan.capture.composite import PartsIn
from stowplan.capture.stand_ins import flatten
from stowplan.errors import BadUse
from stowplan.ir import Graph, Op
from stowplan.ops.effects import aliasing_of
from stowplan.ops.table import site_of
from stowplan.plan.steps import Compute, Free, Step
from stowplan.run.border.frozen import NOWHERE, OutsidePlaces
from stowplan.run.cost.machine import device_of
from stowplan.run.step.function import (
    Consumer,
    LiveTier,
    Run,
    WaitingRuns,
    compiled,
    run_step,
    tier_for,
)
from stowplan.run.step.incoming import IncomingGradients
from stowplan.run.step.literals import Piece
from stowplan.run.step.placing import BY_ALLOCATOR, Placing
from stowplan.run.step.source import source_of
from stowplan.torch_private import pytree

if TYPE_CHECKING:
    from stowplan.run.second_derivatives import Differentiable


ForwardBegins: TypeAlias = Callable[[Sequence[Tensor], Iterable[Tensor]], None]
"""Learns before each forward of the parameters that it trains, and of all tensors that it is given."""


def baseline_steps(graph: Graph) -> tuple[Step, ...]:
    """The steps of the baseline: Compute and Free, nothing else."""
    return tuple(_BaselineWalk(graph).steps())


class _BaselineWalk:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._storages: Storages = storages_of(graph)
        self._last: dict[str, int] = {}  # by tensor
        self._made: set[int] = set()  # storages that an op of the step makes
        for position, op in enumerate(graph.ops):
            self._last.update((name, position) for name in (*op.reads(), *op.writes()))
            self._made.update(map(self._storage, filter(self._owns, op.writes())))
        staying = graph.held.union(name for name, tensor in graph.tensors.items() if is_resident(tensor))
        self._last.update((name, len(graph.ops)) for name in staying)
        self._storage_last: dict[int, int] = {}
        for name, position in self._last.items():
            known = self._storage_last.get(self._storage(name), 0)
            self._storage_last[self._storage(name)] = max(known, position)

    def steps(self) -> Iterator[Step]:
        for position, op in enumerate(self._graph.ops):
            yield Compute(op.id, tuple(self._overwrites(position, op)))
            gone = tuple(n for n in dict.fromkeys((*op.reads(), *op.writes())) if self._last[n] == position)
            if gone:
                yield Free(gone)

    def _storage(self, name: str) -> int:
        return self._storages.number_of[name]

    def _owns(self, name: str) -> bool:
        return self._graph.tensors[name].alias_of is None

    def _overwrites(self, position: int, op: Op) -> Iterator[tuple[str, str]]:
        """Outputs with the inputs whose storage they take. It then lives as long as the output."""
        site = site_of(self._graph, op)
        for output, candidates in aliasing_of(site).in_place_of.items():
            made = site.outputs[output]
            for victim in (site.inputs[candidate] for candidate in candidates):
                storage = self._storage(victim.id)
                ends = storage in self._made and self._storage_last[storage] == position
                if ends and made.alias_of is None and made.nbytes == self._storages.nbytes[storage]:
                    yield made.id, victim.id
                    break


class Binding:
    """Looks tensors up in the tables of the modules they live in, at each call: there may be new ones."""

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        loss: object = None,
        places: OutsidePlaces = NOWHERE,
    ) -> None:
        self._graph, self._program = captured.graph, captured.program
        self._model, self._loss = model, loss
        constants = self._program.constants
        known = places.tensors
        self._found = {name: known[id(held)] for name, held in constants.items() if id(held) in known}
        self._containers = places.containers
        self._constants = {name: held for name, held in constants.items() if name not in self._found}
        self._homes: dict[str, tuple[Mapping[str, Any], str]] = {}
        for tensor, names in (*self._program.parameters.items(), *self._program.buffers.items()):
            self._homes[tensor] = _home(names[0], model, loss)

    def tensors(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Tensor]:
        """All of them by id, for a call with these arguments."""
        found = {name: table[attribute] for name, (table, attribute) in self._homes.items()}
        found.update((name, owner[key]) for name, (owner, key) in self._found.items())
        found |= {**self._constants, **self._inputs(args, kwargs)}
        self._refuse_unwritable(found)
        return found

    def finder(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Callable[[Place], Tensor]:
        """How to find a tensor of this call, or of the model, that the step changes beside its ops."""
        leaves = flatten(args, kwargs)[0]

        def find(place: Place) -> Tensor:
            if isinstance(place, int):
                found: Any = leaves[place]
            else:
                table, attribute = _home(place, self._model, self._loss)
                found = table[attribute]
            assert isinstance(found, Tensor)
            return found

        return find

    def holder_of(self, stored: Stored) -> Any:
        """Where forward leaves these tensors: the attributes of a module, or another container."""
        if not stored.in_module:
            return self._containers[stored.label]
        root, path = _root(stored.label, self._model, self._loss)
        return vars(root.get_submodule(path))

    def _refuse_unwritable(self, found: Mapping[str, Tensor]) -> None:
        """The step writes updates in place; a forward in inference mode leaves tensors that forbid that."""
        for name in self._program.updates:
            if found[name].is_inference() and not torch.is_inference_mode_enabled():
                known = self._program.buffers.get(name, (name,))[0]
                raise BadUse(
                    f"{known!r} was made in inference mode, and the planned step writes into it: replace it"
                    " by its clone(), or call the model under torch.no_grad() instead"
                )

    def _inputs(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Tensor]:
        leaves, spec = flatten(args, kwargs)
        if spec != self._program.input_spec:
            raise BadUse(f"captured for arguments {self._program.input_spec}, called with {spec}")
        found: dict[str, Tensor] = {}
        for name, leaf in zip(self._program.inputs, leaves, strict=True):
            if name is not None:
                found[name] = self._checked(name, leaf)
        return found

    def _checked(self, name: str, leaf: object) -> Tensor:
        expected = self._graph.tensors[name]
        if not isinstance(leaf, Tensor):
            raise BadUse(f"argument {name!r} is no tensor, and was one when the step was captured")
        if tuple(leaf.shape) != expected.shape or str(leaf.dtype) != f"torch.{expected.dtype}":
            raise BadUse(
                f"argument {name!r} is {leaf.dtype} of shape {tuple(leaf.shape)}, but the step was captured"
                f" for {expected.dtype} of shape {expected.shape}"
            )
        return leaf


def _home(name: str, model: nn.Module, loss: object) -> tuple[Mapping[str, Any], str]:
    """The table of the module that holds the tensor of this name, and its name there."""
    root, name = _root(name, model, loss)
    path, _, attribute = name.rpartition(".")
    module: Any = attrgetter(path)(root) if path else root
    if not isinstance(module, nn.Module):  # a part of a composite tensor, or attached to one
        return PartsIn(*_home(path, root, None)), attribute
    return module._parameters if attribute in module._parameters else module._buffers, attribute


def _root(name: str, model: nn.Module, loss: object) -> tuple[nn.Module, str]:
    """The module that holds what has this name, and the name in it."""
    if isinstance(loss, nn.Module) and f"{name}.".startswith("loss.") and not hasattr(model, "loss"):
        return loss, name.removeprefix("loss").removeprefix(".")
    return model, name


class StraightStep:
    """Runs the steps with a model's parameters and buffers. `source` is the code, to be read."""

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        *,
        loss: object = None,
        steps: Sequence[Step] | None = None,
        tier: LiveTier | None = None,
        waiting: WaitingRuns | None = None,
        places: OutsidePlaces = NOWHERE,
        consumer: Consumer | None = None,
        beside: ForwardBegins | None = None,
        placing: Placing = BY_ALLOCATOR,
        again: "Differentiable | None" = None,
    ) -> None:
        """`tier` is the target of Store steps, by default the tier for the step's device.

        `waiting` and `beside` learn of each forward. `consumer` takes the gradients that the steps consume.
        `placing` says where results lie. `again` runs the step as it is, for a backward that is to be
        differentiated itself.
        """
        self._again = again
        self._waiting, self._consumer, self._beside = waiting, consumer, beside
        self._program, self._device = captured.program, device_of(captured.graph)
        steps = steps or baseline_steps(captured.graph)
        self._placing = placing
        source = source_of(
            captured.graph,
            captured.program,
            steps,
            placing,
            paths=captured.paths,
            gradients=captured.gradients,
        )
        self._incoming = IncomingGradients(captured, steps, source)
        if source.stored_bytes:
            tier = tier or tier_for(self._device)
            tier.reserve(source.stored_bytes)
        self._halves = compiled(source, tier, placing, records=captured.records)
        self._captured, self._loss = captured, loss
        self._changes = changes_of(captured.program.output_spec) or Changes()
        self.bind(model, places)
        self.source = source.annotated()
        self._primals = tuple(_primals_of(piece, captured.program) for piece in source.pieces)
        leaves = zip(captured.program.outputs, captured.program.attached, strict=True)
        attached = {leaf for leaf, is_attached in leaves if is_attached and source.pieces}
        self._attached = tuple(Ref(name) in attached for name in source.outputs)
        self._trained = [name for name in captured.program.gradients if name in captured.program.parameters]

    def bind(self, model: nn.Module, places: OutsidePlaces = NOWHERE) -> None:
        """Run from now on with the parameters and buffers of this model, which is like the one captured."""
        self._binding = Binding(self._captured, model, self._loss, places)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The model's results for these arguments, which must look like those of the capture."""
        found, find = self._binding.tensors(args, kwargs), self._binding.finder(args, kwargs)
        self._changes.before(find)
        run = self._new_run()
        call = self._again.call(args, kwargs) if self._again and self._again.has_room() else None
        if self._beside:
            self._beside([found[name] for name in self._trained], found.values())
        self._placing.begins(found.values(), self._waiting.say_once if self._waiting else None)
        if self._consumer and any(piece.consumed for piece in self._halves.source.pieces):
            written = [found[name] for name in self._program.updates]
            run.repeat = self._consumer.repeat_for(
                lambda: self._made(self._new_run(), found), found.values(), written
            )
        if self._waiting:
            self._waiting.begins()
            self._waiting.add(run)
        made = self._made(run, found)
        outputs = dict(zip(self._halves.source.outputs, made, strict=True))
        if call:
            call.ends({name: output for name, output in outputs.items() if output.requires_grad}, found)
            differentiated = {name: found[name] for names in self._primals for name in names}
            run.as_it_is = partial(call.gradients, differentiated)
        elif self._again:
            run.as_it_is = self._again.refused
        if not self._primals:
            outputs |= self._given_back(found)
        returned = pytree.tree_unflatten(self._leaves(outputs), self._program.output_spec)
        if isinstance(returned, Beside):
            self._changes.after(find, args, kwargs, returned.tensors, self._binding.holder_of)
            returned = returned.returned
        return returned.passed() if isinstance(returned, Checked) else returned

    def _new_run(self) -> Run:
        return Run(
            self._halves,
            self._program,
            self._primals,
            self._attached,
            self._incoming,
            self._consumer,
            self._waiting,
        )

    def _made(self, run: Run, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast(self._device.type, enabled=False):
            return run_step(run, found)

    def _given_back(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Results of a step without gradients that came in, and may have a graph of their own."""
        leaves = zip(self._program.outputs, self._program.attached, strict=True)
        names = (leaf.tensor for leaf, attached in leaves if attached and isinstance(leaf, Ref))
        return {name: found[name] for name in names if name in found}

    def _leaves(self, outputs: Mapping[str, Tensor]) -> list[object]:
        """The results for the caller, detached where eager's are."""
        return [
            (outputs[leaf.tensor] if attached else outputs[leaf.tensor].detach())
            if isinstance(leaf, Ref)
            else leaf
            for leaf, attached in zip(self._program.outputs, self._program.attached, strict=True)
        ]


def _primals_of(piece: Piece, program: Program) -> tuple[str, ...]:
    """What a piece differentiates, in the order of the step; what is consumed in the order of the plan."""
    primals = [name for name, gradient in program.gradients.items() if gradient in piece.gradients]
    if piece.consumed:
        primals.sort(key=lambda name: piece.gradients.index(program.gradients[name]))
    return tuple(primals)
