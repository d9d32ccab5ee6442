"""What a forward of ordinary Python does: control, state, calls, containers, ways to build a module."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.idioms.pieces import F, Scores, WithLoss, batch, batches, train
from tests.idioms.side import Side, idiom


@idiom("ModuleList in a loop, with residual connections")
def residual_blocks(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    train(side, side.fit(Net(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("ModuleDict: the branch is named by a string argument")
def branch_by_name(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"small": nn.Linear(8, 1), "large": nn.Linear(8, 4)})

        def forward(self, x: Tensor, head: str) -> Any:
            return self.heads[head](x).square().mean()

    model = side.fit(Net(), batch()[0], "small")
    for head in ("small", "large", "small"):
        model.zero_grad()
        model(batch()[0], head).backward()
        side.see(head, [p.grad for p in model.parameters()])


@idiom("ParameterList and ParameterDict")
def lists_of_parameters(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(8) * i for i in (1.0, 2.0))
            self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(8))})

        def forward(self, x: Tensor) -> Any:
            for scale in self.scales:
                x = torch.tanh(x * scale)
            return (x + self.shifts["a"]).square().mean()

    train(side, side.fit(Net(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("curriculum: a number on the module changes every epoch")
def number_on_the_module(side: Side) -> None:
    class Net(WithLoss):
        temperature = 1.0

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(self.head(self.body(x)) / self.temperature, y)

    model = side.fit(Net(), *batch())
    for temperature in (1.0, 0.7, 0.5):
        model.temperature = temperature
        train(side, model, batches(1))


@idiom("annealing: a number is an argument")
def number_as_an_argument(side: Side) -> None:
    class Net(Scores):
        def forward(self, x: Tensor, weight: float) -> Any:
            return (weight * self.scores(x)).square().mean()

    train(
        side,
        side.fit(Net(), batch()[0], 1.0),
        ((x, w) for w, (x, _) in zip((1.0, 0.5, 0.25), batches(), strict=True)),
    )


@idiom("annealing as PyTorch's own docs advise: the number is a tensor")
def tensor_as_an_argument(side: Side) -> None:
    class Net(Scores):
        def forward(self, x: Tensor, weight: Tensor) -> Any:
            return (weight * self.scores(x)).square().mean()

    weights = (torch.tensor(w) for w in (1.0, 0.5, 0.25))
    train(
        side,
        side.fit(Net(), batch()[0], torch.tensor(1.0)),
        ((x, w) for w, (x, _) in zip(weights, batches(), strict=True)),
    )


@idiom("a debug print and an assertion on shapes")
def print_and_assert(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            assert x.shape[0] == y.shape[0], "one label a row"
            if os.environ.get("IDIOM_DEBUG"):
                print(x.shape)
            return super().forward(x, y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("a timer inside forward that nothing reads")
def timer(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            begun = time.perf_counter()
            loss = super().forward(x, y)
            assert time.perf_counter() >= begun
            return loss

    train(side, side.fit(Net(), *batch()), batches())


@idiom("an optional kernel: try, except, fall back")
def try_and_fall_back(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            try:
                x = torch.ops.a_package_that_is_not_there.norm(x)
            except AttributeError:
                x = F.layer_norm(x, (8,))
            return super().forward(x, y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("a guard against NaN that raises")
def finite_or_raise(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            h = self.body(x)
            if not torch.isfinite(h).all():
                raise FloatingPointError("not finite")
            return F.cross_entropy(self.head(h), y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("memory-conscious code: del of what is not needed")
def deletes(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            h = self.body(x)
            scores = self.head(h)
            del h
            return F.cross_entropy(scores, y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("torchvision: in-place ReLU and in-place residual sums")
def in_place(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            h = F.relu(self.one(x), inplace=True)
            out = self.two(h)
            out += x
            return out.clamp_(min=-1).square().mean()

    train(side, side.fit(Net(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("segment-anything-like code: writes into slices of a new tensor")
def writes_into_slices(side: Side) -> None:
    class Net(Scores):
        def forward(self, x: Tensor) -> Any:
            out = torch.zeros(x.shape[0], 8)
            out[:, :4] = self.scores(x)
            out[:, 4:].copy_(self.scores(x * 2))
            out[0] = 1
            return out.square().mean()

    train(side, side.fit(Net(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("masked_fill_ and index_put_ on what was just made")
def masked_in_place(side: Side) -> None:
    class Net(Scores):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            scores = self.scores(x)
            scores.masked_fill_(y[:, None] == 0, -3.0)
            return scores.logsumexp(1).mean()

    train(side, side.fit(Net(), *batch()), batches())


@idiom("dictionaries in, dictionaries out, as in many trainers")
def dictionaries(side: Side) -> None:
    class Net(Scores):
        def forward(self, batch: dict[str, Tensor]) -> Any:
            scores = self.scores(batch["x"])
            return {"loss": F.cross_entropy(scores, batch["y"]), "scores": scores}

    x, y = batch()
    model = side.fit(Net(), {"x": x, "y": y}, loss="loss")
    for x, y in batches():
        model.zero_grad()
        out = model({"x": x, "y": y})
        out["loss"].backward()
        side.see("scores", out["scores"])


class Sample(NamedTuple):
    """One batch."""

    x: Tensor
    y: Tensor


@dataclass
class Result:
    """Loss and scores."""

    loss: Tensor
    scores: Tensor


@idiom("named tuples in, a dataclass out", refused="no output depends")
def tuples_and_dataclasses(side: Side) -> None:
    class Net(Scores):
        def forward(self, sample: Sample) -> Any:
            scores = self.scores(sample.x)
            return Result(F.cross_entropy(scores, sample.y), scores)

    model = side.fit(Net(), Sample(*batch()), loss="loss")
    for each in batches():
        model.zero_grad()
        out = model(Sample(*each))
        out.loss.backward()
        side.see("loss", out.loss)
        side.see("scores", out.scores)


@idiom("keyword arguments with None and defaults")
def keywords_and_none(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None, *, scale: int = 1) -> Any:
            if mask is not None:
                x = x * mask
            return super().forward(x * scale, y)

    model = side.fit(Net(), *batch())
    for mask in (None, torch.ones(6, 1), None):
        x, y = batch()
        model.zero_grad()
        loss = model(x, y, mask=mask, scale=2)
        loss.backward()
        side.see("loss", loss)


@idiom("arguments in a namespace, as argparse makes one")
def namespace_argument(side: Side) -> None:
    class Net(WithLoss):
        def __init__(self, options: Any) -> None:
            super().__init__()
            self.options = options

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y) * self.options.weight

    model = side.fit(Net(SimpleNamespace(weight=0.5)), *batch())
    train(side, model, batches(2))
    model.options.weight = 2.0
    train(side, model, batches(2))


@idiom("a model whose class overrides __call__")
def overrides_call(side: Side) -> None:
    class Net(WithLoss):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 2

    train(side, side.fit(Net(), *batch()), batches())


@idiom("activation given as a function, a lambda, a partial and a bound method")
def functions_as_attributes(side: Side) -> None:
    class Scale:
        def __init__(self) -> None:
            self.by = 2.0

        def apply(self, x: Tensor) -> Tensor:
            return x * self.by

    class Net(WithLoss):
        def __init__(self, scale: Scale) -> None:
            super().__init__()
            self.steps: list[Any] = [
                torch.tanh,
                lambda x: x + 1,
                partial(F.leaky_relu, negative_slope=0.3),
                scale.apply,
            ]

        def forward(self, x: Tensor, y: Tensor) -> Any:
            for step in self.steps:
                x = step(x)
            return super().forward(x, y)

    scale = Scale()
    model = side.fit(Net(scale), *batch())
    train(side, model, batches(2))
    scale.by = 3.0
    train(side, model, batches(2))


@idiom("a configuration with slots that a schedule changes")
def configuration_with_slots(side: Side) -> None:
    @dataclass(slots=True)
    class Options:
        alpha: float = 1.0

    class Net(WithLoss):
        def __init__(self, options: Options) -> None:
            super().__init__()
            self.options = options

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x * self.options.alpha, y)

    options = Options()
    model = side.fit(Net(options), *batch())
    for alpha in (1.0, 0.5, 2.0):
        options.alpha = alpha
        train(side, model, batches(1))


@idiom("a closure over a number that is rebound")
def closure_that_changes(side: Side) -> None:
    rate = 1.0

    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x * rate, y)

    model = side.fit(Net(), *batch())
    for rate in (1.0, 3.0, 0.5):  # noqa: B007 - forward reads it
        train(side, model, batches(1))


@idiom("torch.utils.checkpoint inside, as densenet and GPT code has it")
def checkpoint_inside(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x.square().mean()

    train(side, side.fit(Net(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("checkpoint_sequential over segments")
def sequential_checkpoints(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))

        def forward(self, x: Tensor) -> Any:
            segments: Any = torch.utils.checkpoint.checkpoint_sequential
            return segments(self.net, 2, x, use_reentrant=False).square().mean()

    train(side, side.fit(Net(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("VQ-VAE and quantisation papers: a custom autograd.Function, straight through")
def straight_through_function(side: Side) -> None:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Any:
            return x.round()

        @staticmethod
        def backward(_: Any, grad: Tensor) -> Any:
            return grad

    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(self.head(cast(Any, Round).apply(self.body(x) * 4)), y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("domain adversarial training: the gradient is reversed")
def gradient_reversal(side: Side) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, by: float) -> Any:
            ctx.by = by
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return -ctx.by * grad, None

    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            h, reverse = self.body(x), cast(Any, Reverse).apply
            return F.cross_entropy(self.head(h), y) + self.head(reverse(h, 0.3)).square().mean()

    train(side, side.fit(Net(), *batch()), batches())


@idiom("memory-efficient swish of EfficientNet: a Function that saves its input")
def function_that_saves(side: Side) -> None:
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            return grad * (s * (1 + x * (1 - s)))

    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(self.head(cast(Any, Swish).apply(self.body(x))), y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("torch.func: functional_call of an inner module with other weights")
def functional_call_inside(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(8, 4), nn.Parameter(torch.ones(4, 8))

        def forward(self, x: Tensor) -> Any:
            weights = {"weight": self.inner.weight * self.scale, "bias": self.inner.bias}
            return torch.func.functional_call(self.inner, weights, (x,)).square().mean()

    train(side, side.fit(Net(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("torch.func: vmap over an ensemble inside forward")
def ensemble_by_vmap(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, 4, 8) / 3)

        def forward(self, x: Tensor) -> Any:
            return torch.func.vmap(lambda w: F.linear(x, w))(self.weights).square().mean()

    train(side, side.fit(Net(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("lazy modules, run once before they are fitted")
def lazy_modules(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LazyLinear(16), nn.LazyLinear(4)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(self.two(torch.relu(self.one(x))), y)

    net = Net()
    net(*batch())
    train(side, side.fit(net, *batch()), batches())


@idiom("TorchScript inside: a scripted activation")
def scripted_function(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(self.head(_scripted(self.body(x))), y)

    for _ in range(3):  # its first calls profile it, and have other bits than those that follow
        Net()(*batch()).backward()
    train(side, side.fit(Net(), *batch()), batches())


def _gated(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_scripted = torch.jit.script(_gated)


@idiom("two fitted parts, one script: encoder and decoder")
def two_fitted_parts(side: Side) -> None:
    encoder = side.fit(nn.Sequential(nn.Linear(8, 3), nn.Tanh()), batch()[0], outputs="all")
    decoder = side.fit(nn.Linear(3, 8), torch.randn(6, 3, requires_grad=True), outputs="all")
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    for x, _ in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(decoder(encoder(x)), x)
        loss.backward()
        optimizer.step()
        side.see("loss", loss)


@idiom("early exits: all heads in training")
def early_exits(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.exits = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

        def losses(self, x: Tensor, y: Tensor) -> Iterable[Tensor]:
            for layer, leave in zip(self.layers, self.exits, strict=True):
                x = torch.relu(layer(x))
                yield F.cross_entropy(leave(x), y)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return sum(self.losses(x, y))

    train(side, side.fit(Net(), *batch()), batches())


@idiom("double precision throughout, as in physics code")
def double_precision(side: Side) -> None:
    x, y = batch()
    model = side.fit(WithLoss().double(), x.double(), y)
    train(side, model, ((x.double(), y) for x, y in batches()))


@idiom("complex weights, as in MRI reconstruction")
def complex_weights(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 4)

        def forward(self, x: Tensor) -> Any:
            return (torch.view_as_complex(x) @ self.weight).abs().mean()

    train(side, side.fit(Net(), torch.randn(6, 8, 2)), ((torch.randn(6, 8, 2),) for _ in range(3)))


@idiom("forward changes the dictionary it was given")
def writes_into_an_argument(side: Side) -> None:
    class Net(Scores):
        def forward(self, batch: dict[str, Tensor]) -> Any:
            batch["x"] = batch["x"] * 2
            return self.scores(batch["x"]).square().mean()

    kept = {"x": batch()[0]}
    model = side.fit(Net(), {"x": batch()[0]})
    for _ in range(3):
        model.zero_grad()
        loss = model(kept)
        loss.backward()
        side.see("loss", loss)
        side.see("kept", kept)


@idiom("metrics kept on the module: the last loss")
def last_loss_is_stored(side: Side) -> None:
    class Net(WithLoss):
        last_loss: Tensor | None = None

        def forward(self, x: Tensor, y: Tensor) -> Any:
            loss = super().forward(x, y)
            self.last_loss = loss.detach()
            return loss

    model = side.fit(Net(), *batch())
    for x, y in batches():
        model.zero_grad()
        model(x, y).backward()
        side.see("kept", model.last_loss)


@idiom("a counter of calls in a Python number", refused="changes the state of the program")
def counter_in_python(side: Side) -> None:
    class Net(WithLoss):
        calls = 0

        def forward(self, x: Tensor, y: Tensor) -> Any:
            self.calls += 1
            return super().forward(x, y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("a counter of calls in a buffer")
def counter_in_a_buffer(side: Side) -> None:
    class Net(WithLoss):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor, y: Tensor) -> Any:
            self.calls += 1
            return super().forward(x, y) / self.calls

    train(side, side.fit(Net(), *batch()), batches())


@idiom("a flag in a buffer: initialise from the first batch")
def flag_in_a_buffer(side: Side) -> None:
    class Net(WithLoss):
        ready: Tensor
        centre: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ready", torch.tensor(False))
            self.register_buffer("centre", torch.zeros(8))

        def forward(self, x: Tensor, y: Tensor) -> Any:
            if not self.ready:
                self.centre.copy_(x.mean(0))
                self.ready.fill_(True)
            return super().forward(x - self.centre, y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("scheduled sampling with Python's random", refused="random numbers")
def random_of_python(side: Side) -> None:
    import random

    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x * 2 if random.random() < 0.5 else x, y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("LayerDrop and scheduled sampling with torch.rand")
def random_of_torch(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            if torch.rand([]) < 0.5:
                x = x * 2
            return super().forward(x, y)

    train(side, side.fit(Net(), *batch()), batches(6))


@idiom("Reformer: the generator is rewound inside forward")
def generator_is_rewound(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            state = torch.get_rng_state()
            one = F.dropout(x, 0.5)
            torch.set_rng_state(state)
            two = F.dropout(x, 0.5)
            return super().forward(one + two, y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("reproducible masks: manual_seed inside forward")
def seeded_inside(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            torch.manual_seed(7)
            return super().forward(F.dropout(x, 0.5), y)

    train(side, side.fit(Net(), *batch()), batches())
