"""What a training loop does between steps, or instead of a plain one: one table of actions.

An action is a function of a side and of a source of random choices, the same for both sides of a case.
`change` marks actions that leave the model changed and can also come before `fit`; `drive` marks those that
run steps in their own way. After each action a plain step follows, and everything seen is compared.
"""

import copy
import io
import random as drawn
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import partial
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .batches import Caller, Fields, loss_of, tensors_of
from .comparing import ASKED, HOOKED
from .networks import HEADS, Network
from .ops import Trait
from .sides import Side

Perform: TypeAlias = Callable[[Side, Random], None]


class Halt(Exception):
    """Raised on purpose inside a step."""


class Interrupt(KeyboardInterrupt):
    """As if the user had pressed Ctrl-C inside a step."""


class BackwardFootprint(Flag):
    """What must hold for an action to be comparable."""

    NOTHING = 0
    BITS = auto()  # rounding would grow: no tiles
    REPEATABLE = auto()  # two runs at once: no draws, no buffers


@dataclass(frozen=True, slots=True)
class Action:
    """An entry of the table. `kinds` are the ops without one of which it would do nothing."""

    name: str
    perform: Perform
    comes_before_fit: bool
    kinds: tuple[str, ...] = ()
    output: str = ""  # the one that a network must have
    needs: BackwardFootprint = BackwardFootprint.NOTHING
    rounds: bool = False  # eager itself adds up in another order than step after step
    weight: int = 3  # 1 for what is mostly refused, which ends a program
    is_strange: bool = False  # drawn after all others, at the end of a program
    has_optimizer: bool = False  # for loops whose optimizer is planned with the step, and for no others

    def suits(self, network: Network, *, has_tiles: bool) -> bool:
        if self.kinds and not network.owners(*self.kinds):
            return False
        if self.output and network.output != self.output:
            return False
        if BackwardFootprint.BITS in self.needs and has_tiles:
            return False
        return not (BackwardFootprint.REPEATABLE in self.needs and network.has(Trait.RANDOM | Trait.UPDATES))


ACTIONS: dict[str, Action] = {}


def _entered(perform: Perform, **traits: Any) -> Perform:
    name = perform.__name__
    assert name not in ACTIONS, f"two actions are called {name}"
    ACTIONS[name] = Action(name, perform, **traits)
    return perform


def change(*kinds: str, weight: int = 3) -> Callable[[Perform], Perform]:
    return partial(_entered, comes_before_fit=True, kinds=kinds, weight=weight)


def drive(
    *kinds: str, needs: BackwardFootprint = BackwardFootprint.NOTHING, rounds: bool = False, weight: int = 3
) -> Callable[[Perform], Perform]:
    traits: dict[str, Any] = {"kinds": kinds, "needs": needs, "rounds": rounds, "weight": weight}
    return partial(_entered, comes_before_fit=False, **traits)


def strange(
    *kinds: str,
    needs: BackwardFootprint = BackwardFootprint.NOTHING,
    rounds: bool = False,
    output: str = "",
) -> Callable[[Perform], Perform]:
    traits: dict[str, Any] = {"kinds": kinds, "needs": needs, "rounds": rounds, "output": output}
    return partial(_entered, comes_before_fit=False, **traits, is_strange=True)


def drive_optimizer(weight: int = 3) -> Callable[[Perform], Perform]:
    return partial(_entered, comes_before_fit=False, has_optimizer=True, weight=weight)


# ---- attributes and modules ----


@change("gain")
def set_a_scalar(side: Side, random: Random) -> None:
    """A scalar attribute that forward reads, as in annealing."""
    setattr(side.model, random.choice(side.network.owners("gain")), random.choice((0.5, 2.0, 2, True)))


@change("mode")
def set_a_string(side: Side, random: Random) -> None:
    """A string that forward branches on."""
    setattr(side.model, random.choice(side.network.owners("mode")), "sigmoid")


