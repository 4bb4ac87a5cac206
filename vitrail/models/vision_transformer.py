"""The one trunk: every architecture of the catalogue is an instance of `VisionTransformer`."""

import re
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import UserError
from vitrail.layers.attention import Attention
from vitrail.layers.block import Block, Branch
from vitrail.layers.layout import Layout, OnGrid
from vitrail.layers.norm import BY_TOKEN, token_norm
from vitrail.layers.passing import watched
from vitrail.layers.patch_embed import LinearStem
from vitrail.layers.pooling import ClassAttentionBlock, PerClassHead, QueryPooling
from vitrail.layers.pos_embed import ABSOLUTE, RELATIVE, absolute_positions, relative_positions
from vitrail.models.builder import make_block, make_pooling, make_stem
from vitrail.models.config import Architecture, as_size, show_size
from vitrail.models.init import start_weights
from vitrail.models.inputs import check_given
from vitrail.models.preprocessing import Preprocessing


class Features(NamedTuple):
    """What the model knows about a batch, after the final norm (before it with `pool_norm`, which norms the pooled vector)."""

    tokens: Tensor  # [B, N, D] patches in raster order
    grid: tuple[int, int]  # N = height * width
    prefix: Tensor  # [B, S, D] class and distillation vectors; S may be 0
    pooled: Tensor  # [B, D] what the classifier reads ([B, C, D] for per-class queries)


class Outputs(NamedTuple):
    """Every head's answer; `logits` is what `model(image)` returns."""

    logits: Tensor  # [B, C]
    distillation: Tensor | None  # [B, C]
    dense: Tensor | None  # [B, N, C]
    main: Tensor  # [B, C] the class head alone


class LayerTrace(NamedTuple):
    attention: Tensor | None  # [B, branches * H, T, T], or [B, H, S, keys] in the pooling; rows sum to one
    ratios: dict[str, Tensor]  # residual -> [B]: norm of what it adds over norm of what it is added to


class Trace(NamedTuple):
    layers: dict[int, LayerTrace]  # block index -> trace; the pooling's blocks follow the trunk's
    grid: tuple[int, int]
    prefix: int


