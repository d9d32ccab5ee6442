"""The optimizer's share: the state that it keeps, and the temporary memory of its step.

PyTorch's own optimizer takes two steps on tensors without data, and the storages that it allocates and frees
are counted. This works for any optimizer, in the implementation that it would choose on the device.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from stowplan.analyse.facts import is_resident, storages_of
from stowplan.capture import Captured
from stowplan.capture.stand_ins import StandIns
from stowplan.errors import BadUse, nearest
from stowplan.ir import Graph, Kind
from stowplan.run.measure.storage_watch import StorageWatch
from stowplan.torch_private import pytree

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}


@dataclass(frozen=True, slots=True)
class OptimizerShare:
    """Bytes that an optimizer keeps from step to step, and temporary bytes of its own step.

    `implementation` is PyTorch's: fused, foreach (all parameters at a time) or single-tensor (one by one).
    """

    name: str
    implementation: str
    state_bytes: int
    step_temporary_bytes: int

    def peak_bytes(self, step_bytes: int, resting_bytes: int) -> int:
        """The most that training takes: during forward and backward, or during the optimizer's step.

        `step_bytes` is the peak of the former; `resting_bytes` is what is there after it, gradients included.
        """
        return self.state_bytes + max(step_bytes, resting_bytes + self.step_temporary_bytes)


def optimizer_share(
    optimizer: Optimizer | str,
    parameters: Iterable[Tensor] = (),
    *,
    device: torch.device | str = "cpu",
    **options: object,
) -> OptimizerShare:
    """The memory of an optimizer: an object, or a name of `torch.optim` with these options.

    By name it needs the `parameters`; those on the meta device are taken to live on `device`.
    """
    stand_ins = StandIns(torch.device(device))
    given = list(parameters if isinstance(optimizer, str) else _parameters_of(optimizer))
    first = next(iter(given), None)
    there = torch.device(device) if first is None or first.is_meta else first.device
    watch = StorageWatch(stand_ins.fakes, there)
    trained = [stand_ins.of(parameter) for parameter in given]
    fixed = watch.enter(_with_gradients(trained, stand_ins))
    with explained(optimizer), stand_ins.fakes, watch:  # which lets tensors be on a device that is not here
        made = (
            optimizer_named(optimizer, trained, **options)
            if isinstance(optimizer, str)
            else twin_of(optimizer, stand_ins.of)
        )
        choose_implementation(made)
        watch.enter(tensors_in(made.state.values()))
        for _ in range(2):  # the first makes the state
            type(made).step(made)
    resting = watch.living_bytes()
    return OptimizerShare(
        name=type(made).__name__,
        implementation=_implementation(made),
        state_bytes=resting - fixed,
        step_temporary_bytes=watch.peak_bytes() - resting,
    )


def training_peak_bytes(
    captured: Captured, share: OptimizerShare, workspace_bytes: Mapping[str, int] | None = None
) -> int:
    """The projected peak of training in eager mode: forward, backward and the optimizer's step."""
    return share.peak_bytes(captured.eager.peak_bytes(workspace_bytes), resting_bytes(captured.graph))


def resting_bytes(graph: Graph) -> int:
    """The bytes alive after the backward half: parameters, buffers, gradients, results and inputs."""
    storages = storages_of(graph)
    staying = {
        storages.number_of[name]
        for name, tensor in graph.tensors.items()
        if name in graph.held or (is_resident(tensor) and tensor.kind is not Kind.CONSTANT)
    }
    return sum(int(storages.nbytes[number]) for number in staying)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _with_gradients(parameters: Iterable[Tensor], stand_ins: StandIns) -> Iterator[Tensor]:
    """The parameters, and the gradients they are given here."""
    for parameter in parameters:
        yield parameter
        if parameter.requires_grad:
            with stand_ins.fakes:
                parameter.grad = torch.empty_like(parameter)
            yield parameter.grad


def optimizer_named(name: str, parameters: Iterable[Tensor], **options: object) -> Optimizer:
    """An optimizer of `torch.optim`, of these parameters."""
    parameters = list(parameters)
    kind = OPTIMIZERS.get(name.lower())
    if kind is None:
        raise BadUse(
            f"{name!r} is no optimizer of torch.optim{nearest(name.lower(), OPTIMIZERS)}; it has"
            f" {', '.join(OPTIMIZERS)}"
        )
    if not parameters:
        raise BadUse(f"what {name!r} takes depends on the parameters; none were given")
    return kind(parameters, **options)


def without_hooks(optimizer: Optimizer) -> Optimizer:
    """The same optimizer in another object, which runs no hook and knows no scheduler."""
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    hooks = [name for name in vars(other) if name.startswith("_optimizer_") and name.endswith("_hooks")]
    other.__dict__.update((name, OrderedDict()) for name in hooks)
    return other


def twin_of(optimizer: Optimizer, other: Callable[[Tensor], Tensor]) -> Optimizer:
    """The same optimizer of other tensors, with the same options and as much state, without hooks."""
    twin = without_hooks(optimizer)
    twin.param_groups = [
        {**group, "params": [other(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        twin.state[other(parameter)] = pytree.tree_map_only(Tensor, other, state)
    return twin


def choose_implementation(optimizer: Optimizer) -> None:
    """As PyTorch does, which looks at the type of tensors too, and does not know that of stand-ins."""
    supported = torch_optimizer._get_foreach_kernels_supported_devices()  # type: ignore[attr-defined]  # private
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = all(parameter.device.type in supported for parameter in group["params"])


def _implementation(optimizer: Optimizer) -> str:
    chosen = (
        name for name in ("fused", "foreach") if any(group.get(name) for group in optimizer.param_groups)
    )
    return next(chosen, "single-tensor")


def tensors_in(values: Iterable[object]) -> list[Tensor]:
    """All tensors, at any depth."""
    return [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor)]


@contextmanager
def explained(optimizer: Optimizer | str) -> Iterator[None]:
    """An optimizer that looks at data, or wants a closure, cannot be followed: say so."""
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AssertionError, KeyError, AttributeError) as fault:
        raise BadUse(f"{name} took no step on tensors without data: {fault}") from fault