@change("offset")
def replace_a_tensor(side: Side, random: Random) -> None:
    """A plain tensor attribute, replaced by another."""
    name = random.choice(side.network.owners("offset"))
    setattr(side.model, name, getattr(side.model, name) * 2 + random.random())


@change("offset")
def write_a_tensor(side: Side, random: Random) -> None:
    """A plain tensor attribute, written in place."""
    getattr(side.model, random.choice(side.network.owners("offset"))).add_(random.random())


@change("dropout", "dropout2d")
def set_dropout(side: Side, random: Random) -> None:
    for module in side.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = random.choice((0.2, 0.5, 0.0))


@change("batch_norm")
def set_momentum(side: Side, random: Random) -> None:
    for module in side.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = random.choice((0.3, None))


@change("block")
def swap_activation(side: Side, random: Random) -> None:
    """A module without parameters becomes one of another class."""
    block = getattr(side.model, random.choice(side.network.owners("block")))
    block[1] = random.choice((nn.Tanh, nn.GELU, nn.Identity))()


@change("block")
def swap_block(side: Side, random: Random) -> None:
    """A module becomes one with other parameters, of the same shapes or not."""
    name, height = random.choice(side.network.owners("block")), side.network.sizes.height
    inner = random.choice((height, height + 1))
    setattr(side.model, name, nn.Sequential(nn.Linear(height, inner), nn.ReLU(), nn.Linear(inner, height)))


@change()
def swap_for_a_copy(side: Side, random: Random) -> None:
    """A module becomes a copy of itself with other numbers."""
    children = [name for name, _ in side.model.named_children()]
    if not children:
        return
    name = random.choice(children)
    other = copy.deepcopy(getattr(side.model, name))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    setattr(side.model, name, other)


@change()
def replace_a_parameter(side: Side, random: Random) -> None:
    side.model.last = nn.Parameter(side.model.get_parameter("last").detach() + random.random())


@change()
def replace_a_buffer(side: Side, random: Random) -> None:
    names = [name for name, buffer in side.model.named_buffers() if buffer.is_floating_point()]
    if not names:
        return
    owner, _, name = random.choice(names).rpartition(".")
    module = side.model.get_submodule(owner)
    setattr(module, name, getattr(module, name) * 0.5 + 0.1)


@change(weight=1)
def set_forward(side: Side, random: Random) -> None:
    """`forward` on the instance, as accelerate's hooks set it."""
    before, factor = side.model.forward, random.choice((1.0, 2.0))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        side.note("wrapped forward", None)
        output = before(*args, **kwargs)
        return output * factor if isinstance(output, Tensor) else output

    side.model.forward = wrapped


@change()
def switch_mode(side: Side, random: Random) -> None:
    """train() and eval(), of the whole or of one module."""
    module = random.choice([side.model, *side.modules()])
    module.train(not module.training)


@change()
def freeze(side: Side, random: Random) -> None:
    parameters = list(side.model.parameters())
    for parameter in random.sample(parameters, random.randint(1, len(parameters))):
        parameter.requires_grad_(not parameter.requires_grad)


@change()
def unfreeze_all(side: Side, random: Random) -> None:  # noqa: ARG001 -- actions are called alike
    side.model.requires_grad_(requires_grad=True)


# ---- hooks ----

_register: Callable[[Tensor, Callable[[Tensor], Tensor]], Any] = Tensor.register_hook
_register_final: Callable[[Tensor, Callable[[Tensor], None]], Any] = Tensor.register_post_accumulate_grad_hook


@dataclass(slots=True)
class Kept:
    """What a hook has taken."""

    several: list[Tensor] = field(default_factory=list)
    named: dict[str, Tensor] = field(default_factory=dict)
    last: Tensor | None = None


def _any_module(side: Side, random: Random) -> nn.Module:
    """The whole model, or an inner module."""
    return random.choice([side.model, *side.modules()])


def _halved(value: Any) -> Any:
    return value * 0.5 if isinstance(value, Tensor) and value.is_floating_point() else value


