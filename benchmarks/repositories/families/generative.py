"""Diffusion, adversarial networks, autoencoders and fields."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from benchmarks.repositories.families.data import batches, numbers, pixels, words
from benchmarks.repositories.sources import definitions, source
from benchmarks.repositories.training import Networks, Training, drawn, entry, one


@entry(
    "lucidrains/denoising-diffusion-pytorch",
    "faed4db28e724735323fa91c70aa9b28a6e1cbac",
    "Unet, GaussianDiffusion",
    absent=("torchvision", "pytorch_fid"),
)
def denoising_diffusion(_: Path) -> Training:
    code = source("denoising_diffusion_pytorch.denoising_diffusion_pytorch")
    net = code.GaussianDiffusion(
        code.Unet(dim=16, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=20
    )
    return one(net, batches(pixels(2, 3, 16, 16)))


@entry(
    "facebookresearch/DiT",
    "ed81ce2229091fd4ecc9a223645f95cf379d582b",
    "DiT, training_losses",
    absent=("torchvision",),
    folders=(".", "../huggingface+pytorch-image-models"),
)
def dit(_: Path) -> Training:
    net = source("models").DiT(
        input_size=8, patch_size=2, hidden_size=48, depth=2, num_heads=4, num_classes=10
    )
    diffusion = source("diffusion").create_diffusion(timestep_respacing="")
    return one(
        net,
        batches(numbers(2, 4, 8, 8), words(1000, 2), words(10, 2)),
        lambda net, x, t, y: diffusion.training_losses(net, x, t, {"y": y})["loss"].mean(),
    )


@entry(
    "openai/guided-diffusion",
    "22e0df8183507e13a7813f8d38d51b072ca1e67c",
    "UNetModel, SpacedDiffusion.training_losses",
    absent=("mpi4py", "blobfile"),
)
def guided_diffusion(_: Path) -> Training:
    code = source("guided_diffusion.script_util")
    options = code.model_and_diffusion_defaults()
    options |= {
        "image_size": 32,
        "num_channels": 32,
        "num_res_blocks": 1,
        "channel_mult": "1,2",
        "attention_resolutions": "16",
        "learn_sigma": True,
        "num_heads": 2,
        "dropout": 0.1,
    }
    net, diffusion = code.create_model_and_diffusion(**options)
    return one(
        net,
        batches(numbers(2, 3, 16, 16), words(1000, 2)),
        lambda net, x, t: diffusion.training_losses(net, x, t)["loss"].mean(),
    )


@entry("NVlabs/edm", "008a4e5316c8e3bfe61a62f874bddba254295afb", "EDMPrecond over SongUNet, EDMLoss")
def edm(_: Path) -> Training:
    net = source("training.networks").EDMPrecond(
        16,
        3,
        label_dim=4,
        model_type="SongUNet",
        model_channels=16,
        channel_mult=[1, 2],
        num_blocks=1,
        attn_resolutions=[8],
        dropout=0.1,
    )
    criterion = source("training.loss").EDMLoss()
    return one(
        net,
        batches(numbers(2, 3, 16, 16), lambda draw: F.one_hot(words(4, 2)(draw), 4).float()),
        lambda net, x, y: criterion(net, x, y).mean(),
    )


@entry(
    "pytorch/examples",
    "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "vae: VAE, loss_function",
    absent=("torchvision",),
    name="examples, vae",
)
def vae(checkout: Path) -> Training:
    code = definitions(checkout / "vae" / "main.py")
    return one(
        code.VAE(),
        batches(pixels(16, 1, 28, 28)),
        lambda net, x: code.loss_function(*_before(net(x), x)),
        optimizer=lambda p: Adam(p, 1e-3),
    )


def _before(found: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
    return found[0], x, *found[1:]


@entry(
    "CompVis/taming-transformers",
    "3ba01b241669f5ade541ce990f7650a3b8f65318",
    "VQModel; VQLPIPSWithDiscriminator without LPIPS; the adaptive weight differentiates with retain_graph",
    absent=("pytorch_lightning", "torchvision"),
    name="taming-transformers",
)
def taming(_: Path) -> Training:
    return _taming(adaptive=True)


@entry(
    "CompVis/taming-transformers",
    "3ba01b241669f5ade541ce990f7650a3b8f65318",
    "VQModel, its loss without the discriminator's part",
    absent=("pytorch_lightning", "torchvision"),
    name="taming-transformers, fixed weight",
    change="the weight of the discriminator is a number",
)
def taming_fixed(_: Path) -> Training:
    return _taming(adaptive=False)


def _taming(*, adaptive: bool) -> Training:
    blocks, quantizer = (
        source("taming.modules.diffusionmodules.model"),
        source("taming.modules.vqvae.quantize"),
    )
    discriminator = source("taming.modules.discriminator.model").NLayerDiscriminator(3, ndf=8, n_layers=1)
    options = {
        "ch": 32,
        "out_ch": 3,
        "ch_mult": (1, 2),
        "num_res_blocks": 1,
        "attn_resolutions": [8],
        "in_channels": 3,
        "resolution": 16,
        "z_channels": 16,
        "dropout": 0.0,
        "double_z": False,
    }

    class Model(nn.Module):
        """`VQModel.encode`, `decode` and `forward`, whose class needs Lightning of 2020."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = blocks.Encoder(**options), blocks.Decoder(**options)
            self.quantize = quantizer.VectorQuantizer2(32, 16, beta=0.25)
            self.quant_conv, self.post_quant_conv = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

        def forward(self, x: Tensor) -> Any:
            quant, loss, _ = self.quantize(self.quant_conv(self.encoder(x)))
            return self.decoder(self.post_quant_conv(quant)), loss

    net = Model()

    def iteration(networks: Networks, optimizers: Sequence[Optimizer], seed: int) -> list[Tensor]:
        x = numbers(2, 3, 16, 16)(drawn(seed))
        found, codes = networks["model"](x)
        nll, fake = (x - found).abs().mean(), -networks["discriminator"](found).mean()
        weight = torch.tensor(0.8)
        if adaptive:
            last = net.decoder.conv_out.weight
            one = torch.autograd.grad(nll, last, retain_graph=True)[0]
            other = torch.autograd.grad(fake, last, retain_graph=True)[0]
            weight = (one.norm() / (other.norm() + 1e-4)).clamp(0.0, 1e4).detach() * 0.8
        loss = nll + weight * fake + codes.mean()
        optimizers[1].zero_grad()
        torch.autograd.backward(loss)
        optimizers[0].step()
        optimizers[1].zero_grad()
        real = networks["discriminator"](x).mean()
        other_loss = F.relu(1 - real) + F.relu(1 + networks["discriminator"](found.detach()).mean())
        torch.autograd.backward(other_loss)
        optimizers[1].step()
        return [loss, other_loss]

    return Training(
        {"model": net.train(), "discriminator": discriminator.train()},
        {"model": batches(numbers(2, 3, 16, 16))(drawn(0))},
        lambda networks: [Adam(networks[name].parameters(), 1e-4, (0.5, 0.9)) for name in networks],
        iteration,
        outputs="all",
    )


