"""Layers from papers: norms, gates, routing, graphs, signals, solvers."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.idioms.pieces import F, Pictures, WithLoss, batch, batches, pictures, train
from tests.idioms.side import Side, idiom


class Head(nn.Module):
    """A layer under test between two linear ones, with a loss."""

    def __init__(self, layer: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.into, self.layer, self.out = nn.Linear(8, width), layer, nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.out(self.layer(self.into(x))), y)


class Conv(nn.Module):
    """A layer of a picture between two convolutions, with a loss."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.into, self.layer, self.out = nn.Conv2d(3, 8, 3, padding=1), layer, nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.out(self.layer(self.into(x)).mean((2, 3))), y)


def _train(side: Side, layer: nn.Module) -> None:
    train(side, side.fit(Head(layer), *batch()), batches())


def _train_pictures(side: Side, layer: nn.Module) -> None:
    train(side, side.fit(Conv(layer), *pictures()), (pictures() for _ in range(3)))


@idiom("BatchNorm with cumulative statistics, momentum=None")
def cumulative_batch_norm(side: Side) -> None:
    _train_pictures(side, nn.BatchNorm2d(8, momentum=None))


@idiom("group norm and instance norm with statistics")
def group_and_instance_norm(side: Side) -> None:
    _train_pictures(
        side, nn.Sequential(nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
    )


@idiom("BiT: weight standardisation")
def weight_standardisation(side: Side) -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Any:
            w = self.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
            return F.conv2d(x, w, self.bias, padding=1)

    _train_pictures(side, Standardised(8, 8, 3))


@idiom("SENet: squeeze and excitation")
def squeeze_and_excitation(side: Side) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1), nn.Sigmoid()
            )

        def forward(self, x: Tensor) -> Any:
            return x * self.net(x)

    _train_pictures(side, Gate())


@idiom("U-Net: pooling, upsampling and concatenation")
def unet(side: Side) -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(8, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.out = nn.Conv2d(16, 8, 1)

        def forward(self, x: Tensor) -> Any:
            h = F.relu(self.down(F.max_pool2d(x, 2)))
            return self.out(torch.cat([x, self.up(h)], 1))

    _train_pictures(side, Skip())


@idiom("ESPCN and interpolation: pixel shuffle and bilinear resizing")
def pixel_shuffle(side: Side) -> None:
    class Up(nn.Module):
        def forward(self, x: Tensor) -> Any:
            wide = F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=False)
            return F.interpolate(
                F.pixel_shuffle(torch.cat([wide, wide, wide, wide], 1), 2), size=(8, 8), mode="nearest"
            )

    _train_pictures(side, Up())


@idiom("pytorch.org, spatial transformer networks: affine_grid and grid_sample")
def spatial_transformer(side: Side) -> None:
    class Transform(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Linear(8, 6)
            nn.init.zeros_(self.place.weight)
            self.place.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

        def forward(self, x: Tensor) -> Any:
            theta = self.place(x.mean((2, 3))).view(-1, 2, 3)
            return F.grid_sample(
                x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False
            )

    _train_pictures(side, Transform())


@idiom("stochastic depth: whole rows are dropped")
def stochastic_depth(side: Side) -> None:
    class Drop(nn.Module):
        def forward(self, x: Tensor) -> Any:
            if not self.training:
                return x
            keep = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(0.8)
            return x * keep.div_(0.8)

    _train_pictures(side, Drop())


@idiom("DropBlock: a mask by max-pooling")
def drop_block(side: Side) -> None:
    class Drop(nn.Module):
        def forward(self, x: Tensor) -> Any:
            mask = (torch.rand(x.shape[0], *x.shape[2:]) < 0.1).float()
            mask = 1 - F.max_pool2d(mask[:, None], 3, 1, 1)
            return x * mask * mask.numel() / mask.sum()

    _train_pictures(side, Drop())


@idiom("mixup inside forward, a permutation and a beta draw")
def mixup_inside(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            order = torch.randperm(x.shape[0])
            share = torch.distributions.Beta(0.4, 0.4).sample()
            scores = self.head(self.body(share * x + (1 - share) * x[order]))
            return share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, y[order])

    train(side, side.fit(Net(), *batch()), batches())


@idiom("spectral norm as a parametrization")
def spectral_norm(side: Side) -> None:
    _train(side, parametrizations.spectral_norm(nn.Linear(8, 8)))


@idiom("weight norm as a parametrization")
def weight_norm(side: Side) -> None:
    _train(side, parametrizations.weight_norm(nn.Linear(8, 8)))


@idiom("orthogonal weights as a parametrization")
def orthogonal(side: Side) -> None:
    _train(side, parametrizations.orthogonal(nn.Linear(8, 8)))


@idiom("pytorch.org, parametrizations tutorial: symmetric weights")
def symmetric(side: Side) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    _train(side, layer)


@idiom("HiFi-GAN: weight_norm of torch.nn.utils, the old hook")
def old_weight_norm(side: Side) -> None:
    _train(side, nn.utils.weight_norm(nn.Linear(8, 8)))


@idiom("SN-GAN: spectral_norm of torch.nn.utils, the old hook")
def old_spectral_norm(side: Side) -> None:
    _train(side, nn.utils.spectral_norm(nn.Linear(8, 8)))


@idiom("pytorch.org, pruning tutorial: masks as hooks")
def pruned(side: Side) -> None:
    layer = nn.Linear(8, 8)
    cut: Any = prune.l1_unstructured
    cut(layer, "weight", 0.3)
    _train(side, layer)


@idiom("LoRA: frozen weights and a product of two thin ones")
def lora(side: Side) -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, 8) / 4), nn.Parameter(torch.zeros(8, 2))

        def forward(self, x: Tensor) -> Any:
            return self.base(x) + F.linear(F.linear(x, self.down), self.up) * 2

    _train(side, Adapter())


