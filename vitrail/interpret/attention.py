"""Attention weights after a plain forward pass: its block inputs are kept, and only the rows that are asked for are computed.

The forward pass uses the fused kernels, so the memory is that of a prediction plus the inputs of the blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.layers.layout import Layout
from vitrail.layers.pooling import ClassAttention, ClassAttentionBlock, QueryPooling
from vitrail.models.evaluation_mode import evaluation_mode
from vitrail.models.vision_transformer import Features, VisionTransformer, attention_branches
from vitrail.training.compile import run_eagerly

CHUNK = 1 << 24  # attention weights that are computed at a time
GRAPH_PATCHES = 2048  # of the images of one pass whose graph is kept: about 1.4 GB with ViT-B


@contextmanager
def without_autocast() -> Iterator[None]:
    """Context, or decorator, in which autocast is off: in bfloat16, products over the blocks would have two digits."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Heads(NamedTuple):
    """The heads of one attention module for recorded tokens."""

    query: Tensor  # [B, H, T, D/H]
    key: Tensor  # [B, H, keys, D/H]
    value: Tensor
    weigh: Callable[..., Tensor]  # queries, keys and rows=index of the queries to weights
    weight_gradient: Callable[[Tensor, Tensor], Tensor]  # gradient of the outputs of the heads and values to that of the weights
    proj: nn.Module  # takes the outputs of the heads

    @without_autocast()
    def weights(self, rows: Tensor | None = None) -> Tensor:
        """[B, H, Q, keys] of all queries or of `rows` [Q], at least in float32."""
        return at_least_float32(self.weigh(self.query if rows is None else self.query[:, :, rows], self.key, rows=rows))


class Gradients(NamedTuple):
    """Gradients of the logit of one class per image."""

    images: Tensor  # [B, 3, height, width]
    outputs: dict[nn.Module, Tensor]  # projection of an attention module -> gradient of its input [B, T, D]