def _adversarial(
    generator: nn.Module, discriminator: nn.Module, noise: tuple[int, ...], image: tuple[int, ...]
) -> Training:
    """The loop of pytorch/examples' dcgan: real, fake, then the generator."""
    criterion = nn.BCELoss()

    def iteration(networks: Networks, optimizers: Sequence[Optimizer], seed: int) -> list[Tensor]:
        draw = drawn(seed)
        real, z = numbers(*image)(draw), numbers(*noise)(draw)
        ones, zeros = torch.ones(image[0]), torch.zeros(image[0])
        net, judge = networks["generator"], networks["discriminator"]
        optimizers[1].zero_grad()
        real_loss = criterion(judge(real).view(-1), ones)
        torch.autograd.backward(real_loss)
        fake = net(z)
        fake_loss = criterion(judge(fake.detach()).view(-1), zeros)
        torch.autograd.backward(fake_loss)
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = criterion(judge(fake).view(-1), ones)
        torch.autograd.backward(loss)
        optimizers[0].step()
        return [real_loss, fake_loss, loss]

    return Training(
        {"generator": generator.train(), "discriminator": discriminator.train()},
        {"generator": batches(numbers(*noise))(drawn(0)), "discriminator": (torch.randn(image),)},
        lambda networks: [Adam(networks[name].parameters(), 2e-4, (0.5, 0.999)) for name in networks],
        iteration,
        outputs="all",
    )


