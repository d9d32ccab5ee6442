"""Models of other packages, and a few that are written out here."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.cases import Batch, Batches, Case, classified, drawn, images, package, squared

_TIMM: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "resnet10t": (64, {}),
    "resnetv2_50": (64, {}),
    "vit_tiny_patch16_224": (64, {"img_size": 64, "depth": 2, "drop_path_rate": 0.1}),
    "deit3_small_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "beit_base_patch16_224": (64, {"img_size": 64, "depth": 1}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (1, 1, 1)}),
    "convnext_atto": (64, {}),
    "convnextv2_atto": (64, {}),
    "efficientnet_lite0": (64, {}),
    "tf_efficientnetv2_b0": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilenetv4_conv_small": (64, {}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "resmlp_12_224": (64, {"img_size": 64}),
    "poolformer_s12": (64, {}),
    "xcit_nano_12_p16_224": (64, {"img_size": 64}),
    "pvt_v2_b0": (64, {}),
    "edgenext_xx_small": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "ghostnet_050": (64, {}),
    "res2net50_26w_4s": (64, {}),
    "nfnet_f0": (64, {}),
    "hrnet_w18_small": (64, {}),
    "repvgg_a0": (64, {}),
    "cspresnet50": (64, {}),
    "cait_xxs24_224": (64, {"img_size": 64, "depth": 2}),
    "eva02_tiny_patch14_224": (56, {"img_size": 56, "depth": 2}),
    "fastvit_t8": (64, {}),
    "davit_tiny": (64, {"depths": (1, 1, 1, 1)}),
    "focalnet_tiny_srf": (64, {}),
    "levit_128s": (224, {}),
    "regnetx_002": (64, {}),
    "densenet121": (64, {}),
    "tresnet_m": (64, {}),
    "volo_d1_224": (64, {"img_size": 64}),
    "hiera_tiny_224": (64, {"img_size": 64}),
    "gcvit_xxtiny": (64, {"img_size": 64}),
    "rexnet_100": (64, {}),
    "dla34": (64, {}),
}


def _timm(name: str, options: Mapping[str, Any]) -> nn.Module:
    made: nn.Module = package("timm").create_model(name, pretrained=False, num_classes=10, **options)
    return made


_TORCHVISION = (
    "resnet18",
    "mobilenet_v2",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "mnasnet0_5",
    "regnet_y_400mf",
    "swin_t",
    "efficientnet_b0",
    "densenet121",
    "convnext_tiny",
)


def _torchvision(name: str) -> nn.Module:
    made: nn.Module = getattr(package("torchvision.models"), name)(weights=None, num_classes=10)
    return made


_SEGMENTING = ("lraspp_mobilenet_v3_large", "fcn_resnet50", "deeplabv3_mobilenet_v3_large")


def _segmenting(name: str) -> nn.Module:
    made: nn.Module = getattr(package("torchvision.models.segmentation"), name)(
        weights=None, weights_backbone=None, num_classes=4
    )
    return made


def _of_pixels(net: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch["x"])["out"], batch["y"])


def _detecting() -> nn.Module:
    backbone = package("torchvision.models.detection.backbone_utils").resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=5
    )
    head = package("torchvision.models.detection.fcos").FCOSHead(backbone.out_channels, 1, 4, num_convs=1)
    made: nn.Module = package("torchvision.models.detection").FCOS(
        backbone, num_classes=4, min_size=64, max_size=64, head=head
    )
    return made


def _with_boxes(seed: int) -> Batch:
    draw = drawn(seed)
    corners = torch.rand(2, 3, 2, generator=draw) * 20
    return {
        "images": torch.rand(2, 3, 64, 64, generator=draw),
        "boxes": torch.cat([corners, corners + 20], 2),
        "labels": torch.randint(1, 4, (2, 3), generator=draw),
    }


def _of_boxes(net: nn.Module, batch: Batch) -> Tensor:
    targets = [
        {"boxes": boxes, "labels": labels}
        for boxes, labels in zip(batch["boxes"], batch["labels"], strict=True)
    ]
    losses: dict[str, Tensor] = net(list(batch["images"]), targets)
    return torch.stack(list(losses.values())).sum()


def _diffusers(name: str, options: Mapping[str, Any]) -> nn.Module:
    made: nn.Module = getattr(package("diffusers"), name)(**options)
    return made


def _noised(seed: int) -> Batch:
    draw = drawn(seed)
    return {
        "sample": torch.randn(2, 4, 16, 16, generator=draw),
        "timestep": torch.randint(0, 1000, (2,), generator=draw),
    }


def _prompted(seed: int) -> Batch:
    return {**_noised(seed), "encoder_hidden_states": torch.randn(2, 8, 32, generator=drawn(seed + 9))}


def _classed(seed: int) -> Batch:
    draw = drawn(seed)
    return {
        "hidden_states": torch.randn(2, 4, 16, 16, generator=draw),
        "timestep": torch.randint(0, 1000, (2,), generator=draw),
        "class_labels": torch.randint(0, 20, (2,), generator=draw),
    }


def _picture(seed: int) -> Batch:
    return {"sample": torch.randn(2, 3, 32, 32, generator=drawn(seed))}


def _diffusion() -> Iterator[Case]:
    groups = {"norm_num_groups": 8, "block_out_channels": (16, 32)}
    unet = {**groups, "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1}
    crossed = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
    }
    attended = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    coder = {
        **groups,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4,
    }
    dit = {
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 2,
        "sample_size": 16,
        "patch_size": 2,
        "norm_num_groups": 4,
        "num_embeds_ada_norm": 20,
    }
    table: Mapping[str, tuple[Mapping[str, Any], Batches]] = {
        "UNet2DConditionModel": ({**unet, **crossed}, _prompted),
        "UNet2DModel": ({**unet, **attended}, _noised),
        "DiTTransformer2DModel": (dit, _classed),
        "AutoencoderKL": (coder, _picture),
        "VQModel": ({**coder, "num_vq_embeddings": 16}, _picture),
        "AutoencoderTiny": (
            {
                "encoder_block_out_channels": (16, 16),
                "decoder_block_out_channels": (16, 16),
                "num_encoder_blocks": (1, 1),
                "num_decoder_blocks": (1, 1),
            },
            lambda seed: {"sample": torch.rand(2, 3, 32, 32, generator=drawn(seed))},
        ),
    }
    for name, (options, batches) in table.items():
        yield Case("diffusers", name, partial(_diffusers, name, options), batches, squared)


def _volumes(seed: int) -> Batch:
    draw = drawn(seed)
    return {
        "x": torch.randn(1, 1, 32, 32, 32, generator=draw),
        "y": torch.randint(0, 2, (1, 1, 32, 32, 32), generator=draw),
    }


def _slices(seed: int) -> Batch:
    draw = drawn(seed)
    return {
        "x": torch.randn(2, 1, 64, 64, generator=draw),
        "y": torch.randint(0, 2, (2, 1, 64, 64), generator=draw),
    }


def _dice(net: nn.Module, batch: Batch) -> Tensor:
    found = net(batch["x"])
    output = found[0] if isinstance(found, (tuple, list)) else found
    loss: Tensor = package("monai.losses").DiceCELoss(to_onehot_y=True, softmax=True)(output, batch["y"])
    return loss


def _monai() -> Iterator[Case]:
    table: Mapping[str, Mapping[str, Any]] = {
        "UNet": {
            "spatial_dims": 3,
            "in_channels": 1,
            "out_channels": 2,
            "channels": (8, 16, 32),
            "strides": (2, 2),
            "num_res_units": 1,
        },
        "BasicUNet": {
            "spatial_dims": 3,
            "in_channels": 1,
            "out_channels": 2,
            "features": (8, 8, 16, 16, 32, 8),
        },
        "SegResNet": {
            "spatial_dims": 3,
            "init_filters": 8,
            "in_channels": 1,
            "out_channels": 2,
            "dropout_prob": 0.1,
            "blocks_down": (1, 1),
            "blocks_up": (1,),
        },
        "UNETR": {
            "in_channels": 1,
            "out_channels": 2,
            "img_size": (32, 32, 32),
            "feature_size": 8,
            "hidden_size": 24,
            "mlp_dim": 48,
            "num_heads": 4,
        },
        "DynUNet": {
            "spatial_dims": 3,
            "in_channels": 1,
            "out_channels": 2,
            "kernel_size": [3, 3, 3],
            "strides": [1, 2, 2],
            "upsample_kernel_size": [2, 2],
            "filters": [8, 16, 32],
        },
        "AttentionUnet": {
            "spatial_dims": 3,
            "in_channels": 1,
            "out_channels": 2,
            "channels": (8, 16, 32),
            "strides": (2, 2),
        },
        "VNet": {"spatial_dims": 3, "in_channels": 1, "out_channels": 2},
        "SwinUNETR": {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "feature_size": 12,
            "depths": (1, 1, 1, 1),
        },
    }
    for name, options in table.items():
        batches = _slices if options.get("spatial_dims") == 2 else _volumes
        yield Case("monai", name, partial(_made, "monai.networks.nets", name, options), batches, _dice)


def _made(module: str, name: str, options: Mapping[str, Any]) -> nn.Module:
    made: nn.Module = getattr(package(module), name)(**options)
    return made


def _segmentation() -> Iterator[Case]:
    for name, encoder in (
        ("Unet", "resnet18"),
        ("UnetPlusPlus", "resnet18"),
        ("DeepLabV3Plus", "mobilenet_v2"),
        ("FPN", "mobilenet_v2"),
        ("PSPNet", "resnet18"),
        ("MAnet", "resnet18"),
        ("Linknet", "resnet18"),
        ("PAN", "resnet18"),
    ):
        options = {"encoder_name": encoder, "encoder_weights": None, "classes": 4}
        make = partial(_made, "segmentation_models_pytorch", name, options)
        size = 128 if name == "PAN" else 64  # it pools three times more
        yield Case("segmentation_models_pytorch", name, make, images(2, size, 4, dense=True), classified)


def _graph(seed: int) -> Batch:
    draw = drawn(seed)
    ends = torch.randint(0, 100, (2, 400), generator=draw)
    ends[1] = (ends[0] + 1 + ends[1] % 99) % 100  # no node is its own neighbour
    return {
        "x": torch.randn(100, 16, generator=draw),
        "edges": ends,
        "y": torch.randint(0, 5, (100,), generator=draw),
    }


def _on_graph(net: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch["x"], batch["edges"]), batch["y"])


def _graphs() -> Iterator[Case]:
    for name in ("GCN", "GraphSAGE", "GAT", "GIN", "EdgeCNN", "PNA"):
        options = {"in_channels": 16, "hidden_channels": 16, "num_layers": 2, "out_channels": 5}
        more = (
            {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.arange(1, 9)}
            if name == "PNA"
            else {}
        )
        make = partial(_made, "torch_geometric.nn", name, {**options, **more})
        yield Case("torch_geometric", name, make, _graph, _on_graph)


class Recommender(nn.Module):
    """Embedding bags and their products, as in DLRM."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum", sparse=sparse) for _ in range(4))
        self.bottom, self.top = nn.Linear(6, 8), nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, :4].abs() * 10).long() % 50
        parts = [self.bottom(x), *(bag(ids[:, n : n + 1]) for n, bag in enumerate(self.bags))]
        rows = torch.stack(parts, 1)
        products = rows @ rows.transpose(1, 2)
        upper = torch.triu_indices(5, 5, 1)
        logits: Tensor = self.top(torch.cat([parts[0], products[:, upper[0], upper[1]]], 1))
        return logits


