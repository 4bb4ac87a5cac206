"""Scopes: which parameters are trained, and that frozen ones cost nothing."""

import numpy as np
import pytest
import torch
from rich.console import Console

import vitrail
from tests.small import structures
from tests.trainers import initial_model, make_trainer
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Subset
from vitrail.recipes import lookup
from vitrail.runs.display import Display
from vitrail.training.batch_norm import frozen_norms
from vitrail.training.scope import apply_scope
from vitrail.training.throughput import Throughput

SCOPES = ("full", "attention", "ffn", "head", "norm", "last_norm", "last:1")


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def trained_fraction(model):
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(sizes[name] for name in trained(model)) / sum(sizes.values())


# Trained parameters at 384 pixels and 1000 classes: attention (or MLPs), classifier and positions.
COUNTS = {
    "deit_small_patch16": {"attention": 7_702_888, "ffn": 14_785_384},
    "deit_base_patch16": {"attention": 29_560_552, "ffn": 57_881_320},
    "vit_large_patch16": {"attention": 102_377_448, "ffn": 203_065_320},
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("scope", ["attention", "ffn"])
def test_trained_parameters_are_those_of_the_paper(name, scope):
    model = vitrail.create(name, image_size=384, device="meta")
    assert apply_scope(model, scope) == COUNTS[name][scope]


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large"])
def test_attention_is_a_third_of_the_blocks(size):
    """4 D^2 of 12 D^2 in each block; about a third of the model, depending on the sizes of classifier and stem."""
    name = f"{'vit' if size == 'large' else 'deit'}_{size}_patch16"
    model = vitrail.create(name, image_size=384, device="meta")
    apply_scope(model, "attention")
    inside, blocks = trained(model), dict(model.blocks.named_parameters())
    in_blocks = sum(value.numel() for key, value in blocks.items() if f"blocks.{key}" in inside)
    assert in_blocks / sum(value.numel() for value in blocks.values()) == pytest.approx(1 / 3, abs=2e-3)
    assert trained_fraction(model) == pytest.approx(1 / 3, abs=0.05 if size == "tiny" else 0.015)


@pytest.mark.parametrize(("scope", "low", "high"), [("attention", 0.32, 0.35), ("ffn", 0.64, 0.68), ("last:4", 0.32, 0.35)])
def test_fraction_of_trained_parameters(scope, low, high):
    model = vitrail.create("deit_base_patch16", device="meta")
    count = apply_scope(model, scope)
    assert low < trained_fraction(model) < high
    assert count == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_parameters_of_each_scope():
    def inside(scope, name="deit_tiny_patch16", **parts):
        model = vitrail.create(name, 3, 32, device="meta", depth=3, **parts)
        apply_scope(model, scope)
        return trained(model)

    head = {"head.weight", "head.bias"}
    assert inside("head") == head
    assert inside("norm") == head | {name for name in inside("full") if "norm" in name}
    attention = inside("attention")
    assert {name.split(".")[2] for name in attention if name.startswith("blocks")} == {"mix"}
    assert not any("norm" in name or "ffn" in name for name in attention)
    assert any(name.startswith("pos_embed") for name in attention)  # a new image size changes it
    assert {name.split(".")[2] for name in inside("ffn") if name.startswith("blocks")} == {"ffn"}
    assert {name.split(".")[1] for name in inside("last:2") if name.startswith("blocks")} == {"1", "2"}
    assert not any(name.startswith(("stem", "pos_embed", "prefix")) for name in inside("last:2"))
    assert inside("last:0") == head | {"norm.weight", "norm.bias"}
    assert inside("last:3") >= {name for name in inside("full") if name.startswith("blocks")}
    branches = inside("attention", "vit_tiny_patch16_6x2_ls")
    assert {name.split(".")[4] for name in branches if name.startswith("blocks")} == {"0", "1"}
    cait = inside("attention", "cait_xxs24")
    assert any(name.startswith("pooling") and ".attention." in name for name in cait)
    assert not any("scale" in name for name in cait)


def test_fixres_trains_the_classifier_and_the_last_norm():
    last = {
        "bit_r50x1": "stem.stages.3.2.norm3",
        "regnety_080": "stem.blocks.16.norm3",
        "deit_tiny_patch16": "norm",
        "cait_xxs24": "norm",
    }
    for name, norm in last.items():
        model = vitrail.create(name, device="meta")
        apply_scope(model, "last_norm")
        assert trained(model) == {f"{part}.{kind}" for part in (norm, "head") for kind in ("weight", "bias")}, name


@pytest.mark.parametrize("scope", ["head", "last_norm", "last:0"])
def test_the_hidden_layer_of_a_classifier_is_trained_with_it(scope):
    mlp = {"pre_logits": 8, "pre_logits_kind": "batch_norm"}
    model = vitrail.create("resnet18_cifar", 3, device="meta", **mlp)
    apply_scope(model, scope)
    assert trained(model) >= {name for name, _ in model.named_parameters() if name.startswith(("head", "pre_logits"))}
    assert model.pre_logits[1] not in frozen_norms(model)
    assert model.stem.root.norm1 in frozen_norms(model)


@pytest.mark.parametrize("count", [4, 99, 10**8])
def test_more_blocks_than_the_model_has(count):
    model = vitrail.create("deit_tiny_patch16", 3, 32, device="meta", depth=3)
    before = trained(model)
    with pytest.raises(vitrail.UserError, match=rf"last:{count} exceeds .* 3 blocks: give last:3, or full"):
        apply_scope(model, f"last:{count}")
    assert trained(model) == before


def test_a_scope_beyond_the_depth_is_rejected_before_training(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in ("train", "plan"):
        result = run_cli(command, "digits", "--from", "vitrail_tiny", "--scope", "last:12", "--device", "cpu")
        assert result.returncode == 2
        assert result.stderr.endswith("init.scope=last:12 exceeds the depth of the model, 11 blocks: give last:11, or full.\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", structures())
@pytest.mark.parametrize("scope", SCOPES)
def test_every_model_trains_its_head_in_every_scope(name, scope):
    """At least the classifier is trained in every scope."""
    model = vitrail.build(structures()[name])
    before = trained(model)
    impossible = {"last:1": not model.layers, "attention": not model.blocks, "ffn": not model.blocks}
    if impossible.get(scope):
        with pytest.raises(vitrail.UserError, match=r"0 blocks|is a convnet"):
            apply_scope(model, scope)
        return
    apply_scope(model, scope)
    assert trained(model) <= before
    assert {part for part in before if part.startswith("head")} <= trained(model)
    if scope == "full":
        assert trained(model) == before


def test_frozen_parameters_have_no_gradient_and_do_not_change(tmp_path):
    changes = {"model": "deit_tiny_patch16", "architecture.width": 16, "architecture.depth": 2, "architecture.heads": 2}
    changes |= {"architecture.patch_size": 4, "augmentation.image_size": 8, "batch_size": 8, "schedule.length": "2 steps"}
    changes |= {"init.scope": "attention", "ema.decay": 0.5, "optimizer.layer_decay": 0.9}
    recipe = lookup("laptop").set(changes)
    image_loader = ImageLoader(Subset(open_splits("digits").train, np.arange(16)), workers=0, log=lambda message: None)
    model = initial_model(recipe, image_loader.source)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training = make_trainer(recipe, image_loader.source, tmp_path, model=model)
    training.validation = image_loader
    gradients = set()
    take = training.optimizer.step

    def step():
        gradients.update(name for name, parameter in model.named_parameters() if parameter.grad is not None)
        take()

    training.optimizer.step = step
    display = Display(2, 2, 8, console=Console(quiet=True))
    training.run(image_loader, display, None, Throughput(model, torch.device("cpu"), 1))
    inside = trained(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert gradients == inside
    assert {names[parameter] for parameter in training.optimizer.state} == inside
    assert changed == inside
    assert 0.2 < trained_fraction(model) < 0.5
    assert set(training.ema.state_dict()) == inside


WIDTH, IMAGES, TOKENS = 32, 2, 17  # 32 pixels in patches of 8, and a class token
IMAGE = torch.randn(IMAGES, 3, 32, 32)


def kept(scope, depth=3, **parts):
    """Shapes and bytes of the activations that a forward pass keeps for the backward pass."""
    torch.manual_seed(0)
    options = {"width": WIDTH, "depth": depth, "heads": 2, "patch_size": 8} | parts
    model = vitrail.create("deit_tiny_patch16", 5, 32, **options)
    apply_scope(model, scope)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.data_ptr(), tensor.numel()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(IMAGE).square().mean()
    loss.backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained(model)
    return [tuple(tensor.shape) for tensor in found.values()], 4 * sum(tensor.numel() for tensor in found.values())


def test_a_frozen_backbone_keeps_no_activations():
    """Only the inputs of the classifier and of the loss are kept."""
    shapes, _ = kept("head")
    assert sorted(shapes) == [(IMAGES, 5), (IMAGES, WIDTH)]
    with_batch_norm, _ = kept("head", stem="hmlp", norm="batch", pooling="mean", mixer="linear")
    assert sorted(with_batch_norm) == [(IMAGES, 5), (IMAGES, WIDTH)]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_frozen_first_blocks_keep_no_activations(count):
    """The memory does not depend on the number of frozen blocks."""
    assert kept(f"last:{count}", depth=3)[1] == kept(f"last:{count}", depth=6)[1]
    assert kept("full", depth=3)[1] < kept("full", depth=6)[1]


@pytest.mark.parametrize("scale", ["plain", "layerscale"])
def test_inputs_of_frozen_weights_are_not_kept(scale):
    """The saved memory is exactly that of the inputs of frozen weights.

    In an MLP these are the inputs of both layers (1 and 4 times the width); in attention only the input of qkv, since attention
    itself keeps the input of its projection; in the stem the image. LayerScale keeps the input that it scales.
    """
    token = 4 * 3 * IMAGES * TOKENS * WIDTH  # bytes of one width of every token in three blocks
    image = 4 * IMAGE.numel()
    scaled = 2 * token if scale == "layerscale" else 0
    full = kept("full", residual=scale)[1]
    assert full - kept("attention", residual=scale)[1] == 5 * token + image + scaled
    assert full - kept("ffn", residual=scale)[1] == token + image + scaled
    hidden = [shape for shape in kept("attention", residual=scale)[0] if shape[-1] == 4 * WIDTH]
    assert len(hidden) == 3  # the input of GELU in every block
