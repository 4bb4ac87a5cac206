"""BEiT and its tokenizer: the authors' step, masks and stems, resume, several processes, and what is refused."""

import dataclasses
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import vitrail
from tests.tasks.trainings import BEIT, CODES, TOKENIZER, trained, write_data, write_tokenizer
from tests.trainers import make_trainer
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.recipes.task_options import TokenizerOptions
from vitrail.tasks.beit import Beit, BeitModule, BeitTargets, hide_pixels
from vitrail.tasks.registry import find_task
from vitrail.tasks.tokenizer import TokenizerModule, TokenizerTargets, gumbel_noise
from vitrail.training.task import Position

# The authors' code (microsoft/unilm, beit/modeling_pretrain.py) in float64: loss, accuracy and gradient norms of one batch, then
# the loss and, of each parameter, the sum and the sum of squares after one step of AdamW.
STEP = json.loads(Path(__file__).with_name("beit_step.json").read_text())
MASK = torch.tensor(
    [[1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0]]
).bool()
THEIR_NAMES = {
    "model.prefix": "cls_token",
    "mask_token": "mask_token",
    "model.stem.proj": "patch_embed.proj",
    "model.pos_embed.0.table": "rel_pos_bias.relative_position_bias_table",
    "model.norm": "norm",
    "head": "lm_head",
    "mix.branches.0.norm": "norm1",
    "mix.branches.0.body": "attn",
    "mix.branches.0.scale.weight": "gamma_1",
    "ffn.branches.0.norm": "norm2",
    "ffn.branches.0.body": "mlp",
    "ffn.branches.0.scale.weight": "gamma_2",
    "model.blocks": "blocks",
}


def fill(name, shape):
    """The values that the authors' parameters had."""
    values = np.sin(np.arange(1, np.prod(shape) + 1) ** 2 * 0.731 + sum(name.encode())) * 0.5
    return torch.from_numpy(values.reshape(shape))


def their_name(name):
    for ours, theirs in THEIR_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def parts(name, tensor):
    """Our tensor as theirs, by name: of the bias of queries, keys and values they have no keys, which softmax would ignore."""
    if not name.endswith("attn.qkv.bias"):
        return {name: tensor}
    query, _, value = tensor.chunk(3)
    return {name.replace("qkv.bias", "q_bias"): query, name.replace("qkv.bias", "v_bias"): value}


def targets_of(mask, codes, weights):
    positions = mask.int().argsort(dim=1, descending=True, stable=True)[:, : int(mask.sum(1).max())]
    return BeitTargets(mask, positions, codes.gather(1, positions), weights(mask.gather(1, positions).double()))


def test_one_step_is_that_of_the_authors():
    fields = {"width": 16, "heads": 2, "depth": 2, "patch_size": 8, "pos_embed": "relative_bias", "pos_embed_place": "shared"}
    module = BeitModule(vitrail.create("vit_tiny_patch16_12x1_ls", 0, (24, 32), **fields), 11, False).double()
    for name, parameter in module.named_parameters():
        values = {key: fill(key, part.shape) for key, part in parts(their_name(name), parameter.data).items()}
        if len(values) == 2:
            query, value = values.values()
            values = {name: torch.cat([query, torch.zeros_like(query), value])}
        parameter.data.copy_(next(iter(values.values())).reshape(parameter.shape))
    images, codes = fill("images", (3, 3, 24, 32)) * 3, torch.arange(36).reshape(3, 12) * 7 % 11
    targets = targets_of(MASK, codes, lambda masked: masked / masked.sum())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    loss, accuracy = module(images, targets)
    loss.backward()
    assert loss.item() == pytest.approx(STEP["loss"], abs=1e-9)
    assert accuracy.item() == pytest.approx(STEP["accuracy"], abs=1e-9)
    gradients = {}
    for name, parameter in module.named_parameters():
        gradients |= parts(their_name(name), parameter.grad)
    assert gradients.keys() == STEP["gradient_norms"].keys()
    for name, norm in STEP["gradient_norms"].items():
        assert gradients[name].norm().item() == pytest.approx(norm, abs=1e-9), name
    optimizer.step()
    assert module(images, targets)[0].item() == pytest.approx(STEP["loss_after"], abs=1e-8)
    for name, parameter in module.named_parameters():
        for key, part in parts(their_name(name), parameter.detach()).items():
            found = [part.sum().item(), part.square().sum().item()]
            assert found == pytest.approx(STEP["after"][key], abs=1e-6), key


# Targets


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tok.safetensors")


def with_tokenizer(path):
    return BEIT.set({"task_options.tokenizer": str(path)})


