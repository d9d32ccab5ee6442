"""Lines of Python that `fit` and its neighbours refuse, and the names that they use."""

import tempfile
import warnings
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import stowplan
from tests.support.asking import asked

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A linear layer, whatever is given, and a loss."""

    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), between

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        h = self.a(x)
        loss: Tensor = (self.b(h) if self.b is not None else h).square().mean()
        return loss


class Forward(nn.Module):
    """Runs a function of the layer and the input as its forward."""

    def __init__(self, run: Callable[["Forward", Tensor], Any]) -> None:
        super().__init__()
        self.a, self.run = nn.Linear(16, 16), run
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        """What the function gives."""
        return self.run(self, x)


def block() -> nn.Module:
    """A layer without a loss."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU())


def fit(model: Any = None, args: Any = (X,), kwargs: Any = None, **how: Any) -> Any:
    """`stowplan.fit` with a model, arguments and a budget that will do."""
    return stowplan.fit(Net() if model is None else model, args, kwargs, **asked({"budget": "1MiB", **how}))


def own(run: Callable[[Forward, Tensor], Any], **how: Any) -> Any:
    """Fit a model with this forward."""
    return fit(Forward(run), **how)


def with_buffer(tensor: Tensor) -> nn.Module:
    """A model that holds a tensor."""
    model = Net()
    model.register_buffer("table", tensor)
    return model


def trained(kind: Any, **options: Any) -> Any:
    """Fit with an optimizer of the model's parameters."""
    how = {name: options.pop(name) for name in list(options) if name in _OF_FIT}
    model = Net()
    return fit(model, optimizer=kind(model.parameters(), **options), **how)


_OF_FIT = ("clip_norm", "clip_value", "accumulate", "keep_gradients", "allow", "mesh")


def parent_of(part: nn.Module) -> nn.Module:
    """A model with this part inside."""
    model = Net()
    model.b = part
    return model


def one_process() -> None:
    """A group of one process."""
    if not torch.distributed.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


def norm(name: str) -> nn.Module:
    """A layer with the old hook of a norm."""
    with warnings.catch_warnings():  # of PyTorch, that there is a newer one
        warnings.simplefilter("ignore")
        layer: nn.Module = getattr(nn.utils, name)(nn.Linear(16, 16))
    return layer


class Subclass(Tensor):
    """A tensor of another class."""


def names() -> Mapping[str, object]:
    """What the lines may use."""
    return {
        **{n: v for n, v in globals().items() if not n.startswith("_")},
        "Decimal": Decimal,
        "checkpoint": checkpoint,
        "flex": flex_attention,
        "np": np,
    }


