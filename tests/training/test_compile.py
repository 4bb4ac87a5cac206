"""What a compiled training computes: branches as one and scales inside products, and the same training for that."""

import pytest
import torch
from torch import nn

from tests.training.processes import trained
from vitrail.layers.block import Branch, Residual
from vitrail.training.distributed import Devices
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
def test_a_compiled_training_is_the_same_training(monkeypatch, tmp_path, changes):
    """Without the compiler, which draws other coins: what it is given must be the same numbers."""
    given = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, *_, **__: given.append(self))
    device = Devices(torch.device("cpu"), micro_batches=1)
    plain, compiled = (
        trained(tmp_path / str(compiles), device, CHANGES | changes, Options(compile=compiles)) for compiles in (False, True)
    )
    parts = [part for part in compiled.model.modules() if isinstance(part, Branch | Residual)]
    assert all((part.folded if isinstance(part, Branch) else part.together) is not None for part in parts)
    assert [type(part).__name__ for part in given][: len(compiled.model.blocks)] == ["Block"] * len(compiled.model.blocks)
    assert (compiled.model.pooling in given) == ("architecture.pooling" in changes)
    assert (compiled.model.stem in given) == ("architecture.stem" in changes)
    ours, theirs = compiled.model.state_dict(), plain.model.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}")
    start = [part.together is None for part in plain.model.modules() if isinstance(part, Residual)]
    assert all(start)