@change(weight=1)
def forward_hook(side: Side, random: Random) -> None:
    """A hook that looks, or one that changes what a module returns."""
    changes = random.random() < 0.5

    def hook(_module: nn.Module, _args: object, output: Any) -> Any:
        side.note("forward hook", None if changes else type(output).__name__)
        return _halved(output) if changes else None

    _any_module(side, random).register_forward_hook(hook)


@change(weight=1)
def forward_pre_hook(side: Side, random: Random) -> None:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> Any:
        side.note("forward pre-hook", len(args))
        return tuple(map(_halved, args))

    _any_module(side, random).register_forward_pre_hook(hook)


@change(weight=1)
def backward_hook(side: Side, random: Random) -> None:
    """A full backward hook on an inner module that halves gradients."""
    modules = side.modules()
    if not modules:
        return

    def hook(_module: nn.Module, gradients: Any, _outputs: object) -> Any:
        side.note("backward hook", len(gradients))
        return tuple(map(_halved, gradients))

    random.choice(modules).register_full_backward_hook(hook)


@change()
def hook_for_a_moment(side: Side, random: Random) -> None:
    """A hook that is removed before the next step."""
    _any_module(side, random).register_forward_hook(lambda _m, _a, output: _halved(output)).remove()


@change()
def parameter_hook(side: Side, random: Random) -> None:
    """A tensor hook that halves a parameter's gradient."""
    name, parameter = random.choice(list(side.model.named_parameters()))

    def hook(gradient: Tensor) -> Tensor:
        side.note(f"{HOOKED} {name}", gradient)
        return gradient * 0.5

    if parameter.requires_grad:
        _register(parameter, hook)


@change()
def accumulated_hook(side: Side, random: Random) -> None:
    """A hook that sees a parameter's gradient when it is final."""
    name, parameter = random.choice(list(side.model.named_parameters()))
    if parameter.requires_grad:
        _register_final(parameter, lambda p: side.note(f"final hook of {name}", p.grad))


# ---- other ways to run steps ----


def _seed(random: Random) -> int:
    return random.randrange(1 << 30)


@drive()
def accumulate(side: Side, random: Random) -> None:
    """Two or three micro-batches before gradients are cleared."""
    for _ in range(random.choice((2, 3))):
        side.step(_seed(random))


@drive(rounds=True)
def two_forwards(side: Side, random: Random) -> None:
    """Two calls, one backward, as in siamese and contrastive loops."""
    first, second = side.batch(_seed(random)), side.batch(_seed(random))
    torch.autograd.backward(side.loss(first) + 2 * side.loss(second))
    side.note_inputs(first)


@drive()
def backwards_out_of_order(side: Side, random: Random) -> None:
    """Two calls; the first is differentiated first, then the second."""
    losses = [side.loss(side.batch(_seed(random))) for _ in range(2)]
    for loss in losses:
        torch.autograd.backward(loss)


@drive()
def dropped_forward(side: Side, random: Random) -> None:
    """A call whose result is thrown away."""
    side.forward(side.batch(_seed(random)))


@drive()
def no_grad_forward(side: Side, random: Random) -> None:
    with random.choice((torch.no_grad, torch.inference_mode))():
        side.forward(side.batch(_seed(random)))


@drive()
def other_rows(side: Side, random: Random) -> None:
    """The last batch of an epoch is smaller, or a batch is larger."""
    side.step(_seed(random), rows=random.choice((1, 3, 4)))


@drive("flag")
def other_flag(side: Side, random: Random) -> None:
    """Arguments that compare equal and are not alike."""
    for flag in random.sample((True, 1, 1.0, 2), 3):
        side.step(_seed(random), flag=flag)


@drive(needs=BackwardFootprint.BITS)
def autocast(side: Side, random: Random) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        batch = side.batch(_seed(random))
        loss = side.loss(batch)
    torch.autograd.backward(loss)
    side.note_inputs(batch)


@drive()
def wrong_argument(side: Side, random: Random) -> None:
    """A batch with other channels, which most networks cannot take."""
    x, z, idx = side.batch(_seed(random))
    batch = Fields(x.detach()[:, :3].clone(), z, idx)
    torch.autograd.backward(side.loss(batch))