@dataclass
class Recording:
    """What one forward pass leaves: the inputs of all blocks and the logits. Layers are numbered as in `model.trace`."""

    model: VisionTransformer
    images: Tensor
    features: Features  # without patch tokens where the model does not read them
    logits: Tensor  # [B, C]; of a model without a classifier the pooled vector
    layout: Layout  # after the last block
    blocks: list[tuple[Tensor, Layout, nn.Module | None]]  # tokens, layout and relative position embedding of each block
    pooling: list[tuple[Tensor, Tensor]]  # queries and patches of each block of the pooling
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)  # with gradients: the inputs of the projections

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches."""
        return self.layout.grid

    def zeros(self, *size: int) -> Tensor:
        """A tensor for maps, which are at least float32, also of a model in bfloat16."""
        return at_least_float32(self.images.new_zeros(size))

    @property
    def covered(self) -> tuple[int, int]:
        """Height and width of the part of the images that the patches cover."""
        height, width = self.images.shape[-2:]
        return covered_size(self.model, height, width)

    @property
    def prefix(self) -> int:
        """Prefix tokens after the last block."""
        return self.layout.prefix

    @property
    def layers(self) -> int:
        """Blocks, then blocks of the pooling."""
        return len(self.blocks) + len(self.pooling)

    def layer_index(self, layer: int) -> int:
        """The number of a layer from 0; -1 is the last."""
        if not -self.layers <= layer < self.layers:
            raise UserError(f"Layer {layer} does not exist: this model has {self.layers} layers, 0 being the first.")
        return layer % self.layers

    def is_pooling(self, layer: int) -> bool:
        return self.layer_index(layer) >= len(self.blocks)

    def prefix_of(self, layer: int) -> int:
        """Keys of a layer that are not patches: prefix tokens, or the queries of a pooling that attends to them too."""
        layer = self.layer_index(layer)
        if layer < len(self.blocks):
            return self.blocks[layer][1].prefix
        return self.pooling[0][0].shape[1] if self.model.architecture.pooling_keys == "all" else 0

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention weights: convolutions and linear layers over the patches have none."""
        return bool(self._attention_modules(layer))

    def attention_rows(self, layer: int, queries: Sequence[int] | None = None) -> Tensor:
        """The attention weights [B, heads, Q, T] of the chosen query tokens (default: all); rows sum to one.

        Parallel branches are concatenated. In the pooling, queries are the learned ones and T are its keys.
        """
        heads = self.heads(layer)
        rows = None
        if queries is not None:
            count = heads[0].query.shape[2]
            if wrong := [query for query in queries if not -count <= query < count]:
                raise UserError(f"Token {wrong[0]} does not exist: layer {layer} has {count} query tokens, 0 being the first.")
            rows = torch.tensor([query % count for query in queries], device=self.images.device)
        with torch.no_grad():
            return torch.cat([part.weights(rows) for part in heads], 1)

    def row_chunks(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows of a layer in chunks of bounded memory: the index of the queries [Q], and weights [B, heads, Q, T]."""
        heads = self.heads(layer)
        for rows in self.chunk_rows(heads):
            with torch.no_grad():
                yield rows, torch.cat([part.weights(rows) for part in heads], 1)

    def chunk_rows(self, heads: list[Heads]) -> Iterator[Tensor]:
        """Indices of the queries in chunks, so that a chunk of weights of all heads has at most `CHUNK` values."""
        batch, count, queries, _ = heads[0].query.shape
        size = max(CHUNK // (batch * count * len(heads) * heads[0].key.shape[2]), 1)
        for start in range(0, queries, size):
            yield torch.arange(start, min(start + size, queries), device=self.images.device)

    @torch.no_grad()
    @without_autocast()
    def heads(self, layer: int) -> list[Heads]:
        """Queries, keys and values of the attention modules of a layer, computed from its recorded input."""
        layer = self.layer_index(layer)
        modules = self._attention_modules(layer)
        if not modules:
            raise UserError(f"Layer {layer} of this model has no attention: choose another layer or method.")
        if layer >= len(self.blocks):
            block = modules[0]
            query, patches = (x.detach() for x in self.pooling[layer - len(self.blocks)])
            with evaluation_mode(block):
                q, k, v = block.attention.split_heads(block.norm1(query), block.norm1(patches))
            return [Heads(q, k, v, weigh_queries, multiply_values, block.attention.proj)]
        x, layout, relative = self.blocks[layer]
        found = []
        for branch in modules:
            body = branch.body
            with evaluation_mode(branch):
                q, k, v = body.split_heads(body.qkv(branch.norm(x.detach())))
            weigh = partial(body.weights, layout=layout, relative=relative)
            found.append(Heads(q, k, v, weigh, body.weight_gradient, body.proj))
        return found

    def _attention_modules(self, layer: int) -> list[Any]:
        """The branches with attention of a block, or the block of the pooling if it has attention."""
        layer = self.layer_index(layer)
        if layer < len(self.blocks):
            return attention_branches(self.model.block(layer))
        assert isinstance(self.model.pooling, QueryPooling)
        block = self.model.pooling.blocks[layer - len(self.blocks)]
        return [block] if isinstance(block, ClassAttentionBlock) else []

    def gradients(self, classes: Tensor) -> Gradients:
        """Gradients of the logits of `classes` [B]; needs `record(..., gradients=True)`."""
        modules = list(self.outputs)
        with torch.inference_mode(False), torch.enable_grad(), plain_forward(self.model):  # also of blocks that are recomputed
            total = self.logits.gather(1, classes[:, None].clone()).sum()
            images, *outputs = torch.autograd.grad(total, [self.images, *self.outputs.values()], retain_graph=True)
        return Gradients(images, dict(zip(modules, outputs, strict=True)))


def weigh_queries(query: Tensor, key: Tensor, rows: Tensor | None) -> Tensor:
    """The attention weights of the pooling."""
    return ClassAttention.weights(query, key)


def multiply_values(output_gradient: Tensor, value: Tensor) -> Tensor:
    """The gradient of softmax weights [B, H, Q, keys] from that of the outputs of the heads [B, H, Q, D/H]."""
    return output_gradient @ value.transpose(-2, -1)


def at_least_float32(x: Tensor) -> Tensor:
    """Values to add and multiply: in bfloat16, sums over blocks and patches would have two digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def covered_size(model: VisionTransformer, height: int, width: int) -> tuple[int, int]:
    """Height and width of the part of an image, from its upper left, that the patches cover.

    Most stems leave out a rest that is smaller than a patch; maps have no value for it.
    """
    patch = model.architecture.patch_size
    rows, columns = model.stem.grid(height, width)
    return min(rows * patch, height), min(columns * patch, width)


def batch_size_for(model: VisionTransformer, largest: int) -> int:
    """Images per pass whose graph is kept: at most `largest`, fewer large ones."""
    height, width = model.preprocessing.image_size
    rows, columns = model.stem.grid(height, width)
    patches = max(rows * columns, height * width // 256)  # the maps of a convnet are finer than its last one
    return max(min(largest, GRAPH_PATCHES // patches), 1)


@contextmanager
def plain_forward(model: VisionTransformer) -> Iterator[None]:
    """Context in which a model is in evaluation mode, in its own precision, and compiled blocks run eagerly.

    The graph of a compiled block has no gradients of tensors inside of it, and allows one backward pass.
    """
    with evaluation_mode(model), without_autocast(), run_eagerly(model):
        yield


def record(model: VisionTransformer, images: Tensor, gradients: bool = False) -> Recording:
    """One forward pass in evaluation mode on preprocessed images [B, 3, height, width]; with `gradients` it keeps the graph."""
    blocks: list[Any] = []
    pooling: list[Any] = []
    outputs: dict[nn.Module, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(plain_forward(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        images = images.detach().clone().requires_grad_(gradients)

        def keep_input(module: nn.Module, kept: Callable[[tuple[Any, ...]], None]) -> None:
            handle = module.register_forward_pre_hook(lambda _, arguments: kept(arguments))
            stack.callback(handle.remove)

        query_blocks = list(model.pooling.blocks) if isinstance(model.pooling, QueryPooling) else []
        for index in range(len(model.blocks)):
            keep_input(model.block(index), blocks.append)
        for block in query_blocks:
            keep_input(block, pooling.append)
        if gradients:
            attentions = [branch.body for index in range(len(model.blocks)) for branch in attention_branches(model.block(index))]
            attentions += [block.attention for block in query_blocks if isinstance(block, ClassAttentionBlock)]
            for attention in attentions:
                proj = attention.proj
                assert isinstance(proj, nn.Module)
                keep_input(proj, lambda arguments, proj=proj: outputs.__setitem__(proj, arguments[0]))  # type: ignore[misc]
        tokens, layout = model.encode(*model.embed(images))
        features = model.read(tokens, layout, patches=model.head_dense is not None)
        logits = model.classify(features).logits
    return Recording(model, images, features, logits, layout, blocks, pooling, outputs)