@entry(
    "pytorch/examples",
    "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "dcgan: Generator, Discriminator, the loop; each fitted",
    absent=("torchvision",),
    name="examples, dcgan",
)
def dcgan(checkout: Path) -> Training:
    code = definitions(checkout / "dcgan" / "main.py", nz=8, ngf=4, ndf=4, nc=3)
    generator, discriminator = code.Generator(1), code.Discriminator(1)
    generator.apply(code.weights_init), discriminator.apply(code.weights_init)
    return _adversarial(generator, discriminator, (4, 8, 1, 1), (4, 3, 64, 64))


_OPTIONS = SimpleNamespace(latent_dim=16, img_size=16, channels=1, n_critic=1)


@entry(
    "eriklindernoren/PyTorch-GAN",
    "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "dcgan: Generator, Discriminator, the loop; each fitted",
    absent=("torchvision",),
    name="PyTorch-GAN, dcgan",
)
def gan(checkout: Path) -> Training:
    code = definitions(checkout / "implementations" / "dcgan" / "dcgan.py", opt=_OPTIONS)
    return _adversarial(code.Generator(), code.Discriminator(), (4, 16), (4, 1, 16, 16))


@entry(
    "eriklindernoren/PyTorch-GAN",
    "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "wgan_gp: compute_gradient_penalty; the generator is fitted",
    absent=("torchvision",),
    name="PyTorch-GAN, wgan_gp, the generator alone",
    change="the critic, which is differentiated twice, is not fitted",
)
def wgan_generator(checkout: Path) -> Training:
    return _wgan(checkout, ("generator",))


@entry(
    "eriklindernoren/PyTorch-GAN",
    "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "wgan_gp: compute_gradient_penalty; generator and critic are fitted",
    absent=("torchvision",),
    name="PyTorch-GAN, wgan_gp",
)
def wgan(checkout: Path) -> Training:
    return _wgan(checkout, ("generator", "discriminator"))


def _wgan(checkout: Path, fitted: tuple[str, ...]) -> Training:
    options = {"opt": _OPTIONS, "img_shape": (1, 16, 16), "Tensor": torch.FloatTensor, "lambda_gp": 10}
    code = definitions(checkout / "implementations" / "wgan_gp" / "wgan_gp.py", **options)

    def iteration(networks: Networks, optimizers: Sequence[Optimizer], seed: int) -> list[Tensor]:
        draw = drawn(seed)
        real, z = numbers(4, 1, 16, 16)(draw), numbers(4, 16)(draw)
        net, critic = networks["generator"], networks["discriminator"]
        optimizers[1].zero_grad()
        fake = net(z)
        penalty = code.compute_gradient_penalty(critic, real, fake.data)
        loss = -critic(real).mean() + critic(fake).mean() + 10 * penalty
        torch.autograd.backward(loss)
        optimizers[1].step()
        optimizers[0].zero_grad()
        other = -critic(net(z)).mean()
        torch.autograd.backward(other)
        optimizers[0].step()
        return [loss, other]

    arguments = {"generator": (torch.randn(4, 16),), "discriminator": (torch.randn(4, 1, 16, 16),)}
    return Training(
        {"generator": code.Generator().train(), "discriminator": code.Discriminator().train()},
        {name: arguments[name] for name in fitted},
        lambda networks: [Adam(networks[name].parameters(), 2e-4, (0.5, 0.999)) for name in networks],
        iteration,
        outputs="all",
    )


@entry(
    "aitorzip/PyTorch-CycleGAN",
    "67da8f9e2b69bd68763451803c7700aaccc92f18",
    "Generator, Discriminator; the generators' step is one module",
    name="PyTorch-CycleGAN",
)
def cyclegan(_: Path) -> Training:
    code = source("models")

    class Generators(nn.Module):
        """What `train` does between zero_grad and backward of the generators."""

        def __init__(self) -> None:
            super().__init__()
            self.a2b, self.b2a = (
                code.Generator(3, 3, n_residual_blocks=1),
                code.Generator(3, 3, n_residual_blocks=1),
            )
            self.a, self.b = code.Discriminator(3), code.Discriminator(3)
            self.a.requires_grad_(False), self.b.requires_grad_(False)

        def forward(self, real_a: Tensor, real_b: Tensor) -> Tensor:
            ones = torch.ones(real_a.shape[0], 1)
            identity = F.l1_loss(self.a2b(real_b), real_b) * 5 + F.l1_loss(self.b2a(real_a), real_a) * 5
            fake_b, fake_a = self.a2b(real_a), self.b2a(real_b)
            fooled = F.mse_loss(self.b(fake_b), ones) + F.mse_loss(self.a(fake_a), ones)
            cycle = F.l1_loss(self.b2a(fake_b), real_a) * 10 + F.l1_loss(self.a2b(fake_a), real_b) * 10
            return identity + fooled + cycle

    return one(
        Generators(),
        batches(numbers(1, 3, 32, 32), numbers(1, 3, 32, 32)),
        optimizer=lambda p: Adam(p, 2e-4, (0.5, 0.999)),
    )


