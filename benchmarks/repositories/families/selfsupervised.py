"""Representations learnt without labels, and images with words."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.repositories.families.data import batches, numbers, words
from benchmarks.repositories.sources import definitions, source
from benchmarks.repositories.training import Networks, Training, drawn, entry, looped, one

_TORCHVISION = ("torchvision",)
_OLD_TIMM = "timm 0.4.12 of the registry"
_ONE = "of its collectives, which one worker has no use for, `concat_all_gather` is the identity"


def _on_one_cpu() -> None:
    """Let code for several cards run on one worker: its collectives and `cuda()` do nothing."""
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.distributed.get_rank = lambda *_: 0
    torch.distributed.all_reduce = lambda *_, **__: None


class _Encoder(nn.Module):
    """A small convolutional encoder of ours whose head is `fc`; theirs is torchvision's."""

    def __init__(self, num_classes: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1)
        )
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.body(x).mean((2, 3)))


@entry(
    "facebookresearch/mae",
    "efb2a8062c206524e35e47d04501ed4f544c0ae8",
    "MaskedAutoencoderViT",
    absent=_TORCHVISION,
    note=f"{_OLD_TIMM}; np.float is given to NumPy, which had it until 1.24",
)
def mae(_: Path) -> Training:
    vars(np).setdefault("float", float)
    vit = source("timm.models.vision_transformer")
    block = vit.Block
    kept = ("qkv_bias", "norm_layer")  # timm 0.3.2 took `qk_scale` too
    vit.Block = lambda *args, **more: block(*args, **{name: more[name] for name in kept})
    net = source("models_mae").MaskedAutoencoderViT(
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        decoder_embed_dim=24,
        decoder_depth=1,
        decoder_num_heads=4,
        norm_layer=nn.LayerNorm,
        norm_pix_loss=True,
    )
    return one(
        net,
        batches(numbers(2, 3, 32, 32)),
        lambda net, x: net(x, 0.75)[0],
        optimizer=lambda p: AdamW(p, 1e-3, (0.9, 0.95)),
    )


@entry(
    "lucidrains/vit-pytorch",
    "69d24fe9e3024c0d4b02761123b8583a24ebed1e",
    "ViT with dropout",
    absent=_TORCHVISION,
)
def vit(_: Path) -> Training:
    net = source("vit_pytorch.vit").ViT(
        image_size=32,
        patch_size=8,
        num_classes=10,
        dim=32,
        depth=3,
        heads=4,
        mlp_dim=64,
        dropout=0.1,
        emb_dropout=0.1,
    )
    return one(
        net, batches(numbers(4, 3, 32, 32), words(10, 4)), lambda net, x, y: F.cross_entropy(net(x), y)
    )


@entry(
    "lucidrains/byol-pytorch",
    "299312613c1f44923e7869d1c82be7d536c2c42b",
    "BYOL over a small encoder of ours, update_moving_average",
    absent=_TORCHVISION,
)
def byol(_: Path) -> Training:
    transforms = source("torchvision.transforms")
    for name in (
        "ColorJitter",
        "RandomGrayscale",
        "RandomHorizontalFlip",
        "GaussianBlur",
        "RandomResizedCrop",
        "Normalize",
    ):
        setattr(transforms, name, lambda *_, **__: nn.Identity())  # of augmentations that are not used
    net = source("byol_pytorch.byol_pytorch").BYOL(
        _Encoder(),
        image_size=16,
        hidden_layer="fc",
        projection_size=16,
        projection_hidden_size=32,
        augment_fn=nn.Identity(),
        augment_fn2=nn.Identity(),
        use_momentum=True,
    )
    return one(net, batches(numbers(4, 3, 16, 16)), after=lambda _: net.update_moving_average())


