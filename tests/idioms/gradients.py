"""What the loop does with outputs and gradients: several backwards, hooks, heads, gradients of inputs."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.idioms.pieces import Classifier, F, Pictures, Scores, WithLoss, batch, batches, pictures, train
from tests.idioms.side import Side, idiom


class Heads(nn.Module):
    """One body, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.body(x))
        return self.one(h), self.two(h)


class Generator(nn.Sequential):
    """Noise to rows."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))


class Critic(nn.Sequential):
    """Rows to one score."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


@idiom("multi-task learning: the sum of two heads' losses")
def two_heads_summed(side: Side) -> None:
    model = side.fit(Heads(), batch()[0], outputs="all")
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        scores, value = model(x)
        (F.cross_entropy(scores, y) + value.square().mean()).backward()
        optimizer.step()


@idiom("alternating multi-task learning: one head a step")
def two_heads_in_turn(side: Side) -> None:
    model = side.fit(Heads(), batch()[0], outputs="all")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        scores, value = model(x)
        (value.square().mean() if step % 2 else F.cross_entropy(scores, y)).backward()
        side.see("grads", [p.grad for p in model.parameters()])
        optimizer.step()


@idiom("PCGrad: a gradient of each task from one forward")
def gradients_of_each_task(side: Side) -> None:
    model = side.fit(Heads(), batch()[0], outputs="all")
    for x, y in batches():
        scores, value = model(x)
        losses = F.cross_entropy(scores, y), value.square().mean()
        shared = list(model.body.parameters())
        one = torch.autograd.grad(losses[0], shared, retain_graph=True)
        two = torch.autograd.grad(losses[1], shared)
        for p, g, h in zip(shared, one, two, strict=True):
            side.see("cosine", (g * h).sum())
            p.data.sub_(0.1 * (g + h))


@idiom("GradNorm, VQGAN: the weight of a loss from gradients of the last layer")
def adaptive_weight(side: Side) -> None:
    model = side.fit(Classifier(), batch()[0], outputs="all")
    for x, y in batches():
        model.zero_grad()
        scores = model(x)
        one, two = F.cross_entropy(scores, y), scores.square().mean()
        weight = model.head.weight
        g = torch.autograd.grad(one, weight, retain_graph=True)[0]
        h = torch.autograd.grad(two, weight, retain_graph=True)[0]
        (one + (g.norm() / (h.norm() + 1e-4)).detach() * two).backward()
        side.see("loss", one)


@idiom("questions on retain_graph: two losses, two backwards")
def backward_twice(side: Side) -> None:
    model = side.fit(Classifier(), batch()[0], outputs="all")
    for x, y in batches():
        model.zero_grad()
        scores = model(x)
        F.cross_entropy(scores, y).backward(retain_graph=True)
        scores.square().mean().backward()


@idiom("pytorch/examples dcgan: critic, then generator, through a detached fake")
def gan_turns(side: Side) -> None:
    z = torch.randn(6, 4)
    make, judge = (
        side.fit(Generator(), z, outputs="all"),
        side.fit(Critic(), torch.randn(6, 8), outputs="all"),
    )
    first = torch.optim.Adam(judge.parameters(), 1e-3, (0.5, 0.999))
    second = torch.optim.Adam(make.parameters(), 1e-3, (0.5, 0.999))
    ones, zeros = torch.ones(6, 1), torch.zeros(6, 1)
    for _ in range(3):
        judge.zero_grad()
        F.binary_cross_entropy_with_logits(judge(torch.randn(6, 8)), ones).backward()
        fake = make(torch.randn(6, 4))
        F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros).backward()
        first.step()
        make.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(fake), ones)
        loss.backward()
        second.step()
        side.see("loss", loss)


