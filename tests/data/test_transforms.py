"""Whole pipelines: deterministic per image, equal to Pillow operation by operation, with label maps and torch.compile."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from tests.data.test_transform_parts import from_pil, images, to_pil
from tests.tasks.labels import make_targets
from vitrail.data.rng import sample_key, uniform, uniform_between
from vitrail.data.transforms import color, mixup, policies, reference
from vitrail.data.transforms.config import NO_ANTIALIAS
from vitrail.data.transforms.crops import random_resized_crop
from vitrail.data.transforms.pipeline import Augmentation, augment, augment_views, reproject, sample_flips, sample_view
from vitrail.errors import UserError
from vitrail.recipes.schema import LossConfig

PIPELINES = {
    "deit": Augmentation(image_size=(32, 32), policy="rand", random_erasing=0.25),
    "deit3": Augmentation(image_size=(32, 32), policy="three", color_jitter=(0.3, 0.3, 0.3, 0.0)),
    "deit3 21k": Augmentation(image_size=(32, 48), crop="simple", policy="three", color_jitter=(0.3, 0.3, 0.3, 0.0)),
    "lvvit": Augmentation(image_size=(32, 32), policy="rand", crop_last=True, interpolation="random", random_erasing=0.25),
    "auto": Augmentation(image_size=(32, 32), policy="auto"),
    "trivial": Augmentation(image_size=(32, 32), policy="trivial"),
    "dino": Augmentation(
        image_size=(32, 32),
        policy="dino",
        color_jitter=(0.4, 0.4, 0.2, 0.1),
        color_jitter_prob=0.8,
        grayscale=0.2,
        blur=0.5,
        solarize=0.2,
    ),
    "scaled": Augmentation(image_size=(32, 48), crop="scaled", color_jitter=(0.3, 0.3, 0.3, 0.1), color_jitter_prob=0.5),
    "test": Augmentation(image_size=(32, 32), crop="center"),
    "google": Augmentation(
        image_size=(32, 32), crop="distorted_box", interpolation=NO_ANTIALIAS, mean=(0.5,) * 3, std=(0.5,) * 3
    ),
    "google test": Augmentation(image_size=(32, 32), crop="squash", interpolation=NO_ANTIALIAS, mean=(0.5,) * 3, std=(0.5,) * 3),
}


def keys(count, epoch=0, seed=0):
    return sample_key(seed, epoch, torch.arange(count), torch.zeros(count, dtype=torch.int64))


def sizes_of(batch):
    return torch.tensor([batch.shape[-2:]]).expand(len(batch), 2)


@pytest.mark.parametrize("name", PIPELINES)
def test_augmentation_does_not_depend_on_the_batch(name):
    """Alone, in a batch or in another order: the same result. Another epoch gives another result, except for validation crops."""
    augmentation, batch = PIPELINES[name], images(12, 60, 80)
    sizes = sizes_of(batch) - torch.arange(12)[:, None]
    together = augment(batch, sizes, keys(12), augmentation)
    assert together.images.shape == (12, 3, *augmentation.image_size)
    order = torch.randperm(12)
    shuffled = augment(batch[order], sizes[order], keys(12)[order], augmentation)
    assert torch.equal(shuffled.images, together.images[order])
    assert torch.equal(shuffled.matrix, together.matrix[order])
    alone = torch.cat([augment(batch[i : i + 1], sizes[i : i + 1], keys(12)[i : i + 1], augmentation).images for i in range(12)])
    assert torch.equal(alone, together.images)
    later = augment(batch, sizes, keys(12, epoch=1), augmentation)
    assert torch.equal(later.images, together.images) == ("test" in name)


PILLOW = {
    "autocontrast": lambda image, v: ImageOps.autocontrast(image),
    "equalize": lambda image, v: ImageOps.equalize(image),
    "invert": lambda image, v: ImageOps.invert(image),
    "rotate": lambda image, v: image.rotate(v, Image.BICUBIC, fillcolor=reference.FILL),
    "posterize": lambda image, v: ImageOps.posterize(image, int(v)),
    "solarize": lambda image, v: ImageOps.solarize(image, int(v)),
    "solarize_add": lambda image, v: image.point([min(255, i + int(v)) if i < 128 else i for i in range(256)] * 3),
    "saturation": lambda image, v: ImageEnhance.Color(image).enhance(v),
    "contrast": lambda image, v: ImageEnhance.Contrast(image).enhance(v),
    "brightness": lambda image, v: ImageEnhance.Brightness(image).enhance(v),
    "sharpness": lambda image, v: ImageEnhance.Sharpness(image).enhance(v),
    "shear_x": lambda image, v: affine(image, (1, v, 0, 0, 1, 0)),
    "shear_y": lambda image, v: affine(image, (1, 0, 0, v, 1, 0)),
    "translate_x": lambda image, v: affine(image, (1, 0, v * image.width, 0, 1, 0)),
    "translate_y": lambda image, v: affine(image, (1, 0, 0, 0, 1, v * image.height)),
}


def affine(image, matrix):
    return image.transform(image.size, Image.AFFINE, matrix, Image.BICUBIC, fillcolor=reference.FILL)


@pytest.mark.parametrize("operation", reference.OPERATIONS)
@pytest.mark.parametrize("magnitude", [3.7, 9.0])
def test_operations_equal_pillow(operation, magnitude):
    """Each operation on images of their own size, bit by bit and independent of the padding."""
    batch, sizes = images(3, 40, 50), torch.tensor([[40, 50], [25, 30], [31, 44]])
    drawn = torch.full((3,), reference.OPERATION_INDEX[operation])
    values = policies.arguments(policies.INCREASING, drawn, torch.full((3,), magnitude), torch.tensor([1.0, -1.0, 1.0]))
    found = reference.apply_operations(batch, sizes, reference.Layer(drawn, values))
    for single, value, ours, (height, width) in zip(batch, values, found, sizes.tolist(), strict=True):
        expected = from_pil(PILLOW[operation](to_pil(single[:, :height, :width]), float(value)))
        assert torch.equal(ours[:, :height, :width], expected)
    assert torch.equal(
        reference.apply_operations(batch, sizes, reference.Layer(torch.full((3,), reference.IDENTITY), values)), batch
    )


def test_levels():
    """Magnitude 9 of 10, RandAugment's "increasing" levels: 27 degrees, 0.27, 0.405 of the side, 1 +- 0.81, 1 bit, 26, 99."""
    number = torch.arange(reference.IDENTITY)
    found = policies.arguments(
        policies.INCREASING, number, torch.full((reference.IDENTITY,), 9.0), torch.ones(reference.IDENTITY)
    )
    expected = {
        "rotate": 27,
        "shear_x": 0.27,
        "translate_y": 0.405,
        "saturation": 1.81,
        "posterize": 1,
        "solarize": 26,
        "solarize_add": 99,
    }
    assert {name: found[reference.OPERATION_INDEX[name]].item() for name in expected} == pytest.approx(expected)
    minus = policies.arguments(
        policies.INCREASING, number, torch.full((reference.IDENTITY,), 9.0), -torch.ones(reference.IDENTITY)
    )
    assert minus[reference.OPERATION_INDEX["rotate"]] == -27
    assert minus[reference.OPERATION_INDEX["sharpness"]] == pytest.approx(0.19)
    assert minus[reference.OPERATION_INDEX["posterize"]] == 1
    found = policies.arguments(policies.ORIGINAL, number, torch.full((reference.IDENTITY,), 3.0), -torch.ones(reference.IDENTITY))
    expected = {"rotate": -9, "saturation": 0.64, "posterize": 5, "solarize": 76}
    assert {name: found[reference.OPERATION_INDEX[name]].item() for name in expected} == pytest.approx(expected)


