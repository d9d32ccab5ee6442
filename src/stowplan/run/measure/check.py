"""Check: eager and the plan side by side. Same losses, gradients, buffers, draws; the peak; the time."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stowplan.capture.composite import opened_by_name
from stowplan.capture.recording import Loss, after_loss, output_named
from stowplan.capture.stand_ins import flatten
from stowplan.errors import BadUse
from stowplan.plan.draft import Exactness
from stowplan.plan.plan import Plan
from stowplan.plan.record import Difference, Record
from stowplan.request import Iteration
from stowplan.run.cost.machine import free_bytes, rng_state
from stowplan.run.fit import plans_of
from stowplan.run.fitting import wants_gradient
from stowplan.run.measure.agreement import compared
from stowplan.run.measure.measure import Measurement, measure
from stowplan.run.planning.planner import DraftedStep, Subject
from stowplan.run.target import Target, subject_of
from stowplan.torch_private import pytree
from stowplan.watch import tell_phase

_ROUNDINGS = 4096  # a difference of this many units in the last place is rounding, if sums change their order
_NOISE = 0.01  # of the largest such allowance counts for small gradients too
_OWN_ERRORS = 4.0  # times the distance of eager itself from float64 is rounding too
_SAME_LOSS = 1e-4  # relative: where float64 draws other numbers, it says nothing about eager
_WIDER = 3.0  # times eager's peak: room for the same step in float64 and for what is compared
_RATE = 1e-3  # of the update between two steps, so that each step starts from other parameters


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two: a model and how its loss is computed, or its results if nothing is differentiated."""

    model: nn.Module
    loss: Callable[[], Tensor] | None
    results: Callable[[], object] = tuple
    optimizer: Optimizer | None = None
    clip_norm: float | None = None  # if it clips in its loop
    accumulate: int = 1  # backwards before each step of the optimizer

    @property
    def device(self) -> str:
        return next((str(parameter.device) for parameter in self.model.parameters()), "cpu")

    def step(self) -> dict[str, Tensor]:
        """Forward and backward from fresh gradients; with an optimizer, an iteration of the usual loop.

        Returns the loss, or the results of a step that is forward alone.
        """
        if self.loss is None:
            return dict(_tensors_in(self.results()))
        self.model.zero_grad(set_to_none=True)
        for _ in range(self.accumulate):
            loss = self.loss()
            loss.backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": loss.detach()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that both sides must agree on after a step."""
        for name, parameter in opened_by_name(dict(self.model.named_parameters())).items():
            yield name, parameter.detach()
            if parameter.grad is not None:
                yield f"{name}.grad", parameter.grad
        yield from opened_by_name(dict(self.model.named_buffers())).items()
        yield from self.state()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer keeps."""
        states = self.optimizer.state_dict()["state"] if self.optimizer else {}
        for number, state in sorted(states.items()):  # the order of first updates differs
            for name, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{name} of parameter {number}", value

    def update(self) -> None:
        """A plain gradient step, if nothing else updates the parameters."""
        if self.optimizer is not None:
            return
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=_RATE)


def check(
    target: Target,
    planning: Callable[[Subject], DraftedStep],
    *,
    steps: int = 3,
    rounds: int = 5,
    subject: Subject | None = None,
) -> Record:
    """Run `steps` training steps of both, comparing all; then measure the memory and time of one step each.

    `planning` drafts the plan of the captured step, which is the `subject` if the caller has captured it.
    Times are medians of `rounds` interleaved rounds.
    """
    subject = subject or subject_of(target)
    drafted = planning(subject)
    step = replace(drafted, draft=compared(drafted.draft, subject)).verified()
    side_of = _eager_side if step.captured.program.is_differentiated else _eager_forward
    eager = side_of(_copied(target))
    before = _kept(target, step.plan)
    straight = step.bound_to(target.model, loss=target.loss)
    run = partial(straight, *target.args, **target.kwargs)
    planned = _Side(target.model, None, run)
    if step.captured.program.is_differentiated:
        planned = _Side(target.model, lambda: _loss_in(run(), target.loss))
    return _recorded(step.plan, eager, planned, before, steps, rounds, side_of)


def check_iterations(
    target: Target,
    fitted_with: Callable[[Iteration], nn.Module],
    iteration_of: Callable[[nn.Module], Iteration],
    *,
    iterations: int = 3,
    rounds: int = 5,
) -> Record:
    """The same for whole iterations: parameters and optimizer state are compared as well.

    `iteration_of` makes that of a model, and `fitted_with` fits the target with it, so that the plan clips.
    """

    def eager_of(of: Target) -> _Side:
        asked = iteration_of(of.model)
        return replace(
            _eager_side(of),
            optimizer=_optimizer_of(asked),
            clip_norm=asked.clip_norm,
            accumulate=asked.accumulate,
        )

    eager = eager_of(_copied(target))
    asked = iteration_of(target.model)
    own, fitted = _optimizer_of(asked), fitted_with(asked)
    (plan,) = plans_of(fitted)
    before = _kept(target, plan)
    planned = replace(
        _Side(target.model, lambda: _loss_in(fitted(*target.args, **target.kwargs), target.loss)),
        optimizer=own,
        accumulate=asked.accumulate,
    )
    return _recorded(plan, eager, planned, before, iterations, rounds, eager_of)


def _optimizer_of(asked: Iteration) -> Optimizer:
    assert isinstance(asked.optimizer, Optimizer), "its name was looked up for the model"
    return asked.optimizer


def _copied(target: Target) -> Target:
    return replace(target, model=copy.deepcopy(target.model))


def _kept(target: Target, plan: Plan) -> Target:
    """The target as it is now, if the plan's rounding may have to be compared with eager's own."""
    return _copied(target) if plan.exactness is Exactness.ROUNDING else target


def _recorded(
    plan: Plan,
    eager: _Side,
    planned: _Side,
    before: Target,
    steps: int,
    rounds: int,
    eager_of: Callable[[Target], _Side],
) -> Record:
    """Compare and measure; `before` is the target with its model as it was before the first step."""
    rounded = plan.exactness is Exactness.ROUNDING
    differences = _differences(eager, planned, steps, roundings=_ROUNDINGS if rounded else 0)
    plain = _measured(eager, before)
    if rounded and any(difference.largest > difference.allowed for difference in differences):
        room = free_bytes(torch.device(eager.device)) > _WIDER * plain.measured_peak_bytes
        own = _own_errors(before, eager_of, steps) if room else {}
        differences = tuple(_allowing(difference, own) for difference in differences)
    measured = _measured(planned, before)
    plain_seconds, seconds = _times(eager, planned, rounds)
    return Record(
        plan=plan,
        device=eager.device,
        measured_curve_bytes=measured.measured_curve_bytes,
        measured_curve_seconds=measured.measured_curve_seconds,
        measured_seconds=seconds,
        plain_measured_peak_bytes=plain.measured_peak_bytes,
        plain_measured_seconds=plain_seconds,
        differences=differences,
    )


def eager_peak_bytes(target: Target, optimizer: Optimizer | None = None) -> int:
    """Measured in one eager step, from fresh gradients; or in the optimizer's second iteration.

    The model is trained meanwhile.
    """
    leaves = flatten(target.args, target.kwargs)[0]
    if optimizer is None and not wants_gradient(target.model, leaves):
        return _measured(_eager_forward(target), target).measured_peak_bytes
    side = replace(_eager_side(target), optimizer=optimizer)
    if optimizer is not None:
        side.step()  # makes the state
    return _measured(side, target).measured_peak_bytes


def _eager_side(target: Target) -> _Side:
    model = target.model

    def loss() -> Tensor:
        output = model(*target.args, **target.kwargs)
        return _loss_in(after_loss(output, target.loss), target.loss)

    return _Side(model, loss)


def _eager_forward(target: Target) -> _Side:
    return _Side(
        target.model, None, lambda: after_loss(target.model(*target.args, **target.kwargs), target.loss)
    )


def _tensors_in(output: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a step returns, by name or place."""
    for path, leaf in pytree.tree_flatten_with_path(output)[0]:
        if isinstance(leaf, Tensor):
            yield f"result{pytree.keystr(path)}", leaf.detach()


