"""Compilation of models block by block, for training and inference."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TypeVar

import torch

from vitrail.layers.pooling import QueryPooling
from vitrail.models.vision_transformer import VisionTransformer

Result = TypeVar("Result")


def compile_blocks(model: VisionTransformer) -> None:
    """Compile each block by itself: equal blocks share one graph, which takes seconds instead of minutes."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * len(model.layers) + 8)  # drop-path rates and shapes differ
    for block in model.layers:
        block.compile()
    if model.architecture.stem not in ("linear", "convnet"):  # a single kernel, and blocks that are compiled already
        model.stem.compile()
    if isinstance(model.pooling, QueryPooling):
        model.pooling.compile()


def is_compiled(model: VisionTransformer) -> bool:
    """Whether `compile_blocks` has compiled the model."""
    return any(block._compiled_call_impl is not None for block in model.layers)


def run_eagerly(model: VisionTransformer) -> AbstractContextManager[None]:
    """Context in which a compiled model runs without compiling: its graphs are for the shapes and the mode of the training."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


@cache
def compile_function(function: Callable[..., Result]) -> Callable[..., Result]:
    """A compiled function, with a graph for each shape of its arguments."""
    return torch.compile(function, dynamic=False)


@contextmanager
def static_shapes(model: VisionTransformer) -> Iterator[None]:
    """Context in which a compiled model gets a graph for each shape of the images, not a slower one for all of them.

    For a task that runs images of a few sizes in every step.
    """
    if is_compiled(model):
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            yield
    else:
        yield
