"""One by one: an optimizer's own step for a single parameter, what that takes, and whether it may be done.

The update of a parameter is run by the optimizer's own code on an object that shares its state and options
and has this parameter alone. So it has the bits of the whole step wherever one parameter's update does not
depend on another's; that is compared on corners of the parameters, together and apart, with gradients of all
sizes, infinities and NaN among them, and with one that is missing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from stowplan.capture.stand_ins import StandIns
from stowplan.errors import BadUse
from stowplan.run.cost.machine import Cost
from stowplan.run.measure.storage_watch import StorageWatch
from stowplan.run.optimizers import choose_implementation, explained, tensors_in, twin_of, without_hooks
from stowplan.techniques.iteration.run.state_elsewhere import movable
from stowplan.torch_private import pytree, version_of

_CHECKED_ONCE = (
    "_need_device_dtype_check_for_fused",
)  # flags of PyTorch's own: whether a check is still due
_CORNER = 3  # elements along each dim that the comparison updates


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps with gradients of these sizes. In the second, one element is `odd`, or one gradient missing."""

    sizes: tuple[float, ...]
    odd: float | None = None
    one_missing: bool = False


_COMPARED = (
    _Steps((1.0, 1e4, 1e12)),  # some clip at a norm
    _Steps((1e-12, 0.0, 1.0), one_missing=True),
    _Steps((1.0, 1.0, 1.0), odd=float("inf")),  # some leave out a step
    _Steps((1.0, 1.0, 1.0), odd=float("nan")),
)


class OneByOne:
    """Takes the step of `optimizer` for one parameter at a time. Its hooks do not run."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._view, self._step = without_hooks(optimizer), _own_step(type(optimizer))

    def update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Update `parameter`, which has a gradient, with the options of its `group`."""
        self._view.state = self.optimizer.state  # another object after load_state_dict
        self._view.param_groups = [{**group, "params": [parameter]}]
        with torch.autocast(parameter.device.type, enabled=False):
            self._step(self._view)


