"""Compilation of models block by block, for training and inference."""

import torch

from vitrail.layers.fused import optimize_for_training
from vitrail.layers.pooling import QueryPooling
from vitrail.models.vision_transformer import VisionTransformer

__all__ = ["compile_blocks", "optimize_for_training"]


def compile_blocks(model: VisionTransformer) -> None:
    """Compile each block by itself: equal blocks share one graph, which takes seconds instead of minutes."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * len(model.blocks) + 8)  # drop-path rates and shapes differ
    for block in model.blocks:
        block.compile()
    if model.architecture.stem != "linear":  # which is a single kernel
        model.stem.compile()
    if isinstance(model.pooling, QueryPooling):
        model.pooling.compile()
