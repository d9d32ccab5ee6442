"""The ops a drawn network is made of: one table, each entry a few lines of Python over values of one shape.

Every value is a tensor of (batch, C, H, H), and so is the result `{y}` of every op. In the templates `{a}`
and `{b}` are two values made before, `{m}` is a name that belongs to the op alone, C and H are sizes, and the
other names are the op's options. Sizes are even, C is a multiple of 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from random import Random
from typing import TypeAlias

Options: TypeAlias = Mapping[str, tuple[object, ...]]


class Trait(Flag):
    """What a network with this op must be spared, or is drawn for."""

    NONE = 0
    RANDOM = auto()  # draws from torch's generator
    UPDATES = auto()  # writes a buffer
    UNREPLAYABLE = auto()  # changes Python state, or looks at values: `fit` has to refuse, or run it in eager
    SPATIAL = auto()  # the kind of op that tiles are made for
    STRANGE = auto()  # what other people's programs do: comes last in a network
    LATE = auto()  # comes behind all else and is drawn last of all, so that seeds keep their networks


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of op. `init` are lines of `__init__`, `forward` lines of `forward`."""

    name: str
    forward: str
    init: str = ""
    options: Options = field(default_factory=dict)
    trait: Trait = Trait.NONE
    weight: int = 1

    def drawn_options(self, random: Random) -> dict[str, object]:
        """One choice for each option."""
        return {name: random.choice(choices) for name, choices in self.options.items()}


_ACTIVATIONS = {
    "relu": "F.relu({a})",
    "gelu": "F.gelu({a})",
    "silu": "F.silu({a})",
    "sigmoid": "torch.sigmoid({a})",
    "tanh": "{a}.tanh()",
    "hardswish": "F.hardswish({a})",
    "softplus": "F.softplus({a})",
    "clamp": "{a}.clamp(-1, 1)",
    "square": "{a} * {a} * 0.5",
    "glu": "F.glu(torch.cat([{a}, {b}], 1), 1)",
}

_DIM: Options = {"dim": (1, 2, 3)}
_MOMENTUM: Options = {"momentum": (0.1, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5, None), "affine": (True, True, False)}


def _activations() -> tuple[Kind, ...]:
    return tuple(
        Kind(name, f"{{y}} = {expression}", trait=Trait.SPATIAL) for name, expression in _ACTIVATIONS.items()
    )


_DRAWN = "torch.rand_like({a})"
_BUFFER = "self.register_buffer('{m}', torch.rand({C}))"
_NEXT = "self.{m}.data * 0.9 + {a}.detach().mean((0, 2, 3)) * 0.1"


