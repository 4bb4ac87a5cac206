"""Parity with the ViT and DeiT classes of `transformers`: random weights, evaluation and gradients, both directions."""

import pytest
import torch
import transformers

import vitrail
from tests.checkpoints.test_formats import little
from vitrail.checkpoints.formats import huggingface
from vitrail.checkpoints.model_io import logit_difference

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "image_size": 48,
    "patch_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def random(kind, **options):
    config_class = transformers.DeiTConfig if kind.startswith("DeiT") else transformers.ViTConfig
    model = getattr(transformers, kind)(config_class(**(SIZES | {"num_labels": 7} | options))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


CASES = [
    ("ViTForImageClassification", {}),
    ("ViTForImageClassification", {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-3}),
    ("ViTForImageClassification", {"qkv_bias": False}),
    ("DeiTForImageClassification", {}),
    ("DeiTForImageClassificationWithTeacher", {}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_their_folder_gives_their_logits_and_gradients(kind, options, tmp_path):
    theirs = random(kind, **options)
    theirs.save_pretrained(tmp_path)
    ours = vitrail.load(tmp_path)
    image = torch.randn(3, 3, 48, 48)
    weight = torch.randn(3, 7)
    expected, found = theirs(image).logits, ours(image)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    names = huggingface.plain_names([key for key, _ in theirs.named_parameters()])
    gradients = {names[key]: parameter.grad for key, parameter in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        pair = huggingface.to_pair(key, ours.architecture)
        if key == "prefix" and gradients[pair.theirs[-1]] is None:
            continue
        torch.testing.assert_close(
            parameter.grad, pair.codec.read([gradients[name] for name in pair.theirs]), rtol=1e-3, atol=1e-3
        )


def test_a_folder_in_shards(tmp_path):
    theirs = random("ViTForImageClassification")
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    image = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(vitrail.load(tmp_path)(image), theirs(image).logits, rtol=1e-4, atol=1e-4)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    with pytest.raises(vitrail.UserError, match="of that folder"):
        vitrail.load(tmp_path)


def test_a_headless_model_gives_the_pooled_vector(tmp_path):
    theirs = random("ViTModel")
    theirs.save_pretrained(tmp_path)
    image = torch.randn(2, 3, 48, 48)
    ours = vitrail.load(tmp_path)
    torch.testing.assert_close(ours(image), theirs(image).pooler_output, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.features(image).prefix[:, 0], theirs(image).last_hidden_state[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("deit_base_patch16", "ViTForImageClassification"),
        ("vit_base_patch16", "ViTForImageClassification"),
        ("deit_base_distilled_patch16", "DeiTForImageClassificationWithTeacher"),
    ],
)
def test_they_read_what_we_write(name, kind, tmp_path):
    ours = little(name)
    ours.class_names = [f"thing {index}" for index in range(7)]
    vitrail.save(ours, tmp_path, "hf")
    theirs = getattr(transformers, kind).from_pretrained(tmp_path).eval()
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(theirs(image).logits, ours(image), rtol=1e-4, atol=1e-4)
    assert theirs.config.id2label[3] == "thing 3"


def test_a_lone_file_of_a_standard_width(tmp_path):
    """Without config.json: 64 channels a head, their epsilon, erf GELU."""
    theirs = random("ViTForImageClassification", hidden_size=128, num_attention_heads=2)
    theirs.save_pretrained(tmp_path)
    image = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(vitrail.load(tmp_path / "model.safetensors")(image), theirs(image).logits, rtol=1e-4, atol=1e-4)


def test_names_in_use_since_2026(tmp_path):
    """In memory their blocks are `layers.i.attention.q_proj`; a state dict saved by hand has those names."""
    model = little("deit_base_patch16")
    vitrail.save(model, tmp_path / "hub", "hf")
    state = vitrail.checkpoints.readers.read_weights(tmp_path / "hub").tensors
    changes = {
        "encoder.layer.": "layers.",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    }
    renamed = {}
    for key, value in state.items():
        for old, new in changes.items():
            key = key.replace(old, new)
        renamed[key] = value
    torch.save(renamed, tmp_path / "modern.pth")
    back = vitrail.load(tmp_path / "modern.pth", norm_eps=1e-6)
    assert logit_difference(model, back)[0] == 0
