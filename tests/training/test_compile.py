"""A compiled training uses fused blocks, with the same results as a plain one."""

import pytest
import torch
from torch import nn

from tests.training.processes import trained
from vitrail.layers.block import Branch, Residual
from vitrail.layers.fused import FusedBranch, FusedFeedForward, FusedResidual
from vitrail.layers.mlp import FeedForward
from vitrail.models.registry import create
from vitrail.training.distributed import Devices
from vitrail.training.drop_path_noise import DropPathNoise
from vitrail.training.task import Position
from vitrail.training.trainer import Options

CHANGES = {
    "precision": "fp32",
    "schedule.length": "6 steps",
    "architecture.branches": 2,
    "architecture.residual": "layerscale",
    "architecture.layerscale_init": 0.5,
    "architecture.drop_path": 0.2,
}


@pytest.mark.parametrize("changes", [{}, {"architecture.pooling": "class_attention"}, {"architecture.stem": "hmlp"}], ids=str)
def test_a_compiled_training_equals_a_plain_one(monkeypatch, tmp_path, changes):
    """Without the compiler itself, which draws other random numbers."""
    compiled_modules = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, *_, **__: compiled_modules.append(self))
    device = Devices(torch.device("cpu"), micro_batches=1)
    plain, compiled = (
        trained(tmp_path / str(compiles), device, CHANGES | changes, Options(compile=compiles)) for compiles in (False, True)
    )
    blocks = Branch | Residual | FeedForward
    kinds = {type(module) for module in compiled.model.modules() if isinstance(module, blocks)}
    assert kinds == {FusedBranch, FusedResidual, FusedFeedForward}
    assert [type(part).__name__ for part in compiled_modules][: len(compiled.model.blocks)] == ["Block"] * len(
        compiled.model.blocks
    )
    assert (compiled.model.pooling in compiled_modules) == ("architecture.pooling" in changes)
    assert (compiled.model.stem in compiled_modules) == ("architecture.stem" in changes)
    ours, theirs = compiled.model.state_dict(), plain.model.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert {type(module) for module in plain.model.modules() if isinstance(module, blocks)} == {Branch, Residual, FeedForward}


def test_blocks_that_skip_different_numbers_of_images_compile():
    """The rates grow with depth; the number of images that a block keeps is not computed in the graph."""
    torch._dynamo.reset()
    model = create("deit_tiny_patch16", 10, 32, width=32, heads=2, depth=4, drop_path=0.6, drop_path_kind="skip").train()
    noise = DropPathNoise(model, 0, 16, 8)
    images, position = torch.randn(16, 3, 32, 32), Position(0, 1, 0, 0, (0, 1))
    with noise.applied(torch.arange(16), position):
        expected = model(images)
        for block in model.blocks:
            block.compile(backend="eager")
        torch.testing.assert_close(model(images), expected)