def test_rand_augment_draws():
    """Each of two layers is applied to half of the images, all 15 operations equally often."""
    count = 6000
    key = keys(count)
    chosen = policies.randint(key, "rand.0.operation", 15)[:, 0]
    assert torch.bincount(chosen).tolist() == pytest.approx([count / 15] * 15, rel=0.15)
    assert policies.bernoulli(key, "rand.0.apply", 0.5).float().mean() == pytest.approx(0.5, abs=0.02)
    other = policies.randint(key, "rand.1.operation", 15)[:, 0]
    assert (chosen == other).float().mean() == pytest.approx(1 / 15, abs=0.015)


def test_trivial_augment_draws_one_of_14():
    """Without invert and solarize-add, all equally often, at 31 magnitudes of the wide ranges."""
    count = 3500
    padded = policies.PaddedImages(torch.zeros(count, 3, 2, 2, dtype=torch.uint8), torch.full((count, 2), 2))
    (layer,) = policies.trivial_augment(padded, keys(count)).layers
    names = [*reference.OPERATIONS, "identity"]
    drawn = torch.bincount(layer.operation, minlength=len(names)).tolist()
    assert {name for name, number in zip(names, drawn, strict=True) if not number} == {"invert", "solarize_add"}
    assert sorted(drawn)[2:] == pytest.approx([250] * 14, rel=0.25)
    values = {name: layer.value[layer.operation == index] for index, name in enumerate(names)}
    assert len(values["rotate"].abs().unique()) == 31
    assert values["rotate"].abs().max() == 135
    assert values["shear_x"].abs().max() == pytest.approx(0.99)
    assert values["contrast"].min() == pytest.approx(0.01, abs=1e-6)
    assert values["posterize"].unique().tolist() == [2, 3, 4, 5, 6, 7, 8]


