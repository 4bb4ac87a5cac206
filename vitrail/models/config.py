"""`Architecture`: stem, token mixer, branches, residual scale, position embedding, prefix tokens and pooling as plain data."""

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any

from vitrail.aliases import upgrade_architecture
from vitrail.errors import UserError
from vitrail.layers.attention import ATTENTION
from vitrail.layers.convnet import ConvNetConfig
from vitrail.layers.layer_scale import SCALES
from vitrail.layers.norm import ACTIVATIONS, MAP_NORMS, TOKEN_NORMS
from vitrail.layers.patch_embed import STEMS, basic_strides, hmlp_strides
from vitrail.layers.pooling import POOLINGS
from vitrail.layers.pos_embed import ABSOLUTE, POS_EMBEDS, RELATIVE, RESAMPLE
from vitrail.layers.token_mixers import MIXERS, SPATIAL

FUSIONS = ("logit_mean", "softmax_sum", "class", "distillation")
CHOICES: dict[str, tuple[str, ...]] = {
    "stem": STEMS,
    "stem_norm": MAP_NORMS,
    "stem_activation": ACTIVATIONS,
    "mixer": MIXERS,
    "activation": ACTIVATIONS,
    "norm": TOKEN_NORMS,
    "norm_place": ("pre", "post"),
    "residual": SCALES,
    "layerscale_init_mode": ("constant", "zero", "uniform"),
    "drop_path_schedule": ("uniform", "linear"),
    "drop_path_kind": ("each", "skip"),
    "pos_embed": POS_EMBEDS,
    "pos_embed_place": ("stem", "layers", "shared"),
    "pos_embed_resample": RESAMPLE,
    "pooling": POOLINGS,
    "pooling_keys": ("all", "patches"),
    "fusion": FUSIONS,
    "weight_init": ("deit", "vit", "beit", "resnet"),
}
# Fields that matter in training or initialization only.
TRAINING_ONLY = {
    "layerscale_init",
    "layerscale_init_mode",
    "layerscale_frozen",
    "drop_path",
    "drop_path_schedule",
    "drop_path_kind",
    "dropout",
    "attention_dropout",
    "weight_init",
}


STEM_DEFAULTS = {  # norm and activation
    "conv": ("batch", "gelu"),
    "hmlp": ("batch", "gelu"),
    "tower": ("batch", "relu"),
    "basic": ("batch", "relu"),
}