def _strange() -> tuple[Kind, ...]:
    """State written in every form, generators moved, values read, Python's many places for a number."""
    lines = {
        # generators
        "reseeded": (f"torch.manual_seed(3)\n{{y}} = {{a}} * {_DRAWN}", ""),
        "rewound": (
            f"state = torch.get_rng_state()\np = {_DRAWN}\ntorch.set_rng_state(state)\n"
            f"{{y}} = {{a}} * p * {_DRAWN}",
            "",
        ),
        "forked": (
            f"with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(5)\n    p = {_DRAWN}\n"
            "{y} = {a} * p",
            "",
        ),
        "own_generator": (
            "{y} = {a} * torch.rand({a}.shape, dtype={a}.dtype, generator=self.{m})",
            "self.{m} = torch.Generator().manual_seed(3)",
        ),
        "drawn_list": ("{y} = {a} * torch.rand(2).tolist()[0]", ""),
        # storages and what tensors say of themselves
        "data_assigned": (f"self.{{m}}.data = {_NEXT}\n{{y}} = {{a}} + self.{{m}}[:, None, None]", _BUFFER),
        "data_written": (
            f"self.{{m}}.data.copy_({_NEXT})\n{{y}} = {{a}} + self.{{m}}[:, None, None]",
            _BUFFER,
        ),
        "data_swapped": (
            "self.{m}.data, self.{m}_b.data = self.{m}_b.data, self.{m}.data\n"
            "{y} = {a} * self.{m}[:, None, None]",
            f"{_BUFFER}\nself.register_buffer('{{m}}_b', torch.rand({{C}}))",
        ),
        "storage_set": (f"self.{{m}}.set_({_NEXT})\n{{y}} = {{a}} + self.{{m}}[:, None, None]", _BUFFER),
        "resized": ("self.{m}.resize_(2 * {C}).fill_(0.5)\n{y} = {a} + self.{m}.sum()", _BUFFER),
        "momentum": (
            "self.{m}.data = self.{m}.data * 0.9 + self.last.data * 0.1\n{y} = {a} * self.{m}",
            "self.{m} = nn.Parameter(torch.ones({C}, 1, 1), requires_grad=False)",
        ),
        "trained_data": (
            "self.{m}.data = self.{m}.data.clamp(-1, 1)\n{y} = {a} * self.{m}",
            "self.{m} = nn.Parameter(torch.rand({C}, 1, 1) * 2)",
        ),
        "gradient_dropped": ("self.last.grad = None\n{y} = {a} * 1.1", ""),
        "wants_gradient": ("x.requires_grad_()\n{y} = {a} + 0.1 * x", ""),
        "frozen_inside": (
            "self.{m}.requires_grad_(False)\n{y} = {a} * self.{m}",
            "self.{m} = nn.Parameter(torch.rand({C}, 1, 1))",
        ),
        # values that exist before the step
        "flag_in_buffer": (
            "if not self.{m}:\n    self.{m}.fill_(True)\n{y} = {a} * 1.1",
            "self.register_buffer('{m}', torch.tensor(False))",
        ),
        "pointer": (
            "place = int(self.{m})\nself.{m}.fill_((place + 1) % 3)\n{y} = {a} + 0.1 * place",
            "self.register_buffer('{m}', torch.zeros((), dtype=torch.long))",
        ),
        "product": (  # with zeros and without: eager asks which
            "{y} = {a} * (F.relu({a}).prod(1, keepdim=True) + {a}.sigmoid().prod(2, keepdim=True)).tanh()",
            "",
        ),
        # where Python keeps a number
        "slots": ("{y} = {a} * self.{m}.by", "self.{m} = Slots(1.5)"),
        "bound": ("{y} = self.{m}({a})", "self.{m} = Scale(1.5).apply"),
        "closed": ("{y} = self.{m}({a})", "self.{m} = closed_over(1.5)"),
        "defaults": ("{y} = self.{m}({a})", "self.{m} = lambda value, by=[1.5]: value * by[0]"),
        "partial": ("{y} = self.{m}({a})", "self.{m} = partial(scaled, by=1.5)"),
        "asked_for": ("{y} = {a} * self.{m}.by", "self.{m} = Asked(1.5)"),
    }
    drawn = {"reseeded", "rewound", "forked", "own_generator", "drawn_list"}
    return tuple(
        Kind(name, forward, init, trait=Trait.STRANGE | (Trait.RANDOM if name in drawn else Trait.UPDATES))
        for name, (forward, init) in lines.items()
    )