@idiom("mixture of experts, dense: a softmax over all")
def soft_experts(side: Side) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.gate = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            outs = torch.stack([expert(x) for expert in self.experts], -1)
            return (outs * self.gate(x).softmax(-1).unsqueeze(1)).sum(-1)

    _train(side, Experts())


@idiom("mixture of experts, top-2 by masks")
def top_two_experts(side: Side) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.gate = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
            out = torch.zeros_like(x)
            for place, expert in enumerate(self.experts):
                share = (weights * (chosen == place)).sum(-1, keepdim=True)
                out = out + share * expert(x)
            return out

    _train(side, Experts())


@idiom("torch_geometric without it: messages by index_add")
def messages_on_a_graph(side: Side) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Any:
            sent = self.lin(x)[edges[0]]
            got = torch.zeros_like(x).index_add(0, edges[1], sent)
            count = torch.zeros(x.shape[0]).scatter_add(0, edges[1], torch.ones(edges.shape[1]))
            return F.cross_entropy(self.out(F.relu(got / count.clamp(min=1)[:, None])), y)

    edges = torch.randint(0, 6, (2, 14))
    x, y = batch()
    train(side, side.fit(Graph(), x, edges, y), ((x, torch.randint(0, 6, (2, 14)), y) for x, y in batches()))


@idiom("pygcn: a normalised dense adjacency")
def dense_adjacency(side: Side) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, adjacency: Tensor, y: Tensor) -> Any:
            return F.nll_loss(F.log_softmax(adjacency @ self.two(F.relu(adjacency @ self.one(x))), 1), y)

    x, y = batch()
    adjacency = torch.rand(6, 6).softmax(1)
    train(side, side.fit(Graph(), x, adjacency, y), ((x, adjacency, y) for x, y in batches()))


@idiom("GAT: attention over a masked adjacency")
def graph_attention(side: Side) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)
            self.out = nn.Linear(8, 4)

        def forward(self, x: Tensor, adjacency: Tensor, y: Tensor) -> Any:
            h = self.w(x)
            e = F.leaky_relu(self.a(h) + self.b(h).T, 0.2)
            e = torch.where(adjacency > 0.5, e, -9e15 * torch.ones_like(e))
            return F.cross_entropy(self.out(F.elu(F.dropout(e.softmax(1), 0.2, self.training) @ h)), y)

    x, y = batch()
    adjacency = (torch.rand(6, 6) + torch.eye(6)).clamp(max=1)
    train(side, side.fit(Graph(), x, adjacency, y), ((x, adjacency, y) for x, y in batches()))


@idiom("pygcn: a sparse adjacency as an argument")
def sparse_adjacency(side: Side) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 4)

        def forward(self, x: Tensor, adjacency: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(torch.sparse.mm(adjacency, self.out(x)), y)

    x, y = batch()
    adjacency = torch.eye(6).to_sparse()
    train(side, side.fit(Graph(), x, adjacency, y), ((x, adjacency, y) for x, y in batches()))


@idiom("FNet and FNO: mixing by FFT with complex weights")
def fourier_layer(side: Side) -> None:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Any:
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8)

    _train(side, Mix())


