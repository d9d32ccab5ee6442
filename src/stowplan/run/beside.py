"""What is alive beside a planned step, and the word before it breaks the budget.

A budget B is for everything that is alive on the step's devices during forward and backward:

    peak(plan) + C + G + S + M <= B

    C   tensors that forward reads from attributes and globals, and workspaces that libraries keep
    G   gradients that are in `.grad` when forward begins: accumulated, or zeroed in place
    S   the state of optimizers
    M   parameters, buffers and gradients of other modules, and copies of the trained parameters (EMA)

A plan is made for B - C - max(reserve, G + S), with the G and S that `fit` finds: gradients that are there,
and the state, existing or to come, of optimizers that hold the model's parameters. What comes later is
counted before each forward and compared with what the plan leaves free; the first forward that would take
more logs a warning with the bytes and the line to write. G is exact up to gradients that end as they are
added, so the bound is from above. S and M are found among Python's objects, which are read and not changed:
in `fit`, before the first forward and those after the first updates, and later at most 1 % of the time.

Tensors of no model count nowhere: a data set is the user's, with or without a step.
"""

import gc
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stowplan.analyse.facts import is_resident
from stowplan.capture import Captured
from stowplan.capture.changes import changes_of
from stowplan.capture.composite import opened
from stowplan.capture.stand_ins import bytes_read
from stowplan.errors import StowplanError
from stowplan.ir import Tensor as GraphTensor
from stowplan.run.instances import instances_of, with_subclasses
from stowplan.torch_private import gradient_of, pytree, storage_id, version_of
from stowplan.units import format_bytes

_LOGGER = logging.getLogger("stowplan")

_UPDATES_SEEN = 3  # after each of the first updates, all objects are looked through
_SHARE_OF_TIME = 0.01  # later
_MORE = 1.01  # times what was said is worth another word
_MOST_NAMED = 4


def constants_by_device(captured: Captured) -> dict[str, int]:
    """Bytes by device that no plan counts: constants, each storage once, and workspaces of libraries.

    Results that forward stores, in modules or lists, stay in memory until the next step has made new ones.
    """
    constants, found = captured.program.constants.values(), Counter[str]()
    for device in dict.fromkeys(str(each.device) for each in constants):
        found[device] += sum(bytes_read(each for each in constants if str(each.device) == device).values())
    for tensor in _stored(captured):
        found[tensor.device] += tensor.nbytes or 0
    for device in dict.fromkeys(op.device for op in captured.graph.ops):
        if device.startswith("cuda") and torch.version.hip is None:
            from stowplan.ops.cublas import cublas_workspaces  # most steps are on the CPU

            major, minor = torch.cuda.get_device_capability(device)
            ops = [op for op in captured.graph.ops if op.device == device]
            found[device] += sum(cublas_workspaces(ops, major + minor / 10))
    return dict(found)


def _stored(captured: Captured) -> Iterator[GraphTensor]:
    """The tensors of the step that forward stores, each storage once."""
    tensors, program = captured.graph.tensors, captured.program
    changes = changes_of(program.output_spec)
    if changes is None:
        return
    beside = pytree.tree_unflatten(program.outputs, program.output_spec).tensors
    roots = dict[str, GraphTensor]()
    for number in changes.stays():
        found = tensors[beside[number].tensor]
        while found.alias_of is not None:
            found = tensors[found.alias_of]
        roots[found.id] = found
    yield from (found for found in roots.values() if not is_resident(found))


class Share(NamedTuple):
    """A part of what is alive beside a step. That of a step's own optimizers `is_own`."""

    what: str
    nbytes: int
    is_own: bool = False


def found_in_fit(model: nn.Module) -> list[Share]:
    """Gradients that are in `.grad`, and the state of optimizers of the model, existing or to come."""
    trained = [p for p in model.parameters() if p.requires_grad and _is_plain(p)]
    gradients = sum(map(_gradient_bytes, trained))
    shares = [Share("gradients in .grad", gradients)] if gradients else []
    found = _Scan(trained, [*opened((*model.parameters(), *model.buffers()))]).shares(WeakKeyDictionary())
    return [*shares, *(share for share in found if share.is_own)]