class VisionTransformer(nn.Module):
    """stem -> positions and tokens -> blocks -> pooling -> heads, as `architecture` says."""

    def __init__(self, architecture: Architecture):
        super().__init__()
        a = self.architecture = architecture
        self.name = ""
        self.preprocessing = Preprocessing(image_size=a.image_size)
        self.class_names: list[str] | None = None
        self.notes: dict[str, str] = {}
        self.recompute = False  # blocks keep only their input for the backward pass and compute the rest again

        self.stem = make_stem(a)
        grid = self.grid = self.stem.grid(*a.image_size)
        if min(grid) < 1:
            raise UserError(f"image size {show_size(a.image_size)} gives no patch of {a.patch_size} pixels; use a larger one.")
        tables = {"none": 0, "stem": 1, "shared": 1, "layers": a.depth}["none" if a.pos_embed == "none" else a.pos_embed_place]
        self.pos_embed = nn.ModuleList()
        for _ in range(tables):
            if a.pos_embed in ABSOLUTE:
                self.pos_embed.append(absolute_positions(a.pos_embed, grid, a.width, a.pos_embed_rows, a.pos_embed_resample))
            else:
                self.pos_embed.append(relative_positions(a.pos_embed, grid, a.width // a.heads, a.heads))
        self.prefix = nn.Parameter(torch.empty(a.trunk_tokens, a.width)) if a.trunk_tokens else None
        self.dropout = nn.Dropout(a.dropout)
        self.blocks = nn.ModuleList(make_block(a, index, grid) for index in range(a.depth))
        self.pooling = make_pooling(a, grid)
        norm = a.pooling_norm if a.final_norm and (a.norm_place == "pre" or a.reads_with_queries) else "none"
        self.norm = token_norm(norm, a.width, a.norm_eps, a.norm_groups)
        self.pre_logits = nn.Sequential(nn.Linear(a.width, a.pre_logits), nn.Tanh()) if a.pre_logits else nn.Identity()
        inputs = a.pre_logits or a.width
        self.head: nn.Module = nn.Identity()
        second = a.distillation and a.distillation_head and a.classes
        self.head_distillation = nn.Linear(inputs, a.classes) if second else None
        self.head_dense = nn.Linear(a.width, a.classes) if a.dense_head and a.classes else None
        if a.classes:
            self.head = PerClassHead(a.width, a.classes) if a.pooling == "per_class" else nn.Linear(inputs, a.classes)
        start_weights(self)

    def forward(self, image: Tensor) -> Tensor:
        """[B, K, height, width], normalized as `preprocessing` says, to logits [B, C]."""
        return self.outputs(image).logits

    def outputs(self, image: Tensor, mixed: Tensor | None = None) -> Outputs:
        """All heads at once: what objectives with a distillation token or token labels need.

        Patches where `mixed` [N] is true are exchanged between the images of a pair before they are encoded (MixToken).
        """
        patches, layout = self.embed(image)
        if mixed is not None:
            patches = mix_tokens(patches, mixed)
        return self.classify(self.read(*self.encode(patches, layout), patches=self.head_dense is not None))

    def features(self, image: Tensor) -> Features:
        """Tokens, grid and pooled vector of a batch."""
        patches, layout = self.embed(image)
        return self.read(*self.encode(patches, layout))

    def embed(self, image: Tensor) -> tuple[Tensor, Layout]:
        """The stem alone: patches [B, N, D] without positions. Masks and token mixing go between this and `encode`."""
        # A graph would keep conditions made of these, and a network refused while torch.compile reads it stays in pieces after.
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            check_given(image, self.architecture, self.stem, self.grid)
        height, width = image.shape[-2:]
        return self.stem(image), Layout(*self.stem.grid(height, width))

    def encode(self, patches: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        """Positions, prefix tokens and all blocks: [B, N, D] to [B, T, D]."""
        x, layout = self._start(patches, layout)
        recompute = self.recompute and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            x, layout = self._before(index, x, layout)
            arguments = (x, layout, self._relative(index))
            x = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
        return self._before(len(self.blocks), x, layout)

    def block(self, index: int) -> Block:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block

    def _start(self, patches: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        a = self.architecture
        x = patches
        if a.pos_embed_rows:  # the prefix tokens have positions: join first, add after
            x, layout = self._join(x, layout)
        if a.pos_embed in ABSOLUTE and a.pos_embed_place == "stem":
            x = x + self.pos_embed[0](layout, x.device)
        if a.pos_embed not in ABSOLUTE or a.pos_embed_place == "stem":
            x = self.dropout(x)
        return x, layout

    def _before(self, index: int, x: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        """What happens between blocks: the class token joins, a layer's own positions are added."""
        a = self.architecture
        if self.prefix is not None and layout.prefix == 0 and index == a.class_token_at:
            x, layout = self._join(x, layout)
        if a.pos_embed in ABSOLUTE and a.pos_embed_place != "stem" and index < len(self.blocks):
            table = self.pos_embed[index if a.pos_embed_place == "layers" else 0](layout, x.device)
            missing = layout.prefix - a.pos_embed_rows
            x = self.dropout(x + (nn.functional.pad(table, (0, 0, missing, 0)) if missing else table))
        return x, layout

    def _join(self, x: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        assert self.prefix is not None
        prefix = self.prefix.to(x.dtype).expand(x.shape[0], -1, -1)
        return torch.cat([prefix, x], 1), layout._replace(prefix=self.prefix.shape[0])

    def _relative(self, index: int) -> nn.Module | None:
        if self.architecture.pos_embed not in RELATIVE:
            return None
        return self.pos_embed[index if self.architecture.pos_embed_place == "layers" else 0]

    def read(self, x: Tensor, layout: Layout, patches: bool = True) -> Features:
        """Final norm and pooling: [B, T, D] to features; without `patches`, those that only a person would read are left out."""
        a = self.architecture
        brief = not patches and isinstance(self.norm, BY_TOKEN) and not watched(self.norm)
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
        a = self.architecture
        main = self.head(self.pre_logits(features.pooled))
        distillation = dense = None
        logits = main
        if self.head_distillation is not None:
            distillation = self.head_distillation(self.pre_logits(features.prefix[:, 1]))
            logits = fuse(main, distillation, a.fusion)
        if self.head_dense is not None:
            dense = self.head_dense(features.tokens)
            if not self.training:
                logits = logits + a.dense_weight * dense.max(1).values
        return Outputs(logits, distillation, dense, main)

    def trace(self, image: Tensor, layers: list[int] | None = None) -> Trace:
        """Attention maps and branch norms of the chosen blocks (all by default), computed beside the fast path.

        The pooling's class-attention blocks follow the trunk's: block `depth` is the first of them. The model is looked at as it
        evaluates: nothing is dropped and no statistic is touched.
        """
        if self.training:
            self.eval()
            try:
                return self.trace(image, layers)
            finally:
                self.train()
        total = len(self.blocks) + (len(self.pooling.blocks) if isinstance(self.pooling, QueryPooling) else 0)
        for layer in layers or []:
            if not isinstance(layer, int) or not -total <= layer < total:
                raise UserError(f"layer {layer} does not exist; this model has {total} layers, 0 being the first.")
        wanted = set(range(total)) if layers is None else {layer % total for layer in layers}
        found: dict[int, LayerTrace] = {}
        x, layout = self._start(*self.embed(image))
        for index in range(len(self.blocks)):
            x, layout = self._before(index, x, layout)
            relative = self._relative(index)
            if index in wanted:
                found[index] = trace_block(self.block(index), x, layout, relative)
            x = self.block(index)(x, layout, relative)
        x, layout = self._before(len(self.blocks), x, layout)
        if isinstance(self.pooling, QueryPooling):
            query = self.pooling.start(x)
            for index, block in enumerate(self.pooling.blocks, len(self.blocks)):
                if index in wanted:
                    found[index] = LayerTrace(block.maps(query, x) if isinstance(block, ClassAttentionBlock) else None, {})
                query = block(query, x)
        return Trace(found, layout.grid, layout.prefix)

    def resize(self, height: int, width: int, patch_size: int | None = None) -> "VisionTransformer":
        """Make the model one for images of another size (and patch size): every table tied to the grid is resampled."""
        size = as_size((height, width))
        changes: dict = {"image_size": size}
        if patch_size is not None and patch_size != self.architecture.patch_size:
            if not isinstance(self.stem, LinearStem):
                raise UserError(f"the {self.architecture.stem} stem has a fixed patch size of {self.architecture.patch_size}.")
            changes["patch_size"] = patch_size
        architecture = self.architecture.replace(**changes)
        if "patch_size" in changes and isinstance(self.stem, LinearStem):
            self.stem.resize_patch(changes["patch_size"])
            self.name = renamed(self.name, changes["patch_size"])
        grid = self.stem.grid(*size)
        if grid != self.grid:
            for module in list(self.modules()):
                if module is not self and isinstance(module, OnGrid):
                    module.resize(grid)
        self.architecture, self.grid = architecture, grid
        self.preprocessing = self.preprocessing._replace(image_size=size)
        return self


def renamed(name: str, patch: int) -> str:
    """What `create` would have called a network with these patches."""
    if "patch_size=" in name:
        return re.sub(r"patch_size=\d+", f"patch_size={patch}", name)
    return f"{name}{', ' if ' with ' in name else ' with '}patch_size={patch}" if name else name


def mix_tokens(tokens: Tensor, mixed: Tensor) -> Tensor:
    """tokens [B, N, D]: those of `mixed` [N] come from the image at the mirrored place of the batch; twice undoes it."""
    return torch.where(mixed[None, :, None], tokens.flip(0), tokens)


def fuse(main: Tensor, distillation: Tensor, how: str) -> Tensor:
    """The two heads of a distilled model as one answer; `softmax_sum` gives the log of the mean probability."""
    match how:
        case "class":
            return main
        case "distillation":
            return distillation
        case "softmax_sum":
            return torch.logaddexp(main.log_softmax(-1), distillation.log_softmax(-1)) - torch.log(torch.tensor(2.0))
    return (main + distillation) / 2


def trace_block(block: Block, x: Tensor, layout: Layout, relative: nn.Module | None) -> LayerTrace:
    maps, ratios = [], {}
    for name, residual in block.residuals().items():
        for branch in residual.branches:
            if isinstance(branch, Branch) and isinstance(branch.body, Attention):
                maps.append(branch.body.maps(branch.norm(x), layout, relative))
        update = residual.update(x, layout, relative)
        ratios[name] = update.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
        x = residual.post(x + update)
    return LayerTrace(torch.cat(maps, 1) if maps else None, ratios)