@drive()
def raise_in_forward(side: Side, random: Random) -> None:
    """A hook raises in the middle of forward."""
    error = random.choice((Halt, Interrupt))

    def hook(*_: object) -> None:
        raise error

    with _removed(_any_module(side, random).register_forward_hook(hook)):
        side.step(_seed(random))


@drive()
def raise_in_backward(side: Side, random: Random) -> None:
    """The hook of a parameter raises in the middle of backward."""
    error = random.choice((Halt, Interrupt))

    def hook(_: object) -> Tensor:
        raise error

    parameter = random.choice(list(side.model.parameters()))
    if parameter.requires_grad:
        with _removed(_register(parameter, hook)):
            side.step(_seed(random))


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@drive()
def weights_changed_between(side: Side, random: Random) -> None:
    """Parameters are written between forward and backward: eager mostly raises."""
    loss = side.loss(side.batch(_seed(random)))
    with torch.no_grad():
        random.choice(list(side.model.parameters())).mul_(2)
    torch.autograd.backward(loss)


@drive(weight=1)
def retain_graph(side: Side, random: Random) -> None:
    loss = side.loss(side.batch(_seed(random)))
    for _ in range(2):
        torch.autograd.backward(loss, retain_graph=True)


@drive()
def backward_twice(side: Side, random: Random) -> None:
    """The second backward without retain_graph, at which eager raises."""
    loss = side.loss(side.batch(_seed(random)))
    for _ in range(2):
        torch.autograd.backward(loss)


@drive()
def gradient_of_some(side: Side, random: Random) -> None:
    """`torch.autograd.grad` for some parameters alone."""
    parameters = [p for p in side.model.parameters() if p.requires_grad]
    chosen = random.sample(parameters, min(len(parameters), 2))
    loss = side.loss(side.batch(_seed(random)))
    for position, gradient in enumerate(torch.autograd.grad(loss, chosen, allow_unused=True)):
        side.note(f"{ASKED} {position}", gradient)


@drive()
def scaled_loss(side: Side, random: Random) -> None:
    """As a gradient scaler does: the loss is multiplied, gradients are divided."""
    torch.autograd.backward(side.loss(side.batch(_seed(random))) * 1024)
    for parameter in side.model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(1024)


@drive()
def zero_gradients(side: Side, random: Random) -> None:
    """Gradients are set to zero in place, and added to."""
    side.step(_seed(random))
    for parameter in side.model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    side.step(_seed(random))


@drive()
def other_thread(side: Side, random: Random) -> None:
    _in_threads([partial(side.step, _seed(random))])


@drive(needs=BackwardFootprint.REPEATABLE)
def two_threads(side: Side, random: Random) -> None:
    """Two threads ask for gradients at once, each for its own batch."""
    found: dict[int, list[Tensor | None]] = {}

    def run(number: int, seed: int) -> None:
        args, kwargs = Caller(side.network.signature).arguments(side.batch(seed))
        loss = loss_of(side.model(*args, **kwargs), side.network.output)
        parameters = [p for p in side.model.parameters() if p.requires_grad]
        found[number] = list(torch.autograd.grad(loss, parameters, allow_unused=True))

    seen = len(side.record)
    _in_threads([partial(run, number, _seed(random)) for number in range(2)])
    del side.record[seen:]  # what hooks saw came in any order
    for number in sorted(found):
        for position, gradient in enumerate(found[number]):
            side.note(f"{ASKED} {position} in thread {number}", gradient)


def _in_threads(runs: list[Callable[[], None]]) -> None:
    """Run all at once; what one raises is raised here."""
    raised: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


# ---- optimizers, copies, files ----