LINES = (
    # budgets
    *(
        f"fit(budget={budget})"
        for budget in (
            *(
                "None",
                "True",
                "1.5",
                "-1",
                "-1.5",
                "float('nan')",
                "float('inf')",
                "1e300",
                "''",
                "'six'",
                "'6 gigs'",
            ),
            *(
                "'-1GiB'",
                "'1.5'",
                "[1]",
                "b'6GiB'",
                "torch.ones(2)",
                "np.ones(2)",
                "np.bool_(True)",
                "Decimal('nan')",
            ),
            *(
                "{}",
                "{'cpu': None}",
                "{'gpu9': '1GiB'}",
                "{'cuda': '1GiB'}",
                "{'cuda:0': '1GiB'}",
                "{0: '1GiB'}",
            ),
            *("{'cpu': '1GiB', torch.device('cpu'): '1GiB'}", "{'cpu': 'six'}", "0", "'1KiB'", "'1B'"),
        )
    ),
    *(f"fit(reserve={reserve})" for reserve in ("None", "1.5", "'six'", "True", "-1", "'1TiB'", "'auto'")),
    "fit(budget={'cpu': '1GiB'}, reserve='1KiB')",
    "stowplan.fit(Net(), (X,), budget='3000B', allow='recompute')",
    # options
    *(
        f"fit({option})"
        for option in (
            *(
                "allow='magic'",
                "allow=3",
                "allow=('recompute', 'tiles')",
                "allow=[1]",
                "prefer='luck'",
            ),
            *(
                "kernels='fast'",
                "kernels=1",
                "gap=-1",
                "gap='wide'",
                "gap=float('nan')",
                "gap=None",
            ),
            *("time_limit=0", "time_limit='soon'", "time_limit=-1", "moves=-1", "moves='few'", "progress=3"),
            *(
                "keep_plans=0",
                "keep_plans='all'",
                "plan='nothing.json'",
                "plan=3",
                "outputs='some'",
                "outputs=1",
            ),
            *("loss='total'", "loss=3", "loss=nn.MSELoss()", "loss=[1]", "loss='total', outputs='all'"),
            *(
                "shapes=3",
                "shapes={}",
                "shapes={'y': {0: (1, 8)}}",
                "shapes={'x': {5: (1, 8)}}",
                "shapes={'x': 3}",
            ),
            *("shapes={'x': {0: (8, 1)}}", "shapes={'x': {0: 8}}", "shapes={'x': {0: (1, 'many')}}"),
            *(
                "clip_norm=1.0",
                "clip_value=1.0",
                "accumulate=2",
                "keep_gradients=True",
                "dims={}",
                "layouts='choose'",
            ),
            *("parameters='shard'", "arena=True, held_blocks=True", "arena=True, budget={'cpu': '1GiB'}"),
            *("mesh='data=2', budget='auto'", "mesh='data=2', arena=True", "mesh='data=2', loss='x'"),
            *(
                "mesh='data=2', kernels='compiled'",
                "mesh='data=2', time_limit=1",
                "mesh='data=2', shapes={'x': {0: (1, 8)}}",
            ),
            *(
                "optimizer='adam'",
                "optimizer=torch.optim.SGD",
                "optimizer=torch.optim.SGD(Net().parameters(), lr=0.1)",
            ),
        )
    ),
    *(
        f"trained(torch.optim.{words})"
        for words in (
            *("LBFGS", "SparseAdam", "SGD, lr=0.1, differentiable=True", "SGD, lr=0.1, accumulate=0"),
            *("SGD, lr=0.1, accumulate=1.5", "SGD, lr=0.1, clip_norm=-1", "SGD, lr=0.1, clip_norm=0"),
            *(
                "SGD, lr=0.1, clip_value=-1",
                "SGD, lr=0.1, clip_norm=1, clip_value=1",
                "SGD, lr=0.1, keep_gradients='a'",
            ),
            *("SGD, lr=0.1, keep_gradients=['none']", "SGD, lr=0.1, allow='offload-gradients'"),
        )
    ),
    # models and arguments
    *(
        "fit(3)",
        "fit([Net()])",
        "fit(torch.relu)",
        "fit(Net)",
        "fit(args=X)",
        "fit(args=3)",
        "fit(kwargs=[1])",
        "fit(args=())",
    ),
    *(
        "fit(args=(X, X))",
        "fit(kwargs={'mask': X})",
        "fit(args=(None,))",
        "fit(args=('x',))",
        "fit(args=(np.ones((8, 16)),))",
    ),
    *(
        "fit(args=({1, 2},))",
        "fit(args=(object(),))",
        "fit(args=(iter([X]),))",
        "fit(args=(X.as_subclass(Subclass),))",
    ),
    *(
        "fit(args=(X.to_sparse().requires_grad_(),))",
        "fit(args=(X.to_sparse_bsr((2, 2)),))",
        "fit(args=(torch.nested.nested_tensor([X, X]),))",
    ),
    *(
        "fit(args=(X.double(),))",
        "fit(args=(X.long(),))",
        "fit(args=(X.half(),))",
        "fit(args=(X[:, :15],))",
        "fit(args=(X[0, 0],))",
    ),
    *(
        "fit(Net().half())",
        "fit(n := Net().requires_grad_(False), optimizer=torch.optim.SGD(n.parameters(), lr=0.1))",
        "fit(nn.DataParallel(Net()))",
    ),
    *(
        "fit(torch.compile(Net()))",
        "fit(parent_of(torch.jit.script(nn.ReLU())))",
        "fit(parent_of(torch.jit.trace(block(), X)))",
    ),
    *(
        "fit(parent_of(nn.LazyLinear(4)))",
        "fit(parent_of(nn.LazyBatchNorm1d()))",
        "fit(parent_of(nn.Linear(16, 16, device='meta')))",
    ),
    *(
        "fit(with_buffer(X.to_sparse().requires_grad_()))",
        "fit(with_buffer(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)))",
    ),
    "seen = []; m = Net(block()); m.b.register_forward_hook(lambda *_: seen.append(1)); fit(m)",
    "seen = {}; m = Net(block()); m.a.register_forward_hook(lambda m, *_: seen.update(w=m.weight)); fit(m)",
    "m = Net(block()); m.b.register_full_backward_hook(lambda *_: None); fit(m)",
    "m = Net(); m.forward = lambda x: m.a(x).mean(); fit(m)",
    "fit(parent_of(fit(b := block(), loss=torch.sum, optimizer=torch.optim.SGD(b.parameters(), lr=0.1))))",
    "stowplan.plans_of(Net())",
    # what forward does
    *(
        f"own(lambda m, x: {body})"
        for body in (
            *(
                "m.a(x).mean() * x.max().item()",
                "m.a(x).mean() * float(x.max())",
                "m.a(x).mean() * int(x.max())",
            ),
            *(
                "m.a(x).mean() * x.mean().numpy()",
                "m.a(x).mean() * x[0].tolist()[0]",
                "m.a(x).mean() if m.a(x).sum() > 0 else x.sum()",
            ),
            *(
                "m.a(x)[x.sum(1) > 0].mean()",
                "m.a(x)[x[:, 0].nonzero()].mean()",
                "m.a(x).mean() if torch.rand(3).tolist()[0] < 1 else x",
            ),
            *(
                "m.a(x).mean() if torch.rand(1).item() < 0.5 else x",
                "m.a(x) * torch.rand(16, generator=torch.Generator())",
            ),
            *(
                "m.a(x).mean() * np.random.rand()",
                "m.a(x).mean() * __import__('random').random()",
                "x.mean()",
                "None",
                "(m.a(x) * 0).detach()",
            ),
            *(
                "[m.a(x).mean().backward(), m.a(x).mean()][1]",
                "m.__dict__.update(n=m.__dict__.get('n', 0) + 1) or m.a(x).mean()",
            ),
            *(
                "[].append(m.nothing) or m.a(x)",
                "m.a(x[:, :3])",
                "1 / 0",
                "torch.sparse.mm(x.to_sparse(), m.a(x).T).mean()",
            ),
            *("torch.nested.as_nested_tensor([m.a(x)]).to_padded_tensor(0).mean()", "m.a(x).view(3, 7)"),
            *(
                "torch.linalg.householder_product(m.a(x)[:, :0], x[0, :0]).mean()",
                "torch.cond(x.sum() > 0, torch.sin, torch.cos, (m.a(x),)).mean()",
            ),
            *(
                "[h := m.a(x), h.register_hook(lambda g: g), h.mean()][2]",
                "nn.functional.embedding(x.long().abs(), m.a.weight, sparse=True).mean()",
            ),
            *("m.a(x).mean() * x.unique().numel()",),
        )
    ),
    "one_process(); own(lambda m, x: [t := m.a(x).mean(), torch.distributed.all_reduce(t.detach()), t][2])",
    "one_process(); own(lambda m, x: [torch.distributed.all_reduce(m.count), m.a(x).mean()][1])",
    "one_process(); own(lambda m, x: [torch.distributed.all_gather([x.clone()], x), m.a(x)][1])",
    # calls and backward
    "f = fit(block(), outputs='all'); torch.autograd.grad(f(X), f[0].bias, X[None], is_grads_batched=1)",
    "f = fit(block(), outputs='all'); torch.autograd.functional.jacobian(f, X, vectorize=True)",
    "f = fit(arena=True); torch.autograd.grad(f(X), list(f.parameters()), create_graph=True)",
    *(
        f"f = fit(); torch.func.{name}"
        for name in ("vmap(f)(X)", "grad(f)(X)", "jacrev(f)(X)", "jvp(f, (X,), (X,))")
    ),
    "f = fit(); f(X.double())",
    "f = fit(); f(X[:, :15])",
    "f = fit(); f(X.to_sparse().requires_grad_())",
    "f = fit(budget='3000B', args=(X[:2],)); f(torch.randn(4000, 16))",
    # torch.compile
    *(
        f"torch._dynamo.reset(); torch.compile(Net(), backend='stowplan'{options})(X)"
        for options in (
            *(
                "",
                ", options={'budgets': '1GiB'}",
                ", options={'budget': 'six'}",
                ", options={'budget': None}",
            ),
            *(
                ", options={'budget': '1GiB', 'allow': 'tile'}",
                ", options={'budget': '1GiB', 'allow': 'magic'}",
            ),
            *(
                ", options={'budget': '1GiB', 'reserve': '2GiB'}",
                ", options={'budget': '1GiB', 'time_limit': 0}",
            ),
            *(
                ", options={'budget': '1GiB', 'moves': 'few'}",
                ", options={'budget': '1GiB', 'kernels': 'fast'}",
            ),
        )
    ),
    # neighbours
    *(
        "stowplan.inspect('nothing.txt')",
        "stowplan.load_plan('nothing.json')",
        "stowplan.check('nothing', '1GiB')",
    ),
    "stowplan.convert('nothing.txt', 'x.stow.json')",
    *(
        "stowplan.project(Net(), (X,), device='a100')",
        "stowplan.project(Net(), (X,), device='a100-80gb', budget='six')",
    ),
    *(
        "stowplan.project(Net(), (X,), device='a100-80gb', optimizer=stowplan.Iteration('a', clip_norm=0))",
        "stowplan.project(Net(), (X,), device='a100-80gb', budget='1B')",
    ),
)