@entry(
    "facebookresearch/dino",
    "7c446df5b9f45747937fb0d72314eb9f7b66930a",
    "VisionTransformer, MultiCropWrapper, DINOHead, DINOLoss; the student is fitted",
    absent=_TORCHVISION,
)
def dino(checkout: Path) -> Training:
    vits, helpers = source("vision_transformer"), source("utils")
    code = definitions(checkout / "main_dino.py", torchvision_archs=[])

    def network() -> Any:
        vit = vits.VisionTransformer(
            [32], patch_size=8, embed_dim=32, depth=2, num_heads=4, drop_path_rate=0.1
        )
        return helpers.MultiCropWrapper(vit, vits.DINOHead(32, 24, hidden_dim=32, bottleneck_dim=16))

    student, teacher = network(), network()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    criterion = code.DINOLoss(24, 3, 0.04, 0.04, 1, 10)
    criterion.update_center = lambda found: criterion.center.mul_(0.9).add_(found.mean(0, keepdim=True) * 0.1)

    def iteration(networks: Networks, optimizers: Sequence[Optimizer], seed: int) -> list[Tensor]:
        draw = drawn(seed)
        views = [numbers(2, 3, size, size)(draw) for size in (32, 32, 16)]
        loss = criterion(networks["student"](views), networks["teacher"](views[:2]), 0)
        torch.autograd.backward(loss)
        helpers.clip_gradients(networks["student"], 3.0)
        helpers.cancel_gradients_last_layer(0, networks["student"], 1)
        optimizers[0].step()
        with torch.no_grad():
            pairs = zip(networks["student"].parameters(), networks["teacher"].parameters(), strict=True)
            for one, other in pairs:
                other.data.mul_(0.99).add_(0.01 * one.detach().data)
        return [loss]

    views = [torch.randn(2, 3, size, size) for size in (32, 32, 16)]
    return Training(
        {"student": student.train(), "teacher": teacher.train()},
        {"student": (views,)},
        lambda networks: [AdamW(helpers.get_params_groups(networks["student"]), 1e-3)],
        iteration,
        outputs="all",
    )


@entry(
    "facebookresearch/moco",
    "0d6137a6e66236fe8b3d6258326b51b4bb52d60f",
    "MoCo, its queue and momentum encoder; " + _ONE,
    note="an older commit: the newest has no code",
)
def moco(_: Path) -> Training:
    code = source("moco.builder")
    code.concat_all_gather = lambda tensor: tensor
    code.MoCo._batch_shuffle_ddp = lambda _, x: (x, None)
    code.MoCo._batch_unshuffle_ddp = lambda _, x, __: x
    _on_one_cpu()
    net = code.MoCo(_Encoder, dim=16, K=16, m=0.99, T=0.07)
    return one(
        net,
        batches(numbers(4, 3, 16, 16), numbers(4, 3, 16, 16)),
        lambda net, q, k: F.cross_entropy(*net(q, k)),
        optimizer=lambda p: torch.optim.SGD(p, 0.03, momentum=0.9, weight_decay=1e-4),
    )


@entry(
    "facebookresearch/moco-v3",
    "c349e6e24f40d3fedb22d973f92defa4cedf37a7",
    "MoCo_ViT over its ViT; " + _ONE,
    absent=_TORCHVISION,
    note=_OLD_TIMM,
)
def moco_v3(_: Path) -> Training:
    code, vits = source("moco.builder"), source("vits")
    code.concat_all_gather = lambda tensor: tensor
    _on_one_cpu()

    def encoder(num_classes: int) -> Any:
        return vits.VisionTransformerMoCo(
            img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=num_classes
        )

    net = code.MoCo_ViT(encoder, dim=16, mlp_dim=32, T=0.2)
    return one(
        net,
        batches(numbers(4, 3, 32, 32), numbers(4, 3, 32, 32)),
        lambda net, one, other: net(one, other, 0.99),
    )