def make_task(recipe):
    return make_trainer(recipe, open_splits("digits").train).task


def batch_of(count):
    loader = ImageLoader(open_splits("digits").train, torch.device("cpu"), 0)
    return next(iter(loader.iterate(count)))


def at(step=0, total=8):
    return Position(step, total, 0, step)


def test_the_loss_is_a_mean_over_masked_patches(tokenizer):
    """Of each image, so that it does not matter how a batch is divided; or, as the authors average, of all images together."""
    by_image = make_task(with_tokenizer(tokenizer))
    by_batch = make_task(with_tokenizer(tokenizer).set({"task_options.average": "batch"}))
    module, batch = by_image.module.eval(), batch_of(8)
    masks = torch.arange(16) < torch.arange(8)[:, None] % 5 + 2
    by_image._draw_masks = by_batch._draw_masks = lambda keys: masks
    images, targets = by_image.prepare_batch(batch, at())
    logits = module.predict(images, targets.mask, torch.arange(16).expand(8, -1))
    codes = torch.full((8, 16), -100).scatter(1, targets.positions, targets.codes)
    losses = F.cross_entropy(logits.transpose(1, 2), codes, reduction="none")
    each = (losses * targets.mask).sum(1) / targets.mask.sum(1)
    assert module(images, targets)[0].item() == pytest.approx(each.mean().item(), rel=1e-5)
    _, averaged = by_batch.prepare_batch(batch, at())
    assert module(images, averaged)[0].item() == pytest.approx(losses[targets.mask].mean().item(), rel=1e-5)


def test_the_tokenizer_sees_the_same_crop(tokenizer):
    """Twice as many pixels of the same box, also flipped."""
    larger = write_tokenizer(tokenizer.with_name("larger.safetensors"), patch_size=4)
    task = make_task(with_tokenizer(larger))
    seen = []
    task._tokenize = lambda images: seen.append(images) or torch.zeros(len(images), 16, dtype=torch.long)
    images, _ = task.prepare_batch(batch_of(32), at())
    assert seen[0].shape == (32, 3, 16, 16)
    smaller = F.avg_pool2d(seen[0], 2)
    others = smaller.roll(1, 0)
    error, wrong = ((images - part).square().mean((1, 2, 3)) for part in (smaller, others))
    assert error.max() < wrong.min()


def test_targets_depend_on_the_image_alone(tokenizer):
    task = make_task(with_tokenizer(tokenizer))
    images, targets = task.prepare_batch(batch_of(8), at())
    some, few = task.prepare_batch(batch_of(8)._map(lambda tensor: tensor[2:5]), at())
    assert torch.equal(some, images[2:5])
    assert torch.equal(few.mask, targets.mask[2:5])
    assert torch.equal(few.codes, targets.codes[2:5])


# Masking before and after the stem


def stem_of(name, **fields):
    torch.manual_seed(0)
    model = vitrail.create(name, 0, (16, 16), patch_size=4, width=32, heads=2, depth=1, **fields)
    for norm in model.stem.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.normal_()
    return model


@pytest.mark.parametrize(
    ("name", "mode", "commutes"),
    [
        ("vit_tiny_patch16_12x1", "train", True),
        ("vit_tiny_patch16_12x1_local", "train", True),
        ("vit_tiny_patch16_12x1_hmlp_ln", "train", True),
        ("vit_tiny_patch16_12x1_hmlp", "eval", True),
        ("vit_tiny_patch16_12x1_hmlp", "train", False),  # the statistics of BatchNorm include the masked pixels
        ("vit_tiny_patch16_12x1_conv_ln", "eval", False),  # patches overlap
    ],
)
def test_masking_commutes_with_stems_without_overlap(name, mode, commutes):
    model = stem_of(name).train(mode == "train")
    images, mask = torch.randn(4, 3, 16, 16), torch.rand(4, 4, 4) < 0.4
    with torch.no_grad():
        before, after = (model.embed(part)[0][~mask.flatten(1)] for part in (hide_pixels(images, mask, 4), images))
    assert torch.allclose(before, after, atol=1e-5) == commutes


def test_the_loss_is_the_same_before_and_after_the_stem(tokenizer):
    losses = []
    for place in ("before_stem", "after_stem"):
        task = make_task(with_tokenizer(tokenizer).set({"task_options.mask_place": place}))
        images, targets = task.prepare_batch(batch_of(8), at())
        losses.append(task.module.eval()(images, targets)[0])
    torch.testing.assert_close(*losses)


def test_masked_pixels_have_no_effect(tokenizer):
    task = make_task(with_tokenizer(tokenizer))
    images, targets = task.prepare_batch(batch_of(8), at())
    changed = torch.where(targets.mask.unflatten(1, (4, 4)).repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None], 7.0, images)
    torch.testing.assert_close(task.module.eval()(images, targets), task.module(changed, targets))