@dataclass(frozen=True)
class Architecture:
    """All that defines a `VisionTransformer`. The defaults are a ViT-B/16."""

    # size
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_ratio: float = 4.0  # 0: blocks without an MLP
    branches: int = 1  # parallel branches of every residual
    classes: int = 1000  # 0: no classifier, the model returns the pooled vector
    image_size: tuple[int, int] = (224, 224)
    channels: int = 3
    # stem
    stem: str = "linear"
    patch_size: int = 16  # the stride from pixels to tokens
    stem_norm: str = ""  # "": the default of the stem
    stem_activation: str = ""
    stem_width: int = 64  # channels of the tower, of the first basic stage, or of the ResNet root
    stem_kernels: tuple[int, ...] = ()  # of the tower
    stem_strides: tuple[int, ...] = ()  # of the tower, the hMLP and the basic stages
    stem_layers: tuple[int, ...] = ()  # basic blocks, or bottlenecks of the ResNet, per stage
    stem_eps: float = 1e-6  # of the GroupNorm of the ResNet
    convnet: ConvNetConfig | None = None  # of the stem "convnet", a ResNet or RegNet with BatchNorm
    # blocks
    mixer: str = "attention"
    qkv_bias: bool = True
    activation: str = "gelu"
    norm: str = "layer"
    norm_eps: float = 1e-6
    norm_groups: int = 1
    norm_place: str = "pre"
    residual: str = "plain"
    layerscale_init: float = 1e-4  # initial value of a learned scale, value of a constant one
    layerscale_init_mode: str = "constant"
    layerscale_frozen: bool = False
    drop_path: float = 0.0
    drop_path_schedule: str = "uniform"
    drop_path_kind: str = "each"  # drop each image at random, or "skip": do not compute a random part of each group
    dropout: float = 0.0
    attention_dropout: float = 0.0
    # position embeddings and prefix tokens
    pos_embed: str = "learned"
    pos_embed_place: str = "stem"
    pos_embed_prefix: bool = True  # prefix tokens have position embeddings too
    pos_embed_resample: str = "bicubic"
    class_token_at: int = 0  # the block before which the class token is prepended
    keep_class_token: bool = False  # with pooling=mean: the blocks have a class token too, which is not pooled
    distillation: bool = False  # a second prefix token with its own head
    distillation_head: bool = True  # False: the token has no head
    # pooling
    pooling: str = "class"
    pooling_depth: int = 2
    pooling_heads: int = 0  # 0: as in the blocks
    pooling_mlp_ratio: float = 4.0
    pooling_keys: str = "all"
    pooling_scale: bool = True  # residual scales in the blocks of the pooling
    final_norm: bool = True
    pool_norm: bool = False  # the final norm comes after pooling
    pre_logits: int = 0  # width of a layer before the classifier
    pre_logits_kind: str = "tanh"  # what follows that layer: tanh, or batch_norm and ReLU
    dense_head: bool = False  # a second classifier on every patch; its maximum is added in evaluation
    dense_weight: float = 0.5
    fusion: str = "logit_mean"
    weight_init: str = "deit"

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", as_size(self.image_size))
        if isinstance(self.convnet, dict):
            object.__setattr__(self, "convnet", ConvNetConfig.from_dict(self.convnet))
        check_types(self)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices and not (name in ("stem_norm", "stem_activation") and not getattr(self, name)):
                raise UserError(f"{name}={getattr(self, name)!r} is not known; choose from {', '.join(choices)}.")
        for name, default in zip(("stem_norm", "stem_activation"), STEM_DEFAULTS.get(self.stem, ("none", "none")), strict=True):
            if not getattr(self, name):
                object.__setattr__(self, name, default)
        if self.stem == "basic" and not self.stem_strides:
            object.__setattr__(self, "stem_strides", basic_strides(self.patch_size, len(self.stem_layers)))
        if self.stem == "hmlp" and not self.stem_strides:
            object.__setattr__(self, "stem_strides", hmlp_strides(self.patch_size))
        if self.stem == "tower" and not self.stem_kernels:
            object.__setattr__(self, "stem_kernels", (7, 3, 3, 8))
            object.__setattr__(self, "stem_strides", (2, 1, 1, self.patch_size // 2))
        if not self.pooling_heads:
            object.__setattr__(self, "pooling_heads", self.heads)
        for violated, message in self._constraints():
            if violated:
                raise UserError(message)

    def _constraints(self) -> list[tuple[bool, str]]:
        """Which combinations are not possible: for each constraint, whether it is violated, and the error message."""
        return [
            (
                self.depth < 1 and self.stem not in ("resnet_features", "convnet"),
                "depth=0 is a model without blocks; give at least 1.",
            ),
            (
                self.depth * self.branches > 2000,
                f"depth={self.depth} x branches={self.branches} exceeds the limit of 2000.",
            ),
            (self.mlp_ratio > 0 and self.hidden < 1, f"mlp_ratio={self.mlp_ratio} gives an MLP without hidden units."),
            (
                self.has_query_pooling and self.pooling_hidden < 1,
                f"pooling_mlp_ratio={self.pooling_mlp_ratio} gives an MLP without units.",
            ),
            (
                min(self.image_size) < self.patch_size and self.stem != "convnet",  # which pads its images
                f"image size {format_size(self.image_size)} is smaller than one patch of {self.patch_size}.",
            ),
            (
                self.uses_heads and (self.heads < 1 or self.width % self.heads != 0),
                f"{self.heads} heads do not divide the width {self.width}; choose a divisor.",
            ),
            (
                self.pooling in ("class_attention", "per_class")
                and (self.pooling_heads < 1 or self.width % self.pooling_heads != 0),
                f"{self.pooling_heads} pooling heads do not divide the width {self.width}; choose a divisor.",
            ),
            (
                self.mixer in SPATIAL and self.pooling == "class",
                f"the {self.mixer} mixer takes no class token; use pooling=mean, class_attention, per_class or class_mlp.",
            ),
            (self.keep_class_token and self.pooling != "mean", "keep_class_token needs pooling=mean."),
            (
                self.keep_class_token and self.mixer not in ATTENTION,
                f"the {self.mixer} mixer does not use a class token; use keep_class_token=false.",
            ),
            (
                self.pos_embed in RELATIVE and self.mixer not in ATTENTION,
                f"{self.pos_embed} position embeddings are added to attention scores; use mixer=attention or talking_heads.",
            ),
            (
                self.pos_embed in RELATIVE and self.pos_embed_place == "stem",
                f"{self.pos_embed} position embeddings are part of the blocks; use pos_embed_place=layers or shared.",
            ),
            (self.pos_embed == "sincos" and self.width % 4 != 0, "sincos position embeddings need a width divisible by 4."),
            (
                self.pos_embed == "sincos" and self.pos_embed_place == "layers",
                "sincos position embeddings are the same in every layer; use pos_embed_place=stem or shared.",
            ),
            (
                self.distillation and self.pooling not in ("class", "class_attention"),
                "a distillation token needs pooling=class or class_attention.",
            ),
            (self.dense_head and self.pooling == "per_class", "pooling=per_class has no dense head."),
            (
                self.pooling == "per_class" and (self.pre_logits > 0 or self.classes < 1),
                "pooling=per_class needs classes > 0 and pre_logits=0.",
            ),
            (
                self.pre_logits_kind not in ("tanh", "batch_norm") or (self.pre_logits_kind != "tanh" and not self.pre_logits),
                "pre_logits_kind is tanh, or batch_norm with pre_logits above 0.",
            ),
            (self.has_query_pooling and self.pooling_depth < 1, f"pooling={self.pooling} needs pooling_depth of at least 1."),
            (self.pool_norm and self.pooling != "mean", "pool_norm needs pooling=mean."),
            (
                not 0 <= self.class_token_at < max(self.depth, 1),
                f"class_token_at must be the index of a block, 0 to {max(self.depth - 1, 0)}.",
            ),
            (self.norm_place == "post" and self.norm == "none", "norm_place=post needs a norm."),
            (
                self.norm == "group" and self.width % self.norm_groups != 0,
                f"{self.norm_groups} groups do not divide the width {self.width}.",
            ),
            (
                self.stem in ("resnet", "resnet_features") and self.stem_width % 32 != 0,
                "the ResNet's stem_width must be a multiple of 32.",
            ),
            (
                self.stem == "resnet" and self.patch_size % self.backbone_stride != 0,
                f"the stride {self.backbone_stride} of the ResNet stages does not divide the patch size {self.patch_size}.",
            ),
            (
                self.stem == "resnet_features"
                and self.width != self.stem_width * (2 ** (len(self.stem_layers) + 1) if self.stem_layers else 1),
                "stem=resnet_features needs width = stem_width x 2^(stages + 1), the channels of the last stage.",
            ),
            (
                (self.stem == "convnet") != (self.convnet is not None),
                "the stem convnet and the field convnet need each other: set both or none.",
            ),
            (
                self.convnet is not None and self.width != self.convnet.widths[-1],
                "stem=convnet needs the width of its last stage.",
            ),
            (
                self.convnet is not None and self.patch_size != self.convnet.stride,
                "stem=convnet needs its total stride as the patch size.",
            ),
            (
                self.convnet is not None and self.drop_path_kind == "skip" and self.drop_path > 0,
                "a convnet computes all images: set drop_path_kind=each.",
            ),
            (
                self.stem in ("conv", "basic") and self.patch_size & (self.patch_size - 1) != 0,
                f"the {self.stem} stem needs a patch size that is a power of two, not {self.patch_size}.",
            ),
            (self.stem == "basic" and not self.stem_layers, "the basic stem needs stem_layers, such as (2, 2)."),
            (
                self.stem == "local_transformer" and self.patch_size % 4 != 0,
                f"the local_transformer stem needs a patch size divisible by 4, not {self.patch_size}.",
            ),
            (
                self.stem == "tower" and len(self.stem_kernels) != len(self.stem_strides),
                f"the tower stem needs as many stem_strides as stem_kernels, not {self.stem_strides} and {self.stem_kernels}.",
            ),
            (
                self.stem == "basic" and len(self.stem_strides) != len(self.stem_layers) + 1,
                f"the basic stem needs {len(self.stem_layers) + 1} stem_strides: one per stage and one for the last convolution.",
            ),
            (
                self.stem in ("tower", "hmlp", "basic") and math.prod(self.stem_strides) != self.patch_size,
                f"the product of the stem_strides {self.stem_strides} is not the patch size {self.patch_size}.",
            ),
        ]

    @property
    def hidden(self) -> int:
        """Hidden units of the MLP of a block."""
        return round(self.width * self.mlp_ratio)

    @property
    def pooling_hidden(self) -> int:
        return round(self.width * self.pooling_mlp_ratio)

    @property
    def backbone_stride(self) -> int:
        """Stride of the feature map of the ResNet."""
        return resnet_stride(len(self.stem_layers))

    @property
    def uses_heads(self) -> bool:
        return self.depth > 0 and self.mixer in (*ATTENTION, "axial")

    @property
    def has_query_pooling(self) -> bool:
        return self.pooling in ("class_attention", "per_class", "class_mlp")

    @property
    def pooling_norm(self) -> str:
        """The norm of the pooling, and the final norm. BatchNorm is not possible: initial queries are equal for all images."""
        return "layer" if self.norm == "batch" and self.has_query_pooling else self.norm

    @property
    def num_prefix_tokens(self) -> int:
        """Prefix tokens in (some of) the blocks."""
        return (2 if self.distillation else 1) if self.pooling == "class" or self.keep_class_token else 0

    @property
    def pos_embed_prefix_rows(self) -> int:
        """Rows for prefix tokens in an absolute position embedding."""
        inside = self.pos_embed in ABSOLUTE and self.pos_embed_prefix and self.class_token_at == 0
        return self.num_prefix_tokens if inside else 0

    def replace(self, **changes: Any) -> "Architecture":
        """A copy with some fields changed; unknown names raise UserError with a suggestion."""
        check_fields(changes)
        if "image_size" in changes:
            changes["image_size"] = as_size(changes["image_size"])
        if "stem" in changes or (("patch_size" in changes or "stem_layers" in changes) and "stem_strides" not in changes):
            changes = {"stem_strides": (), "stem_kernels": ()} | changes
        if changes.get("stem", self.stem) != self.stem:
            changes = {"stem_norm": "", "stem_activation": ""} | changes
        if "heads" in changes and self.pooling_heads == self.heads:
            changes.setdefault("pooling_heads", changes["heads"])
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return values if self.convnet else {name: value for name, value in values.items() if name != "convnet"}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Architecture":
        values = upgrade_architecture(values)
        check_fields(values)
        return cls(**values)

    def differences(self, other: "Architecture") -> list[str]:
        """Fields in which two architectures differ, as far as they matter in evaluation."""
        return [name for name in FIELDS if self._effective_value(name) != other._effective_value(name)]

    def _effective_value(self, name: str) -> Any:
        """The value of a field, or None where this architecture does not use it in evaluation."""
        conv_stem = self.stem in ("conv", "tower", "basic", "hmlp", "linear")
        unused = {
            "heads": not self.uses_heads,
            "qkv_bias": not self.uses_heads and self.pooling not in ("class_attention", "per_class"),
            "branches": self.depth == 0,
            "stem_norm": not conv_stem,
            "stem_activation": not conv_stem,
            "stem_width": self.stem not in ("tower", "basic", "resnet", "resnet_features"),
            "stem_kernels": self.stem != "tower",
            "stem_strides": self.stem not in ("tower", "hmlp", "basic"),
            "stem_layers": self.stem not in ("basic", "resnet", "resnet_features"),
            "stem_eps": self.stem not in ("resnet", "resnet_features"),
            "norm_eps": self.norm not in ("layer", "group") and self.pooling_norm != "layer",
            "norm_groups": self.norm != "group",
            "pos_embed_place": self.pos_embed == "none",
            "pos_embed_prefix": self.pos_embed not in ABSOLUTE or self.num_prefix_tokens == 0 or self.class_token_at > 0,
            "pos_embed_resample": self.pos_embed not in ("learned", "learned2d"),
            "class_token_at": self.num_prefix_tokens == 0,
            "pooling_depth": not self.has_query_pooling,
            "pooling_heads": self.pooling not in ("class_attention", "per_class"),
            "pooling_mlp_ratio": not self.has_query_pooling,
            "pooling_keys": self.pooling not in ("class_attention", "per_class"),
            "pooling_scale": not self.has_query_pooling or self.residual == "plain",
            "pool_norm": not self.final_norm,
            "dense_head": not self.classes,
            "dense_weight": not (self.dense_head and self.classes),
            "fusion": not (self.distillation and self.distillation_head and self.classes),
            "distillation_head": not (self.distillation and self.classes),
        }
        if name == "layerscale_init" and self.residual == "constant":
            return self.layerscale_init  # a factor, not an initial value
        if name in TRAINING_ONLY:
            return None
        if name == "residual":  # names of the same module
            return {"rezero": "scalar", "skipinit": "scalar", "tfixup": "scalar"}.get(self.residual, self.residual)
        if name in ("mlp_ratio", "pooling_mlp_ratio") and not unused.get(name, False):  # the number of units matters
            return self.hidden if name == "mlp_ratio" else self.pooling_hidden
        return None if unused.get(name, False) else getattr(self, name)


FIELDS = tuple(field.name for field in dataclasses.fields(Architecture))
# Minimum and maximum; integers that are not listed are at least 0, floats are any finite number.
RANGES: dict[str, tuple[float, float]] = {
    "width": (1, 1 << 20),
    "heads": (1, 1 << 20),
    "branches": (1, 1 << 20),
    "channels": (1, 1 << 20),
    "patch_size": (1, 1 << 16),
    "stem_width": (1, 1 << 20),
    "norm_groups": (1, 1 << 20),
    "mlp_ratio": (0.0, 1e6),
    "pooling_mlp_ratio": (0.0, 1e6),
    "norm_eps": (0.0, 1.0),
    "stem_eps": (0.0, 1.0),
    "drop_path": (0.0, 0.999),
    "dropout": (0.0, 0.999),
    "attention_dropout": (0.0, 0.999),
}


def check_types(a: Architecture) -> None:
    """Raise UserError if a field has another type or is out of its range. Integers become floats, lists tuples."""
    for field in dataclasses.fields(a):
        value, kind = getattr(a, field.name), field.type
        if kind == "tuple[int, ...]" or kind == tuple[int, ...]:
            fits = isinstance(value, tuple | list) and all(type(item) is int and item > 0 for item in value)
            object.__setattr__(a, field.name, tuple(value) if fits else value)
        elif kind is float:
            low, high = RANGES.get(field.name, (-1e30, 1e30))
            fits = type(value) in (int, float) and low <= value <= high
            object.__setattr__(a, field.name, float(value) if fits else value)
        elif kind is int:
            low, high = RANGES.get(field.name, (0, 1 << 31))
            fits = type(value) is int and low <= value <= high
        else:
            fits = field.name == "image_size" or type(value) is kind
            if field.name == "convnet":
                fits = value is None or isinstance(value, ConvNetConfig)
        if not fits:
            hint = f"the default is {field.default!r}"
            if kind in (int, float):
                hint = f"give an integer from {low} to {high:,}" if kind is int else f"give a number from {low:g} to {high:g}"
            raise UserError(f"{field.name}={value!r} is not a valid value; {hint}.")


def resnet_stride(stages: int) -> int:
    """Total stride: root, max-pool and each stage after the first have a stride of 2."""
    stride: int = 2 ** (1 + max(stages, 1))
    return stride


def check_fields(values: dict[str, Any]) -> None:
    """Raise UserError for names that are no fields of `Architecture`."""
    for name in values:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise UserError(f"{name!r} is not a field of Architecture{hint}")


def as_size(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """A size or (height, width) as (height, width)."""
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2 or not all(type(side) is int and 0 < side < 1 << 16 for side in pair):
        raise UserError(f"image size {size!r} is not a positive integer or a pair (height, width).")
    return pair[0], pair[1]


def format_size(size: tuple[int, int]) -> str:
    """224 for (224, 224), 192x256 for (192, 256)."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"