def _loss_in(output: object, loss: Loss | None) -> Tensor:
    """The loss among what a step returns, as capture takes it."""
    if isinstance(loss, str | int):
        output = output_named(output, loss)
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    scalars = [leaf for leaf in leaves if leaf.dim() == 0]
    if len(scalars) != 1:
        raise BadUse(
            "check needs one scalar to differentiate: return (model, args, loss), where loss is a function of"
            " the model's output, or the name or index of the output that is the loss"
        )
    return scalars[0]


def _differences(eager: _Side, planned: _Side, steps: int, roundings: int) -> tuple[Difference, ...]:
    """The largest difference of every tensor over all steps."""
    worst: dict[str, Difference] = {}
    for difference in _compared(eager, planned, steps, roundings):
        name = difference.tensor
        if name not in worst or difference.largest > worst[name].largest:
            worst[name] = difference
    return tuple(_with_noise(worst))


def _compared(reference: _Side, other: _Side, steps: int, roundings: int) -> Iterator[Difference]:
    """The difference of every tensor after each step of both sides."""
    for seed in range(steps):
        tell_phase("comparing steps", seed, steps)
        found = zip(_after_a_step(reference, seed), _after_a_step(other, seed), strict=True)
        for (name, expected), (_, got) in found:
            yield _difference(name, expected, got, roundings)
        reference.update()
        other.update()


