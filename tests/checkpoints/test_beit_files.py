"""Parity with the BEiT classes of `transformers`: random weights under their names and those of the released code."""

import pytest
import torch
import transformers

import vitrail
from vitrail.errors import UserError

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96, "image_size": 48}
SHARED = {"use_shared_relative_position_bias": True, "use_mean_pooling": False}
FINETUNED = {"use_relative_position_bias": True, "num_labels": 7, "layer_norm_eps": 1e-6}


def random(kind, **options):
    model = getattr(transformers, kind)(transformers.BeitConfig(**SIZES | options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def released(model):
    """The weights of their classifier as the released code saves them."""
    state = {key.removeprefix("beit."): tensor for key, tensor in model.state_dict().items()}
    out = {
        "cls_token": state["embeddings.cls_token"],
        "head.weight": state["classifier.weight"],
        "head.bias": state["classifier.bias"],
    }
    for leaf in ("weight", "bias"):
        out[f"patch_embed.proj.{leaf}"] = state[f"embeddings.patch_embeddings.projection.{leaf}"]
        out[f"fc_norm.{leaf}"] = state[f"pooler.layernorm.{leaf}"]
    for index in range(SIZES["num_hidden_layers"]):
        theirs, block = f"layers.{index}", f"blocks.{index}"
        attention = [f"{theirs}.attention.{name}_proj" for name in "qkv"]
        out[f"{block}.attn.qkv.weight"] = torch.cat([state[f"{name}.weight"] for name in attention])
        out[f"{block}.attn.q_bias"], out[f"{block}.attn.v_bias"] = (state[f"{attention[part]}.bias"] for part in (0, 2))
        table = "relative_position_bias_table"
        out[f"{block}.attn.{table}"] = state[f"{theirs}.relative_position_bias.{table}"]
        out[f"{block}.attn.relative_position_index"] = torch.zeros(10, 10, dtype=torch.int64)
        names = {"attention.o_proj": "attn.proj", "layernorm_before": "norm1", "layernorm_after": "norm2"}
        for old, new in (names | {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}).items():
            out |= {f"{block}.{new}.{leaf}": state[f"{theirs}.{old}.{leaf}"] for leaf in ("weight", "bias")}
        out |= {f"{block}.gamma_{number}": state[f"{theirs}.lambda_{number}"] for number in (1, 2)}
    return out


def check(model, images, expected):
    torch.testing.assert_close(model.eval()(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("names", ["files", "modules", "released"])
def test_a_classifier_gives_their_logits(names, tmp_path):
    theirs, images = random("BeitForImageClassification", **FINETUNED), torch.randn(3, 3, 48, 48)
    path, options = tmp_path / "beit.pth", {"heads": 2}
    if names == "files":
        theirs.save_pretrained(tmp_path)
        path, options = tmp_path, {}
    else:
        torch.save({"model": released(theirs)} if names == "released" else theirs.state_dict(), path)
    ours = vitrail.load(path, **options)
    assert (ours.architecture.pooling, ours.architecture.image_size, ours.preprocessing.mean) == (
        "mean",
        (48, 48),
        (0.5, 0.5, 0.5),
    )
    check(ours, images, theirs(images).logits)


@pytest.mark.parametrize("options", [{"use_relative_position_bias": True}, SHARED])
def test_a_backbone_gives_their_pooled_vector(options, tmp_path):
    theirs, images = random("BeitModel", **options), torch.randn(3, 3, 48, 48)
    theirs.save_pretrained(tmp_path)
    expected = theirs(images)
    ours = vitrail.load(tmp_path).eval()
    torch.testing.assert_close(ours.features(images).pooled, expected.pooler_output, rtol=1e-5, atol=1e-5)


def test_the_rest_of_the_pretraining_is_left_out(tmp_path):
    theirs = random("BeitForMaskedImageModeling", use_shared_relative_position_bias=True, use_mask_token=True)
    images, seen = torch.randn(3, 3, 48, 48), []
    theirs.layernorm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    theirs(images)
    theirs.save_pretrained(tmp_path)
    ours = vitrail.load(tmp_path).eval()
    torch.testing.assert_close(ours.features(images).pooled, seen[0][:, 0], rtol=1e-5, atol=1e-5)


def test_other_variants_are_refused(tmp_path):
    random("BeitModel", use_relative_position_bias=True, use_absolute_position_embeddings=True).save_pretrained(tmp_path / "both")
    with pytest.raises(UserError, match=r"1 tensors do not belong .*position_embeddings"):
        vitrail.load(tmp_path / "both")
    random("BeitForMaskedImageModeling", use_mask_token=True, **SHARED).save_pretrained(tmp_path / "norms")
    with pytest.raises(UserError, match=r"two norm\.bias"):
        vitrail.load(tmp_path / "norms")
    state = released(random("BeitForImageClassification", **FINETUNED))
    state["blocks.0.attn.relative_position_bias_table"] = torch.zeros(20, 2)
    torch.save(state, tmp_path / "damaged.pth")
    with pytest.raises(UserError, match="20 rows is not that of a square image"):
        vitrail.load(tmp_path / "damaged.pth", heads=2)
    state["blocks.0.attn.v_bias"] = torch.zeros(2, 2)
    torch.save(state, tmp_path / "damaged.pth")
    with pytest.raises(UserError, match=r"its shapes .* do not match one"):
        vitrail.load(tmp_path / "damaged.pth", heads=2)