def jittered(strengths, count=200, **changes):
    """Original and jittered images, uint8 values as float [B, 3, 8, 8]."""
    batch = images(count, 8, 8)
    augmentation = Augmentation((8, 8), "squash", color_jitter=strengths, mean=(0.0,) * 3, std=(1 / 255,) * 3, **changes)
    return batch, augment(batch, sizes_of(batch), keys(count), augmentation).images.round().to(torch.uint8)


@pytest.mark.parametrize("policy", ["none", "dino"])
def test_hue_jitter_alone(policy):
    batch, found = jittered((0.0, 0.0, 0.0, 0.3), policy=policy)
    shift = uniform_between(keys(200), "jitter.hue", -0.3, 0.3)
    assert torch.equal(found, color.hue(batch, shift))
    assert not torch.equal(found, batch)
    batch, found = jittered((0.0, 0.0, 0.0, 0.3), color_jitter_prob=0.0)
    assert torch.equal(found, batch)


def test_color_jitter_is_a_random_permutation_of_four():
    """All 24 orders of brightness, contrast, saturation and hue occur, and the operations are applied in that order."""
    strengths, key = (0.4, 0.4, 0.2, 0.1), keys(200)
    batch, found = jittered(strengths)
    names = ("brightness", "contrast", "saturation", "hue")
    ranges = [(1 - s, 1 + s) for s in strengths[:3]] + [(-0.1, 0.1)]
    values = [uniform_between(key, f"jitter.{name}", *limits) for name, limits in zip(names, ranges, strict=True)]
    orders = uniform(key, "jitter.order", 4).argsort(1)
    assert len(orders.unique(dim=0)) == 24
    for row in range(40):
        image = batch[row : row + 1]
        for number in orders[row].tolist():
            value = values[number][row : row + 1]
            if names[number] == "hue":
                image = color.hue(image, value)
            else:
                layer = reference.Layer(torch.tensor([reference.OPERATION_INDEX[names[number]]]), value)
                image = reference.apply_operations(image, sizes_of(image), layer)
        assert torch.equal(found[row], image[0])