@idiom("WGAN: the critic's weights are clamped after each step")
def clamped_weights(side: Side) -> None:
    judge = side.fit(Critic(), torch.randn(6, 8), outputs="all")
    optimizer = torch.optim.RMSprop(judge.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (judge(torch.randn(6, 8)).mean() - judge(torch.randn(6, 8)).mean()).backward()
        optimizer.step()
        for p in judge.parameters():
            p.data.clamp_(-0.1, 0.1)


@idiom("WGAN-GP: a penalty on the gradient of the critic's input")
def gradient_penalty(side: Side) -> None:
    judge = side.fit(Critic(), torch.randn(6, 8), outputs="all")
    x = torch.randn(6, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(judge(x).sum(), x, create_graph=True)
    ((slope.norm(dim=1) - 1) ** 2).mean().backward()


@idiom("pytorch.org, adversarial example generation: FGSM")
def adversarial_input(side: Side) -> None:
    x, y = batch()
    model = side.fit(Classifier(), x.requires_grad_(), outputs="all")
    for _ in range(3):
        x, y = batch()
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        assert x.grad is not None
        side.see("attacked", x + 0.1 * x.grad.sign())


@idiom("pytorch.org, neural transfer: the input is optimized, the net is frozen")
def input_is_optimized(side: Side) -> None:
    net = Pictures().eval().requires_grad_(False)
    picture = torch.randn(1, 3, 8, 8, requires_grad=True)
    model = side.fit(net, picture, outputs="all")
    optimizer = torch.optim.Adam([picture], 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(picture).square().mean().backward()
        optimizer.step()
    side.see("picture", picture)


@idiom("adversarial training: PGD inside the step, then the update")
def pgd_training(side: Side) -> None:
    model = side.fit(WithLoss(), torch.randn(6, 8, requires_grad=True), batch()[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        delta = torch.zeros_like(x, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x + delta, y), delta)
        optimizer.zero_grad()
        model((x + 0.1 * slope.sign()).requires_grad_(), y).backward()
        optimizer.step()


@idiom("Captum and saliency maps: autograd.grad of one score")
def saliency(side: Side) -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    model = side.fit(Pictures().eval(), x, outputs="all")
    for _ in range(3):
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
        side.see("saliency", slope.abs().amax(1))


class Features(Pictures):
    """Scores and the features that they come from."""

    def forward(self, x: Tensor) -> Any:
        features = self.features(x)
        return self.head(features.mean((2, 3))), features


@idiom("Grad-CAM: retain_grad on returned features")
def grad_cam(side: Side) -> None:
    model = side.fit(Features().eval(), pictures()[0], outputs="all")
    for _ in range(3):
        scores, features = model(pictures()[0])
        features.retain_grad()
        scores[:, 2].sum().backward()
        assert features.grad is not None
        side.see("map", F.relu((features.grad.mean((2, 3), keepdim=True) * features).sum(1)))


@idiom("gradient surgery: a hook on the output scales its gradient")
def hook_on_the_output(side: Side) -> None:
    model = side.fit(Classifier(), batch()[0], outputs="all")
    for x, y in batches():
        model.zero_grad()
        scores = model(x)
        scores.register_hook(lambda g: g.clamp(-0.05, 0.05))
        scores.retain_grad()
        F.cross_entropy(scores, y).backward()
        side.see("at the output", scores.grad)


@idiom("questions on discuss.pytorch.org: print the gradient of each parameter by a hook")
def hooks_on_parameters(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    p: Any
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: side.see(name, g))
    for x, y in batches():
        model.zero_grad()
        model(x, y).backward()


@idiom("PyTorch 1.x tutorials: a full backward hook on the model")
def backward_hook_on_the_model(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    model.register_full_backward_hook(lambda _, __, after: side.see("after", list(after)))
    train(side, model, batches())


@idiom("Lightning callbacks: a forward hook on the whole model")
def forward_hook_on_the_model(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    model.register_forward_hook(lambda _, __, out: side.see("out", out))
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2, args[1]))
    train(side, model, batches())


@idiom("siamese nets: one net called twice, one backward")
def called_twice(side: Side) -> None:
    model = side.fit(Classifier(), batch()[0], outputs="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches():
        optimizer.zero_grad()
        F.cosine_embedding_loss(model(x), model(x + 0.1), torch.ones(6)).backward()
        optimizer.step()
        side.see("head", model.head.bias)


@idiom("contrastive pairs inside one module, the net called on both views")
def both_views_inside(side: Side) -> None:
    class Pairs(Scores):
        def forward(self, x: Tensor, z: Tensor) -> Any:
            one, two = self.scores(x), self.scores(z)
            return 2 - 2 * F.cosine_similarity(one, two.detach()).mean()

    model = side.fit(Pairs(), torch.randn(6, 8), torch.randn(6, 8))
    train(side, model, ((x, x + 0.1) for x, _ in batches()))


@idiom("truncated BPTT: the state is detached between chunks")
def truncated_bptt(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(8, 12), nn.Linear(12, 8)

        def forward(self, x: Tensor, h: Tensor) -> Any:
            y, h = self.rnn(x, h)
            return (self.out(y) - x).square().mean(), h

    h = torch.zeros(1, 2, 12)
    model = side.fit(Net(), torch.randn(5, 2, 8), h, loss=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss, h = model(torch.randn(5, 2, 8), h)
        loss.backward()
        optimizer.step()
        h = h.detach()
        side.see("state", h)


@idiom("MAML, first order: the copy adapts, its gradient goes to the original")
def first_order_maml(side: Side) -> None:
    net = WithLoss()
    fast = side.fit(WithLoss(), *batch())
    outer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        fast.load_state_dict(net.state_dict())
        inner = torch.optim.SGD(fast.parameters(), lr=0.5)
        x, y = batch()
        inner.zero_grad()
        fast(x, y).backward()
        inner.step()
        inner.zero_grad()
        loss = fast(x, y)
        loss.backward()
        for p, q in zip(net.parameters(), fast.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        outer.step()
        side.see("loss", loss)
    side.see("net", list(net.parameters()))


@idiom("questions on views: the loss is changed in place before backward")
def loss_changed_in_place(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    for x, y in batches():
        model.zero_grad()
        loss = model(x, y)
        loss /= 2
        loss.backward()
        side.see("loss", loss)


@idiom("deep supervision: a list of outputs, weighted")
def list_of_outputs(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            outs = []
            for layer, head in zip(self.layers, self.heads, strict=True):
                x = torch.relu(layer(x))
                outs.append(head(x))
            return outs

    model = side.fit(Net(), batch()[0], outputs="all")
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        sum(w * F.cross_entropy(out, y) for w, out in zip((0.2, 0.3, 0.5), model(x), strict=True)).backward()
        optimizer.step()


@idiom("actor-critic of pytorch/examples: policy and value from one net")
def actor_critic(side: Side) -> None:
    model = side.fit(Heads(), batch()[0], outputs="all")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for x, _ in batches():
        scores, value = model(x)
        policy: Any = torch.distributions.Categorical(logits=scores)
        action = policy.sample()
        advantage = (torch.randn(6) - value.squeeze(1)).detach()
        loss = -(policy.log_prob(action) * advantage).mean() + F.smooth_l1_loss(
            value.squeeze(1), torch.zeros(6)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        side.see("loss", loss)


@idiom("PPO: several epochs over one batch with a clipped ratio")
def ppo(side: Side) -> None:
    model = side.fit(Heads(), batch()[0], outputs="all")
    optimizer = torch.optim.Adam(model.parameters())
    x, actions = batch()
    with torch.no_grad():
        old = model(x)[0].log_softmax(1).gather(1, actions[:, None])
    advantage = torch.randn(6, 1)
    for _ in range(3):
        scores, value = model(x)
        ratio = (scores.log_softmax(1).gather(1, actions[:, None]) - old).exp()
        policy = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        policies: Any = torch.distributions.Categorical(logits=scores)
        entropy = policies.entropy().mean()
        optimizer.zero_grad()
        (-policy + 0.5 * value.square().mean() - 0.01 * entropy).backward()
        optimizer.step()


@idiom("DQN: a target network and gathered values")
def dqn(side: Side) -> None:
    target = Classifier()
    model = side.fit(Classifier(), batch()[0], outputs="all")
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for step, (x, actions) in enumerate(batches(4)):
        with torch.no_grad():
            best = target(x).max(1).values
        loss = F.smooth_l1_loss(model(x).gather(1, actions[:, None]).squeeze(1), 0.9 * best)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 100)
        optimizer.step()
        if step % 2:
            target.load_state_dict(model.state_dict())


@idiom("gradient accumulation into flat buffers, as in early apex")
def flat_gradients(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    begin = 0
    for p in model.parameters():
        p.grad = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    for x, y in batches():
        model(x, y).backward()
        side.see("flat", flat)


@idiom("pytorch.org, per-sample gradients: torch.func on the model that was fitted", refused="torch.func")
def per_sample_gradients(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    x, y = batch()

    def loss(params: dict[str, Tensor], row: Tensor, label: Tensor) -> Any:
        return torch.func.functional_call(model, params, (row[None], label[None]))

    params = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, x, y)


@idiom("BYOL: the target's weights follow in the loop, by .data")
def byol_in_the_loop(side: Side) -> None:
    online, target = side.fit(Classifier(), batch()[0], outputs="all"), Classifier()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
    for x, _ in batches():
        with torch.no_grad():
            goal = target(x + 0.1)
        loss = (2 - 2 * F.cosine_similarity(online(x), goal)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.data = slow.data * 0.99 + fast.data * 0.01
        side.see("loss", loss)


@idiom("DINO: gradients of the last layer are dropped in the first epoch")
def last_layer_is_held(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        model(x, y).backward()
        if step < 2:
            for p in model.head.parameters():
                p.grad = None
        optimizer.step()