# The tokenizer


def tokenizer_module(codes=5):
    torch.manual_seed(0)
    model = vitrail.create("vitrail_mini", codes, (8, 8), patch_size=4, width=16, depth=1, stem_norm="layer")
    return TokenizerModule(model, TokenizerOptions(codes=codes, width=8, usage_weight=0.3)).double()


def test_the_tokenizer_s_loss():
    module = tokenizer_module()
    module.usage.copy_(torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]))
    images, keys = torch.randn(3, 3, 8, 8).double(), torch.tensor([1, 2, 3])
    loss, error, perplexity = module(images, TokenizerTargets(keys, torch.tensor(0.7)))
    logits = module.model.head(module.model.features(images).tokens)
    weights = ((logits + gumbel_noise(keys, logits.shape[1:])) / torch.tensor(0.7).double()).softmax(-1)
    expected = (module.decoder(weights, (2, 2)) - images).square().mean()
    attraction = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.01 / 5]).double() * 5
    usage = (logits.softmax(-1).mean((0, 1)) * attraction.log()).sum()
    assert error.item() == pytest.approx(expected.item(), abs=1e-12)
    assert loss.item() == pytest.approx((expected + 0.3 * usage).item(), abs=1e-7)
    shares = module.usage[:4]
    assert perplexity.item() == pytest.approx((-(shares * shares.log()).sum()).exp().item(), rel=1e-6)