class Points(nn.Module):
    """A point cloud: a network for each point, then the maximum, as in PointNet."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.local(x).amax(2))
        return logits


class Neighbours(nn.Module):
    """A point cloud as a graph of the nearest neighbours, as in DGCNN."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.Sequential(nn.Conv2d(6, 16, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        points = x.transpose(1, 2)
        near = torch.cdist(points, points).topk(8, largest=False).indices
        rows = torch.arange(len(x))[:, None, None]
        apart = points[rows, near] - points[:, :, None]
        edges = torch.cat([apart, points[:, :, None].expand_as(apart)], 3).permute(0, 3, 1, 2)
        logits: Tensor = self.head(self.edges(edges).amax(3).mean(2))
        return logits


class Waves(nn.Module):
    """Dilated gated convolutions over a wave, as in WaveNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 8, 1), nn.Linear(8, 5)
        self.layers = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**n, padding=2**n) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x[:, None])
        for layer in self.layers:
            gate, value = layer(h)[..., : h.shape[-1]].chunk(2, 1)
            h = h + gate.sigmoid() * value.tanh()
        logits: Tensor = self.last(h.mean(2))
        return logits


class Recurrent(nn.Module):
    """A recurrent network over a sequence."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(8, 16, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(x)[0][:, -1])
        return logits


