"""The loop around the step: optimizers, schedules, accumulation, checkpoints, evaluation in between."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from tests.idioms.pieces import Classifier, F, Pictures, WithLoss, batch, batches, pictures, train
from tests.idioms.side import Side, idiom


@idiom("pytorch.org, Training a Classifier: the loss outside of the model")
def loss_outside(side: Side) -> None:
    model = side.fit(Classifier(0.2), batch()[0], outputs="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss()(model(x), y)
        loss.backward()
        optimizer.step()
        side.see("loss", loss.item())


@idiom("minGPT and nanoGPT: the model returns its loss")
def loss_inside(side: Side) -> None:
    train(side, side.fit(WithLoss(0.1), *batch()), batches())


@idiom("Keras-like trainers: the criterion is handed over")
def loss_as_a_function(side: Side) -> None:
    model = side.fit(Classifier(), batch()[0], loss=lambda scores: scores.square().mean())
    train(side, model, ((x,) for x, _ in batches()))


@idiom("fast.ai forums: gradients of four micro-batches")
def accumulation(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        for x, y in batches(4):
            (model(x, y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        side.see("step", step)


@idiom("Chainer users: gradients are zeroed in place")
def zeroed_in_place(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches():
        optimizer.zero_grad(set_to_none=False)
        model(x, y).backward()
        optimizer.step()


@idiom("word_language_model of pytorch/examples: clipping by norm and a hand-written update")
def clipped_and_updated_by_hand(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    for x, y in batches():
        model.zero_grad()
        model(x, y).backward()
        side.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.25))
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.add_(p.grad, alpha=-0.5)


@idiom("DeepSpeech recipes: clipping by value")
def clipped_by_value(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.RMSprop(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        model(x, y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


@idiom("NFNets: adaptive clipping by the norm of each parameter")
def adaptive_clipping(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        model(x, y).backward()
        for p in model.parameters():
            assert p.grad is not None
            largest = p.detach().norm().clamp(min=1e-3) * 0.01
            p.grad.mul_((largest / p.grad.norm().clamp(min=1e-6)).clamp(max=1))
        optimizer.step()


@idiom("timm: cosine schedule with warm-up")
def scheduler(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    for x, y in batches(4):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        schedule.step()
        side.see("rate", schedule.get_last_lr())


@idiom("nanoGPT: no decay for biases")
def groups_by_dimension(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    train(side, model, batches(), torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))


@idiom("pytorch/examples time_sequence_prediction: LBFGS with a closure")
def lbfgs(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = batch()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        return loss

    for _ in range(3):
        side.see("loss", optimizer.step(closure))


@idiom("davda54/sam: ascend, descend, two backwards a step")
def sam(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        model(x, y).backward()
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                moved.append(0.05 * p.grad / (p.grad.norm() + 1e-12))
                p.add_(moved[-1])
        optimizer.zero_grad()
        model(x, y).backward()
        with torch.no_grad():
            for p, step in zip(model.parameters(), moved, strict=True):
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()


@idiom("pytorch.org blog: stochastic weight averaging with new statistics")
def swa(side: Side) -> None:
    model = side.fit(Pictures(), pictures()[0], outputs="all")
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [pictures() for _ in range(3)]
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(model)
    torch.optim.swa_utils.update_bn([x for x, _ in data], averaged)
    side.see("averaged", [*averaged.parameters(), *averaged.buffers()])


@idiom("diffusers EMAModel: a deep copy that follows")
def ema_of_a_copy(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    side.see("ema", list(ema.parameters()))
    side.see("ema's loss", ema(*batch()))


@idiom("lookahead optimizers: slow weights every second step")
def lookahead(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    slow = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        if step % 2:
            for s, p in zip(slow, model.parameters(), strict=True):
                s.add_(p.detach() - s, alpha=0.5)
                p.data.copy_(s)


@idiom("Neelakantan 2015: noise added to gradients")
def gradient_noise(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        model(x, y).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad += torch.randn_like(p.grad) * 0.01
        optimizer.step()


@idiom("fairseq: a step whose gradient is not finite is skipped")
def not_finite_is_skipped(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        model(x * (float("inf") if step == 1 else 1.0), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        side.see("finite", bool(norm.isfinite()))
        if norm.isfinite():
            optimizer.step()


@idiom("ULMFiT: freeze the body, thaw it later")
def freeze_and_thaw(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(4):
        model.body.requires_grad_(len(side.seen) >= 2)
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        side.see("loss", loss)


@idiom("torchvision detection references: batch norm frozen in training")
def frozen_batch_norm(side: Side) -> None:
    net = Pictures()
    model = side.fit(net, pictures()[0], outputs="all")
    model.train()
    model.norm.eval()
    for _ in range(3):
        x, y = pictures()
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        side.see("loss", loss)


@idiom("pytorch.org, Saving and Loading a General Checkpoint")
def checkpoint_and_resume(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(side, model, batches(), optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(side, model, batches(), optimizer)
    file.seek(0)
    kept = torch.load(file)
    side.see("names", list(kept["model"]))
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    train(side, model, batches(), optimizer)


@idiom("questions on discuss.pytorch.org: load_state_dict(assign=True) in the middle")
def state_is_assigned(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    train(side, model, batches(2))
    model.load_state_dict({k: v.clone() * 0.5 for k, v in model.state_dict().items()}, assign=True)
    train(side, model, batches(2))
    side.see("weights", list(model.parameters()))


@idiom("population-based training: a deep copy trains on")
def deep_copy_trains(side: Side) -> None:
    model = side.fit(WithLoss(0.1), *batch())
    train(side, model, batches(2))
    other = copy.deepcopy(model)
    train(side, other, batches(2))
    train(side, model, batches(2))
    side.see("other", list(other.parameters()))


@idiom("torch.save of a whole module, as the notes on serialization show")
def whole_module_saved(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    train(side, model, batches(2))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    train(side, other, batches(2))
    side.see("other", list(other.parameters()))


@idiom("every tutorial: evaluation under no_grad between epochs")
def evaluation_between(side: Side) -> None:
    model = side.fit(Pictures(), pictures()[0], outputs="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.train()
        x, y = pictures()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            side.see("accuracy", (model(x).argmax(1) == y).float().mean())


@idiom("pytorch.org, autograd mechanics: validation in inference_mode")
def inference_mode_between(side: Side) -> None:
    model = side.fit(WithLoss(0.3), *batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        model.train()
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            side.see("validation", model(*batch()).clone())


@idiom("pytorch.org, automatic mixed precision: bfloat16 around forward")
def autocast_around(side: Side) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        side.see("loss", loss)


@idiom("pytorch.org, automatic mixed precision: autocast inside forward")
def autocast_inside(side: Side) -> None:
    class Net(WithLoss):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.body(x)
            return F.cross_entropy(self.head(h.float()), y)

    train(side, side.fit(Net(), *batch()), batches())


@idiom("pytorch.org, automatic mixed precision: a scaler that meets an overflow")
def scaler_with_overflow(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        scaler.scale(model(x * (1e38 if step == 1 else 1.0), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        side.see("scale", scaler.get_scale())


@idiom("pix2pix and many others: two optimizers for two parts")
def two_optimizers(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    body, head = torch.optim.Adam(model.body.parameters()), torch.optim.SGD(model.head.parameters(), lr=0.1)
    for x, y in batches():
        body.zero_grad()
        head.zero_grad()
        model(x, y).backward()
        body.step()
        head.step()


@idiom("pytorch.org, optimizer step in backward")
def optimizer_in_backward(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    p: Any
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        side.see("loss", loss)


@idiom("fine-tuning guides: a group is added when a part thaws")
def group_added(side: Side) -> None:
    net = WithLoss()
    net.body.requires_grad_(False)
    model = side.fit(net, *batch())
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    train(side, model, batches(2), optimizer)
    model.body.requires_grad_(True)
    optimizer.add_param_group({"params": model.body.parameters(), "lr": 0.01})
    train(side, model, batches(2), optimizer)


@idiom("Keller Jordan: Muon for matrices, AdamW for the rest")
def muon(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    matrices: Any = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)
    others = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2])
    for x, y in batches():
        matrices.zero_grad()
        others.zero_grad()
        model(x, y).backward()
        matrices.step()
        others.step()


@idiom("transformers' default since 2024: fused AdamW")
def fused_adamw(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    train(side, model, batches(), torch.optim.AdamW(model.parameters(), fused=True))


@idiom("t5 recipes: Adafactor")
def adafactor(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    train(side, model, batches(), torch.optim.Adafactor(model.parameters()))


@idiom("the whole iteration in the plan, with the usual loop")
def optimizer_in_the_plan(side: Side) -> None:
    net = WithLoss(0.1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = side.fit(net, *batch(), **({"optimizer": optimizer} if side.by_plans else {}))
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.see("loss", loss)
    side.see("state", [optimizer.state[p] for p in net.parameters()])


@idiom("pytorch.org, profiler recipe: some steps under the profiler")
def profiler_around(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(side, model, batches())
    assert len(profile.key_averages()) > 10


@idiom("pytorch.org, autograd: detect_anomaly while looking for a NaN")
def anomaly_detection(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    with torch.autograd.detect_anomaly(check_nan=True):
        train(side, model, batches())


@idiom("pytorch.org, DataLoader: a last batch that is smaller")
def smaller_last_batch(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    loader = DataLoader(
        TensorDataset(torch.randn(20, 8), torch.randint(0, 4, (20,))), batch_size=6, shuffle=True
    )
    train(side, model, iter(loader))


@idiom("bucketed batches: a new length now and then")
def several_lengths(side: Side) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, ids: Tensor) -> Any:
            return F.cross_entropy(self.out(self.words(ids[:, :-1])).flatten(0, 1), ids[:, 1:].flatten())

    lengths = (8, 5, 8, 6)
    model = side.fit(Net(), torch.randint(0, 20, (2, 8)))
    train(side, model, ((torch.randint(0, 20, (2, length)),) for length in lengths))


@idiom("reinit of a layer in the middle, as in self-distillation and reset papers")
def layer_is_reset(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(side, model, batches(2), optimizer)
    model.head.reset_parameters()
    first: Any = model.body[0]
    nn.init.orthogonal_(first.weight)
    train(side, model, batches(2), optimizer)


@idiom("class-incremental learning: the head grows")
def head_grows(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    train(side, model, batches(2))
    old = model.head
    model.head = nn.Linear(16, 6)
    with torch.no_grad():
        model.head.weight[:4].copy_(old.weight)
    train(side, model, batches(2))
    side.see("head", model.head.weight)


@idiom("set_grad_enabled(phase == 'train') of the transfer learning tutorial")
def phases(side: Side) -> None:
    model = side.fit(Classifier(0.2), batch()[0], outputs="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for phase in ("train", "val", "train", "val"):
        model.train(phase == "train")
        x, y = batch()
        optimizer.zero_grad()
        with torch.set_grad_enabled(phase == "train"):
            loss = F.cross_entropy(model(x), y)
            if phase == "train":
                loss.backward()
                optimizer.step()
        side.see(phase, loss)


@idiom("parameters_to_vector: evolution strategies between gradient steps")
def parameters_as_a_vector(side: Side) -> None:
    model = side.fit(WithLoss(), *batch())
    for x, y in batches():
        model.zero_grad()
        model(x, y).backward()
        flat = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(flat + 0.01 * torch.randn_like(flat), model.parameters())


def _rows(times: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from batches(times, 1)


@idiom("online learning: one row at a time")
def one_row_at_a_time(side: Side) -> None:
    train(side, side.fit(WithLoss(), *batch(1)), _rows(4))


@idiom("mean teacher: the teacher predicts under no_grad, the student follows")
def mean_teacher(side: Side) -> None:
    teacher = Classifier()
    teacher.requires_grad_(False)
    student = side.fit(Classifier(), batch()[0], outputs="all")
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for x, _ in batches():
        with torch.no_grad():
            target = teacher(x).softmax(1)
        optimizer.zero_grad()
        F.mse_loss(student(x + 0.1 * torch.randn_like(x)).softmax(1), target).backward()
        optimizer.step()
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
    side.see("teacher", list(teacher.parameters()))
