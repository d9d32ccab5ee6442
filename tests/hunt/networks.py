"""Network: a drawn network as data, and as Python source that a person can read and paste."""

import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from textwrap import indent

import torch
from torch import nn

from .ops import BY_NAME, KINDS, Kind, Trait

INPUTS = ("x", "z")  # the values that a network starts from

OUTPUTS: Mapping[str, str] = {
    "square": "return {y}.square().mean()",
    "sum": "return {y}.sum()",
    "mse_loss": "return F.mse_loss({y}, z.detach())",
    "smooth_l1": "return F.smooth_l1_loss({y}, torch.zeros_like({y}))",
    "classes": "return F.cross_entropy({y}.mean((2, 3)), idx % {C})",
    "pixels": "return F.cross_entropy({y}, (idx % {C})[:, None, None].expand(-1, {H}, {H}))",
    "several": "return {y}.mean(), {y}.detach().amax((2, 3)), {middle}",
    "dict": 'return {{"loss": {y}.square().mean(), "scores": {y}}}',
    "pair": "return {y}.mean(), {y}.square().mean()",
    "tensor": "return {y}",
    "complex": "return torch.fft.rfft2({y})",
}
HEADS = "heads"
_HEADS = "return ({y} * self.left).mean(), ({y} * self.right).square().mean()"
_OF_HEADS = """\
        self.left = nn.Parameter(torch.rand({C}, 1, 1))
        self.right = nn.Parameter(torch.rand({C}, 1, 1))
"""
"""Two heads with parameters of their own; a network that has them has no other output."""

SIGNATURES: Mapping[str, str] = {
    "tensors": "self, x, z, idx, flag=1",
    "keywords": "self, x, z, idx, flag=1",
    "dict": "self, batch, flag=1",
    "named": "self, batch, flag=1",
    "record": "self, batch, flag=1",
}

_UNPACK: Mapping[str, str] = {
    "dict": 'x, z, idx = batch["x"], batch["z"], batch["idx"]',
    "named": "x, z, idx = batch",
    "record": "x, z, idx = batch.x, batch.z, batch.idx",
}

_TEMPLATE = """\
import random

import torch
import torch.nn.functional as F
from torch import nn
{helpers}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Parameter(torch.rand({C}, 1, 1) + 0.5)
{init}
    def forward({signature}):
{forward}"""

_HELPERS = """\
from dataclasses import dataclass
from functools import partial


@dataclass(slots=True)
class Slots:
    by: float


class Scale:
    def __init__(self, by):
        self.by = by

    def apply(self, value):
        return value * self.by


class Asked:
    def __init__(self, by):
        self.kept = {"by": by}

    def __getattr__(self, name):
        if name == "kept":
            raise AttributeError(name)
        return self.kept[name]


def closed_over(by):
    return lambda value: value * by


def scaled(value, by):
    return value * by

"""

_OWN_CALL = """
    def __call__(self, *args, **kwargs):
        output = super().__call__(*args, **kwargs)
        return output * 1.5 if isinstance(output, torch.Tensor) else output
"""

_FILLED: Mapping[str, str] = {
    "dict": 'batch["x"] = batch["x"] * 1.5\nx = batch["x"]',
    "record": "batch.x = batch.x * 1.5\nx = batch.x",
}
"""Lines that write into the argument that holds a batch."""