@idiom("audio codecs: a loss over spectrograms")
def spectrogram_loss(side: Side) -> None:
    class Net(nn.Module):
        window: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 9, padding=4)
            self.register_buffer("window", torch.hann_window(16), persistent=False)

        def forward(self, x: Tensor) -> Any:
            def spectrum(wave: Tensor) -> Tensor:
                return torch.stft(wave, 16, 4, window=self.window, return_complex=True).abs().clamp(min=1e-5)

            return (spectrum(self.conv(x[:, None])[:, 0]).log() - spectrum(x).log()).abs().mean()

    train(side, side.fit(Net(), torch.randn(2, 64)), ((torch.randn(2, 64),) for _ in range(3)))


@idiom("mamba.py: a selective scan as a Python loop")
def scan_in_a_loop(side: Side) -> None:
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay, self.mix = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            state, outs = torch.zeros(8), []
            for row in x.unbind(0):
                state = state * torch.sigmoid(self.decay) + self.mix(row)
                outs.append(state)
            return torch.stack(outs)

    _train(side, Scan())


@idiom("neural ODEs: explicit Euler and RK4 with fixed steps")
def fixed_step_solver(side: Side) -> None:
    class Solve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: Tensor) -> Any:
            h = 0.25
            for _ in range(3):
                one = self.field(x)
                two = self.field(x + h / 2 * one)
                three = self.field(x + h / 2 * two)
                x = x + h / 6 * (one + 2 * two + 2 * three + self.field(x + h * three))
            return x

    _train(side, Solve())


@idiom("deep equilibrium models: iterate under no_grad, one step with gradients")
def equilibrium(side: Side) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(4):
                    z = torch.tanh(self.inner(z) * 0.5 + x)
            return torch.tanh(self.inner(z) * 0.5 + x)

    _train(side, Fixed())


@idiom("NeRF: positional encoding and alpha compositing by cumprod")
def nerf(side: Side) -> None:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, points: Tensor, goal: Tensor) -> Any:
            scaled = [f(points * 2**k * math.pi) for k in range(4) for f in (torch.sin, torch.cos)]
            out = self.net(torch.cat(scaled, -1))
            alpha = 1 - torch.exp(-F.relu(out[..., 3]) * 0.1)
            through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[
                :, :-1
            ]
            colour = ((alpha * through)[..., None] * torch.sigmoid(out[..., :3])).sum(1)
            return F.mse_loss(colour, goal)

    calls = ((torch.rand(4, 5, 3), torch.rand(4, 3)) for _ in range(3))
    train(side, side.fit(Field(), torch.rand(4, 5, 3), torch.rand(4, 3)), calls)


@idiom("sinkhorn: normalise rows and columns in turn")
def sinkhorn(side: Side) -> None:
    class Assign(nn.Module):
        def forward(self, x: Tensor) -> Any:
            for _ in range(4):
                x = x - x.logsumexp(0, keepdim=True)
                x = x - x.logsumexp(1, keepdim=True)
            return x.exp()

    _train(side, Assign())


@idiom("quantisation-aware training: fake quantisation, straight through")
def fake_quantisation(side: Side) -> None:
    class Quant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            w = torch.fake_quantize_per_tensor_affine(self.layer.weight, 0.02, 0, -128, 127)
            return F.linear(x, w, self.layer.bias)

    _train(side, Quant())


