"""Names: the catalogue's, other projects', patterns, and the nearest guess."""

import pytest
import torch

import vitrail
from vitrail.models.registry import PAGES, list_models, lookup, model_pages, name_of


@pytest.mark.parametrize("name", list_models())
def test_every_name_is_found_by_itself_and_by_its_architecture(name):
    plain, architecture = lookup(name)
    assert plain == name
    same = lookup(name_of(architecture))[1]
    assert not same.differences(architecture)


def test_every_alias_leads_to_a_model():
    for page in PAGES:
        for alias in page.ALIASES:
            assert lookup(alias)[1]


@pytest.mark.parametrize(
    ("name", "plain", "size"),
    [
        ("deit_base_distilled_patch16_384", "deit_base_distilled_patch16", 384),
        ("deit_small_patch16_LS", "deit3_small_patch16", 224),
        ("deit_huge_patch14_26x2_LS", "deit3_huge_patch14_26x2", 224),
        ("cait_M48", "cait_m48", 448),
        ("cait_XXS24_224", "cait_xxs24", 224),
        ("cait_xxs24_384.fb_dist_in1k", "cait_xxs24", 384),
        ("resmlpB_24", "resmlp_b24_patch8", 224),
        ("resmlp_12_224.fb_in1k", "resmlp_s12", 224),
        ("deit3_base_patch16_384.fb_in22k_ft_in1k", "deit3_base_patch16", 384),
        ("vit_base_patch16_224.augreg_in21k", "vit_base_patch16", 224),
        ("vit_base_patch16_384_in21k", "vit_base_patch16", 384),
        ("vit_base_r50_s16_384", "vit_base_r50_s16", 384),
        ("R50+ViT-B_16", "vit_base_r50_s16", 224),
        ("vit-b_32", "vit_base_patch32", 224),
        ("S60_multi", "patchconvnet_s60_multi", 224),
        ("lvvit_s_384", "lvvit_s", 384),
        ("lvvit_l", "lvvit_l", 288),
        ("vit_small_patch16_18x2_224", "vit_small_patch16_18x2", 224),
        ("vit_small_patch16_7x5_ls_hmlp_384", "vit_small_patch16_7x5_ls_hmlp", 384),
        ("VIT_BASE_PATCH16", "vit_base_patch16", 224),
    ],
)
def test_names_of_other_projects(name, plain, size):
    found, architecture = lookup(name)
    assert (found, architecture.image_size) == (plain, (size, size))


def test_any_pattern_of_blocks_and_branches():
    model = vitrail.create("vit_small_patch16_7x5_ls", device="meta")
    assert (model.architecture.depth, model.architecture.branches, model.architecture.residual) == (7, 5, "layerscale")
    assert len(model.block(0).mix.branches) == 5


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("deit_smal_patch16", "deit_small_patch16"),
        ("cait_s25", "cait_s24"),
        ("vit_base_patch61", "vit_base_patch16"),
        ("deit_base_patch16_36", "deit_base_patch16_36x1"),
        ("vit_small_patch16_0x2", "vit_small_patch16"),
    ],
)
def test_unknown_names_suggest_the_nearest(wrong, near):
    with pytest.raises(vitrail.UserError, match=f"no model '{wrong}'.*{near}"):
        vitrail.create(wrong)
    with pytest.raises(vitrail.UserError, match="vitrail models"):
        vitrail.create("zzz")


def test_a_file_is_not_a_name(tmp_path):
    with pytest.raises(vitrail.UserError, match="There is no file"):
        vitrail.create(str(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(vitrail.UserError, match="is a weight file, not the name of a model"):
        vitrail.create(str(tmp_path / "model.safetensors"))


def test_listing():
    assert list_models("cait_*24") == ["cait_xxs24", "cait_xs24", "cait_s24", "cait_m24"]
    assert "vit_base_r50_s16" in list_models("r50")
    assert len(list_models()) == len(model_pages()) > 150
    assert list_models("nothing like it") == []


def test_create_takes_classes_size_and_overrides():
    model = vitrail.create("deit_tiny_patch16", classes=3, image_size=(32, 64), depth=2, drop_path=0.1)
    assert model(torch.randn(2, 3, 32, 64)).shape == (2, 3)
    assert model.preprocessing.image_size == (32, 64)
    assert model.name == "deit_tiny_patch16 with depth=2"
    assert vitrail.create("deit_tiny_patch16", classes=0, depth=1)(torch.randn(1, 3, 224, 224)).shape == (1, 192)
    with pytest.raises(vitrail.UserError, match="drop_path"):
        vitrail.create("deit_tiny_patch16", droppath=0.1)
