"""Classifiers, detectors, segmentation, optical flow and points."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.repositories.families.data import batches, numbers, pixels, words
from benchmarks.repositories.sources import definitions, source
from benchmarks.repositories.training import Training, entry, looped, one

_TORCHVISION = ("torchvision",)
_OLD_TIMM = "timm 0.4.12 of the registry, which imports torchvision for data alone"


def _classified(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def _classifier(net: nn.Module, size: int, count: int = 4, classes: int = 10) -> Training:
    return one(
        net,
        batches(numbers(count, 3, size, size), words(classes, count)),
        _classified,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=5e-4),
    )


@entry(
    "milesial/Pytorch-UNet",
    "21d7850f2af30a9695bbeea75f3136aa538cfc4a",
    "UNet, cross entropy and dice_loss as in train.py",
)
def unet(_: Path) -> Training:
    net, dice = source("unet.unet_model").UNet(3, 2), source("utils.dice_score").dice_loss

    def loss(net: Any, images: Tensor, masks: Tensor) -> Any:
        found = net(images)
        hot = F.one_hot(masks, 2).permute(0, 3, 1, 2).float()
        entropy = F.cross_entropy(found, masks)
        entropy += dice(F.softmax(found, dim=1).float(), hot, multiclass=True)
        return entropy

    return one(
        net,
        batches(numbers(1, 3, 32, 32), words(2, 1, 32, 32)),
        loss,
        optimizer=lambda p: torch.optim.RMSprop(p, 1e-5, weight_decay=1e-8, momentum=0.999, foreach=True),
    )


@entry(
    "kuangliu/pytorch-cifar",
    "49b7aa97b0c12fe0d4054e670403a16b6b834ddd",
    "PreActResNet18 as in main.py",
    absent=_TORCHVISION,
)
def cifar(_: Path) -> Training:
    preact = source("models.preact_resnet")
    return _classifier(preact.PreActResNet(preact.PreActBlock, [1, 1, 1, 1]), 32)


@entry(
    "facebookresearch/ConvNeXt",
    "048efcea897d999aed302f2639b6270aedf8d4c8",
    "ConvNeXt",
    absent=_TORCHVISION,
    note=_OLD_TIMM,
)
def convnext(_: Path) -> Training:
    return _classifier(
        source("models.convnext").ConvNeXt(
            num_classes=10, depths=[1, 1, 2, 1], dims=[16, 32, 48, 64], drop_path_rate=0.1
        ),
        64,
    )


@entry(
    "lukemelas/EfficientNet-PyTorch",
    "7e8b0d312162f335785fb5dcfa1df29a75a1783a",
    "EfficientNet, b0 at a quarter of its width",
)
def efficientnet(_: Path) -> Training:
    parts = source("efficientnet_pytorch.utils")
    blocks, options = parts.efficientnet(0.25, 0.5, image_size=64, num_classes=10)
    return _classifier(source("efficientnet_pytorch.model").EfficientNet(blocks, options), 64)


@entry(
    "microsoft/Swin-Transformer",
    "f82860bfb5225915aca09c3227159ee9e1df874d",
    "SwinTransformer",
    folders=(".", "models"),
    absent=_TORCHVISION,
    note=_OLD_TIMM,
)
def swin(_: Path) -> Training:
    return _classifier(
        source("swin_transformer").SwinTransformer(
            img_size=56, num_classes=10, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=7
        ),
        56,
    )


@entry(
    "facebookresearch/hiera",
    "b12b842542ee5c757fcfec8c41f6b56fcbe89b65",
    "Hiera",
    absent=_TORCHVISION,
    note=_OLD_TIMM,
)
def hiera(_: Path) -> Training:
    return _classifier(
        source("hiera.hiera").Hiera(
            input_size=(64, 64),
            embed_dim=24,
            num_heads=1,
            stages=(1, 1, 2, 1),
            num_classes=10,
            drop_path_rate=0.1,
            q_pool=2,
        ),
        64,
    )


@entry(
    "facebookresearch/deit",
    "7e160fe43f0252d17191b71cbb5826254114ea5b",
    "VisionTransformer, DistillationLoss",
    absent=_TORCHVISION,
    note=_OLD_TIMM,
)
def deit(_: Path) -> Training:
    models = source("timm.models.vision_transformer")
    student = source("models").DistilledVisionTransformer(
        img_size=32, patch_size=8, num_classes=10, embed_dim=48, depth=3, num_heads=4
    )
    teacher = models.VisionTransformer(
        img_size=32, patch_size=8, num_classes=10, embed_dim=24, depth=1, num_heads=2
    )
    criterion = source("losses").DistillationLoss(nn.CrossEntropyLoss(), teacher.eval(), "hard", 0.5, 1.0)
    return one(
        student,
        batches(numbers(4, 3, 32, 32), words(10, 4)),
        lambda net, x, y: criterion(x, net(x), y),
    )


@entry(
    "huggingface/pytorch-image-models",
    "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "mobilenetv3_small_050, LabelSmoothingCrossEntropy",
    absent=_TORCHVISION,
    name="timm",
)
def timm(_: Path) -> Training:
    net = source("timm").create_model("mobilenetv3_small_050", num_classes=10)
    criterion = source("timm.loss").LabelSmoothingCrossEntropy(0.1)
    return one(net, batches(numbers(4, 3, 64, 64), words(10, 4)), lambda net, x, y: criterion(net(x), y))


@entry(
    "qubvel-org/segmentation_models.pytorch",
    "5006616357631a48c7c8e11977cf5abb00803590",
    "Unet over timm-efficientnet-b0, DiceLoss",
    folders=(".", "../huggingface+pytorch-image-models"),
    absent=_TORCHVISION,
)
def segmentation(_: Path) -> Training:
    models = source("segmentation_models_pytorch")
    net = models.Unet(
        "timm-efficientnet-b0", encoder_weights=None, classes=2, decoder_channels=(32, 16, 16, 8, 8)
    )
    criterion = models.losses.DiceLoss("multiclass")
    return one(
        net, batches(numbers(2, 3, 64, 64), words(2, 2, 64, 64)), lambda net, x, y: criterion(net(x), y)
    )


@entry(
    "facebookresearch/detr",
    "29901c51d7fe8712168b8d0d64351170bc0f83e0",
    "DETR, a small backbone of our own; SetCriterion, HungarianMatcher in the loop, as in engine.py",
    absent=("torchvision", "panopticapi", "pycocotools"),
)
def detr(_: Path) -> Training:
    models, misc = source("models.detr"), source("util.misc")
    source("util.box_ops").box_area = lambda boxes: (boxes[:, 2:] - boxes[:, :2]).prod(1)  # torchvision's
    backbones, places = source("models.backbone"), source("models.position_encoding")

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 4, 1))
            self.num_channels = 32

        def forward(self, nested: Any) -> dict[str, Any]:
            x = self.body(nested.tensors)
            mask = F.interpolate(nested.mask[None].float(), size=x.shape[-2:]).to(torch.bool)[0]
            return {"0": misc.NestedTensor(x, mask)}

    joiner = backbones.Joiner(Small(), places.PositionEmbeddingSine(24, normalize=True))
    joiner.num_channels = 32
    transformer = source("models.transformer").Transformer(48, 4, 1, 1, 96, 0.1, return_intermediate_dec=True)
    net = models.DETR(joiner, transformer, num_classes=5, num_queries=6, aux_loss=True)
    matcher = source("models.matcher").HungarianMatcher(1, 5, 2)
    weights = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}
    criterion = models.SetCriterion(5, matcher, weights, 0.1, ["labels", "boxes", "cardinality"])

    def loss(net: Any, nested: Any, labels: Tensor, boxes: Tensor) -> Any:
        outputs = net(nested)
        targets = [{"labels": one, "boxes": box * 0.4 + 0.3} for one, box in zip(labels, boxes, strict=True)]
        found = criterion(outputs, targets)
        return sum(found[key] * weights[key] for key in found if key in weights)

    def images(draw: torch.Generator) -> Any:
        mask = torch.zeros(2, 64, 64, dtype=torch.bool)
        return misc.NestedTensor(torch.randn(2, 3, 64, 64, generator=draw), mask)

    return looped(net, batches(images, words(5, 2, 3), pixels(2, 3, 4)), loss)


@entry(
    "princeton-vl/RAFT",
    "2888e15a51fa41140771d3f498ed8023cff098d1",
    "RAFT, small; sequence_loss in the loop, as in train.py",
    folders=("core",),
    absent=("cv2", "matplotlib", "torch.utils.tensorboard", "evaluate", "datasets"),
)
def raft(checkout: Path) -> Training:
    net = source("raft").RAFT(_Options(small=True, mixed_precision=False, alternate_corr=False, dropout=0.0))
    code = definitions(checkout / "train.py", MAX_FLOW=400)

    def loss(net: Any, one: Tensor, two: Tensor, iters: int, flow: Tensor, valid: Tensor) -> Any:
        return code.sequence_loss(net(one, two, iters), flow, valid, 0.8)[0]

    def colours(draw: torch.Generator) -> Tensor:
        return 255 * torch.rand(1, 3, 128, 128, generator=draw)

    flow = numbers(1, 2, 128, 128), pixels(1, 128, 128)
    return looped(net, batches(colours, colours, lambda _: 2, *flow), loss, given=3)


class _Options(SimpleNamespace):
    """Options of a command line; some repositories ask whether one is in them."""

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)


@entry(
    "RangiLyu/nanodet",
    "be9b4a9001d7f9b6fc89c2df31ae8d428e35b4f0",
    "OneStageDetector: ShuffleNetV2, PAN, NanoDetHead; its losses after forward, as in forward_train",
    absent=(
        "torchvision",
        "pytorch_lightning",
        "cv2",
        "pycocotools",
        "matplotlib",
        "torch.utils.tensorboard",
    ),
)
def nanodet(_: Path) -> Training:
    head = {
        "name": "NanoDetHead",
        "num_classes": 4,
        "input_channel": 16,
        "feat_channels": 16,
        "stacked_convs": 1,
        "octave_base_scale": 5,
        "strides": [8, 16, 32],
        "reg_max": 7,
        "norm_cfg": {"type": "BN"},
        "loss": {
            "loss_qfl": {"name": "QualityFocalLoss", "use_sigmoid": True, "beta": 2.0, "loss_weight": 1.0},
            "loss_dfl": {"name": "DistributionFocalLoss", "loss_weight": 0.25},
            "loss_bbox": {"name": "GIoULoss", "loss_weight": 2.0},
        },
    }
    net = source("nanodet.model.arch.one_stage_detector").OneStageDetector(
        {"name": "ShuffleNetV2", "model_size": "0.5x", "out_stages": [2, 3, 4], "pretrain": False},
        {"name": "PAN", "in_channels": [48, 96, 192], "out_channels": 16, "start_level": 0, "num_outs": 3},
        source("nanodet.util.config").CfgNode(head),
    )

    def loss(net: Any, images: Tensor, corners: Tensor, labels: Tensor) -> Any:
        boxes = torch.cat([corners * 30, corners * 30 + 30], 2)
        meta = {
            "img": images,
            "gt_bboxes": [one.numpy() for one in boxes],
            "gt_labels": [one.numpy() for one in labels],
            "gt_bboxes_ignore": [torch.zeros(0, 4).numpy()] * 2,
        }
        return net.forward_train(meta)[1]

    return looped(net, batches(numbers(2, 3, 64, 64), pixels(2, 2, 2), words(4, 2, 2)), loss)


@entry(
    "yanx27/Pointnet_Pointnet2_pytorch",
    "eb64fe0b4c24055559cea26299cb485dcb43d8dd",
    "PointNet, get_model and get_loss",
    folders=("models",),
)
def pointnet(_: Path) -> Training:
    code = source("pointnet_cls")
    net, criterion = code.get_model(10, normal_channel=False), code.get_loss()
    return one(
        net,
        batches(numbers(4, 3, 32), words(10, 4)),
        lambda net, x, y: criterion(*_swapped(net(x), y)),
    )


def _swapped(found: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return found[0], target, found[1]