KINDS: tuple[Kind, ...] = (
    *_activations(),
    # convolutions and what is like them
    Kind(
        "conv",
        "{y} = self.{m}({a})",
        "self.{m} = nn.Conv2d({C}, {C}, {k}, padding={k} // 2 * {d}, dilation={d}, groups={g}, bias={bias},"
        " padding_mode={mode!r})",
        {
            "k": (1, 3, 3, 5),
            "d": (1, 1, 2),
            "g": (1, 1, 2, 4),
            "bias": (True, True, False),
            "mode": ("zeros", "zeros", "zeros", "zeros", "reflect", "circular", "replicate"),
        },
        Trait.SPATIAL,
        weight=8,
    ),
    Kind(
        "conv_transpose",
        "{y} = self.{m}(F.max_pool2d({a}, 2))",
        "self.{m} = nn.ConvTranspose2d({C}, {C}, 2, 2)",
        trait=Trait.SPATIAL,
        weight=2,
    ),
    Kind(
        "strided_conv",
        "{y} = F.interpolate(self.{m}({a}), scale_factor=2, mode='nearest')",
        "self.{m} = nn.Conv2d({C}, {C}, 3, 2, 1)",
        trait=Trait.SPATIAL,
    ),
    Kind(
        "cat_conv",
        "{y} = self.{m}(torch.cat([{a}, {b}], 1))",
        "self.{m} = nn.Conv2d(2 * {C}, {C}, 1)",
        trait=Trait.SPATIAL,
        weight=3,
    ),
    Kind("linear", "{y} = self.{m}({a})", "self.{m} = nn.Linear({H}, {H})", weight=3),
    Kind("unfold", "{y} = F.fold(F.unfold({a}, 3, padding=1), ({H}, {H}), 3, padding=1) / 9"),
    # norms
    Kind(
        "batch_norm",
        "{y} = self.{m}({a})",
        "self.{m} = nn.BatchNorm2d({C}, momentum={momentum}, affine={affine})",
        _MOMENTUM,
        Trait.UPDATES | Trait.SPATIAL,
        weight=4,
    ),
    Kind(
        "batch_norm_eval",
        "{y} = self.{m}({a})",
        "self.{m} = nn.BatchNorm2d({C}).eval()",
        trait=Trait.SPATIAL,
    ),
    Kind(
        "batch_norm_batch",
        "{y} = self.{m}({a})",
        "self.{m} = nn.BatchNorm2d({C}, track_running_stats=False)",
        trait=Trait.SPATIAL,
    ),
    Kind(
        "group_norm",  # of rows: torch's own backward crashes on channels_last with an expanded gradient
        "{y} = self.{m}({a}.contiguous())",
        "self.{m} = nn.GroupNorm({groups}, {C})",
        {"groups": (1, 2, 4)},
        Trait.SPATIAL,
    ),
    Kind(
        "instance_norm",
        "{y} = self.{m}({a})",
        "self.{m} = nn.InstanceNorm2d({C}, affine={affine}, track_running_stats={track})",
        {"affine": (True, False), "track": (False, False, True)},
        Trait.UPDATES | Trait.SPATIAL,
    ),
    Kind("layer_norm", "{y} = self.{m}({a})", "self.{m} = nn.LayerNorm([{H}])", weight=2),
    Kind("rms_norm", "{y} = self.{m}({a})", "self.{m} = nn.RMSNorm({H})"),
    Kind("local_response_norm", "{y} = F.local_response_norm({a}, 3)"),
    # in place, and into slices
    Kind("relu_", "{y} = F.relu_({a} * 1.5)", trait=Trait.SPATIAL),
    Kind("relu_over", "{y} = self.{m}({a})", "self.{m} = nn.ReLU(inplace=True)", trait=Trait.SPATIAL),
    Kind("elu_", "{y} = F.elu_({a}.clone())"),
    Kind("add_over", "{y} = {a}.add_({b}, alpha=0.5)"),
    Kind("add_", "{y} = {a}.clone()\n{y}.add_({b}, alpha=0.5)"),
    Kind("rows_", "{y} = {a} + 1\n{y}[:, :, ::2] *= 2.0\n{y} = F.leaky_relu_({y}, 0.1)"),
    Kind(
        "copy_", "{y} = torch.zeros_like({a})\n{y}[..., 1:] = {a}[..., :-1]\n{y}[..., :1].copy_({b}[..., :1])"
    ),
    Kind("split_", "p, q = {a}.clone().split([1, {C} - 1], 1)\n{y} = torch.cat([p.mul(2), q], 1)"),
    Kind("view_", "{y} = {a} * 2\n{y}.view(-1)[::3].add_(1.0)\n{y}.transpose(1, 2).tanh_()"),
    Kind("masked_", "{y} = {a}.clone()\n{y}.masked_fill_({b} > 0.5, 0.25)"),
    Kind("index_put_", "{y} = {a}.clone()\n{y}[idx % {y}.shape[0], 0] += 0.5"),
    Kind(
        "scan",
        "h, steps = torch.zeros_like({a}[:, :, 0]), []\nfor t in range({H}):\n"
        "    h = torch.tanh(h * 0.7 + {a}[:, :, t])\n    steps.append(h)\n{y} = torch.stack(steps, 2)",
    ),
    # views
    Kind("transpose", "{y} = {a}.transpose(-1, -2)"),
    Kind("flip", "{y} = {a}.flip([{dim}])", options=_DIM),
    Kind("roll", "{y} = {a}.roll({n}, {dim})", options={"n": (1, -1, 2), **_DIM}),
    Kind(
        "view", "{y} = {a}.reshape(-1, {C} * {H}, {H}).unflatten(1, ({H}, {C})).transpose(1, 2).contiguous()"
    ),
    Kind("permute", "{y} = {a}.permute(0, 2, 3, 1).reshape({a}.shape)"),
    Kind("expand", "{y} = {a} + {b}[:, :1].expand_as({a})"),
    Kind("same", "{y} = {a}"),
    Kind("chunk", "p, q = {a}.chunk(2, 1)\n{y} = torch.cat([q * p.sigmoid(), p], 1)"),
    Kind("cat_narrow", "{y} = torch.cat([{a}, {b}], {dim}).narrow({dim}, 1, {a}.shape[{dim}])", options=_DIM),
    Kind("cat_halves", "{y} = torch.cat([{a}[..., : {H} // 2], {b}[..., {H} // 2 :]], -1)"),
    Kind("detach", "{y} = {a} + {b}.detach()"),
    Kind("channels_last", "{y} = {a}.contiguous(memory_format=torch.channels_last)"),
    Kind("zero_size", "{y} = torch.cat([{a}, {a}[:, :0]], 1) + {b}[:0].sum()"),
    Kind("pixel_shuffle", "{y} = F.pixel_unshuffle(F.pixel_shuffle({a} + {b}, 2), 2)"),
    # pools and resizing
    Kind(
        "max_pool",
        "{y} = F.interpolate(F.max_pool2d({a}, 2), scale_factor=2, mode='nearest')",
        trait=Trait.SPATIAL,
        weight=2,
    ),
    Kind("max_pool3", "{y} = F.max_pool2d({a}, 3, 1, 1)", trait=Trait.SPATIAL),
    Kind(
        "avg_pool",
        "{y} = F.avg_pool2d({a}, 2)\n"
        "{y} = F.interpolate({y}, size=({H}, {H}), mode='bilinear', align_corners={corners})",
        options={"corners": (True, False)},
        trait=Trait.SPATIAL,
    ),
    Kind(
        "avg_pool3",
        "{y} = F.avg_pool2d({a}, 3, 1, 1, count_include_pad={include})",
        options={"include": (True, False)},
        trait=Trait.SPATIAL,
    ),
    Kind("adaptive_pool", "{y} = F.interpolate(F.adaptive_avg_pool2d({a}, 3), size=({H}, {H}))"),
    Kind(
        "bicubic",
        "{y} = F.interpolate({a}, size=({H} + 2, {H} + 2), mode='bicubic')[..., 1:-1, 1:-1]",
    ),
    Kind(
        "pad",
        "{y} = F.pad({a}, (1, 1, 1, 1), mode={mode!r})[..., 2:, 2:].contiguous()",
        options={"mode": ("reflect", "replicate", "circular", "constant")},
    ),
    Kind("pad_crop", "{y} = F.pad({a}, (2, 0, 0, 1))[..., :{H}, 1 : {H} + 1]"),
    # arithmetic of two values
    Kind("add", "{y} = {a} + {b}", weight=3),
    Kind("mul", "{y} = {a} * {b}", weight=2),
    Kind("where", "{y} = torch.where({a} > 0, {a}, {b} * 0.1)"),
    Kind("div", "{y} = {a} / ({b}.square() + 1)"),
    Kind("lerp", "{y} = torch.lerp({a}, {b}, 0.3)"),
    Kind("addcmul", "{y} = torch.addcmul({a}, {a}, {b}, value=0.2)"),
    # products
    Kind("matmul", "{y} = {a} @ {b}.transpose(-1, -2) / {H}", weight=2),
    Kind(
        "attention",
        "{y} = F.scaled_dot_product_attention({a}, {b}, {b}, is_causal={causal})",
        options={"causal": (True, False)},
    ),
    Kind(
        "heads",
        "q, k, v = self.{m}({a}).chunk(3, -1)\n"
        "{y} = self.{m}_out(torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v)",
        "self.{m} = nn.Linear({H}, 3 * {H})\nself.{m}_out = nn.Linear({H}, {H})",
    ),
    Kind(
        "einsum",
        "{y} = torch.einsum({form!r}, {a}, {b}) / {H}",
        options={
            "form": (
                "bchw,bcwk->bchk",
                "bchw,bchw->bchw",
                "bchw,bdhw->bchw",
                "bchw,bcij->bchw",
            )
        },
    ),
    Kind("bmm", "{y} = torch.bmm({a}.flatten(0, 1), {b}.flatten(0, 1)).view({a}.shape) / {H}"),
    # reductions, sorting
    Kind("softmax", "{y} = torch.softmax({a}, {dim})", options=_DIM),
    Kind("log_softmax", "{y} = F.log_softmax({a}, {dim})", options=_DIM),
    Kind("mean", "{y} = {a} - {a}.mean({dim}, keepdim=True)", options=_DIM),
    Kind("var", "{y} = {a} / ({a}.var({dim}, keepdim=True, unbiased=False) + 1).sqrt()", options=_DIM),
    Kind("amax", "{y} = {a} - {a}.amax({dim}, keepdim=True)", options=_DIM),
    Kind("norm", "{y} = {a} / ({a}.norm(dim={dim}, keepdim=True) + 1)", options=_DIM),
    Kind("logsumexp", "{y} = {a} + {a}.logsumexp(1, keepdim=True)"),
    Kind("cumsum", "{y} = {a}.cumsum({dim}) / {H}", options=_DIM),
    Kind("sort", "{y} = {a}.sort(-1).values"),
    Kind("topk", "{y} = {a} + {a}.topk(1, dim=1).values"),
    Kind("argmax", "{y} = {a} * {b}.argmax(1, keepdim=True)"),
    # looking up
    Kind("embedding", "{y} = {a} + self.{m}(idx)[:, None, None, :]", "self.{m} = nn.Embedding(7, {H})"),
    Kind("one_hot", "{y} = {a} + F.one_hot(idx, {H})[:, None, None, :]", trait=Trait.UNREPLAYABLE),
    Kind("index", "{y} = {a}[:, [{C} - 1, 1, 1, *range(3, {C})]]"),
    Kind("gather", "{y} = {a}.gather(3, (idx[:, None, None, None] % {H}).expand_as({a}))"),
    Kind("index_select", "{y} = {a}.index_select(2, torch.arange({H} - 1, -1, -1))"),
    Kind("index_add", "{y} = {a}.index_add(1, torch.tensor([0, 2, 0]), {b}[:, :3])"),
    # complex numbers
    Kind("fft", "{y} = torch.fft.irfft2(torch.fft.rfft2({a}), s=({H}, {H})) * 0.9"),
    Kind("complex", "w = torch.complex({a}, {b})\n{y} = (w * w.conj()).real * 0.1 + w.imag"),
    Kind("polar", "{y} = torch.view_as_real(torch.polar({a}.abs() + 1, {b})).sum(-1)"),
    # random numbers
    Kind(
        "dropout",
        "{y} = self.{m}({a})",
        "self.{m} = nn.Dropout({p})",
        {"p": (0.3, 0.5, 0.5, 0.0, 1.0)},
        Trait.RANDOM,
        weight=3,
    ),
    Kind("dropout2d", "{y} = self.{m}({a})", "self.{m} = nn.Dropout2d({p})", {"p": (0.3, 0.5)}, Trait.RANDOM),
    Kind(
        "alpha_dropout",
        "{y} = F.alpha_dropout({a}, 0.2, training=self.training)",
        trait=Trait.RANDOM,
    ),
    Kind("rand", "{y} = {a} * torch.rand_like({a})", trait=Trait.RANDOM),
    Kind("randn", "{y} = {a} + 0.1 * torch.randn({a}.shape)", trait=Trait.RANDOM),
    Kind("bernoulli", "{y} = {a} * torch.bernoulli(torch.full_like({a}, 0.5))", trait=Trait.RANDOM),
    Kind("randperm", "{y} = {a}[:, torch.randperm({C})]", trait=Trait.RANDOM),
    Kind("rrelu", "{y} = F.rrelu({a}, training=self.training)", trait=Trait.RANDOM),
    # parameters, their views, and tied ones
    Kind("prelu", "{y} = self.{m}({a})", "self.{m} = nn.PReLU()"),
    Kind("scale", "{y} = {a} * self.{m}", "self.{m} = nn.Parameter(torch.rand({C}, 1, 1) + 0.5)", weight=2),
    Kind(
        "parameter_views",
        "{y} = {a} * self.{m}[::2] - self.{m}.view(2, -1, 1, {H})[1]",
        "self.{m} = nn.Parameter(torch.randn(2 * {C}, 1, {H}))",
    ),
    Kind(
        "tied",
        "{y} = F.linear(self.{m}_in({a}), self.{m}_in.weight.t()) + self.{m}_out({b})",
        "self.{m}_in = nn.Linear({H}, {H}, bias=False)\nself.{m}_out = nn.Linear({H}, {H})\n"
        "self.{m}_out.weight = self.{m}_in.weight",
    ),
    Kind(
        "unused_parameter",
        "{y} = {a} * 1.1",
        "self.{m} = nn.Parameter(torch.ones(3))",
    ),
    # buffers
    Kind(
        "running_mean",
        "self.{m}.mul_(0.9).add_({a}.detach().mean((0, 2, 3)), alpha=0.1)\n"
        "{y} = {a} - self.{m}[:, None, None]",
        "self.register_buffer('{m}', torch.zeros({C}))",
        trait=Trait.UPDATES,
    ),
    Kind(
        "buffer_view",
        "self.{m}[:2].add_({a}.detach().mean((0, 2, 3))[:2])\n{y} = {a} + self.{m}.view(-1, 1, 1).tanh()",
        "self.register_buffer('{m}', torch.zeros({C}))",
        trait=Trait.UPDATES,
    ),
    Kind(
        "buffer_rebound",
        "self.{m} = self.{m} + 1\n{y} = {a} / (1 + 0.1 * self.{m})",
        "self.register_buffer('{m}', torch.zeros(()))",
        trait=Trait.UPDATES,
    ),
    Kind("buffer_read", "{y} = {a} * self.{m}", "self.register_buffer('{m}', torch.rand({C}, 1, 1))"),
    # what forward reads and a loop may change
    Kind("gain", "{y} = {a} * self.{m}", "self.{m} = 1.5", weight=2),
    Kind("mode", "{y} = {a}.tanh() if self.{m} == 'tanh' else {a}.sigmoid()", "self.{m} = 'tanh'"),
    Kind("offset", "{y} = {a} + self.{m}", "self.{m} = torch.linspace(0, 1, {C}).view(-1, 1, 1)", weight=2),
    Kind("flag", "{y} = {a} * 3 if flag is True else {a} + 1 if isinstance(flag, float) else {a} - flag"),
    Kind(
        "block", "{y} = self.{m}({a})", "self.{m} = nn.Sequential(nn.Linear({H}, {H}), nn.ReLU())", weight=2
    ),
    # Python state that changes in forward
    Kind(
        "counter",
        "self.{m} += 1\n{y} = {a} * min(1.0, self.{m} / 4)",
        "self.{m} = 0",
        trait=Trait.UNREPLAYABLE,
    ),
    Kind("python_random", "{y} = {a} * (1 + random.random())", trait=Trait.UNREPLAYABLE),
    Kind("kept_result", "self.{m} = {a}.detach().mean()\n{y} = {a} * 1.1", trait=Trait.UNREPLAYABLE),
    Kind(
        "history",
        "self.{m}.append(1)\n{y} = {a} * len(self.{m})",
        "self.{m} = []",
        trait=Trait.UNREPLAYABLE,
    ),
    *_strange(),
    # sequences of as many rows as `idx` says
    Kind(
        "packed",
        "n = idx % {H} + 1\n"
        "p = {a}.mean(3).mT\n"
        "p = nn.utils.rnn.pack_padded_sequence(p, n{form}, batch_first=True, enforce_sorted=False)\n"
        "p, n = nn.utils.rnn.pad_packed_sequence(self.{m}(p)[0], batch_first=True, total_length={H})\n"
        "{y} = {a} + p.mT[..., None] * (torch.arange({H}) < n[:, None])[:, None, :, None]",
        "self.{m} = nn.{net}({C}, {C}, batch_first=True)",
        {"net": ("GRU", "LSTM", "RNN"), "form": ("", ".tolist()", ".cpu().numpy()")},
        Trait.LATE,
    ),
)

BY_NAME = {kind.name: kind for kind in KINDS}
assert len(BY_NAME) == len(KINDS), "two kinds of op have one name"