def test_the_usage_is_that_of_all_micro_batches_of_a_step():
    whole, split = tokenizer_module(), tokenizer_module()
    images, keys = torch.randn(4, 3, 8, 8).double(), torch.arange(4)
    for module, sizes in ((whole, (4,)), (split, (1, 3))):
        for part, own in zip(images.split(sizes), keys.split(sizes), strict=True):
            module(part, TokenizerTargets(own, torch.tensor(1.0)))
        module.update_usage(torch.tensor(0.0))
    codes = whole.model.head(whole.model.features(images).tokens).argmax(-1).flatten()
    expected = 0.95 * 0.2 + 0.05 * torch.bincount(codes, minlength=5) / 16
    torch.testing.assert_close(whole.usage, expected.double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(split.usage, whole.usage)
    before = whole.usage.clone()
    whole(images * torch.nan, TokenizerTargets(keys, torch.tensor(1.0)))
    whole.update_usage(torch.tensor(1.0))
    assert torch.equal(whole.usage, before), "a skipped step changes nothing"
    assert not whole.step_usage.any()


def test_the_noise_is_gumbel_noise():
    noise = gumbel_noise(torch.arange(200), torch.Size((4, 50)))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.std().item() == pytest.approx(np.pi / 6**0.5, abs=0.02)
    assert torch.equal(noise[3:5], gumbel_noise(torch.arange(200)[3:5], torch.Size((4, 50))))


def test_the_temperature_falls_geometrically():
    task = make_task(TOKENIZER.set({"task_options.temperature": 0.8, "task_options.temperature_end": 0.2}))
    batch = batch_of(2)
    found = [task.prepare_batch(batch, at(step))[1].temperature.item() for step in (0, 4, 8)]
    assert found == pytest.approx([0.8, 0.4, 0.2])


def test_few_codes_are_reported():
    task = make_task(TOKENIZER.set({"task_options.codes": 100}))
    assert task.diagnose({"codes_used": 50, "images": 10}, 1.0) == ""
    message = "only 3 of 100 codes are used: raise task_options.usage_weight or lower task_options.codes."
    assert task.diagnose({"codes_used": 3, "images": 10}, 1.0) == message
    assert task.diagnose({"codes_used": 3, "images": 1}, 1.0) == "", "an image has 16 patches"


def test_a_tokenizer_is_followed_by_beit():
    task = make_task(TOKENIZER)
    command = shlex.split(task.suggest_next(task.module.model, Path("runs/some photos"), "digits").split("`")[1])
    options = ["--recipe", "beit_small", "--tokenizer", "runs/some photos"]
    assert command == ["vitrail", "train", "digits", *options]


# Whole trainings


def test_validation(tmp_path):
    training = trained("beit", write_data(tmp_path), tmp_path / "run")
    values = training.evaluate()
    assert 0 <= values["masked_accuracy"] <= 1
    assert values["majority_code"] >= 1 / CODES
    assert values["loss"] == pytest.approx(np.log(CODES), rel=0.5)
    assert training.evaluate() == values, "the same masks every time"


def test_the_best_weights_have_the_lowest_loss(tokenizer):
    task = make_task(with_tokenizer(tokenizer))
    assert task.is_better({"knn": 0.1, "loss": 1.0}, {"knn": 0.9, "loss": 2.0})
    assert not task.is_better({"knn": 0.9, "loss": 2.0}, {"knn": 0.1, "loss": 1.0})


# What is refused


BAD = {
    "no tokenizer": ({"task_options.tokenizer": ""}, "tiny needs a tokenizer: run `vitrail tokenizer train"),
    "missing file": ({"task_options.tokenizer": "/nowhere.safetensors"}, "There is no tokenizer at /nowhere.safetensors"),
    "all patches": ({"task_options.masked": 1.0}, "give more than 0 and less than 1"),
    "no patches": ({"task_options.masked": 0.01, "task_options.min_block": 0.0}, "of 4 x 4 patches is 0: choose another share"),
    "large blocks": ({"task_options.min_block": 0.5}, "larger than the masked share of the patches"),
    "negative blocks": ({"task_options.min_block": -0.5}, "is a share of the patches: give 0 or more"),
    "aspect": ({"task_options.aspect": 0.0}, "is the smallest aspect ratio"),
    "size": ({"augmentation.image_size": [9, 8]}, "9x8 pixels are not a multiple of that: give another image size"),
    "one row": ({"augmentation.image_size": [2, 16]}, "Masks do not fit into 1 x 8 patches"),
    "overlap": ({"model": "vit_tiny_patch16_12x1_conv", "task_options.mask_place": "before_stem"}, "in the conv stem they do"),
    "per class": ({"model": "patchconvnet_s20_multi", "architecture": {}}, "training without labels needs one vector per image"),
    "other crop": ({"augmentation.crop": "simple", "architecture.patch_size": 1}, "would crop another part of the image"),
    "unknown": ({"task_options.mask_ratio": 0.5}, "the nearest are"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings(name, tokenizer):
    changes, message = BAD[name]
    recipe = with_tokenizer(tokenizer)
    if "architecture" in changes:
        recipe, changes = dataclasses.replace(recipe, architecture={}), {"model": changes["model"]}
    with pytest.raises(UserError, match=message):
        make_task(Beit.resolve_recipe(recipe.set(changes), frozenset()))


def test_a_tokenizer_for_training_from_labels(tokenizer):
    recipe = lookup("laptop").set({"tokenizer": str(tokenizer)})
    with pytest.raises(UserError, match=r"task_options.tokenizer has no effect on training from labels"):
        find_task(recipe.task).resolve_recipe(recipe, frozenset())


def test_other_weights_are_no_tokenizer(tmp_path):
    path = vitrail.save(
        vitrail.create("vitrail_mini", 5, (8, 8), patch_size=2, width=16, depth=1), tmp_path / "other.safetensors"
    )
    with pytest.raises(UserError, match="is not a tokenizer: run `vitrail tokenizer train"):
        make_task(with_tokenizer(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_options.codes": 1}, "codes is at least 2"),
        ({"task_options.temperature_end": 0.0}, "give numbers above 0"),
        ({"task_options.usage_weight": -1.0}, "give 0 or more"),
        ({"augmentation.image_size": [9, 8]}, "an image size that is a multiple of the patch size 2, not 9 x 8"),
        ({"architecture.pooling": "class", "architecture.mixer": "attention"}, "cannot be a tokenizer, which has pooling=mean"),
    ],
)
def test_bad_tokenizers(changes, message):
    with pytest.raises(UserError, match=message):
        make_task(TOKENIZER.set(changes))


def test_a_replaced_tokenizer_is_noticed(tokenizer, tmp_path):
    recipe = with_tokenizer(write_tokenizer(tmp_path / "tok.safetensors"))
    before = Beit.dependencies(recipe)
    write_tokenizer(tmp_path / "tok.safetensors", depth=2)
    assert before.keys() == {str(tmp_path / "tok.safetensors")}
    assert Beit.dependencies(recipe) != before


@pytest.mark.parametrize("model", ["deit_tiny_patch16", "deit3_small_patch16", "cait_xxs24", "resmlp_s12", "vitrail_mini"])
def test_every_trainable_weight_has_a_gradient(model, tokenizer):
    """Class-attention layers, which the loss does not reach, are frozen."""
    recipe = dataclasses.replace(with_tokenizer(tokenizer), model=model, architecture={"patch_size": 2, "depth": 1, "width": 32})
    task = make_task(recipe.set({"architecture.heads": 2}))
    task.module(*task.prepare_batch(batch_of(4), at()))[0].backward()
    missing = [name for name, parameter in task.module.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert not missing
