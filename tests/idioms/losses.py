"""Losses and probabilistic models."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.idioms.pieces import Classifier, F, Scores, WithLoss, batch, batches, pictures, train
from tests.idioms.side import Side, idiom

D: Any = torch.distributions
"""Untyped, as in a script."""


@idiom("pytorch/examples vae: reparametrisation, reconstruction and KL")
def vae(side: Side) -> None:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)

        def forward(self, x: Tensor) -> Any:
            mean, log_variance = self.encode(x).chunk(2, 1)
            z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
            kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
            return F.mse_loss(self.decode(z), x, reduction="sum") + kl

    train(side, side.fit(Vae(), batch()[0]), ((x,) for x, _ in batches()))


@idiom(
    "torch.distributions: rsample and kl_divergence",
)
def distributions(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Any:
            mean, scale = self.net(x).chunk(2, 1)
            posterior = D.Normal(mean, F.softplus(scale) + 1e-3)
            return D.kl_divergence(posterior, D.Normal(0.0, 1.0)).mean() + posterior.rsample().square().mean()

    train(side, side.fit(Net(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("mixture density networks")
def mixture_density(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 9)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            weights, means, scales = self.net(x).chunk(3, 1)
            parts = D.Independent(D.Normal(means[..., None], scales.exp()[..., None]), 1)
            return -D.MixtureSameFamily(D.Categorical(logits=weights), parts).log_prob(y).mean()

    train(
        side, side.fit(Net(), batch()[0], torch.randn(6, 1)), ((x, torch.randn(6, 1)) for x, _ in batches())
    )


@idiom("REINFORCE: sample, then the log probability of the sample")
def reinforce(side: Side) -> None:
    class Policy(Scores):
        def forward(self, x: Tensor, reward: Tensor) -> Any:
            policy = D.Categorical(logits=self.scores(x))
            return -(policy.log_prob(policy.sample()) * reward).mean()

    train(side, side.fit(Policy(), batch()[0], torch.randn(6)), ((x, torch.randn(6)) for x, _ in batches()))


@idiom("DDPM: a random step, noise and the schedule in buffers")
def ddpm(side: Side) -> None:
    class Diffusion(nn.Module):
        kept: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
            self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0))

        def forward(self, x: Tensor) -> Any:
            t = torch.randint(0, 50, (x.shape[0],))
            noise = torch.randn_like(x)
            kept = self.kept[t][:, None]
            noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
            return F.mse_loss(self.net(torch.cat([noisy, t[:, None] / 50], 1)), noise)

    train(side, side.fit(Diffusion(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("flow matching: a straight path and its velocity")
def flow_matching(side: Side) -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> Any:
            noise, t = torch.randn_like(x), torch.rand(x.shape[0], 1)
            return F.mse_loss(self.net(torch.cat([(1 - t) * noise + t * x, t], 1)), x - noise)

    train(side, side.fit(Flow(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("SimCLR: NT-Xent over two views with a masked diagonal")
def nt_xent(side: Side) -> None:
    class Contrast(Scores):
        def forward(self, x: Tensor) -> Any:
            z = F.normalize(self.scores(torch.cat([x, x + 0.1 * torch.randn_like(x)])), dim=1)
            scores = z @ z.T / 0.5
            scores.fill_diagonal_(-1e9)
            n = x.shape[0]
            return F.cross_entropy(scores, (torch.arange(2 * n) + n) % (2 * n))

    train(side, side.fit(Contrast(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("CLIP: a learned temperature and a symmetric loss")
def clip(side: Side) -> None:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(8, 6), nn.Linear(8, 6)
            self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, x: Tensor, z: Tensor) -> Any:
            scores = F.normalize(self.image(x), dim=1) @ F.normalize(self.text(z), dim=1).T * self.scale.exp()
            goal = torch.arange(x.shape[0])
            return (F.cross_entropy(scores, goal) + F.cross_entropy(scores.T, goal)) / 2

    train(side, side.fit(Clip(), torch.randn(6, 8), torch.randn(6, 8)), ((x, x * 2) for x, _ in batches()))


@idiom("FaceNet: the hardest triplets of a batch")
def hard_triplets(side: Side) -> None:
    class Triplets(Scores):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            z = F.normalize(self.scores(x), dim=1)
            apart = torch.cdist(z, z)
            alike = y[:, None] == y[None]
            far = apart.masked_fill(~alike, 0).max(1).values
            near = apart.masked_fill(alike, 10).min(1).values
            return F.relu(far - near + 0.2).mean()

    train(side, side.fit(Triplets(), *batch()), batches())


@idiom("RetinaNet: focal loss")
def focal_loss(side: Side) -> None:
    class Focal(Scores):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            scores, goal = self.scores(x), F.one_hot(y, 4).float()
            loss = F.binary_cross_entropy_with_logits(scores, goal, reduction="none")
            p = torch.sigmoid(scores)
            right = p * goal + (1 - p) * (1 - goal)
            return (0.25 * (1 - right) ** 2 * loss).sum() / goal.sum()

    train(side, side.fit(Focal(), *batch()), batches())


@idiom("segmentation: dice loss and cross entropy with ignored pixels")
def dice_loss(side: Side) -> None:
    class Dice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            scores = self.conv(x)
            p, goal = scores.softmax(1), F.one_hot(y.clamp(min=0), 4).permute(0, 3, 1, 2).float()
            dice = 1 - (2 * (p * goal).sum((2, 3)) + 1) / (p.sum((2, 3)) + goal.sum((2, 3)) + 1)
            return dice.mean() + F.cross_entropy(scores, y, ignore_index=-1)

    def example() -> tuple[Tensor, Tensor]:
        return pictures()[0], torch.randint(-1, 4, (4, 8, 8))

    train(side, side.fit(Dice(), *example()), (example() for _ in range(3)))


@idiom("detection: boxes by generalised intersection over union")
def box_loss(side: Side) -> None:
    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 4)

        def forward(self, x: Tensor, goal: Tensor) -> Any:
            centre, size = torch.sigmoid(self.net(x)).chunk(2, 1)
            box = torch.cat([centre - size / 2, centre + size / 2], 1)
            low, high = torch.max(box[:, :2], goal[:, :2]), torch.min(box[:, 2:], goal[:, 2:])
            inside = (high - low).clamp(min=0).prod(1)
            whole = (box[:, 2:] - box[:, :2]).prod(1) + (goal[:, 2:] - goal[:, :2]).prod(1) - inside
            return (1 - inside / whole.clamp(min=1e-6)).mean() + F.l1_loss(box, goal)

    def example() -> tuple[Tensor, Tensor]:
        low = torch.rand(6, 2) * 0.5
        return torch.randn(6, 8), torch.cat([low, low + 0.3], 1)

    train(side, side.fit(Boxes(), *example()), (example() for _ in range(3)))


@idiom("speech: CTC")
def ctc(side: Side) -> None:
    class Ctc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 5)

        def forward(self, x: Tensor, goal: Tensor, long: Tensor, short: Tensor) -> Any:
            return F.ctc_loss(F.log_softmax(self.net(x), -1), goal, long, short)

    long, short = torch.tensor([7, 6]), torch.tensor([3, 2])

    def example() -> tuple[Tensor, ...]:
        return torch.randn(7, 2, 8), torch.randint(1, 5, (2, 3)), long, short

    train(side, side.fit(Ctc(), *example()), (example() for _ in range(3)))


@idiom("multi-task weights by uncertainty")
def uncertainty_weights(side: Side) -> None:
    class Weighted(WithLoss):
        def __init__(self) -> None:
            super().__init__()
            self.logs = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor, y: Tensor) -> Any:
            h = self.body(x)
            losses = torch.stack([F.cross_entropy(self.head(h), y), h.square().mean()])
            return (torch.exp(-self.logs) * losses + self.logs).sum()

    train(side, side.fit(Weighted(), *batch()), batches())


@idiom("Barlow Twins: a cross-correlation close to the identity")
def barlow_twins(side: Side) -> None:
    class Barlow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6, affine=False)

        def forward(self, x: Tensor, z: Tensor) -> Any:
            c = self.norm(self.net(x)).T @ self.norm(self.net(z)) / x.shape[0]
            on = torch.diagonal(c).add_(-1).pow_(2).sum()
            off = c.flatten()[:-1].view(5, 7)[:, 1:].flatten().pow_(2).sum()
            return on + 0.005 * off

    train(
        side, side.fit(Barlow(), torch.randn(6, 8), torch.randn(6, 8)), ((x, x + 0.1) for x, _ in batches())
    )


@idiom("MAE: rows are masked by a random order and put back by gather")
def masked_autoencoder(side: Side) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.token = nn.Linear(8, 8), nn.Parameter(torch.zeros(1, 1, 8))

        def forward(self, x: Tensor) -> Any:
            order = torch.rand(x.shape[:2]).argsort(1)
            back = order.argsort(1)
            kept = self.net(x.gather(1, order[:, :2, None].expand(-1, -1, 8)))
            whole = torch.cat([kept, self.token.expand(x.shape[0], x.shape[1] - 2, -1)], 1)
            out = whole.gather(1, back[..., None].expand(-1, -1, 8))
            hidden = (back >= 2).float()
            return ((out - x).square().mean(-1) * hidden).sum() / hidden.sum()

    train(side, side.fit(Masked(), torch.randn(3, 5, 8)), ((torch.randn(3, 5, 8),) for _ in range(3)))


@idiom("knowledge distillation: a frozen teacher inside the module")
def teacher_inside(side: Side) -> None:
    class Distil(WithLoss):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = Classifier().eval().requires_grad_(False)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            with torch.no_grad():
                goal = (self.teacher(x) / 2).softmax(1)
            scores = self.head(self.body(x))
            return F.kl_div(F.log_softmax(scores / 2, 1), goal, reduction="batchmean") * 4 + F.cross_entropy(
                scores, y
            )

    train(side, side.fit(Distil(), *batch()), batches())


@idiom("RNN transducer-like loss: logaddexp over a grid")
def grid_of_logaddexp(side: Side) -> None:
    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            scores = F.log_softmax(self.net(x), -1)
            rows = [torch.zeros(4)]
            for t in range(1, x.shape[0]):
                moved = torch.cat([rows[-1][:1], rows[-1][:-1]])
                rows.append(torch.logaddexp(rows[-1] + scores[t, 0], moved + scores[t, 1]))
            return -rows[-1].mean()

    train(side, side.fit(Grid(), batch()[0]), ((x,) for x, _ in batches()))


@idiom("products of probabilities: prod over a dim")
def product_of_probabilities(side: Side) -> None:
    class Product(Scores):
        def forward(self, x: Tensor) -> Any:
            return -torch.sigmoid(self.scores(x)).prod(1).clamp(min=1e-6).log().mean()

    train(side, side.fit(Product(), batch()[0]), ((x,) for x, _ in batches()))