@entry(
    "sthalles/SimCLR",
    "1848fc934ad844ae630e6c452300433fe99acfd9",
    "SimCLR.info_nce_loss in the loop, as in `train`, over an encoder of ours, whose own is torchvision's",
    absent=(*_TORCHVISION, "torch.utils.tensorboard", "tqdm"),
)
def simclr(_: Path) -> Training:
    code = source("simclr").SimCLR
    holder = SimpleNamespace(args=SimpleNamespace(batch_size=4, n_views=2, device="cpu", temperature=0.07))
    return looped(
        _Encoder(16),
        batches(numbers(8, 3, 16, 16)),
        lambda net, x: F.cross_entropy(*code.info_nce_loss(holder, net(x))),
        optimizer=lambda p: torch.optim.Adam(p, 3e-4, weight_decay=1e-4),
    )


@entry(
    "facebookresearch/swav",
    "06b1b7cbaf6ba2a792300d79c7299db98b93b7f9",
    "ResNet with prototypes, distributed_sinkhorn, multi-crop loss",
    absent=("apex", *_TORCHVISION, "src.multicropdataset", "pandas"),
)
def swav(checkout: Path) -> Training:
    resnets = source("src.resnet50")
    net = resnets.ResNet(
        resnets.Bottleneck,
        [1, 1, 1, 1],
        widen=1,
        normalize=True,
        hidden_mlp=32,
        output_dim=16,
        nmb_prototypes=12,
    )
    options = SimpleNamespace(epsilon=0.05, world_size=1, sinkhorn_iterations=3)
    code = definitions(checkout / "main_swav.py", args=options)
    _on_one_cpu()

    def loss(net: Any, *inputs: Tensor) -> Any:
        _, output = net(list(inputs))
        count, total = inputs[0].size(0), torch.zeros(())
        for crop in (0, 1):
            with torch.no_grad():
                q = code.distributed_sinkhorn(output[count * crop : count * (crop + 1)].detach())[-count:]
            for view in {0, 1, 2} - {crop}:
                x = output[count * view : count * (view + 1)] / 0.1
                total = total - torch.mean(torch.sum(q * F.log_softmax(x, dim=1), dim=1)) / 2
        return total / 2

    return one(
        net,
        batches(numbers(4, 3, 32, 32), numbers(4, 3, 32, 32), numbers(4, 3, 16, 16)),
        loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-6),
    )


@entry(
    "facebookresearch/barlowtwins",
    "8e8d284ca0bc02f88b92328e53f9b901e86b4a3c",
    "BarlowTwins over an encoder of ours, LARS",
    absent=_TORCHVISION,
)
def barlow(checkout: Path) -> Training:
    models = SimpleNamespace(models=SimpleNamespace(resnet50=lambda **_: _Wide()))
    code = definitions(checkout / "main.py")
    code.torchvision = models
    _on_one_cpu()
    net = code.BarlowTwins(SimpleNamespace(projector="32-32", batch_size=8, lambd=0.0051))
    return one(
        net,
        batches(numbers(8, 3, 16, 16), numbers(8, 3, 16, 16)),
        optimizer=lambda p: code.LARS(
            p, lr=0.1, weight_decay=1e-6, weight_decay_filter=True, lars_adaptation_filter=True
        ),
    )


class _Wide(_Encoder):
    """With the 2048 features that the projector takes."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.Conv2d(16, 2048, 1))


@entry(
    "mlfoundations/open_clip",
    "89fb801f1e6087880e951fc8354b8a2077b79c6d",
    "CLIP, ClipLoss",
    folders=("src", "../huggingface+pytorch-image-models"),
    absent=(*_TORCHVISION,),
)
def open_clip(_: Path) -> Training:
    model, losses = source("open_clip.model"), source("open_clip.loss")
    net = model.CLIP(
        24,
        model.CLIPVisionCfg(layers=2, width=32, head_width=16, patch_size=8, image_size=32),
        model.CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=2, layers=2),
    )
    criterion = losses.ClipLoss()
    return one(
        net,
        batches(numbers(4, 3, 32, 32), words(64, 4, 12)),
        lambda net, images, texts: criterion(*net(images, texts)),
    )