def test_three_augment_draws_one_of_three():
    augmentation = Augmentation(image_size=(24, 24), crop="squash", policy="three", hflip=0.0)
    batch = images(90, 24, 24)
    plain = augment(batch, sizes_of(batch), keys(90), Augmentation(image_size=(24, 24), crop="squash")).images
    seen = augment(batch, sizes_of(batch), keys(90), augmentation).images
    mean, std = torch.tensor(augmentation.mean)[:, None, None], torch.tensor(augmentation.std)[:, None, None]
    values = (seen * std + mean) * 255
    gray = ((values[:, 0] - values[:, 1]).abs().amax((1, 2)) < 1e-2) & ((values[:, 0] - values[:, 2]).abs().amax((1, 2)) < 1e-2)
    original = (plain * std + mean) * 255
    solarized = torch.where(original < 127.5, original, 255 - original)
    inverted = (values - solarized).abs().amax((1, 2, 3)) < 1e-2
    blurred = ~gray & ~inverted
    assert [gray.sum().item(), inverted.sum().item(), blurred.sum().item()] == pytest.approx([30, 30, 30], abs=15)
    texture = lambda x: (x[..., 1:] - x[..., :-1]).abs().mean((1, 2, 3))  # noqa: E731
    assert (texture(values)[blurred] <= texture(original)[blurred] + 1e-3).all()


SIZES = torch.tensor([[60, 80], [33, 80], [60, 41], [50, 50]])  # of images padded to 60 x 80


def test_lvvit_order_is_flip_policy_crop():
    """Step by step the same as Pillow on each image of its own size: the crop of the operations of the flipped image."""
    augmentation = Augmentation(
        image_size=(48, 48), policy="rand", crop_last=True, scale=(0.3, 0.8), mean=(0.0,) * 3, std=(1 / 255,) * 3
    )
    batch, sizes, key = images(48, 60, 80), SIZES.repeat(12, 1), keys(48)
    seen = augment(batch, sizes, key, augmentation)
    flip, crop = (
        sample_flips(key, augmentation),
        random_resized_crop(sizes, key, augmentation.image_size, augmentation.scale, augmentation.ratio),
    )
    off = []
    for row, (height, width) in enumerate(sizes.tolist()):
        image = to_pil(batch[row, :, :height, :width])
        image = ImageOps.mirror(image) if flip[row] else image
        for layer in seen.layers:
            if layer.operation[row] != reference.IDENTITY:
                image = PILLOW[reference.OPERATIONS[layer.operation[row]]](image, float(layer.value[row]))
        top, left = int(crop.rows.start[row]), int(crop.columns.start[row])
        image = image.crop((left, top, left + int(crop.columns.length[row]), top + int(crop.rows.length[row])))
        expected = from_pil(image.resize((48, 48), Image.BICUBIC))
        off.append(((seen.images[row] - expected).abs() > 2).float().mean().item())
    assert 0 < flip.sum() < 48
    assert np.median(off) == 0
    assert np.mean(off) < 0.01, "but for edges of warps, and levels that a table tears apart"