@dataclass(frozen=True, slots=True)
class Call:
    """One op of a network: its kind, the values it reads (by position), and the choices made for it."""

    kind: str
    a: int
    b: int
    options: Mapping[str, object]

    def lines(self, template: str, position: int, sizes: "Sizes") -> str:
        """The template of the op's kind, filled in."""
        return template.format(
            y=value_name(position + len(INPUTS)),
            a=value_name(self.a),
            b=value_name(self.b),
            m=own_name(position),
            C=sizes.channels,
            H=sizes.height,
            **self.options,
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Few sizes are drawn, so that ops recur and have been probed before."""

    batch: int
    channels: int
    height: int


@dataclass(frozen=True, slots=True)
class Network:
    """Values 0 and 1 are the inputs x and z; call number i makes value i + 2."""

    sizes: Sizes
    dtype: torch.dtype
    calls: tuple[Call, ...]
    output: str
    signature: str
    reads_all: bool  # the loss depends on every value, not on the last alone
    has_own_call: bool = False  # the class overrides `__call__`
    fills_argument: bool = False  # forward writes into the argument that holds the batch

    def kinds(self) -> Iterator[tuple[int, Kind]]:
        """Each call's position and kind."""
        return ((position, BY_NAME[call.kind]) for position, call in enumerate(self.calls))

    def owners(self, *kinds: str) -> list[str]:
        """The names under which calls of these kinds keep what is theirs."""
        return [own_name(position) for position, call in enumerate(self.calls) if call.kind in kinds]

    def has(self, trait: Trait) -> bool:
        return any(kind.trait & trait for _, kind in self.kinds())

    def is_spatial(self) -> bool:
        """Whether tiles are made for all of it."""
        return all(kind.trait & Trait.SPATIAL for _, kind in self.kinds())

    def without(self, position: int) -> "Network":
        """The network without one call: who read its result reads its first operand instead."""
        gone, instead = position + len(INPUTS), self.calls[position].a

        def moved(value: int) -> int:
            return instead if value == gone else value - (value > gone)

        kept = (call for index, call in enumerate(self.calls) if index != position)
        return replace(self, calls=tuple(replace(c, a=moved(c.a), b=moved(c.b)) for c in kept))

    def source(self) -> str:
        """The network as a Python module."""
        init = [call.lines(BY_NAME[call.kind].init, i, self.sizes) for i, call in enumerate(self.calls)]
        text = _TEMPLATE.format(
            C=self.sizes.channels,
            helpers=_HELPERS if self.has(Trait.STRANGE) else "",
            init="".join(indent(f"{text}\n", " " * 8) for text in init if text)
            + _OF_HEADS.format(C=self.sizes.channels) * (self.output == HEADS),
            signature=SIGNATURES[self.signature],
            forward=indent("\n".join(self._forward()), " " * 8) + "\n",
        )
        return text + _OWN_CALL * self.has_own_call

    def _forward(self) -> Iterator[str]:
        if self.signature in _UNPACK:
            yield _UNPACK[self.signature]
        if self.fills_argument and self.signature in _FILLED:
            yield _FILLED[self.signature]
        for position, call in enumerate(self.calls):
            yield call.lines(BY_NAME[call.kind].forward, position, self.sizes)
        last = len(self.calls) + len(INPUTS) - 1 if self.calls else 0
        yield f"out = {value_name(last)} * self.last"
        if self.reads_all:
            means = [f"{value_name(v)}.mean()" for v in range(len(INPUTS), last)]
            yield f"out = out + 0.01 * ({' + '.join([*means, 'z.mean()'])})"
        middle = value_name((last + 1) // 2)
        form = _HEADS if self.output == HEADS else OUTPUTS[self.output]
        yield form.format(y="out", C=self.sizes.channels, H=self.sizes.height, middle=middle)

    def build(self, seed: int) -> nn.Module:
        """A new module with parameters drawn from a seed."""
        torch.manual_seed(seed)
        return _class_of(self.source())()


def value_name(value: int) -> str:
    """How the source calls a value."""
    return INPUTS[value] if value < len(INPUTS) else f"v{value - len(INPUTS)}"


def own_name(position: int) -> str:
    """How the source calls what belongs to one call: a module, a parameter, a buffer, an attribute."""
    return f"m{position}"


def draw_network(random: Random) -> Network:
    """Of ops that tiles are made for, of ops that draw numbers and are cheap to recompute, or of any."""
    sizes = Sizes(random.choice((1, 2, 2, 8)), random.choice((4, 4, 8)), random.choice((6, 8)))
    flavour = random.choice((Trait.SPATIAL,) * 4 + (Trait.RANDOM,) * 2 + (Trait.NONE,) * 4)
    if flavour is Trait.RANDOM:  # to replay draws takes room for states of the generator: 5 KB each
        sizes = Sizes(8, 8, 8)
    calls: list[Call] = []
    for position in range(random.choice((2, 3, 4, 5, 6, 8, 10))):
        kind = random.choice(_POOLS[flavour])
        last, made = position + 1 if position else 0, position + len(INPUTS)
        a = last if random.random() < 0.75 else random.randrange(made)
        calls.append(Call(kind.name, a, random.randrange(made), kind.drawn_options(random)))
    network = Network(
        sizes,
        random.choice((torch.float32, torch.float64, torch.float64)),
        tuple(calls),
        random.choice(("square", *OUTPUTS)),
        random.choice(("tensors", "tensors", "tensors", *SIGNATURES)),
        reads_all=random.random() < 0.6,
    )
    network = _made_strange(network, random) if random.random() < _STRANGE else network
    network = replace(network, output=HEADS) if random.random() < _WITH_HEADS else network
    return _followed_by(_LATE_KINDS, network, random) if random.random() < _WITH_LATE else network


def _made_strange(network: Network, random: Random) -> Network:
    """The network with something that other people's programs do; drawn last, so that all else stays."""
    what = random.choice(("op", "op", "op", "op", "call", "argument"))
    if what == "call":
        return replace(network, has_own_call=True)
    if what == "argument":
        return replace(network, signature=random.choice(tuple(_FILLED)), fills_argument=True)
    return _followed_by(_STRANGE_KINDS, network, random)


def _followed_by(kinds: Sequence[Kind], network: Network, random: Random) -> Network:
    kind, last = random.choice(kinds), len(network.calls) + len(INPUTS) - 1
    call = Call(kind.name, last, random.randrange(last + 1), kind.drawn_options(random))
    return replace(network, calls=(*network.calls, call))


def _pool(flavour: Trait) -> tuple[Kind, ...]:
    """The kinds to draw from, each as often as it weighs. What cannot be replayed is rare."""
    tidy = (kind for kind in KINDS if not kind.trait & (Trait.STRANGE | Trait.LATE))
    chosen = [kind for kind in tidy if kind.trait & flavour or not flavour]
    if flavour is Trait.RANDOM:
        chosen += [BY_NAME[name] for name in ("gelu", "tanh", "sigmoid", "add", "mul", "scale")]
    return tuple(
        kind for kind in chosen for _ in range(1 if kind.trait & Trait.UNREPLAYABLE else 3 * kind.weight)
    )


_WITH_HEADS, _WITH_LATE = 0.06, 0.03  # drawn last: all other networks stay as they were
_STRANGE = 0.25  # the share of networks that have something of other people's programs
_STRANGE_KINDS = tuple(kind for kind in KINDS if kind.trait & Trait.STRANGE)
_LATE_KINDS = tuple(kind for kind in KINDS if kind.trait & Trait.LATE)
_POOLS = {flavour: _pool(flavour) for flavour in (Trait.NONE, Trait.SPATIAL, Trait.RANDOM)}
_FOLDER = tempfile.TemporaryDirectory(prefix="stowplan-hunt-")


def _class_of(source: str) -> type[nn.Module]:
    """The class of an imported module with a file of its own: errors and pickles can name it."""
    name = f"hunted_{sha256(source.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        path = Path(_FOLDER.name, f"{name}.py")
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    found: type[nn.Module] = sys.modules[name].Net
    return found
