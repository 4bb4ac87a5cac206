"""What is compiled when a model trains."""

from typing import cast

import torch

from vitrail.layers.fused_branches import join_branches
from vitrail.layers.fused_scales import fold_scales
from vitrail.layers.pooling import QueryPooling
from vitrail.models.vision_transformer import VisionTransformer


def for_compiling(model: VisionTransformer) -> VisionTransformer:
    """Let parallel branches run as one and scales be part of products, from which a compiled model gains time and memory.

    Uncompiled, it would be more small kernels for the host to launch.
    """
    return cast(VisionTransformer, fold_scales(join_branches(model)))


def compile_blocks(model: VisionTransformer) -> None:
    """Compile block by block: blocks are alike, so one graph serves all, in seconds instead of minutes."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * len(model.blocks) + 8)  # drop-path rates may differ
    for block in model.blocks:
        block.compile()
    if model.architecture.stem != "linear":  # which is one kernel already
        model.stem.compile()
    if isinstance(model.pooling, QueryPooling):
        model.pooling.compile()