@pytest.mark.parametrize("crop_last", [False, True])
@pytest.mark.parametrize("crop", ["random_resized", "simple"])
def test_the_matrix_is_exact_with_warps(crop_last, crop):
    """An image of its own coordinates and a map of them agree everywhere and are filled at the same pixels."""
    y, x = torch.meshgrid(torch.arange(60) + 0.5, torch.arange(80) + 0.5, indexing="ij")
    ramp = torch.stack([x * 3, y * 4, torch.zeros_like(x)])
    batch, sizes, key = ramp.to(torch.uint8).repeat(60, 1, 1, 1), SIZES.repeat(15, 1), keys(60)
    for row, (height, width) in enumerate(sizes.tolist()):
        batch[row, :, height:] = batch[row, :, :, width:] = 255
    augmentation = Augmentation(
        image_size=(64, 48), crop=crop, policy="rand", crop_last=crop_last, scale=(0.4, 1.0), mean=(0.0,) * 3, std=(1 / 255,) * 3
    )
    done = augment(batch, sizes, key, augmentation)
    operations = torch.stack([layer.operation for layer in done.layers])
    warped = torch.stack([operations == reference.OPERATION_INDEX[name] for name in reference.WARPS]).any(0)
    rows = (warped | (operations == reference.IDENTITY)).all(0).nonzero()[:, 0]  # only geometry
    assert warped[:, rows].all(0).any(), "some went through two warps"
    # Each image's map of coordinates has its own scale, as label maps have: 12 x 16 cells over the whole image.
    share_y, share_x = torch.meshgrid((torch.arange(12) + 0.5) / 12, (torch.arange(16) + 0.5) / 16, indexing="ij")
    maps = torch.stack([share_x * sizes[:, 1, None, None] * 3, share_y * sizes[:, 0, None, None] * 4], 1)
    found = reproject(
        maps, done.matrix, augmentation.image_size, sizes, augmentation.image_size, filter="bilinear", fill=-1.0, steps=done.steps
    )
    for row in rows.tolist():
        height, width = sizes[row].tolist()
        shown, mapped = done.images[row], found[row]
        filled = (shown - torch.tensor(reference.FILL)[:, None, None]).abs().amax(0) < 2
        places = mapped / torch.tensor([3.0, 4.0])[:, None, None]
        # The bilinear map is flat within half a cell of its border.
        margin = torch.tensor([width / 32, height / 24])[:, None, None] + 1
        inner = ((places > margin) & (places < torch.tensor([width, height])[:, None, None] - margin)).all(0)
        known = mapped[0] >= 0
        assert not (known & ~near(~filled)).any(), "what was filled is not known"
        assert not (filled & ~near(~known)).any(), "what is known was not filled"
        inner &= ~near(~known)
        if inner.any():
            assert (shown[:2] - mapped).abs().amax(0)[inner].max() < 4, "a pixel, and a level that every warp truncates"


def near(mask):
    """Within four pixels of the mask, where interpolation sees it."""
    return torch.nn.functional.max_pool2d(mask.float()[None, None], 9, 1, 4)[0, 0] > 0


@pytest.mark.parametrize("policy", ["none", "rand", "auto", "trivial"])
def test_reprojected_masks_match_their_images(policy):
    """An image drawn from a class map: after the augmentation, the reprojected map matches the pixels."""
    cells = torch.randint(0, 2, (16, 1, 4, 5))
    single = (cells * 255).to(torch.uint8).repeat_interleave(20, 2).repeat_interleave(20, 3).expand(-1, 3, -1, -1).contiguous()
    augmentation = Augmentation(image_size=(64, 64), policy=policy, scale=(0.3, 0.9), mean=(0.0,) * 3, std=(1.0,) * 3)
    sizes = sizes_of(single)
    done = augment(single, sizes, keys(16), augmentation)
    followed = reproject(cells.float(), done.matrix, (64, 64), sizes, (64, 64), fill=-1.0)
    moved = reproject(single[:, :1].float(), done.matrix, (64, 64), sizes, (64, 64), fill=-255.0)
    agree = ((moved / 255).round() == followed).float().mean()
    assert agree > 0.97, "a map of cells and a map of pixels are moved alike"
    if policy == "none":
        inside = followed[:, 0] >= 0
        same = (done.images[:, 0].round() == followed[:, 0])[inside].float().mean()
        assert same > 0.95, "but for the edges of cells, where the single is smooth"
    coarse = reproject(cells.float(), done.matrix, (4, 4), sizes, (64, 64), filter="bilinear")
    assert coarse.shape == (16, 1, 4, 4)