@idiom("VQ-VAE: nearest code, straight through, commitment")
def vector_quantisation(side: Side) -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.codes, self.out = nn.Linear(8, 4), nn.Embedding(16, 4), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Any:
            z = self.into(x)
            nearest = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            commitment = F.mse_loss(z, nearest.detach()) * 0.25 + F.mse_loss(nearest, z.detach())
            return F.mse_loss(self.out(z + (nearest - z).detach()), x) + commitment

    train(side, side.fit(Codes(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("VQ-VAE with codes that follow by moving averages in buffers")
def codes_by_moving_averages(side: Side) -> None:
    class Codes(nn.Module):
        codes: Tensor
        size: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(8, 4), nn.Linear(4, 8)
            self.register_buffer("codes", torch.randn(8, 4))
            self.register_buffer("size", torch.ones(8))

        def forward(self, x: Tensor) -> Any:
            z = self.into(x)
            one_hot = F.one_hot(torch.cdist(z, self.codes).argmin(1), 8).float()
            nearest = one_hot @ self.codes
            if self.training:
                with torch.no_grad():
                    self.size.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                    self.codes.mul_(0.9).add_((one_hot.T @ z) / self.size.clamp(min=0.1)[:, None], alpha=0.1)
            return F.mse_loss(self.out(z + (nearest - z).detach()), x)

    train(side, side.fit(Codes(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("Gumbel softmax, hard")
def gumbel_softmax(side: Side) -> None:
    class Choose(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return F.gumbel_softmax(x, tau=0.7, hard=True)

    _train(side, Choose())


@idiom("HyperNetworks: weights are made by a net")
def hypernetwork(side: Side) -> None:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.make = nn.Parameter(torch.randn(3)), nn.Linear(3, 72)

        def forward(self, x: Tensor) -> Any:
            made = self.make(self.code)
            return F.linear(x, made[:64].view(8, 8), made[64:])

    _train(side, Hyper())


@idiom("PointNet: max over points, and a learned transform with a penalty")
def pointnet(side: Side) -> None:
    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.transform, self.out = nn.Conv1d(3, 16, 1), nn.Linear(3, 9), nn.Linear(16, 4)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            turn = self.transform(x.amax(2)).view(-1, 3, 3) + torch.eye(3)
            h = F.relu(self.one(turn @ x)).max(2).values
            penalty = (turn @ turn.transpose(1, 2) - torch.eye(3)).norm(dim=(1, 2)).mean()
            return F.cross_entropy(self.out(h), y) + 0.001 * penalty

    calls = ((torch.randn(4, 3, 10), torch.randint(0, 4, (4,))) for _ in range(3))
    train(side, side.fit(Points(), torch.randn(4, 3, 10), torch.randint(0, 4, (4,))), calls)


@idiom("capsules: routing by agreement in a loop")
def capsules(side: Side) -> None:
    class Capsules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, 4, 2) / 2)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            votes = torch.einsum("bni,nkoi->bnko", x.view(-1, 4, 2), self.weight)
            agreement = torch.zeros(x.shape[0], 4, 3)
            for _ in range(3):
                out = (agreement.softmax(2)[..., None] * votes).sum(1)
                norm = out.norm(dim=-1, keepdim=True)
                out = norm / (1 + norm**2) * out
                agreement = agreement + (votes * out[:, None]).sum(-1)
            return F.cross_entropy(out.norm(dim=-1), y % 3)

    train(side, side.fit(Capsules(), *batch()), batches())


@idiom("EMA of the weights inside the module, by .data, as in MoCo v3")
def momentum_by_data(side: Side) -> None:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.slow = nn.Linear(8, 4), nn.Linear(8, 4)
            self.slow.load_state_dict(self.online.state_dict())
            self.slow.requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                for s, o in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                    s.data = s.data * 0.9 + o.data * 0.1
                goal = self.slow(x)
            return F.mse_loss(self.online(x + 0.1), goal)

    train(side, side.fit(Momentum(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("MoCo: a queue of keys and a pointer in buffers")
def queue_of_keys(side: Side) -> None:
    class Queue(nn.Module):
        queue: Tensor
        pointer: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 4)
            self.register_buffer("queue", F.normalize(torch.randn(4, 12), dim=0))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Tensor) -> Any:
            q, k = F.normalize(self.net(x), dim=1), F.normalize(self.net(x + 0.1), dim=1).detach()
            scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1)
            place = int(self.pointer)
            self.queue[:, place : place + x.shape[0]] = k.T
            self.pointer[0] = (place + x.shape[0]) % 12
            return F.cross_entropy(scores / 0.07, torch.zeros(x.shape[0], dtype=torch.long))

    train(side, side.fit(Queue(), torch.randn(4, 8)), ((torch.randn(4, 8),) for _ in range(4)))


@idiom("DINO: a centre that follows in a buffer")
def centre_in_a_buffer(side: Side) -> None:
    class Centre(nn.Module):
        centre: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 4)
            self.register_buffer("centre", torch.zeros(1, 4))

        def forward(self, x: Tensor) -> Any:
            student, teacher = self.net(x), self.net(x + 0.1).detach()
            loss = (
                -(((teacher - self.centre) / 0.04).softmax(-1) * F.log_softmax(student / 0.1, -1))
                .sum(-1)
                .mean()
            )
            self.centre = self.centre * 0.9 + teacher.mean(0, keepdim=True) * 0.1
            return loss

    train(side, side.fit(Centre(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("channels-last pictures, as the memory format tutorial advises")
def channels_last(side: Side) -> None:
    net = Pictures().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = pictures()[0].contiguous(memory_format=torch.channels_last)
    model = side.fit(net, x, outputs="all")
    for _ in range(3):
        x, y = pictures()
        model.zero_grad()
        F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y).backward()
        side.see("strides", model.one.weight.grad.stride())