def _with_noise(worst: Mapping[str, Difference]) -> Iterator[Difference]:
    """A gradient that is zero but for rounding, as before a norm, is as far off as the others' rounding."""
    noise = _NOISE * max((d.allowed for name, d in worst.items() if name.endswith(".grad")), default=0.0)
    for difference in worst.values():
        yield replace(difference, allowed=max(difference.allowed, noise) if difference.allowed else 0.0)


def _own_errors(before: Target, eager_of: Callable[[Target], _Side], steps: int) -> Mapping[str, float]:
    """How far eager is from the same steps in float64, by tensor; empty if float64 cannot run them.

    Rounding moves some value across zero, and a ReLU or a maximum there takes the other side. Gradients then
    differ by far more than units in the last place, in eager as in a plan: only a reference tells.
    """
    eager, exact = eager_of(_copied(before)), eager_of(_in_float64(before))
    errors: dict[str, float] = {}
    try:
        for difference in _compared(exact, eager, steps, roundings=0):
            if difference.tensor == "loss" and difference.relative > _SAME_LOSS:
                return {}
            errors[difference.tensor] = max(errors.get(difference.tensor, 0.0), difference.largest)
    except (RuntimeError, TypeError, ValueError):  # some op of the model takes float32 alone
        return {}
    return errors


def _in_float64(target: Target) -> Target:
    args, kwargs, loss = pytree.tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
        (target.args, dict(target.kwargs), copy.deepcopy(target.loss)),
    )
    if isinstance(loss, nn.Module):
        loss = loss.double()
    return Target(copy.deepcopy(target.model).double(), args, kwargs, loss)


def _allowing(difference: Difference, own: Mapping[str, float]) -> Difference:
    allowed = max(difference.allowed, _OWN_ERRORS * own.get(difference.tensor, 0.0))
    return replace(difference, allowed=allowed if difference.allowed else 0.0)


def _after_a_step(side: _Side, seed: int) -> list[tuple[str, Tensor]]:
    torch.manual_seed(seed)
    results = side.step()
    places = {torch.device("cpu"), torch.device(side.device)}
    states = [(f"generator state of {place}", rng_state(place)) for place in sorted(places, key=str)]
    return [*results.items(), *side.tensors(), *states]


def _difference(name: str, expected: Tensor, got: Tensor, roundings: int) -> Difference:
    if expected.shape != got.shape:
        return Difference(name, float("inf"), 0.0)
    scale = expected.double().abs().max().item() if expected.numel() else 0.0
    allowed = roundings * torch.finfo(expected.dtype).eps * scale if expected.is_floating_point() else 0.0
    if torch.equal(expected, got):
        return Difference(name, 0.0, scale, allowed)
    apart = (expected.double() - got.double()).abs().max().item()
    return Difference(name, apart if apart == apart else float("inf"), scale, allowed)


def _measured(side: _Side, target: Target) -> Measurement[None]:
    """One step from fresh gradients; all that the step can see is there before it."""
    tell_phase("measuring memory")
    side.model.zero_grad(set_to_none=True)
    there = [*target.tensors_before(side.model), *(tensor for _, tensor in side.state())]
    return measure(lambda: _discard(side.step()), device=side.device, before=there)


def _discard(_: object) -> None:
    return None


def _times(eager: _Side, planned: _Side, rounds: int) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        tell_phase("timing steps", number, rounds)
        for side, seconds in zip((eager, planned), times, strict=True):
            seconds.append(_seconds_of(side))
    return median(times[0]), median(times[1])


def _seconds_of(side: _Side) -> float:
    """Of one step, until its device is done."""
    started = perf_counter()
    side.step()
    if side.device != "cpu":
        torch.accelerator.synchronize(side.device)
    return perf_counter() - started
