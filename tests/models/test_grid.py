"""The grid: any combination that the rules call valid builds, runs, differentiates, saves and loads."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vitrail
from tests.models.test_every_model import any_size, loss, randomize
from vitrail.errors import UserError
from vitrail.layers.attention import ATTENTION
from vitrail.layers.layer_scale import SCALES
from vitrail.layers.norm import TOKEN_NORMS
from vitrail.layers.pooling import POOLINGS
from vitrail.layers.pos_embed import POS_EMBEDS, RELATIVE
from vitrail.layers.token_mixers import MIXERS, SPATIAL
from vitrail.models.config import CHOICES, Architecture
from vitrail.models.registry import build

STEMS = {
    "linear": {"stem_norm": ("none", "batch", "layer"), "stem_activation": ("none", "gelu")},
    "conv": {"stem_norm": ("none", "batch", "layer")},
    "tower": {"stem_norm": ("batch", "layer"), "stem_width": (8,)},
    "basic": {"stem_norm": ("none", "batch", "layer"), "stem_width": (8,), "stem_layers": ((1,), (2, 1))},
    "hmlp": {"stem_norm": ("batch", "layer")},
    "local_transformer": {},
    "resnet": {"stem_width": (32,), "stem_layers": ((1,), (1, 1))},
}


@st.composite
def architectures(draw):
    stem = draw(st.sampled_from(sorted(STEMS)))
    parts = {field: draw(st.sampled_from(values)) for field, values in STEMS[stem].items()}
    mixer, pooling = draw(st.sampled_from(MIXERS)), draw(st.sampled_from(POOLINGS))
    if mixer in SPATIAL and pooling == "class":
        pooling = "mean"
    positions = draw(st.sampled_from(POS_EMBEDS))
    if positions in RELATIVE and mixer not in ATTENTION:
        positions = "learned"
    places = {"relative": ("layers", "shared"), "relative_bias": ("layers", "shared"), "sincos": ("stem", "shared")}
    place = draw(st.sampled_from(places.get(positions, ("stem", "layers", "shared"))))
    norm = draw(st.sampled_from(TOKEN_NORMS))
    norm_place = "post" if norm != "none" and draw(st.booleans()) else "pre"
    two_heads = pooling in ("class", "class_attention") and draw(st.booleans())
    return Architecture(
        stem=stem,
        **parts,
        patch_size=16 if stem != "linear" else draw(st.sampled_from([4, 6])),
        image_size=(32, 48),
        width=draw(st.sampled_from([32, 48])),
        depth=2,
        heads=draw(st.sampled_from([1, 2, 4])),
        mlp_ratio=draw(st.sampled_from([0, 1.5, 4.0])),
        branches=draw(st.sampled_from([1, 2, 3])),
        classes=draw(st.sampled_from([1, 5])),
        channels=draw(st.sampled_from([1, 3])),
        mixer=mixer,
        qkv_bias=draw(st.booleans()),
        activation=draw(st.sampled_from(["gelu", "gelu_tanh", "relu", "silu", "hardswish"])),
        norm=norm,
        norm_groups=2,
        norm_place=norm_place,
        residual=draw(st.sampled_from(SCALES)),
        layerscale_init=0.5,
        layerscale_init_mode=draw(st.sampled_from(["constant", "zero", "uniform"])),
        drop_path=0.0,
        pos_embed=positions,
        pos_embed_place=place,
        pos_embed_prefix=draw(st.booleans()),
        class_token_at=draw(st.sampled_from([0, 1])),
        distillation=two_heads,
        fusion=draw(st.sampled_from(["logit_mean", "softmax_sum", "class", "distillation"])),
        pooling=pooling,
        keep_class_token=pooling == "mean" and mixer in ATTENTION and draw(st.booleans()),
        pooling_depth=draw(st.sampled_from([1, 2])),
        pooling_keys=draw(st.sampled_from(["all", "patches"])),
        pooling_scale=draw(st.booleans()),
        final_norm=draw(st.booleans()),
        pre_logits=draw(st.sampled_from([0, 8])) if pooling != "per_class" else 0,
        dense_head=pooling != "per_class" and draw(st.booleans()),
        weight_init=draw(st.sampled_from(["deit", "vit", "beit"])),
    )


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(architecture=architectures())
def test_valid_combinations_build_run_save_and_load(architecture, tmp_path):
    model = randomize(build(architecture)).train()
    loss(model.outputs(torch.randn(3, architecture.channels, 32, 48))).backward()
    # With two classes or more each parameter matters; the fusion may ignore a head, but `loss` sees all of them.
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    size = (48, 32) if any_size(architecture) else (32, 48)
    image = torch.randn(2, architecture.channels, *size)
    with torch.no_grad():
        logits = model(image)
        back = vitrail.load(vitrail.save(model, tmp_path / "model.safetensors"))
        assert back.architecture == architecture
        assert torch.equal(back(image), logits)
        assert logits.shape == (2, architecture.classes)
        features = model.features(image)
        assert features.tokens.shape[1] == features.grid[0] * features.grid[1]
        model.trace(torch.randn(2, architecture.channels, 32, 48))
        resized = model.resize(48, 32)(torch.randn(2, architecture.channels, 48, 32))
        assert resized.isfinite().all()


@pytest.mark.parametrize("field", CHOICES)
def test_unknown_choices_are_named(field):
    with pytest.raises(UserError, match=f"{field}='magic' is not known; choose from"):
        Architecture(**{field: "magic"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "do not divide the width"),
        ({"mixer": "linear"}, "takes no class token"),
        ({"pos_embed": "relative"}, "pos_embed_place"),
        ({"pos_embed": "relative", "pos_embed_place": "layers", "mixer": "conv", "pooling": "mean"}, "attention scores"),
        ({"pos_embed": "sincos", "pos_embed_place": "layers"}, "same in every layer"),
        ({"distillation": True, "pooling": "mean"}, "distillation token"),
        ({"pooling": "per_class", "dense_head": True}, "dense head"),
        ({"pooling": "per_class", "classes": 0}, "needs classes > 0"),
        ({"class_token_at": 12}, "0 to 11"),
        ({"image_size": 8}, "smaller than one patch"),
        ({"image_size": (1, 2, 3)}, "pair"),
        ({"image_size": -4}, "positive"),
        ({"width": 192.0}, "width=192.0 is not a valid value"),
        ({"width": 0}, "width=0 is not a valid value; give an integer from 1 to"),
        ({"width": -4}, "width=-4"),
        ({"depth": 0}, "depth=0 is a model without blocks; give at least 1"),
        ({"depth": -1}, "depth=-1"),
        ({"heads": 0}, "heads=0"),
        ({"heads": 0, "mixer": "linear", "pooling": "mean"}, "heads=0"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"drop_path": 1.0}, "drop_path=1.0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan"),
        ({"qkv_bias": "no"}, "qkv_bias='no'"),
        ({"mlp_ratio": 0.0001}, "without hidden units"),
        ({"depth": 99999}, "exceeds the limit of 2000"),
        ({"stem_layers": 3}, "stem_layers=3"),
        ({"pre_logits": -5}, "pre_logits=-5"),
        ({"norm": "group", "norm_groups": 5}, "groups"),
        ({"norm": "none", "norm_place": "post"}, "needs a norm"),
        ({"stem": "resnet", "stem_layers": (3, 4, 6, 3)}, "stride 32"),
        ({"stem": "resnet_features", "stem_layers": (3, 4, 6, 3)}, "stages"),
        ({"stem": "conv", "patch_size": 14}, "power of two"),
        ({"stem": "local_transformer", "patch_size": 14}, "divisible by 4"),
        ({"stem": "tower", "stem_kernels": (7, 3, 8)}, "as many"),
        ({"stem": "hmlp", "stem_strides": (2, 2)}, "is not the patch size"),
        ({"stem": "basic"}, "stem_layers"),
        ({"stem": "basic", "stem_layers": (1,), "patch_size": 12}, "power of two"),
        (
            {"stem": "basic", "stem_layers": (1,), "patch_size": 4, "stem_strides": (2, 2, 1)},
            "2 stem_strides: one per stage and one for the last convolution",
        ),
        ({"stem": "basic", "stem_layers": (1,), "patch_size": 4, "stem_strides": (2, 1)}, "is not the patch size"),
        ({"widht": 3}, "did you mean width"),
    ],
)
def test_constraints_have_messages(changes, message):
    with pytest.raises(UserError, match=message):
        Architecture().replace(**changes)