@dataclass(slots=True)
class BesideWatch:
    """Compares what is alive beside the step with what its plan leaves free, before each forward.

    `counted` is the optimizer whose state and gradients the plan counts.
    """

    name: str
    budget_bytes: int
    counted: Optimizer | None = None
    _shares: list[Share] = field(default_factory=list)
    _optimizers: "WeakKeyDictionary[Optimizer, int]" = field(default_factory=WeakKeyDictionary)
    _updates: int = -1  # that were seen; the first forward counts as one
    _seen_version: int | None = None  # of the first trained parameter
    _states: int = 0  # parameters that known optimizers have state of
    _looked_at: float = 0.0
    _look_seconds: float = 0.0
    _said_bytes: int = 0

    def for_a_copy(self) -> "BesideWatch":
        """For a copy of the model, of whose loop nothing is known."""
        return BesideWatch(self.name, self.budget_bytes)

    def forward_begins(self, taken_bytes: int, trained: Sequence[Tensor], there: Iterable[Tensor]) -> None:
        """`taken_bytes` is the peak of the step; `there` are the tensors that it is of."""
        gradients = 0 if self.counted else sum(map(_gradient_bytes, trained))
        if self._may_be_more(trained):
            self._look(trained, there)
        if self._is_news(taken_bytes, gradients):
            gc.collect()  # what is garbage ends now, and is nothing to speak of
            self._look(trained, there)
        if self._is_news(taken_bytes, gradients):
            kept = [Share("gradients of earlier backwards in .grad", gradients)] if gradients else []
            shares = [*kept, *self._shares]
            self._said_bytes = sum(share.nbytes for share in shares)
            self._say(taken_bytes, shares)

    def _is_news(self, taken_bytes: int, gradients: int) -> bool:
        beside = gradients + sum(share.nbytes for share in self._shares)
        return taken_bytes + beside > self.budget_bytes and beside > _MORE * self._said_bytes

    def _may_be_more(self, trained: Sequence[Tensor]) -> bool:
        """Whether it is time to look through all objects: cheap signs say that something may have come."""
        version = version_of(trained[0]) if trained else None
        is_updated = self._updates < 0 or version != self._seen_version
        self._seen_version = version
        if is_updated and self._updates < _UPDATES_SEEN:
            self._updates += 1
            return True
        if sum(len(optimizer.state) for optimizer in list(self._optimizers)) != self._states:
            return True
        return time.perf_counter() - self._looked_at > self._look_seconds / _SHARE_OF_TIME

    def _look(self, trained: Sequence[Tensor], there: Iterable[Tensor]) -> None:
        begun = time.perf_counter()
        self._shares = _Scan(trained, there, self.counted).shares(self._optimizers)
        self._states = sum(len(optimizer.state) for optimizer in list(self._optimizers))
        self._looked_at = time.perf_counter()
        self._look_seconds = self._looked_at - begun

    def _say(self, taken_bytes: int, shares: Sequence[Share]) -> None:
        beside = sum(share.nbytes for share in shares)
        above = taken_bytes + beside - self.budget_bytes
        _LOGGER.warning(
            "this loop can take %s (%d bytes), %s more than the budget of %s: the step of %s takes %s, and"
            ' beside it are alive %s. Call fit with reserve="%s" to plan for the rest%s',
            format_bytes(taken_bytes + beside),
            taken_bytes + beside,
            format_bytes(above),
            format_bytes(self.budget_bytes),
            self.name,
            format_bytes(taken_bytes),
            described(shares),
            reserve_text(beside),
            self._other_ways(shares),
        )

    def _other_ways(self, shares: Sequence[Share]) -> str:
        ways = []
        if any(share.is_own for share in shares):
            ways.append("with optimizer=, which plans its state and its updates too")
        if not self.counted and any("gradients of earlier" in share.what for share in shares):
            ways.append("clear gradients with zero_grad() where they are not accumulated")
        return "".join(f"; or {way}" for way in ways)


def described(shares: Sequence[Share]) -> str:
    """The shares with their bytes, the largest first."""
    by_name = Counter[str]()
    for share in shares:
        by_name[share.what] += share.nbytes
    ordered = by_name.most_common()
    texts = [f"{what} ({format_bytes(nbytes)})" for what, nbytes in ordered[:_MOST_NAMED]]
    if rest := sum(nbytes for _, nbytes in ordered[_MOST_NAMED:]):
        texts.append(f"others ({format_bytes(rest)})")
    return ", ".join(texts)


