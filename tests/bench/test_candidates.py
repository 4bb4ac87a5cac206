"""Our models, and timm's beside them. timm itself is not needed but for the last test: a small stand-in has its two functions."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import vitrail
from vitrail.bench import candidates
from vitrail.bench.candidates import WithLoss, find_recipe, make_timm, open_candidate, timm_candidates, timm_name
from vitrail.bench.settings import Setting
from vitrail.errors import UserError
from vitrail.models.registry import build, list_models, lookup
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.tasks.targets import ClassificationTargets


class Timm(ModuleType):
    """Knows some names, and answers with one of our networks."""

    __version__ = "0"

    def __init__(self, *names: str) -> None:
        super().__init__("timm")
        self.names, self.requested = names, []

    def is_model(self, name):
        return name in self.names

    def create_model(self, name, pretrained, **wanted):
        assert not pretrained
        self.requested.append((name, wanted))
        size, classes = wanted["img_size"], wanted["num_classes"]
        return build(lookup(name)[1].replace(image_size=size, classes=classes, depth=wanted.get("depth", lookup(name)[1].depth)))


@pytest.fixture
def timm(monkeypatch):
    def install(*names):
        monkeypatch.setitem(sys.modules, "timm", Timm(*names))
        return sys.modules["timm"]

    return install


def test_loss_and_stochastic_depth_of_the_paper():
    found = open_candidate("deit3_base_patch16")
    assert found.recipe.name == "deit3_base"
    assert found.recipe.loss.kind == "binary"
    assert found.architecture.drop_path == 0.2
    assert open_candidate("lvvit_s").recipe.token_labels.weight == 1.0
    assert open_candidate("deit_tiny_distilled_patch16").recipe.distillation.kind == "hard"


def test_every_model_has_a_recipe_or_a_plain_one():
    for name in list_models():
        architecture = lookup(name)[1]
        recipe = find_recipe(name, architecture)
        assert recipe.model == name or recipe.name == "custom"
        assert not recipe.token_labels.weight or architecture.dense_head


def test_a_checkpoint_is_its_architecture(tmp_path):
    vitrail.save(vitrail.create("deit_tiny_patch16", 3, 32, depth=2), tmp_path / "m.safetensors")
    found = open_candidate(str(tmp_path / "m.safetensors"), is_file=True)
    assert (found.architecture.classes, found.architecture.depth) == (3, 2)
    with pytest.raises(UserError, match="no model 'deit_tyni'"):
        open_candidate("deit_tyni")


def test_size_and_depth_of_a_setting():
    candidate = open_candidate("deit_tiny_patch16")
    setting = Setting(size=(32, 48), depth=3)
    network = candidate.network(setting, torch.device("cpu"))
    assert isinstance(network, VisionTransformer)
    assert (network.grid, len(network.blocks)) == ((2, 3), 3)
    found = candidate.cost(setting)
    assert found.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert found.macs < candidate.cost(Setting(size=(32, 48))).macs
    with pytest.raises(UserError, match="smaller than one patch"):
        candidate.cost(Setting(size=(8, 8)))


def test_timms_names(timm):
    known = timm("deit_small_patch16_224", "resmlp_big_24_224", "cait_m36_384", "vit_small_patch16_18x2_224")
    for ours, theirs in (
        ("deit_small_patch16", "deit_small_patch16_224"),
        ("resmlp_b24_patch8", "resmlp_big_24_224"),
        ("cait_m36", "cait_m36_384"),
        ("vit_small_patch16_18x2_ls", "vit_small_patch16_18x2_224"),
        ("lvvit_s", None),
    ):
        assert timm_name(known, open_candidate(ours)) == theirs


def test_timm_models_get_our_size_and_depth(timm):
    known = timm("deit_tiny_patch16_224")
    ours = [open_candidate("deit_tiny_patch16"), open_candidate("lvvit_t")]
    (found,), said = timm_candidates(ours)
    assert (found.project, found.name, found.timm_model) == ("timm", "deit_tiny_patch16", "deit_tiny_patch16_224")
    assert said == ["timm has no counterpart of lvvit_t."]
    found.network(Setting(size=(32, 32), depth=2), torch.device("cpu"))
    name, wanted = known.requested[-1]
    assert name == "deit_tiny_patch16_224"
    assert (wanted["img_size"], wanted["depth"], wanted["drop_path_rate"]) == ((32, 32), 2, 0.1)


def test_layer_scale_is_removed_if_ours_has_none(timm):
    known = timm("vit_small_patch16_36x1_224")
    make_timm("vit_small_patch16_36x1_224", lookup("vit_small_patch16_36x1")[1].replace(image_size=32, depth=1), True)
    assert known.requested[-1][1]["init_values"] == 0.0
    make_timm("vit_small_patch16_36x1_224", lookup("vit_small_patch16_36x1_ls")[1].replace(image_size=32, depth=1), True)
    assert "init_values" not in known.requested[-1][1]


def test_a_different_number_of_parameters_is_not_compared(timm, monkeypatch):
    timm("deit_tiny_patch16_224")
    monkeypatch.setattr(candidates, "make_timm", lambda *given: nn.Linear(10, 10))
    found, said = timm_candidates([open_candidate("deit_tiny_patch16")])
    assert not found
    assert "has 110 parameters, deit_tiny_patch16 has 5,717,416: they are not compared." in said[0]


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"timm (is not installed|cannot be imported)"):
        timm_candidates([open_candidate("deit_tiny_patch16")])


def test_the_loss_of_a_foreign_network():
    torch.manual_seed(0)
    network, targets = nn.Linear(4, 3), torch.full((2, 3), 1 / 3)
    images = torch.randn(2, 4)
    loss = WithLoss(network, open_candidate("deit_tiny_patch16").recipe.loss)(images, ClassificationTargets(targets))
    assert torch.allclose(loss, nn.functional.cross_entropy(network(images), targets))


@pytest.mark.timm
def test_real_timm_models_match():
    ours = [open_candidate(name) for name in ("deit_tiny_patch16", "cait_xxs24", "resmlp_s12", "vit_small_patch16_18x2")]
    found, said = timm_candidates(ours)
    assert [each.name for each in found] == [each.name for each in ours]
    assert not said