def test_views_have_their_own_keys():
    batch = images(3, 40, 40)
    large, small = Augmentation(image_size=(32, 32), scale=(0.4, 1.0)), Augmentation(image_size=(16, 16), scale=(0.05, 0.4))
    views = augment_views(batch, sizes_of(batch), keys(3), [(large, 1), (large, 1), (small, 2)])
    assert [view.images.shape for view in views] == [(3, 3, 32, 32), (3, 3, 32, 32), (6, 3, 16, 16)]
    assert not torch.equal(views[0].images, views[1].images)
    alone = augment_views(batch, sizes_of(batch), keys(3), [(large, 1), (large, 1), (small, 1), (small, 1)])
    assert torch.equal(views[2].images, torch.cat([view.images for view in alone[2:]])), "in one batch or in two: the same views"
    assert not torch.equal(*views[2].images.split(3))


def test_mixup_and_cutmix():
    images, labels = torch.randn(8, 3, 20, 30), torch.arange(8) % 4
    draws = [mixup.draw_mix(1, 0, step, 0, (20, 30), 0.8, 1.0) for step in range(400)]
    assert draws == [mixup.draw_mix(1, 0, step, 0, (20, 30), 0.8, 1.0) for step in range(400)]
    boxes = [draw for draw in draws if draw.box is not None]
    assert len(boxes) == pytest.approx(200, abs=40)
    for draw in draws[:50]:
        mixed, targets = mixup.mix_images(images, [draw]), make_targets(labels, 4, draw, LossConfig(label_smoothing=0.1))
        torch.testing.assert_close(targets.sum(1), torch.ones(8))
        plain = torch.nn.functional.one_hot(labels, 4) * 0.9 + 0.025
        torch.testing.assert_close(targets, draw.lam * plain + (1 - draw.lam) * plain.flip(0))
        if draw.box is None:
            torch.testing.assert_close(mixed, draw.lam * images + (1 - draw.lam) * images.flip(0))
        else:
            kept = (mixed == images).float().mean().item()
            assert kept == pytest.approx(draw.lam, abs=1e-6)
    assert mixup.draw_mix(0, 0, 0, 0, (20, 30), 0.0, 0.0).lam == 1.0
    assert all(mixup.draw_mix(0, 0, step, 0, (20, 30), 0.0, 1.0).box for step in range(50))
    shares = np.array([mixup.draw_mix(0, 0, step, 0, (9, 9), 0.8, 0.0).lam for step in range(4000)])
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert shares.var() == pytest.approx(1 / (4 * (2 * 0.8 + 1)), abs=0.01)


def test_erasing():
    images = torch.full((4000, 3, 32, 32), 7.0)
    boxes = mixup.erasing_boxes(keys(4000), (32, 32))
    erased = reference.normalize(images.to(torch.uint8), (0.0,) * 3, (1 / 255,) * 3, boxes, keys(4000))
    changed = erased != 7.0
    hit = changed.flatten(1).any(1)
    assert hit.float().mean() == pytest.approx(0.25, abs=0.02)
    area = changed[hit][:, 0].float().mean((1, 2))
    assert area.min() > 0.015
    assert area.max() < 0.36
    assert area.mean() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.02)
    noise = erased[changed]
    assert noise.mean() == pytest.approx(0, abs=0.02)
    assert noise.std() == pytest.approx(1, abs=0.02)
    rows = changed[hit][:, 0].any(2).sum(1) * changed[hit][:, 0].any(1).sum(1)
    assert torch.equal(rows, changed[hit][:, 0].sum((1, 2))), "one box each"


def test_unknown_names_are_rejected():
    with pytest.raises(UserError, match="choose from none, rand"):
        Augmentation(policy="magic")
    with pytest.raises(UserError, match="random_resized"):
        Augmentation(crop="magic")
    with pytest.raises(UserError, match="crop_ratio"):
        Augmentation(crop_ratio=1.5)


def test_the_center_crop_needs_no_key():
    assert sample_view(torch.tensor([[40, 50]]), keys(1), PIPELINES["test"]).columns.flip.sum() == 0