def reserve_text(nbytes: int) -> str:
    """A round size that is no less."""
    unit, name = (2**20, "MiB") if nbytes >= 2**20 else (2**10, "KiB")
    tenths = -(-nbytes * 10 // unit)
    return f"{tenths // 10}.{tenths % 10} {name}"


class _Scan:
    """One look through Python's objects for state of training on the devices of a step."""

    def __init__(
        self, trained: Sequence[Tensor], there: Iterable[Tensor], counted: Optimizer | None = None
    ) -> None:
        """`there` are the tensors of the step, which the plan counts, as it does `counted`."""
        self._trained, self._counted = trained, counted
        self._devices = {parameter.device for parameter in trained}
        known = [*there, *trained, *(found for p in trained if (found := gradient_of(p)) is not None)]
        self._seen = {number for tensor in known if (number := _storage_of(tensor)) is not None}

    def shares(self, optimizers: "WeakKeyDictionary[Optimizer, int]") -> list[Share]:
        """What was found; `optimizers` has those of the step, with the bytes of the state to come."""
        kinds = [Tensor, nn.Parameter, *with_subclasses(nn.Module), *with_subclasses(Optimizer)]
        modules, tensors, found = list[nn.Module](), list[Tensor](), list[Optimizer]()
        for thing in instances_of(kinds):
            group: list[Any] = tensors
            if not isinstance(thing, Tensor):
                group = modules if isinstance(thing, nn.Module) else found
            group.append(thing)
        shares = [*self._of_optimizers(found, optimizers), *self._of_modules(modules), *self._copies(tensors)]
        return [share for share in shares if share.nbytes]

    def _of_optimizers(
        self, found: Iterable[Optimizer], known: "WeakKeyDictionary[Optimizer, int]"
    ) -> Iterator[Share]:
        trained = set(self._trained)
        if self._counted:
            self._new_bytes(_tensors_in(dict(self._counted.state)))
        for optimizer in found:
            state = [*_tensors_in(vars(optimizer).get("state", {}))]
            nbytes, name = self._new_bytes(state), type(optimizer).__name__
            groups = vars(optimizer).get("param_groups", ())
            is_own = any(parameter in trained for group in groups for parameter in group["params"])
            if not is_own:
                yield Share(f"state of another {name}", nbytes)
                continue
            if not state and optimizer not in known and not self._counted:
                known[optimizer] = state_to_come(optimizer)
            to_come = known.setdefault(optimizer, 0)
            if state:
                yield Share(f"state of {name}", nbytes, is_own=True)
            else:
                yield Share(f"state that {name} keeps from its first step on", to_come, is_own=True)

    def _of_modules(self, modules: Sequence[nn.Module]) -> Iterator[Share]:
        """By the outermost module."""
        inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
        for root in modules:
            if id(root) not in inner and "_parameters" in vars(root):
                held = [*opened((*root.parameters(), *root.buffers()))]
                gradients = [found for p in held if p.is_leaf and (found := gradient_of(p)) is not None]
                yield Share(f"other parameters of {type(root).__name__}", self._new_bytes(held))
                yield Share(f"other gradients of {type(root).__name__}", self._new_bytes(gradients))

    def _copies(self, tensors: Iterable[Tensor]) -> Iterator[Share]:
        """Whole copies of the trained parameters, by shape; single tensors of such a shape may be data."""
        wanted = Counter(tuple(parameter.shape) for parameter in self._trained)
        alike: dict[tuple[int, ...], list[int]] = {shape: [] for shape in wanted}
        for tensor in tensors:
            if (shape := tuple(tensor.shape)) in alike and (nbytes := self._new_bytes([tensor])):
                alike[shape].append(nbytes)
        copies = min((len(alike[shape]) // count for shape, count in wanted.items()), default=0)
        sizes = (sorted(alike[shape])[-copies * count :] for shape, count in wanted.items() if copies)
        yield Share("copies of the parameters", sum(map(sum, sizes)))

    def _new_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Of storages on the devices of the step that were not counted yet."""
        total = 0
        for tensor in tensors:
            number = _storage_of(tensor)
            if number is not None and number not in self._seen and tensor.device in self._devices:
                self._seen.add(number)
                total += tensor.untyped_storage().nbytes()
        return total


def state_to_come(optimizer: Optimizer) -> int:
    """The bytes of state that an optimizer without any makes in its first step."""
    from stowplan.run.optimizers import optimizer_share  # most optimizers have their state

    try:
        return optimizer_share(optimizer).state_bytes
    except StowplanError:  # it takes no step without data: its state counts when it is there
        return 0


def _gradient_bytes(parameter: Tensor) -> int:
    gradient = gradient_of(parameter)
    return 0 if gradient is None else gradient.nbytes


def _tensors_in(state: Mapping[Any, object]) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(list(state.values())) if isinstance(leaf, Tensor))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _storage_of(tensor: Tensor) -> int | None:
    """None for tensors without memory of their own: of subclasses, sparse, within transforms."""
    if not _is_plain(tensor) or tensor.is_meta:
        return None
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None