def _train(side: Side, random: Random, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        side.step(_seed(random))
        optimizer.step()
    side.clear()


@drive()
def sgd(side: Side, random: Random) -> None:
    _train(side, random, torch.optim.SGD(side.model.parameters(), lr=0.01, momentum=0.9))


@drive(needs=BackwardFootprint.BITS)
def adamw(side: Side, random: Random) -> None:
    foreach = random.choice((True, False))
    _train(side, random, torch.optim.AdamW(side.model.parameters(), lr=0.01, foreach=foreach))


@drive()
def optimizer_in_backward(side: Side, random: Random) -> None:
    """Each parameter is updated, and its gradient freed, as soon as that is final."""

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None

    parameters = [p for p in side.model.parameters() if p.requires_grad]
    handles = [_register_final(parameter, update) for parameter in parameters]
    try:
        side.clear()
        for _ in range(2):
            side.step(_seed(random))
    finally:
        for handle in handles:
            handle.remove()


@drive()
def deep_copy(side: Side, random: Random) -> None:
    """The loop goes on with a copy; the original takes a step of its own first."""
    other = copy.deepcopy(side.model)
    side.step(_seed(random))
    side.model = other


@drive()
def save_state(side: Side, random: Random) -> None:
    """A checkpoint is written, and read after one more step."""
    file = io.BytesIO()
    torch.save(side.model.state_dict(), file)
    optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1)
    side.step(_seed(random))
    optimizer.step()
    file.seek(0)
    side.model.load_state_dict(torch.load(file))


@drive()
def load_by_assignment(side: Side, random: Random) -> None:  # noqa: ARG001 -- actions are called alike
    """Parameters and buffers become other tensors."""
    state = {name: tensor.clone() * 1.1 for name, tensor in side.model.state_dict().items()}
    side.model.load_state_dict(state, assign=True)


@drive(weight=1)
def save_whole(side: Side, random: Random) -> None:  # noqa: ARG001 -- actions are called alike
    """The model itself goes through a file."""
    file = io.BytesIO()
    torch.save(side.model, file)
    file.seek(0)
    side.model = torch.load(file, weights_only=False)


# ---- what other people's programs do ----


def _differentiable(output: object) -> list[Tensor]:
    return [tensor for tensor in tensors_of(output) if tensor.grad_fn is not None]


@strange()
def hook_on_an_output(side: Side, random: Random) -> None:
    """A hook that halves the gradient of an output, and a gradient that is retained there."""
    output = side.forward(side.batch(_seed(random)))
    chosen = random.choice(_differentiable(output))
    factor = random.choice((0.5, 0.5, 1.0))

    def hook(gradient: Tensor) -> Tensor:
        side.note(f"{HOOKED} an output", gradient)
        return gradient * factor

    chosen.retain_grad()
    _register(chosen, hook)
    torch.autograd.backward(loss_of(output, side.network.output))
    side.note("retained", chosen.grad)


@strange()
def prehook_on_a_node(side: Side, random: Random) -> None:
    output = side.forward(side.batch(_seed(random)))
    node: Any = random.choice(_differentiable(output)).grad_fn
    node.register_prehook(lambda gradients: side.note("prehook", gradients[0]))
    torch.autograd.backward(loss_of(output, side.network.output))


@strange()
def gradient_of_an_output(side: Side, random: Random) -> None:
    output = side.forward(side.batch(_seed(random)))
    chosen = random.choice(_differentiable(output))
    loss = loss_of(output, side.network.output)
    if loss is chosen or side.network.output in ("pair", "complex", "tensor"):
        side.note(f"{ASKED} of an output", torch.autograd.grad(loss, chosen, allow_unused=True)[0])
        return
    chosen.retain_grad()  # the loss is made inside: docs/limits.md says that `grad` does not see it
    torch.autograd.backward(loss)
    side.note(f"{ASKED} of an output", chosen.grad)


@strange(needs=BackwardFootprint.BITS)
def hook_that_stores(side: Side, random: Random) -> None:
    """What an inner module returns, taken by a hook into a list, a dict or an attribute for two steps."""
    kept, layer, place = Kept(), _any_module(side, random), random.choice(("list", "dict", "attribute"))

    def hook(_module: nn.Module, _args: object, output: Any) -> None:
        for tensor in list(tensors_of(output))[:1]:
            if place == "list":
                kept.several.append(tensor.detach())
            elif place == "dict":
                kept.named["h"] = tensor
            else:
                kept.last = tensor.detach()

    with _removed(layer.register_forward_hook(hook)):
        for _ in range(2):
            side.step(_seed(random))
            for number, tensor in enumerate((*kept.several, *kept.named.values(), kept.last)):
                side.note(f"stored {number}", tensor)
            kept.several.clear()


