"""The networks that stowplan is tested and measured on, by name. All are built from code."""

from collections.abc import Mapping

from tests.support.nets import (
    densenet,
    diffusion,
    efficientnet,
    gpt,
    huggingface,
    llama,
    lstm,
    moe,
    resnet,
    ssm,
    swin,
    t5,
    unet,
    unet3d,
    vgg,
    vit,
)
from tests.support.nets.net import Example, Net, Settings, Size, Supervised

__all__ = ["NETS", "Example", "Net", "Settings", "Size", "Supervised"]

NETS: Mapping[str, Net] = {
    net.name: net
    for net in (
        unet.NET,
        unet3d.NET,
        resnet.NET,
        efficientnet.NET,
        densenet.NET,
        vgg.NET,
        vit.NET,
        swin.NET,
        gpt.NET,
        llama.NET,
        t5.NET,
        moe.NET,
        lstm.NET,
        ssm.NET,
        diffusion.NET,
        huggingface.GPT2,
        huggingface.LLAMA,
        huggingface.T5,
        huggingface.VIT,
    )
}
