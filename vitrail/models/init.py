"""Weight initialization: those of the DeiT family, of ViT, of BEiT and of ResNet, Fixup and T-Fixup."""

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from vitrail.layers.attention import Attention
from vitrail.layers.bit_resnet import ResNetStem
from vitrail.layers.convnet import ConvBlock
from vitrail.layers.mlp import FeedForward
from vitrail.layers.patch_embed import LinearStem
from vitrail.layers.pooling import ClassAttention
from vitrail.layers.token_mixers import ConvMixer, PatchConv, SqueezeExcite

if TYPE_CHECKING:
    from vitrail.models.vision_transformer import VisionTransformer


def init_weights(model: "VisionTransformer") -> None:
    """Initialize all linear layers and prefix tokens as `architecture.weight_init` and `architecture.residual` say.

    Convolutions keep torch's default, as in the code of the DeiT family, except with "beit" and "resnet".
    """
    a = model.architecture
    pointwise = pointwise_convolutions(model)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in pointwise:
            # Not cut at 2 standard deviations but at +-2, as in the authors' code: in effect a normal distribution.
            if a.weight_init == "vit" and module is not model.head:
                nn.init.xavier_uniform_(module.weight)
            elif a.weight_init == "beit":
                init_beit_normal(module.weight)
            else:
                nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if model.prefix is not None:
        nn.init.zeros_(model.prefix) if a.weight_init == "vit" else nn.init.trunc_normal_(model.prefix, std=0.02)
    if a.weight_init == "vit":
        init_vit(model)
    if a.weight_init == "beit":
        init_beit(model)
    if a.weight_init == "resnet":
        init_resnet(model)
    if a.residual == "fixup":
        init_fixup(model)
    if a.residual == "tfixup":
        init_tfixup(model)


def pointwise_convolutions(model: "VisionTransformer") -> set[nn.Module]:
    """Linear layers on tokens that are 1x1 convolutions in the authors' code; torch initializes both in the same way."""
    mixers = (module for module in model.modules() if isinstance(module, (PatchConv, SqueezeExcite, ConvMixer)))
    return {layer for mixer in mixers for layer in mixer.children() if isinstance(layer, nn.Linear)}


def init_vit(model: "VisionTransformer") -> None:
    """Google's code: LeCun-normal stem and pre-logits, MLP biases of 1e-6, zero classifier.

    Query, key and value are initialized separately.
    """
    for module in model.modules():
        if isinstance(module, FeedForward):
            nn.init.normal_(module.fc1.bias, std=1e-6)
            nn.init.normal_(module.fc2.bias, std=1e-6)
        if isinstance(module, Attention):
            for part in module.qkv.weight.data.chunk(3):
                nn.init.xavier_uniform_(part)
    stem = model.stem.modules() if isinstance(model.stem, (LinearStem, ResNetStem)) else ()
    for layer in (*stem, *model.pre_logits.modules()):
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            init_lecun_normal(layer)
    if isinstance(model.head, nn.Linear):
        nn.init.zeros_(model.head.weight)


def init_lecun_normal(layer: nn.Conv2d | nn.Linear) -> None:
    """Weights with the standard deviation fan_in^(-1/2) from a normal distribution cut at 2 of its own; zero bias."""
    # A standard normal distribution cut at +-2 has a standard deviation of 0.8796.
    std = math.sqrt(1 / layer.weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def init_beit_normal(weight: Tensor) -> None:
    """BEiT's distribution: a normal one of standard deviation 0.02, cut at one standard deviation."""
    nn.init.trunc_normal_(weight, std=0.02, a=-0.02, b=0.02)


def init_beit(model: "VisionTransformer") -> None:
    """BEiT's code: the last layers of block l, counted from 1, are divided by sqrt(2 l); convolutions are as linear layers."""
    for number, block in enumerate(model.blocks, 1):
        for _, last in branch_layers(block):
            last.weight.data.div_(math.sqrt(2.0 * number))
    for layer in model.stem.modules():
        if isinstance(layer, nn.Conv2d):
            init_beit_normal(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    if model.prefix is not None:
        init_beit_normal(model.prefix)


def init_resnet(model: "VisionTransformer") -> None:
    """He's normal distribution of convolutions by their outputs; zero for the last norm of every branch (arXiv 1706.02677)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ConvBlock):
            nn.init.zeros_(module.last_norm.weight)
    if isinstance(model.head, nn.Linear):
        nn.init.normal_(model.head.weight, std=0.01)


def branch_layers(blocks: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    """The first and the last linear layer of every attention and MLP of one or more blocks."""
    pairs = []
    for module in blocks.modules():
        if isinstance(module, Attention):
            pairs.append((module.qkv, module.proj))
        elif isinstance(module, FeedForward):
            pairs.append((module.fc1, module.fc2))
    return pairs


def init_fixup(model: "VisionTransformer") -> None:
    """Fixup with two layers per branch: the first is scaled by branches^(-1/2), the last is zero."""
    pairs = branch_layers(model.blocks)
    for first, last in pairs:
        first.weight.data.mul_(len(pairs) ** -0.5)
        nn.init.zeros_(last.weight)


def init_tfixup(model: "VisionTransformer") -> None:
    """T-Fixup of an encoder: Xavier weights; values, output projections and MLPs are scaled by 0.67 depth^(-1/4)."""
    factor = 0.67 * max(model.architecture.depth, 1) ** -0.25
    for module in model.modules():
        if isinstance(module, Attention):
            for part in module.qkv.weight.data.chunk(3):
                nn.init.xavier_uniform_(part)
            module.qkv.weight.data.chunk(3)[2].mul_(factor)
            nn.init.xavier_uniform_(module.proj.weight).data.mul_(factor)
        elif isinstance(module, FeedForward):
            nn.init.xavier_uniform_(module.fc1.weight).data.mul_(factor)
            nn.init.xavier_uniform_(module.fc2.weight).data.mul_(factor)
        elif isinstance(module, ClassAttention):
            nn.init.xavier_uniform_(module.v.weight).data.mul_(factor)
            nn.init.xavier_uniform_(module.proj.weight).data.mul_(factor)