class Sound(nn.Module):
    """A spectrogram and convolutions over it."""

    def __init__(self) -> None:
        super().__init__()
        self.window = nn.Buffer(torch.hann_window(64))
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 64, 32, window=self.window, return_complex=True).abs().log1p()
        logits: Tensor = self.net(spectrum[:, None])
        return logits


class Normed(nn.Module):
    """Parametrized weights: weight norm or spectral norm."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        wrap = getattr(nn.utils.parametrizations, f"{kind}_norm" if kind != "orthogonal" else kind)
        self.net = nn.Sequential(wrap(nn.Linear(8, 16)), nn.ReLU(), wrap(nn.Linear(16, 5)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits


def _vectors(*shape: int) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        draw = drawn(seed)
        return {"x": torch.randn(*shape, generator=draw), "y": torch.randint(0, 2, shape[:1], generator=draw)}

    return batch


def _written() -> Iterator[Case]:
    yield Case("torch", "recommender", Recommender, _vectors(16, 6), classified)
    yield Case("torch", "recommender, sparse", partial(Recommender, sparse=True), _vectors(16, 6), classified)
    yield Case("torch", "point cloud", Points, _vectors(4, 3, 64), classified)
    yield Case("torch", "point cloud, neighbours", Neighbours, _vectors(2, 3, 32), classified)
    yield Case("torch", "waves", Waves, _vectors(4, 256), classified)
    yield Case("torch", "spectrogram", Sound, _vectors(4, 1024), classified)
    for kind in ("RNN", "GRU", "LSTM"):
        yield Case("torch", kind, partial(Recurrent, kind), _vectors(4, 12, 8), classified)
    for kind in ("weight", "spectral", "orthogonal"):
        yield Case("torch", f"{kind} norm", partial(Normed, kind), _vectors(8, 8), classified)
    layer = partial(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True)
    yield Case(
        "torch",
        "transformer encoder",
        layer,
        lambda seed: {"src": torch.randn(4, 12, 8, generator=drawn(seed))},
        squared,
    )


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _written()
    for name, (size, options) in _TIMM.items():
        yield Case("timm", name, partial(_timm, name, options), images(2, size), classified)
    for name in _TORCHVISION:
        yield Case("torchvision", name, partial(_torchvision, name), images(2, 64), classified)
    for name in _SEGMENTING:
        make = partial(_segmenting, name)
        yield Case("torchvision", name, make, images(2, 64, 4, dense=True), _of_pixels)
    yield Case("torchvision", "FCOS", _detecting, _with_boxes, _of_boxes)
    yield from _diffusion()
    yield from _monai()
    yield from _segmentation()
    yield from _graphs()