@strange(needs=BackwardFootprint.BITS)
def profiler_around(side: Side, random: Random) -> None:
    """A profile of the user's, in which a new shape is planned too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        side.step(_seed(random), rows=random.choice((None, 3)))
    events: Any = profile.key_averages()
    side.note("the profile has events", len(events) > 0)


@strange()
def checkpoint_around(side: Side, random: Random) -> None:
    """The fitted model inside a checkpoint of the user's."""
    if side.network.fills_argument:  # recomputed, it fills it twice, and eager differentiates the second
        return
    batch = side.batch(_seed(random))
    args, kwargs = side.arguments(batch)
    output = checkpoint(partial(side.model, *args, **kwargs), use_reentrant=False)
    torch.autograd.backward(loss_of(output, side.network.output))
    side.note_inputs(batch)


@strange()
def beside_a_thread(side: Side, random: Random) -> None:
    """A step, perhaps of a new shape, while another thread draws random numbers and allocates."""
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            drawn.random()
            torch.empty(1000).fill_(1)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        side.step(_seed(random), rows=random.choice((None, 3)))
    finally:
        stop.set()
        thread.join()
        drawn.seed(0)


@strange(output=HEADS, needs=BackwardFootprint.BITS)
def heads_in_turn(side: Side, random: Random) -> None:
    """One head is trained, then the other; parameters of the one that rests have no gradient."""
    optimizer = torch.optim.AdamW(side.model.parameters(), lr=0.01)
    for _ in range(2):
        head = random.randrange(2)
        optimizer.zero_grad()
        torch.autograd.backward(list(tensors_of(side.forward(side.batch(_seed(random)))))[head])
        side.note_state()
        optimizer.step()


@strange("gradient_dropped")
def added_to_what_forward_dropped(side: Side, random: Random) -> None:
    """Micro-batches of a forward that drops a gradient: only the last one counts there."""
    for _ in range(2):
        side.step(_seed(random))


@strange("frozen_inside")
def thawed_before_it_freezes(side: Side, random: Random) -> None:
    side.model.requires_grad_(requires_grad=True)
    side.step(_seed(random))
    side.note("trained", [parameter.requires_grad for parameter in side.model.parameters()])


@strange("slots")
def set_a_slot(side: Side, random: Random) -> None:
    getattr(side.model, random.choice(side.network.owners("slots"))).by = random.choice((0.5, 2.0))


@strange("bound")
def set_of_a_bound_method(side: Side, random: Random) -> None:
    """What the object of a bound method holds."""
    method = getattr(side.model, random.choice(side.network.owners("bound")))
    method.__self__.by = random.choice((0.5, 2.0))


@strange("closed")
def set_in_a_closure(side: Side, random: Random) -> None:
    function = getattr(side.model, random.choice(side.network.owners("closed")))
    function.__closure__[0].cell_contents = random.choice((0.5, 2.0))


@strange("defaults")
def set_in_a_default(side: Side, random: Random) -> None:
    """A list that is the default of a parameter."""
    function = getattr(side.model, random.choice(side.network.owners("defaults")))
    function.__defaults__[0][0] = random.choice((0.5, 2.0))


@strange("partial")
def set_in_a_partial(side: Side, random: Random) -> None:
    function = getattr(side.model, random.choice(side.network.owners("partial")))
    function.keywords["by"] = random.choice((0.5, 2.0))


@strange("asked_for")
def set_behind_getattr(side: Side, random: Random) -> None:
    """What `__getattr__` of a configuration answers."""
    getattr(side.model, random.choice(side.network.owners("asked_for"))).kept["by"] = random.choice(
        (0.5, 2.0)
    )