@entry(
    "NVlabs/stylegan2-ada-pytorch",
    "d72cc7d041b42ec8e806021a205ed9349f87c6a4",
    "Generator, the loss of Gmain; the discriminator is frozen",
    name="stylegan2-ada-pytorch",
)
def stylegan(_: Path) -> Training:
    code = source("training.networks")
    options = {"channel_base": 256, "channel_max": 16, "num_fp16_res": 0}
    generator = code.Generator(16, 0, 16, 16, 3, mapping_kwargs={"num_layers": 2}, synthesis_kwargs=options)
    judge = code.Discriminator(0, 16, 3, **options).requires_grad_(False)

    class Generating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mapping, self.synthesis, self.judge = generator.mapping, generator.synthesis, judge

        def forward(self, z: Tensor) -> Tensor:
            ws = self.mapping(z, torch.zeros(z.shape[0], 0))
            return F.softplus(-self.judge(self.synthesis(ws), torch.zeros(z.shape[0], 0))).mean()

    return one(Generating(), batches(numbers(4, 16)), optimizer=lambda p: Adam(p, 2e-3, (0.0, 0.99)))


@entry(
    "lucidrains/vector-quantize-pytorch",
    "0d7d1aa83334b6f2f8a40306bece75cdaa13d065",
    "examples/autoencoder.py: SimpleVQAutoEncoder",
    absent=("torchvision", "fire"),
)
def vector_quantize(checkout: Path) -> Training:
    code = definitions(checkout / "examples" / "autoencoder.py")
    net = code.SimpleVQAutoEncoder(codebook_size=32, rotation_trick=True, straight_through=False)

    def loss(net: Any, x: Tensor) -> Any:
        out, _, commitment = net(x)
        return (out.clamp(-1, 1) - x).abs().mean() + 10 * commitment.mean()

    return one(net, batches(numbers(4, 1, 16, 16)), loss)


@entry(
    "yenchenlin/nerf-pytorch",
    "63a5a630c9abd62b0f21c08703d0ac2ea7d4b9dd",
    "NeRF, get_embedder, raw2outputs",
    absent=("imageio", "matplotlib", "load_llff", "load_deepvoxels", "load_blender", "load_LINEMOD", "tqdm"),
)
def nerf(checkout: Path) -> Training:
    helpers = source("run_nerf_helpers")
    code = definitions(checkout / "run_nerf.py", DEBUG=False, device=torch.device("cpu"))
    embed, width = helpers.get_embedder(4, 0)
    view, view_width = helpers.get_embedder(2, 0)
    net = helpers.NeRF(
        D=4, W=32, input_ch=width, output_ch=4, skips=[2], input_ch_views=view_width, use_viewdirs=True
    )

    def loss(net: Any, origins: Tensor, directions: Tensor, target: Tensor) -> Any:
        depths = torch.linspace(2, 6, 12).expand(origins.shape[0], 12)
        points = origins[:, None] + directions[:, None] * depths[..., None]
        raw = code.run_network(points, F.normalize(directions, dim=-1), net, embed, view, netchunk=1024)
        rgb = code.raw2outputs(raw, depths, directions, raw_noise_std=1.0, white_bkgd=True)[0]
        return helpers.img2mse(rgb, target)

    return one(
        net, batches(numbers(32, 3), numbers(32, 3), pixels(32, 3)), loss, optimizer=lambda p: Adam(p, 5e-4)
    )


@entry("xinntao/ESRGAN", "73e9b634cf987f5996ac2dd33f4050922398a921", "RRDBNet, L1", name="ESRGAN")
def esrgan(_: Path) -> Training:
    net = source("RRDBNet_arch").RRDBNet(3, 3, 16, 2, gc=8)
    return one(
        net, batches(pixels(1, 3, 12, 12), pixels(1, 3, 48, 48)), lambda net, x, y: F.l1_loss(net(x), y)
    )