def groups_by_parameter(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The parameters in the optimizer's order, with the group that each is in."""
    return {parameter: group for group in optimizer.param_groups for parameter in group["params"]}


def options_of(group: Mapping[str, Any]) -> dict[str, object]:
    """The options of a group. Equal as long as nobody changed one."""
    return {
        name: (id(value), version_of(value)) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """What the update of one parameter takes: state that stays, and temporaries.

    `movable_bytes` are the sizes of the tensors of the state that may wait in a tier. The kernels of an
    update are `launches`, and `traffic_bytes` is what they read and write.
    """

    state_bytes: int
    temporary_bytes: int
    movable_bytes: tuple[int, ...] = ()
    launches: int = 0
    traffic_bytes: int = 0


class UpdateBook:
    """What updates take, found out once for parameters that look alike and have the same options.

    Parameters on the meta device are taken to live on `device`.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device | None = None) -> None:
        self._optimizer, self._device = optimizer, device or torch.device("cpu")
        self._known: dict[object, UpdateBytes] = {}
        self.costs: dict[object, Cost] = {}  # filled by whoever takes the time

    def of(self, parameter: Tensor, group: Mapping[str, Any]) -> UpdateBytes:
        """The optimizer takes two steps for a stand-in of the parameter."""
        state = self._optimizer.state.get(parameter, {})
        look = _look(parameter), id(group), tuple(map(_look, tensors_in([state])))
        if look not in self._known:
            self._known[look] = self._watched([parameter], [group])
        return self._known[look]

    def together(self, parameters: list[Tensor]) -> UpdateBytes:
        """The same for one step of all of them."""
        groups = groups_by_parameter(self._optimizer)
        return self._watched(parameters, [groups[parameter] for parameter in parameters])

    def _watched(self, parameters: list[Tensor], groups: list[Mapping[str, Any]]) -> UpdateBytes:
        device = parameters[0].device
        device = self._device if device.type == "meta" else device
        stand_ins = StandIns(device)
        watch = StorageWatch(stand_ins.fakes, device)
        trained = [stand_ins.of(parameter) for parameter in parameters]
        for parameter in trained:
            with stand_ins.fakes:
                parameter.grad = torch.empty_like(parameter)
        few = without_hooks(self._optimizer)
        few.param_groups = [
            {**group, "params": [p for p, of in zip(parameters, groups, strict=True) if of is group]}
            for group in {id(group): group for group in groups}.values()
        ]
        own = ((parameter, self._optimizer.state.get(parameter)) for parameter in parameters)
        few.state = defaultdict(dict, {parameter: state for parameter, state in own if state})
        fixed = watch.enter([*trained, *(p.grad for p in trained if p.grad is not None)])
        with explained(self._optimizer), stand_ins.fakes, watch:
            made = twin_of(few, stand_ins.of)
            choose_implementation(made)
            watch.enter(tensors_in(made.state.values()))
            _own_step(type(made))(made)  # makes the state
            launches, traffic = watch.launches, watch.traffic_bytes
            _own_step(type(made))(made)
        resting = watch.living_bytes()
        moved = (tensor.nbytes for state in made.state.values() for tensor in movable(state).values())
        return UpdateBytes(
            resting - fixed,
            watch.peak_bytes() - resting,
            tuple(moved),
            watch.launches - launches,
            watch.traffic_bytes - traffic,
        )


def refuse_unless_one_by_one(optimizer: object) -> None:
    """Raise BadUse for an optimizer whose step for each parameter by itself is not its step for all."""
    if not isinstance(optimizer, Optimizer):
        raise BadUse(
            f"optimizer is of type {type(optimizer).__name__}; give an object, as"
            " torch.optim.AdamW(model.parameters())"
        )
    name = type(optimizer).__name__
    kept = pytree.tree_leaves([v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")])
    if any(isinstance(leaf, Optimizer) for leaf in kept):
        raise BadUse(f"{name} wraps another optimizer; give the one inside: fit(..., optimizer=inner)")
    if any(isinstance(leaf, nn.Parameter) for leaf in kept):
        raise BadUse(f"{name} keeps its parameters outside of its groups: it updates them together{_ADVICE}")
    if not all(isinstance(key, Tensor) for key in optimizer.state):
        raise BadUse(f"{name} keeps state that belongs to no parameter: it updates them together{_ADVICE}")
    replaced = vars(optimizer).get("step")
    if replaced is not None and not getattr(replaced, "_wrapped_by_lr_sched", False):
        raise BadUse(f"step was replaced on this {name} itself, and its class has another{_ADVICE}")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise BadUse(f"{name} has differentiable=True: an update in backward is not differentiated{_ADVICE}")
    for steps in _COMPARED:
        with explained(optimizer), torch.random.fork_rng(devices=[]), torch.no_grad():
            together, apart = (_trained_on_corners(optimizer, steps, apart=a) for a in (False, True))
        if len(together) != len(apart) or not all(map(_same, together, apart)):
            raise BadUse(
                f"{name} updates parameters otherwise one by one than together: the update of one depends on"
                f" others (a norm of all gradients, a check that all are finite), or on their order{_ADVICE}"
            )


_ADVICE = "; leave it out of fit, and use reserve= for its state and its step"


def _trained_on_corners(optimizer: Optimizer, steps: _Steps, *, apart: bool) -> list[Tensor]:
    """Parameters and state after some steps on corners; `apart` goes backwards through the parameters."""
    corners: dict[int, Tensor] = {}
    twin = twin_of(optimizer, lambda tensor: corners.setdefault(id(tensor), _corner(tensor)))
    generator = torch.Generator().manual_seed(0)
    trained = [p for p in groups_by_parameter(twin) if p.requires_grad]
    own, options = dict(vars(twin)), [options_of(group) for group in twin.param_groups]
    single = OneByOne(twin)
    torch.manual_seed(0)
    for step, size in enumerate(steps.sizes):
        for parameter in trained:
            drawn = torch.randn(parameter.shape, generator=generator) * size
            parameter.grad = drawn.to(parameter)
        first = trained[0].grad if trained and step == 1 else None
        if first is not None and steps.odd is not None:
            first.view(-1)[:1] = steps.odd
        elif first is not None and steps.one_missing:
            trained[0].grad = None
        if apart:
            groups = groups_by_parameter(twin)
            for parameter in reversed(trained):
                if parameter.grad is not None:
                    single.update(parameter, groups[parameter])
        else:
            _own_step(type(twin))(twin)
    changed = [
        name for name, value in vars(twin).items() if own.get(name) is not value and name not in _CHECKED_ONCE
    ]
    if changed or options != [options_of(group) for group in twin.param_groups]:
        what = changed[0] if changed else "an option of a group"
        raise BadUse(f"{type(optimizer).__name__} changes {what} when it takes a step{_ADVICE}")
    return [*trained, *(t for parameter in trained for t in tensors_in([twin.state.get(parameter)]))]


def _corner(tensor: Tensor) -> Tensor:
    part = tensor.detach()[tuple(slice(min(size, _CORNER)) for size in tensor.shape)]
    part = torch.ones(part.shape, dtype=part.dtype) if part.is_meta else part.clone()
    return nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _own_step(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """The step as its class defines it, without the hooks that PyTorch puts around it."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[[Optimizer], object] = step
    return found


def _look(tensor: Tensor) -> object:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


class OwnHook:
    """A hook before an optimizer's steps that knows of updates in backward."""


def hooks_before_steps(optimizer: Optimizer) -> Iterator[object]:
    """Hooks that run before each step: those of the optimizer and those of all optimizers."""
    yield from optimizer._optimizer_step_pre_hooks.values()
    yield from torch_optimizer._global_optimizer_pre_hooks.values()
