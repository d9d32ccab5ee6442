"""Series, graphs, differential equations and control."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.repositories.families.data import batches, numbers, words
from benchmarks.repositories.sources import definitions, source
from benchmarks.repositories.training import Training, entry, one


def _graph(count: int) -> Tensor:
    near = torch.eye(count) + torch.eye(count).roll(1, 0) + torch.eye(count).roll(-1, 0)
    return near / near.sum(1, keepdim=True)


def _nodes(net: nn.Module, x: Tensor, graph: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(net(x, graph), y)


@entry("tkipf/pygcn", "1600b5b748b3976413d1e307540ccc62605b4d6d", "GCN, the adjacency as a sparse argument")
def pygcn(_: Path) -> Training:
    net = source("pygcn.models").GCN(8, 16, 4, 0.5)
    return one(net, batches(numbers(12, 8), lambda _: _graph(12).to_sparse(), words(4, 12)), _nodes)


@entry(
    "tkipf/pygcn",
    "1600b5b748b3976413d1e307540ccc62605b4d6d",
    "GCN",
    name="pygcn, dense",
    change="the adjacency is dense",
)
def pygcn_dense(_: Path) -> Training:
    net = source("pygcn.models").GCN(8, 16, 4, 0.5)
    return one(net, batches(numbers(12, 8), lambda _: _graph(12), words(4, 12)), _nodes)


@entry(
    "pytorch/examples",
    "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "gat: GAT",
    absent=("torchvision", "requests"),
    name="examples, gat",
)
def gat(checkout: Path) -> Training:
    net = definitions(checkout / "gat" / "main.py").GAT(8, 8, 2, 4, dropout=0.6)
    return one(net, batches(numbers(12, 8), lambda _: _graph(12), words(4, 12)), _nodes)


@entry(
    "rtqichen/torchdiffeq",
    "657943acefa826ef04c025ebeb1ff5e9d60dc268",
    "odenet_mnist: ODEBlock with dopri5 and its adaptive steps",
    absent=("torchvision",),
)
def torchdiffeq(checkout: Path) -> Training:
    return _ode(checkout, "dopri5")


@entry(
    "rtqichen/torchdiffeq",
    "657943acefa826ef04c025ebeb1ff5e9d60dc268",
    "odenet_mnist: ODEBlock with rk4",
    absent=("torchvision",),
    name="torchdiffeq, rk4",
    change='method="rk4" in place of adaptive steps',
)
def torchdiffeq_fixed(checkout: Path) -> Training:
    return _ode(checkout, "rk4")


def _ode(checkout: Path, method: str) -> Training:
    solve = source("torchdiffeq").odeint
    code = definitions(
        checkout / "examples" / "odenet_mnist.py",
        odeint=lambda *given, **more: solve(*given, **more, method=method),
        args=SimpleNamespace(tol=1e-2),
    )
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2),
        code.ODEBlock(code.ODEfunc(8)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    return one(
        net, batches(numbers(4, 1, 12, 12), words(10, 4)), lambda net, x, y: F.cross_entropy(net(x), y)
    )


@entry(
    "dragen1860/MAML-Pytorch",
    "98a00d41724c133bd29619a2fb2cc46dd128a368",
    "Learner; the inner steps of Meta.forward, differentiated inside of forward",
)
def maml(_: Path) -> Training:
    layers: list[Any] = [
        ("conv2d", [8, 1, 3, 3, 2, 0]),
        ("relu", [True]),
        ("bn", [8]),
        ("flatten", []),
        ("linear", [5, 8 * 36]),
    ]
    net = source("learner").Learner(layers, 1, 14)

    def loss(net: Any, x: Tensor, y: Tensor, query: Tensor, target: Tensor) -> Any:
        weights = list(net.parameters())
        for _ in range(2):
            found = F.cross_entropy(net(x, weights, bn_training=True), y)
            slopes = torch.autograd.grad(found, weights)
            weights = [weight - 0.01 * slope for weight, slope in zip(weights, slopes, strict=True)]
        return F.cross_entropy(net(query, weights, bn_training=True), target)

    return one(
        net,
        batches(numbers(5, 1, 14, 14), words(5, 5), numbers(5, 1, 14, 14), words(5, 5)),
        loss,
        optimizer=lambda p: torch.optim.Adam(p, 1e-3),
    )


def _clipped(ratio: Tensor, advantages: Tensor, values: Tensor, returns: Tensor, old: Tensor) -> Tensor:
    """The two losses of PPO as the scripts write them."""
    policy = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
    near = old + torch.clamp(values - old, -0.2, 0.2)
    value = 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2).mean()
    return policy + 0.5 * value


_ROLLOUT = (numbers(16), numbers(16), numbers(16), numbers(16))


@entry(
    "vwxyzjn/cleanrl",
    "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "ppo: Agent, the clipped losses",
    absent=("gymnasium", "tyro", "torch.utils.tensorboard"),
)
def cleanrl(checkout: Path) -> Training:
    code = definitions(checkout / "cleanrl" / "ppo.py", Args=object)
    spaces = SimpleNamespace(
        single_observation_space=SimpleNamespace(shape=(6,)), single_action_space=SimpleNamespace(n=3)
    )

    def loss(
        net: Any,
        seen: Tensor,
        actions: Tensor,
        old: Tensor,
        advantages: Tensor,
        returns: Tensor,
        values: Tensor,
    ) -> Any:
        _, log, entropy, value = net.get_action_and_value(seen, actions)
        return (
            _clipped((log - old).exp(), advantages, value.view(-1), returns, values) - 0.01 * entropy.mean()
        )

    return one(
        code.Agent(spaces),
        batches(numbers(16, 6), words(3, 16), *_ROLLOUT),
        loss,
        optimizer=lambda p: torch.optim.Adam(p, 2.5e-4, eps=1e-5),
    )


@entry(
    "ikostrikov/pytorch-a2c-ppo-acktr-gail",
    "41332b78dfb50321c29bade65f9d244387f68a60",
    "Policy with a recurrent CNNBase, the losses of PPO.update",
    absent=("gym", "baselines", "stable_baselines3", "pybullet_envs"),
)
def a2c(_: Path) -> Training:
    class Discrete:
        n = 4

    net = source("a2c_ppo_acktr.model").Policy(
        (6,), Discrete(), base_kwargs={"recurrent": True, "hidden_size": 16}
    )

    def loss(
        net: Any,
        seen: Tensor,
        states: Tensor,
        masks: Tensor,
        actions: Tensor,
        old: Tensor,
        advantages: Tensor,
        returns: Tensor,
        values: Tensor,
    ) -> Any:
        value, log, entropy, _ = net.evaluate_actions(seen, states, masks, actions)
        return _clipped((log[:, 0] - old).exp(), advantages, value[:, 0], returns, values) - 0.01 * entropy

    masks = lambda _: (torch.arange(16) % 5 > 0).float()[:, None]  # noqa: E731
    return one(net, batches(numbers(16, 6), numbers(4, 16), masks, words(4, 16, 1), *_ROLLOUT), loss)


@entry(
    "locuslab/TCN",
    "2f8c2b817050206397458dfd1f5a25ce8a32fe65",
    "word_cnn: TCN with tied weights",
    folders=(".", "TCN/word_cnn"),
)
def tcn(_: Path) -> Training:
    net = source("model").TCN(16, 40, [16, 16, 16], kernel_size=3, dropout=0.3, tied_weights=True)
    return one(
        net,
        batches(words(40, 4, 24), words(40, 4, 24)),
        lambda net, x, y: F.cross_entropy(net(x)[:, 8:].reshape(-1, 40), y[:, 8:].reshape(-1)),
        optimizer=lambda p: torch.optim.SGD(p, 4.0),
    )


def _marks(length: int) -> Callable[[Generator], Tensor]:
    """What tells of the hour, the day and so on."""
    return lambda draw: torch.randint(0, 7, (2, length, 4), generator=draw).float()


@entry(
    "zhouhaoyi/Informer2020",
    "29f2a739226a509202a092b464163da81fa74960",
    "Informer with ProbSparse attention, which draws its keys",
)
def informer(_: Path) -> Training:
    net = source("models.model").Informer(
        5,
        5,
        5,
        24,
        12,
        12,
        factor=2,
        d_model=16,
        n_heads=2,
        e_layers=2,
        d_layers=1,
        d_ff=32,
        dropout=0.1,
        device=torch.device("cpu"),
    )
    return one(
        net,
        batches(numbers(2, 24, 5), _marks(24), numbers(2, 24, 5), _marks(24), numbers(2, 12, 5)),
        lambda net, x, mark, past, past_mark, y: F.mse_loss(net(x, mark, past, past_mark), y),
    )


@entry(
    "thuml/Autoformer",
    "51c7d416ae120b805fd5beef2f4ccf7de496a6ff",
    "Autoformer, whose auto-correlation chooses delays by values",
)
def autoformer(_: Path) -> Training:
    options = SimpleNamespace(
        seq_len=24,
        label_len=12,
        pred_len=12,
        output_attention=False,
        moving_avg=5,
        enc_in=5,
        dec_in=5,
        c_out=5,
        d_model=16,
        embed="timeF",
        freq="h",
        dropout=0.1,
        factor=1,
        n_heads=2,
        d_ff=32,
        e_layers=1,
        d_layers=1,
        activation="gelu",
    )
    net = source("models.Autoformer").Model(options)
    return one(
        net,
        batches(numbers(2, 24, 5), _marks(24), numbers(2, 24, 5), _marks(24), numbers(2, 12, 5)),
        lambda net, x, mark, past, past_mark, y: F.mse_loss(net(x, mark, past, past_mark)[:, -12:], y),
    )


@entry(
    "yuqinie98/PatchTST",
    "204c21efe0b39603ad6e2ca640ef5896646ab1a9",
    "PatchTST, supervised",
    folders=("PatchTST_supervised",),
    absent=("matplotlib",),
)
def patchtst(_: Path) -> Training:
    options = SimpleNamespace(
        enc_in=4,
        seq_len=32,
        pred_len=8,
        e_layers=2,
        n_heads=2,
        d_model=16,
        d_ff=32,
        dropout=0.1,
        fc_dropout=0.1,
        head_dropout=0.0,
        individual=False,
        patch_len=8,
        stride=4,
        padding_patch="end",
        revin=True,
        affine=True,
        subtract_last=False,
        decomposition=False,
        kernel_size=5,
    )
    net = source("models.PatchTST").Model(options)
    return one(net, batches(numbers(4, 32, 4), numbers(4, 8, 4)), lambda net, x, y: F.mse_loss(net(x), y))


@entry(
    "ServiceNow/N-BEATS",
    "c746a4f13ffc957487e0c3279b182c3030836053",
    "NBeats of a generic and a trend block",
    absent=("gin", "fire"),
)
def nbeats(_: Path) -> Training:
    import numpy as np

    np.float = float  # type: ignore[attr-defined] # which NumPy has dropped
    code = source("models.nbeats")
    generic = code.NBeatsBlock(20, 25, code.GenericBasis(20, 5), 2, 32)
    trend = code.NBeatsBlock(20, 2 * 3, code.TrendBasis(2, 20, 5), 2, 32)
    net = code.NBeats(nn.ModuleList([generic, trend]))
    return one(
        net,
        batches(numbers(8, 20), lambda _: torch.ones(8, 20), numbers(8, 5)),
        lambda net, x, mask, y: (net(x, mask) - y).abs().mean(),
    )


@entry(
    "pytorch/examples",
    "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "time_sequence_prediction: Sequence under LBFGS, which calls a closure",
    absent=("matplotlib",),
    name="examples, time_sequence_prediction",
)
def lbfgs(checkout: Path) -> Training:
    net = definitions(checkout / "time_sequence_prediction" / "train.py").Sequence().double()
    made = one(
        net,
        batches(lambda draw: numbers(2, 8)(draw).double(), lambda draw: numbers(2, 8)(draw).double()),
        lambda net, x, y: F.mse_loss(net(x), y),
    )
    x, y = made.arguments["model"]

    def iteration(networks: Any, optimizers: Any, _: int) -> list[Tensor]:
        def closure() -> Tensor:
            optimizers[0].zero_grad()
            loss: Tensor = networks["model"](x, y)
            torch.autograd.backward(loss)
            return loss

        return [optimizers[0].step(closure)]

    def optimizers(networks: Any) -> Any:
        return [torch.optim.LBFGS(networks["model"].parameters(), lr=0.8, max_iter=4)]

    return Training(made.networks, made.arguments, optimizers, iteration)
