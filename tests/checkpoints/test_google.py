"""Google's dumps in their several spellings."""

import numpy as np
import pytest
import torch

import vitrail
from tests.checkpoints.test_formats import little


@pytest.fixture
def model():
    return little("vit_base_patch16")


@pytest.fixture
def arrays(model, tmp_path):
    return dict(np.load(vitrail.save(model, tmp_path / "original.npz", "npz")))


def same(model, arrays, path):
    with path.open("wb") as file:
        np.savez(file, **arrays)
    back = vitrail.load(path)
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(back(image), model(image), rtol=0, atol=0)


def test_released_numbering_is_written(arrays):
    assert "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel" in arrays
    assert "Transformer/encoderblock_0/LayerNorm_2/scale" in arrays
    assert "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel" in arrays


def test_modern_numbering(model, arrays, tmp_path):
    names = {"Attention_1": "Attention_0", "LayerNorm_2": "LayerNorm_1", "MlpBlock_3": "MlpBlock_0"}
    renamed = {}
    for key, value in arrays.items():
        for old, new in names.items():
            key = key.replace(old, new)
        renamed[key] = value
    same(model, renamed, tmp_path / "modern.npz")


def test_big_vision_prefix_and_stacked_blocks(model, arrays, tmp_path):
    stacked = {}
    for key, value in arrays.items():
        if "encoderblock_0/" in key:
            name = key.replace("encoderblock_0/", "encoderblock/").replace("Attention_1", "Attention_0")
            name = name.replace("LayerNorm_2", "LayerNorm_1").replace("MlpBlock_3", "MlpBlock_0")
            both = [arrays[key.replace("encoderblock_0", f"encoderblock_{index}")] for index in range(2)]
            stacked[f"params/{name}"] = np.stack(both)
        elif "encoderblock_1/" not in key:
            stacked[f"params/{key}"] = value
    stacked["opt/count"] = np.zeros(())
    same(model, stacked, tmp_path / "stacked.npz")


def test_big_vision_positions_before_the_class_token(tmp_path):
    model = little("vit_base_patch16", pos_embed_prefix=False)
    path = vitrail.save(model, tmp_path / "modern.npz", "npz")
    assert "pos_embedding" in np.load(path).files
    assert vitrail.load(path).architecture.pos_embed_prefix is False


def test_averaged_vit_without_a_class_token(tmp_path):
    model = little("vit_base_patch16", pooling="mean")
    same(model, dict(np.load(vitrail.save(model, tmp_path / "mean.npz", "npz"))), tmp_path / "again.npz")


def test_bfloat16_arrays(model, arrays, tmp_path):
    value = torch.from_numpy(arrays["head/bias"]).bfloat16()
    arrays["head/bias"] = value.view(torch.int16).numpy().view("V2")
    model.head.bias.data = value.float()
    same(model, arrays, tmp_path / "bfloat16.npz")


def test_map_head_is_refused_by_name(arrays, tmp_path):
    path = tmp_path / "map.npz"
    with path.open("wb") as file:
        np.savez(file, **arrays, **{"MAPHead_0/probe": np.zeros(3)})
    with pytest.raises(vitrail.UserError, match="MAP head"):
        vitrail.load(path)
