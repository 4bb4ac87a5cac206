"""`VisionTransformer`, the one class of all architectures; a convnet is one with a stem and no blocks."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import UserError
from vitrail.layers.attention import Attention
from vitrail.layers.block import Block, Branch
from vitrail.layers.convnet import ConvNetStem
from vitrail.layers.kernels import has_hooks
from vitrail.layers.layout import Layout, Resizable, to_map
from vitrail.layers.norm import PER_TOKEN_NORMS, token_norm
from vitrail.layers.patch_embed import LinearStem
from vitrail.layers.pooling import ClassAttentionBlock, PerClassHead, QueryPooling
from vitrail.layers.pos_embed import ABSOLUTE, RELATIVE, make_absolute_pos_embed, make_relative_pos_embed
from vitrail.models.builder import Stem, make_block, make_pooling, make_stem
from vitrail.models.config import Architecture, as_size, format_size
from vitrail.models.evaluation_mode import evaluation_mode
from vitrail.models.init import init_weights
from vitrail.models.inputs import check_input, check_weights_match
from vitrail.models.preprocessing import Preprocessing, min_decode_side, read_images

if TYPE_CHECKING:
    from vitrail.evaluation.predict import Prediction
    from vitrail.models.preprocessing import ImageInput


class Features(NamedTuple):
    """Tokens and pooled vector of a batch after the final norm; with `pool_norm` the tokens are those before it."""

    tokens: Tensor  # [B, N, D] patches in raster order
    grid: tuple[int, int]  # N = height * width
    prefix: Tensor  # [B, S, D] class and distillation vectors; S may be 0
    pooled: Tensor  # [B, D] the input of the classifier ([B, C, D] for per-class queries)


class Outputs(NamedTuple):
    """The logits of every head; `logits` is what `model(image)` returns."""

    logits: Tensor  # [B, C]
    distillation: Tensor | None  # [B, C]
    dense: Tensor | None  # [B, N, C]
    main: Tensor  # [B, C] the class head alone


class LayerTrace(NamedTuple):
    """Attention maps and residual norms of one block."""

    attention: Tensor | None  # [B, branches * H, T, T], or [B, H, S, keys] in the pooling; rows sum to one
    ratios: dict[str, Tensor]  # residual -> [B]: norm of its branches over norm of its input


class Trace(NamedTuple):
    """What `VisionTransformer.trace` returns."""

    layers: dict[int, LayerTrace]  # block index -> trace; the blocks of the pooling come last
    grid: tuple[int, int]
    prefix: int


class VisionTransformer(nn.Module):
    """Stem, position embeddings and prefix tokens, blocks, pooling and heads as in `architecture`."""

    def __init__(self, architecture: Architecture):
        super().__init__()
        a = self.architecture = architecture
        self.name = ""
        self.preprocessing = Preprocessing(image_size=a.image_size)
        self.class_names: list[str] | None = None
        self.notes: dict[str, str] = {}
        self.task_head: nn.Module | None = None  # of another task than classification: see `set_task_head`

        self.stem = make_stem(a)
        self.recompute = False
        grid = self.grid = self.stem.grid(*a.image_size)
        if min(grid) < 1:
            raise UserError(f"image size {format_size(a.image_size)} gives no patch of {a.patch_size} pixels; use a larger one.")
        tables = {"none": 0, "stem": 1, "shared": 1, "layers": a.depth}["none" if a.pos_embed == "none" else a.pos_embed_place]
        self.pos_embed = nn.ModuleList()
        for _ in range(tables):
            if a.pos_embed in ABSOLUTE:
                self.pos_embed.append(
                    make_absolute_pos_embed(a.pos_embed, grid, a.width, a.pos_embed_prefix_rows, a.pos_embed_resample)
                )
            else:
                self.pos_embed.append(make_relative_pos_embed(a.pos_embed, grid, a.width // a.heads, a.heads))
        self.prefix = nn.Parameter(torch.empty(a.num_prefix_tokens, a.width)) if a.num_prefix_tokens else None
        self.dropout = nn.Dropout(a.dropout)
        self.blocks = nn.ModuleList(make_block(a, index, grid) for index in range(a.depth))
        self.pooling = make_pooling(a, grid)
        norm = a.pooling_norm if a.final_norm and (a.norm_place == "pre" or a.has_query_pooling) else "none"
        self.norm = token_norm(norm, a.width, a.norm_eps, a.norm_groups)
        self.pre_logits = nn.Sequential(nn.Linear(a.width, a.pre_logits), *after_pre_logits(a)) if a.pre_logits else nn.Identity()
        inputs = a.pre_logits or a.width
        self.head: nn.Module = nn.Identity()
        second = a.distillation and a.distillation_head and a.classes
        self.head_distillation = nn.Linear(inputs, a.classes) if second else None
        self.head_dense = nn.Linear(a.width, a.classes) if a.dense_head and a.classes else None
        if a.classes:
            self.head = PerClassHead(a.width, a.classes) if a.pooling == "per_class" else nn.Linear(inputs, a.classes)
        init_weights(self)

    def forward(self, image: Tensor) -> Tensor:
        """Images [B, K, height, width], normalized as in `preprocessing`, to logits [B, C]."""
        return self.outputs(image).logits

    def outputs(self, image: Tensor, mixed: Tensor | None = None) -> Outputs:
        """The logits of all heads, as distillation and token labeling need them.

        Patches where `mixed` [N] is true are swapped between image i and image B - 1 - i after the stem (MixToken).
        """
        patches, layout = self.embed(image)
        if mixed is not None:
            patches = mix_tokens(patches, mixed)
        return self.classify(self.read(*self.encode(patches, layout), patches=self.head_dense is not None))

    def features(self, image: Tensor) -> Features:
        """Patch tokens, prefix tokens and pooled vector of a batch."""
        patches, layout = self.embed(image)
        return self.read(*self.encode(patches, layout))

    def feature_maps(self, image: Tensor, blocks: Sequence[int] = ()) -> list[Tensor]:
        """Feature maps [B, C, h, w]: one per stage of a convnet, at falling resolutions.

        Of other models the patch tokens after the final norm, or after each of `blocks`.
        """
        if isinstance(self.stem, ConvNetStem) and not self.blocks:
            return self.stem.stages(image)
        patches, layout = self.embed(image)
        taken: dict[int, Tensor] = {}
        x, layout = self.encode(patches, layout, taken if blocks else None)
        if blocks:
            return [to_map(taken[block][:, -layout.patches :], layout) for block in blocks]
        tokens = x if self.architecture.pool_norm else self.norm(x)
        return [to_map(tokens[:, layout.prefix :], layout)]

    def set_task_head(self, config: Any) -> "VisionTransformer":
        """Add the head of a configuration (`vitrail.heads.task_heads`), newly initialized."""
        from vitrail.heads.task_heads import build_head

        a, maps = self.architecture, max(len(config.blocks), 1)
        if any(block >= a.depth for block in config.blocks):
            raise UserError(f"the model has {a.depth} blocks, 0 being the first: it has no block {max(config.blocks)}.")
        channels, strides = [a.width] * maps, [a.patch_size] * maps
        if a.convnet and not self.blocks:
            channels = list(a.convnet.widths)
            strides = [a.convnet.stride >> index for index in reversed(range(len(channels)))]
        self.task_head = build_head(config, channels, strides)
        return self

    @property
    def task(self) -> str:
        """What the model computes: that of its head ("segmentation", "detection"), "classification", or "features"."""
        return getattr(self.task_head, "task", "") or ("classification" if self.architecture.classes else "features")

    @property
    def recompute(self) -> bool:
        """Gradient checkpointing: blocks store their input only and are recomputed in the backward pass."""
        return self._recompute

    @recompute.setter
    def recompute(self, value: bool) -> None:
        self._recompute = value
        if isinstance(self.stem, ConvNetStem):
            self.stem.recompute = value

    @property
    def layers(self) -> list[nn.Module]:
        """The residual blocks in order: those of a convnet, then `blocks`. They are compiled and sharded one by one."""
        return [*(self.stem.blocks if isinstance(self.stem, ConvNetStem) else ()), *self.blocks]

    def embed(self, image: Tensor) -> tuple[Tensor, Layout]:
        """The stem: patch tokens [B, N, D] without position embeddings. Masks and MixToken go between this and `encode`."""
        # While tracing, the checks would become guards of the graph, and an error would split the graph for good.
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            check_input(image, self.architecture, self.stem, self.grid)
            if isinstance(self.stem, Stem):  # packed stems convert the images
                check_weights_match(image, self.stem)
        height, width = image.shape[-2:]
        return self.stem(image), Layout(*self.stem.grid(height, width))

    def encode(self, patches: Tensor, layout: Layout, taken: dict[int, Tensor] | None = None) -> tuple[Tensor, Layout]:
        """Position embeddings, prefix tokens and all blocks: [B, N, D] to [B, T, D]; the output of each block goes to `taken`."""
        x, layout = self._add_pos_embed(patches, layout)
        recompute = self.recompute and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            x, layout = self._prepare_block_input(index, x, layout)
            arguments = (x, layout, self._relative_pos_embed(index))
            x = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
            if taken is not None:
                taken[index] = x
        return self._prepare_block_input(len(self.blocks), x, layout)

    def block(self, index: int) -> Block:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block

    def _add_pos_embed(self, patches: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        a = self.architecture
        x = patches
        if a.pos_embed_prefix_rows:  # prefix tokens have position embeddings too, so they are prepended first
            x, layout = self._prepend_prefix_tokens(x, layout)
        if a.pos_embed in ABSOLUTE and a.pos_embed_place == "stem":
            x = x + self.pos_embed[0](layout, x.device)
        if a.pos_embed not in ABSOLUTE or a.pos_embed_place == "stem":
            x = self.dropout(x)
        return x, layout

    def _prepare_block_input(self, index: int, x: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        """Prepend the prefix tokens before block `class_token_at`, and add the position embeddings of this block."""
        a = self.architecture
        if self.prefix is not None and layout.prefix == 0 and index == a.class_token_at:
            x, layout = self._prepend_prefix_tokens(x, layout)
        if a.pos_embed in ABSOLUTE and a.pos_embed_place != "stem" and index < len(self.blocks):
            table = self.pos_embed[index if a.pos_embed_place == "layers" else 0](layout, x.device)
            missing = layout.prefix - a.pos_embed_prefix_rows
            x = self.dropout(x + (nn.functional.pad(table, (0, 0, missing, 0)) if missing else table))
        return x, layout

    def _prepend_prefix_tokens(self, x: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        assert self.prefix is not None
        prefix = self.prefix.to(x.dtype).expand(x.shape[0], -1, -1)
        return torch.cat([prefix, x], 1), layout._replace(prefix=self.prefix.shape[0])

    def _relative_pos_embed(self, index: int) -> nn.Module | None:
        if self.architecture.pos_embed not in RELATIVE:
            return None
        return self.pos_embed[index if self.architecture.pos_embed_place == "layers" else 0]

    def read(self, x: Tensor, layout: Layout, patches: bool = True) -> Features:
        """Final norm and pooling: [B, T, D] to features, without patch tokens where `patches` is false and nothing needs them."""
        a = self.architecture
        brief = not patches and isinstance(self.norm, PER_TOKEN_NORMS) and not has_hooks(self.norm)
        if isinstance(self.pooling, QueryPooling):
            query = self.norm(self.pooling(x, layout))
            pooled = query if a.pooling == "per_class" else query[:, 0]
            return Features(x[:, :0] if brief else self.norm(x), layout.grid, query, pooled)
        if a.pool_norm:
            tokens = x[:, layout.prefix :]
            pooled = self.norm(tokens.mean(1, keepdim=True))[:, 0]
            return Features(tokens, layout.grid, x[:, : layout.prefix], pooled)
        x = self.norm(x[:, : layout.prefix] if brief and a.pooling == "class" else x)
        prefix, tokens = x[:, : layout.prefix], x[:, layout.prefix :]
        return Features(tokens, layout.grid, prefix, tokens.mean(1) if a.pooling == "mean" else prefix[:, 0])

    def classify(self, features: Features) -> Outputs:
        """All heads."""
        a = self.architecture
        main = self.head(self.pre_logits(features.pooled))
        distillation = dense = None
        logits = main
        if self.head_distillation is not None:
            distillation = self.head_distillation(self.pre_logits(features.prefix[:, 1]))
            logits = fuse_logits(main, distillation, a.fusion)
        if self.head_dense is not None:
            dense = self.head_dense(features.tokens)
            if not self.training:
                logits = logits + a.dense_weight * dense.max(1).values
        return Outputs(logits, distillation, dense, main)

    def trace(self, image: Tensor, layers: list[int] | None = None) -> Trace:
        """Attention maps and residual norms of the chosen blocks (default: all), always in evaluation mode.

        The class-attention blocks of the pooling are numbered after the others: `depth` is the first of them.
        """
        if self.training:
            with evaluation_mode(self):
                return self.trace(image, layers)
        total = len(self.blocks) + (len(self.pooling.blocks) if isinstance(self.pooling, QueryPooling) else 0)
        for layer in layers or []:
            if not isinstance(layer, int) or not -total <= layer < total:
                raise UserError(f"layer {layer} does not exist; this model has {total} layers, 0 being the first.")
        chosen = set(range(total)) if layers is None else {layer % total for layer in layers}
        traces: dict[int, LayerTrace] = {}
        x, layout = self._add_pos_embed(*self.embed(image))
        for index in range(len(self.blocks)):
            x, layout = self._prepare_block_input(index, x, layout)
            relative = self._relative_pos_embed(index)
            if index in chosen:
                traces[index] = trace_block(self.block(index), x, layout, relative)
            x = self.block(index)(x, layout, relative)
        x, layout = self._prepare_block_input(len(self.blocks), x, layout)
        if isinstance(self.pooling, QueryPooling):
            query = self.pooling.expand_queries(x)
            for index, block in enumerate(self.pooling.blocks, len(self.blocks)):
                if index in chosen:
                    traces[index] = LayerTrace(block.maps(query, x) if isinstance(block, ClassAttentionBlock) else None, {})
                query = block(query, x)
        return Trace(traces, layout.grid, layout.prefix)

    def preprocess(self, images: "ImageInput | Sequence[ImageInput]") -> Tensor:
        """One image or a list of images to the input of `forward`: float32 [B, 3, height, width] on the model's device.

        An image is a path, a PIL image, a uint8 array [H, W, 3] or a uint8 tensor [3, H, W].
        """
        device = next(self.parameters()).device
        pixels, sizes = read_images(images, min_decode_side(self.preprocessing, self.notes))
        return self.preprocessing.apply(pixels.to(device), sizes.to(device))

    def predict(self, images: "ImageInput | Sequence[ImageInput]", top: int = 5) -> "list[Prediction]":
        """The `top` most probable classes of each image; `images` as in `vitrail.predict`."""
        from vitrail.evaluation.predict import predict

        return predict(self, images, top)

    def resize(self, height: int, width: int, patch_size: int | None = None) -> "VisionTransformer":
        """Change the image size (and patch size) in place: all weights tied to the grid are resampled. Returns the model."""
        size = as_size((height, width))
        changes: dict[str, Any] = {"image_size": size}
        if patch_size is not None and patch_size != self.architecture.patch_size:
            if not isinstance(self.stem, LinearStem):
                raise UserError(f"the {self.architecture.stem} stem has a fixed patch size of {self.architecture.patch_size}.")
            changes["patch_size"] = patch_size
        architecture = self.architecture.replace(**changes)
        if "patch_size" in changes and isinstance(self.stem, LinearStem):
            self.stem.resize_patch(changes["patch_size"])
            self.name = name_with_patch_size(self.name, changes["patch_size"])
        grid = self.stem.grid(*size)
        if grid != self.grid:
            for module in list(self.modules()):
                if module is not self and isinstance(module, Resizable):
                    module.resize(grid)
        self.architecture, self.grid = architecture, grid
        self.preprocessing = self.preprocessing._replace(image_size=size)
        return self


def after_pre_logits(a: Architecture) -> list[nn.Module]:
    return [nn.Tanh()] if a.pre_logits_kind == "tanh" else [nn.BatchNorm1d(a.pre_logits), nn.ReLU()]


def name_with_patch_size(name: str, patch: int) -> str:
    """The name that `create` gives to the model with this patch size."""
    if "patch_size=" in name:
        return re.sub(r"patch_size=\d+", f"patch_size={patch}", name)
    return f"{name}{', ' if ' with ' in name else ' with '}patch_size={patch}" if name else name


def mix_tokens(tokens: Tensor, mixed: Tensor) -> Tensor:
    """Tokens [B, N, D] with those of `mixed` [groups, N] swapped between images i and size - 1 - i of each group.

    It is its own inverse.
    """
    groups = tokens.unflatten(0, (len(mixed), -1))
    return torch.where(mixed[:, None, :, None], groups.flip(1), groups).flatten(0, 1)


def fuse_logits(main: Tensor, distillation: Tensor, fusion: str) -> Tensor:
    """One set of logits from the two heads of a distilled model; `softmax_sum` is the log of the mean probability."""
    match fusion:
        case "class":
            return main
        case "distillation":
            return distillation
        case "softmax_sum":
            return torch.logaddexp(main.log_softmax(-1), distillation.log_softmax(-1)) - torch.log(torch.tensor(2.0))
    return (main + distillation) / 2


def trace_block(block: Block, x: Tensor, layout: Layout, relative: nn.Module | None) -> LayerTrace:
    maps = [branch.body.maps(branch.norm(x), layout, relative) for branch in attention_branches(block)]
    return LayerTrace(torch.cat(maps, 1) if maps else None, branch_ratios(block, x, layout, relative))


def attention_branches(block: Block) -> list[Any]:
    """The branches of a block whose body is attention."""
    branches = block.mix.branches if block.mix is not None else ()
    return [branch for branch in branches if isinstance(branch, Branch) and isinstance(branch.body, Attention)]


def branch_ratios(block: Block, x: Tensor, layout: Layout, relative: nn.Module | None) -> dict[str, Tensor]:
    """|branches| / |input| of the residuals "mix" and "ffn" of a block: [B]."""
    ratios = {}
    for name, residual in block.residuals().items():
        update = residual.update(x, layout, relative)
        ratios[name] = update.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
        x = residual.post(x + update)
    return ratios
