"""Token labels (LV-ViT, arXiv 2104.10858): projection through every augmentation, mixing, loss."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.autograd import gradcheck
from torch.nn import functional as F

from vitrail.data.rng import sample_key
from vitrail.data.transforms.crops import flip_view
from vitrail.data.transforms.mixup import Mix, draw_mix, mix_images
from vitrail.data.transforms.pipeline import Augmentation, Augmented, augment
from vitrail.data.transforms.reference import OPERATION_INDEX, Layer, apply_operations, crop_resize, normalize
from vitrail.models.vision_transformer import mix_tokens
from vitrail.tasks.targets import blend
from vitrail.tasks.token_labels import POINTS, covered, draw_token_mix, project, token_loss, token_mask

CPU = torch.device("cpu")
SIZES = torch.tensor([[40, 60], [64, 64], [51, 33], [48, 80]])
GRID, PATCH = (3, 4), 8  # images of 24 x 32
FINE, SMALL = (6, 8), 4  # the same in more patches
AFFINE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
MAP = (19, 23)


def plane(sizes, shape, center=False):
    """Maps [B, 3, h, w] that are linear in the place in the source image: 2 + x / 10, y / 10 - 3, (x - 2 y) / 7."""
    height, width = shape
    maps = torch.empty(len(sizes), 3, height, width, dtype=torch.float64)
    for row, (tall, wide) in enumerate(sizes.tolist()):
        side = min(tall, wide)
        x = (torch.arange(width, dtype=torch.float64) + 0.5) * (side if center else wide) / width
        y = (torch.arange(height, dtype=torch.float64) + 0.5) * (side if center else tall) / height
        x, y = (x + (wide - side) / 2, y + (tall - side) / 2) if center else (x, y)
        maps[row] = torch.stack(linear(x[None].expand(height, -1), y[:, None].expand(-1, width)))
    return maps


def linear(x, y):
    return [2 + x / 10, y / 10 - 3, (x - 2 * y) / 7]


def every_class(maps):
    return torch.arange(maps.shape[1])[None, :, None, None].expand_as(maps)


def middles(grid, patch):
    """Of the patches, (x, y, 1) [N, 3]."""
    return torch.tensor([[(c + 0.5) * patch, (r + 0.5) * patch, 1.0] for r in range(grid[0]) for c in range(grid[1])]).double()


def points_of(grid, patch):
    """The places in each patch at which a map is read, [N, POINTS^2, 3]."""
    steps = [((number + 0.5) / POINTS - 0.5) * patch for number in range(POINTS)]
    reach = torch.tensor([[x, y, 0.0] for y in steps for x in steps]).double()
    return middles(grid, patch)[:, None] + reach


def inside_of(seen, grid, patch, margin):
    """Patches [B, N] all of whose points lie, wherever an operation has taken them, inside what it reads, and `margin` [B, 2]
    (x, y) inside the source: there maps are not extended."""
    places = points_of(grid, patch)[None].expand(len(seen.sizes), -1, -1, -1)
    good = torch.ones(places.shape[:2], dtype=torch.bool)
    for matrix, sizes in seen.steps:
        places = torch.einsum("bij,bnkj->bnki", matrix.double(), places)
        limit = sizes.flip(1)[:, None, None].double()
        good &= ((places[..., :2] >= 1e-3) & (places[..., :2] <= limit - 1e-3)).all(-1).all(-1)
    limit, margin = seen.sizes.flip(1)[:, None, None].double(), margin[:, None, None]
    return good & ((places[..., :2] >= margin) & (places[..., :2] <= limit - margin)).all(-1).all(-1)


def check_plane(seen, least, center=False):
    """Logits of the patches are the linear function of where their middles come from; gives which are not at a rim."""
    maps = plane(seen.sizes, MAP, center)
    found = project(maps, every_class(maps), seen, FINE, SMALL, 3, center)
    places = torch.einsum("bij,nj->bni", seen.matrix.double(), middles(FINE, SMALL))
    expected = torch.stack(linear(places[..., 0], places[..., 1]), -1)
    whole = seen.sizes.flip(1).double()
    size = whole.amin(1, keepdim=True).expand_as(whole) if center else whole
    inside = inside_of(seen, FINE, SMALL, (whole - size) / 2 + size / torch.tensor([MAP[1], MAP[0]]) / 2)
    assert inside.sum() >= least
    torch.testing.assert_close(found.double()[inside], expected[inside], rtol=1e-4, atol=1e-4)
    return inside


def augmented(augmentation, seed=0, sizes=SIZES):
    pixels = torch.zeros(len(sizes), 3, 96, 96, dtype=torch.uint8)
    index = torch.arange(len(sizes))
    return augment(pixels, sizes, sample_key(0, seed, index, torch.zeros_like(index)), augmentation)


@pytest.mark.parametrize("crop_last", [False, True])
@pytest.mark.parametrize("crop", ["random_resized", "simple", "center", "squash"])
def test_labels_follow_every_crop_and_flip(crop, crop_last):
    for seed in range(4):
        check_plane(augmented(Augmentation((24, 32), crop, scale=(0.4, 1.0), crop_last=crop_last), seed), 100)


@pytest.mark.parametrize("crop_last", [False, True])
@pytest.mark.parametrize("policy", ["rand", "auto", "trivial"])
def test_labels_follow_every_policy(policy, crop_last):
    """RandAugment's rotations, shears and translations, before the crop (LV-ViT's order) and after it (DeiT's)."""
    augmentation = Augmentation((24, 32), scale=(0.6, 1.0), policy=policy, magnitude=6.0, num_ops=3, crop_last=crop_last)
    moved = inside = 0
    for seed in range(2):
        seen = augmented(augmentation, seed, SIZES.repeat(6, 1))
        inside += int(check_plane(seen, 20).sum())
        moved += sum(int((layer.operation == OPERATION_INDEX[name]).sum()) for layer in seen.layers for name in AFFINE)
    assert moved > 10
    assert inside > 500


@pytest.mark.parametrize("crop_last", [False, True])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    ("name", "value"), [("rotate", 17.0), ("shear_x", -0.2), ("shear_y", 0.2), ("translate_x", 0.2), ("translate_y", -0.3)]
)
def test_labels_follow_each_warp(name, value, flip, crop_last):
    seen = warped(name, value, flip, crop_last)
    assert check_plane(seen, 80).sum() < 4 * 48


def warped(name, value, flip=False, crop_last=False, sizes=SIZES):
    """The whole image, flipped, warped, in either order, put together by hand."""
    count = len(sizes)
    flips = torch.full((count,), flip)
    augmentation = Augmentation((24, 32), "squash")
    plain = augmented(augmentation, sizes=sizes)
    layer = Layer(torch.full((count,), OPERATION_INDEX[name]), torch.full((count,), value), flips if crop_last else None)
    view = plain.view.after_flip(sizes[:, 1], flips) if crop_last else flip_view(plain.view, flips)
    return Augmented(plain.images, view, (layer,), sizes, crop_last)


@pytest.mark.parametrize("crop_last", [False, True])
def test_maps_of_the_middle_square_lie_over_it(crop_last):
    check_plane(augmented(Augmentation((24, 32), "squash", crop_last=crop_last)), 40, center=True)


@pytest.mark.parametrize(("name", "value"), [("translate_x", 0.5), ("translate_y", -0.5), ("rotate", 30.0)])
@pytest.mark.parametrize("crop_last", [False, True])
def test_labels_lie_where_the_pixels_lie(name, value, crop_last):
    """An image whose left third is red, and a map that says so: after every operation the labels agree with the pixels."""
    pixels = torch.zeros(1, 3, 96, 96, dtype=torch.uint8)
    pixels[:, 0, :, :32], pixels[:, 1, :, 32:] = 255, 255
    augmentation = Augmentation(
        (96, 96), "random_resized", scale=(0.5, 1.0), policy="rand", crop_last=crop_last, mean=(0, 0, 0), std=(1, 1, 1)
    )
    maps = torch.zeros(1, 2, 12, 12)
    maps[:, 0, :, :4], maps[:, 1, :, 4:] = 1.0, 1.0
    agree = total = 0
    for seed in range(12):
        key = torch.tensor([seed])
        seen = augment(pixels, torch.tensor([[96, 96]]), key, augmentation)
        colors = seen.layers[0].operation * 0 + torch.tensor([OPERATION_INDEX[name]])
        layer = Layer(colors, torch.tensor([value]), seen.layers[0].flip)
        seen = by_hand(pixels, seen, layer, augmentation)
        labels = project(maps, every_class(maps), seen, (12, 12), 8, 2).unflatten(1, (12, 12))[0]
        tiles = seen.images[0].unfold(1, 8, 8).unfold(2, 8, 8)
        for channel in (0, 1):
            pure = (tiles[channel].amin((2, 3)) > 0.9) & (tiles[1 - channel].amax((2, 3)) < 0.1)
            agree += int((labels[..., channel] > labels[..., 1 - channel])[pure].sum())
            total += int(pure.sum())
    assert total > 500
    assert agree == total


def by_hand(pixels, seen, layer, augmentation):
    """The same view with this one operation, through the pixels' own passes."""
    if augmentation.crop_last:
        images = crop_resize(apply_operations(pixels, seen.sizes, layer), seen.view, "bilinear", None)
    else:
        images = apply_operations(crop_resize(pixels, seen.view, "bilinear", None), torch.tensor([[96, 96]]), layer)
    return Augmented(
        normalize(images, augmentation.mean, augmentation.std, None, torch.tensor([0])),
        seen.view,
        (layer,),
        seen.sizes,
        augmentation.crop_last,
    )


def test_the_whole_image_gives_the_stored_map_within_a_bound():
    """Four places, a quarter of a cell from the middle: weights of 1/8, 3/4, 1/8 in each direction, so that a label is off by at
    most 7/16 of the cell's largest difference from its eight neighbours; a constant comes back whole."""
    sizes = torch.tensor([[48, 64]])
    seen = augmented(Augmentation((24, 32), "squash"), sizes=sizes)
    maps = torch.randn(1, 5, *GRID, dtype=torch.float64)
    found = project(maps, every_class(maps), seen, GRID, PATCH, 5).transpose(1, 2).unflatten(2, GRID).double()
    around = F.pad(maps, (1, 1, 1, 1), mode="replicate")
    kernel = torch.tensor([1 / 8, 3 / 4, 1 / 8], dtype=torch.float64)
    expected = F.conv2d(around.transpose(0, 1), (kernel[:, None] * kernel)[None, None]).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    near = F.unfold(around.transpose(0, 1), 3).unflatten(2, GRID)  # [5, 9, rows, columns]
    worst = (near - maps[0][:, None]).abs().amax(1)
    assert ((found - maps)[0].abs() <= 7 / 16 * worst + 1e-6).all()
    same = torch.full((1, 2, 5, 7), 3.25)
    assert torch.allclose(project(same, every_class(same), seen, GRID, PATCH, 2), torch.tensor(3.25))


@pytest.mark.parametrize("grid", [(3, 4), (4, 3), (1, 5), (1, 1)])
@pytest.mark.parametrize("cells", [(4, 6), (1, 1), (1, 7), (7, 1)])
def test_flipping_the_image_flips_the_labels(grid, cells):
    size = (grid[0] * PATCH, grid[1] * PATCH)
    plain = augmented(Augmentation(size, "squash"))
    back = plain._replace(view=flip_view(plain.view, torch.ones(len(SIZES), dtype=torch.bool)))
    maps = torch.randn(len(SIZES), 2, *cells)
    straight, mirrored = (project(maps, every_class(maps), seen, grid, PATCH, 2).unflatten(1, grid) for seen in (plain, back))
    torch.testing.assert_close(mirrored, straight.flip(2))
    turned_maps = project(maps.flip(3), every_class(maps), plain, grid, PATCH, 2).unflatten(1, grid)
    torch.testing.assert_close(turned_maps, mirrored)


@pytest.mark.parametrize("crop_last", [False, True])
def test_no_label_where_the_image_was_filled(crop_last):
    """A translation by half the width: the half that is filled has zero logits, the other one has none."""
    seen = warped("translate_x", 0.5, crop_last=crop_last, sizes=torch.tensor([[48, 64]]))
    maps = torch.full((1, 1, 6, 8), 7.0)
    labels = project(maps, every_class(maps), seen, GRID, PATCH, 1).unflatten(1, GRID)[0, ..., 0]
    torch.testing.assert_close(labels, torch.tensor([7.0, 7.0, 0.0, 0.0]).expand(3, 4))


def test_a_patch_filled_in_part_keeps_its_part():
    seen = warped("translate_x", 4 / 32, sizes=torch.tensor([[48, 64]]))  # half a patch
    maps = torch.full((1, 1, 6, 8), 7.0)
    labels = project(maps, every_class(maps), seen, GRID, PATCH, 1).unflatten(1, GRID)[0, ..., 0]
    torch.testing.assert_close(labels, torch.tensor([7.0, 7.0, 7.0, 3.5]).expand(3, 4))


def test_labels_lost_by_one_warp_stay_lost():
    """There and back again: the pixels are gone, and so are the labels."""
    there, back = (Layer(torch.tensor([OPERATION_INDEX["translate_x"]]), torch.tensor([value])) for value in (0.5, -0.5))
    plain = augmented(Augmentation((24, 32), "squash"), sizes=torch.tensor([[48, 64]]))
    maps = torch.full((1, 1, 6, 8), 7.0)
    labels = project(maps, every_class(maps), plain._replace(layers=(there, back)), GRID, PATCH, 1).unflatten(1, GRID)[0, ..., 0]
    torch.testing.assert_close(labels, torch.tensor([0.0, 0.0, 7.0, 7.0]).expand(3, 4))


@pytest.mark.parametrize("crop_last", [False, True])
def test_a_reflected_border_has_labels(crop_last):
    """The simple random crop goes four pixels beyond the image, where it mirrors it: there are labels, those of the rim."""
    augmentation = Augmentation((24, 32), "simple", padding=12, hflip=0.0, crop_last=crop_last)
    maps = torch.full((len(SIZES), 1, 6, 8), 7.0)
    beyond = 0
    for seed in range(4):
        seen = augmented(augmentation, seed)
        places = torch.einsum("bij,nj->bni", seen.matrix, middles(GRID, PATCH).float())[..., :2]
        beyond += int(((places < 0) | (places > SIZES.flip(1)[:, None])).any(-1).sum())
        labels = project(maps, every_class(maps), seen, GRID, PATCH, 1)
        torch.testing.assert_close(labels, torch.full_like(labels, 7.0))
    assert beyond > 5


def test_a_reflected_border_has_the_labels_of_its_pixels():
    augmentation = Augmentation((24, 32), "simple", padding=12, hflip=0.0)
    for seed in range(4):
        seen = augmented(augmentation, seed)
        maps = plane(SIZES, (48, 64))
        found = project(maps, every_class(maps), seen, GRID, PATCH, 3)
        points = [(d + 0.5) / POINTS - 0.5 for d in range(POINTS)]
        expected = torch.zeros(found.shape, dtype=torch.float64)
        for dy in points:
            for dx in points:
                places = middles(GRID, PATCH) + torch.tensor([dx * PATCH, dy * PATCH, 0.0])
                places = torch.einsum("bij,nj->bni", seen.matrix.double(), places)[..., :2].abs()
                limit = SIZES.flip(1)[:, None].double()
                places = limit - (limit - places).abs()
                expected += torch.stack(linear(places[..., 0], places[..., 1]), -1) / POINTS**2
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.15)  # half a cell at the rim


@pytest.mark.parametrize("kept", [1, 3, 5])
@pytest.mark.parametrize("crop_last", [False, True])
def test_top_k_logits_are_dense_logits_with_zeros(kept, crop_last):
    """Against a dense map and torch's own bilinear lookup in double precision, at each of the four places."""
    augmentation = Augmentation((24, 32), policy="rand", num_ops=2, crop_last=crop_last)
    seen = augmented(augmentation, 5)
    logits = torch.randn(len(SIZES), 9, 5, 7, dtype=torch.float64)
    values, classes = logits.topk(kept, 1)
    found = project(values, classes, seen, GRID, PATCH, 9)
    dense = torch.zeros_like(logits).scatter(1, classes, values)
    torch.testing.assert_close(found.double(), interpolated(dense, seen, GRID, PATCH), rtol=1e-4, atol=1e-4)


def interpolated(dense, seen, grid, patch):
    """Dense maps [B, C, h, w] to logits of the patches [B, N, C], in double precision, by torch's bilinear lookup."""
    places = points_of(grid, patch)[None].expand(len(dense), -1, -1, -1)
    known = torch.ones(places.shape[:3], dtype=torch.bool)
    for matrix, sizes in seen.steps:
        places = torch.einsum("bij,bnkj->bnki", matrix.double(), places)
        limit = sizes.flip(1)[:, None, None].double()
        known &= ((places[..., :2] >= -1e-4) & (places[..., :2] <= limit + 1e-4)).all(-1)
    normal = places[..., :2] / seen.sizes.flip(1)[:, None, None].double() * 2 - 1
    values = F.grid_sample(dense, normal, padding_mode="border", align_corners=False)  # [B, C, N, points]
    return (values * known[:, None]).mean(-1).transpose(1, 2)


def test_classes_that_the_student_does_not_have_are_ignored():
    seen = augmented(Augmentation((24, 32), "squash"))
    values = torch.randn(len(SIZES), 3, 4, 4)
    classes = every_class(values)
    all_three = project(values, classes, seen, GRID, PATCH, 3)
    two = project(values, torch.where(classes == 1, 2, torch.where(classes == 2, 1, 0)), seen, GRID, PATCH, 2)
    torch.testing.assert_close(two, all_three[..., [0, 2]])


@settings(deadline=None, derandomize=True, max_examples=60)
@given(some.integers(1, 5), some.integers(1, 5), some.sampled_from([1, 4, 7, 16]), some.integers(0, 10**6))
def test_the_covered_fraction_of_a_pasted_box(rows, columns, patch, step):
    size = (rows * patch, columns * patch)
    mix = draw_mix(0, 0, step, 0, size, 0.0, 1.0)
    part = covered(mix, (rows, columns), patch, CPU)
    top, bottom, left, right = mix.box or (0, 0, 0, 0)
    assert part.shape == (rows * columns,)
    assert 0 <= part.min() <= part.max() <= 1
    area = (part.double() * patch**2).round().sum().item()
    assert area == (bottom - top) * (right - left)
    assert part.mean().item() == pytest.approx(1 - mix.lam, abs=1e-6)
    pixels = torch.zeros(size)
    pixels[top:bottom, left:right] = 1
    torch.testing.assert_close(part.unflatten(0, (rows, columns)), F.avg_pool2d(pixels[None], patch)[0])


def test_patches_on_the_edge_of_a_box_are_mixed_by_area():
    part = covered(Mix(0.0, (4, 20, 8, 14)), (3, 4), 8, CPU).unflatten(0, (3, 4))
    expected = torch.tensor([[0, 0.375, 0, 0], [0, 0.75, 0, 0], [0, 0.375, 0, 0]])
    torch.testing.assert_close(part, expected)


def test_pixels_beyond_the_last_patch_do_not_count():
    """21 x 30 pixels, patches of 8: a box over all covers every patch, one in the rest covers none."""
    assert covered(Mix(0.0, (0, 21, 0, 30)), (2, 3), 8, CPU).tolist() == [1.0] * 6
    assert covered(Mix(0.9, (16, 21, 24, 30)), (2, 3), 8, CPU).tolist() == [0.0] * 6


def test_mixup_covers_all_patches_alike():
    torch.testing.assert_close(covered(Mix(0.7, None), (3, 4), 8, CPU), torch.full((12,), 0.3))


def test_token_labels_are_mixed_as_the_pixels_are():
    """Images of one number each: the mean of a patch of the mixed image is the mixed label of the patch."""
    numbers = torch.tensor([0.0, 2.0, 5.0])
    for step in range(30):
        mix = draw_mix(1, 0, step, 0, (24, 32), 0.8, 1.0)
        images = mix_images(numbers[:, None, None, None].expand(-1, 1, 24, 32), [mix])
        part = covered(mix, (3, 4), 8, CPU)
        labels = torch.lerp(numbers[:, None].expand(-1, 12), numbers.flip(0)[:, None].expand(-1, 12), part)
        torch.testing.assert_close(labels.unflatten(1, (3, 4)), F.avg_pool2d(images, 8)[:, 0], rtol=1e-5, atol=1e-5)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(some.integers(1, 9), some.integers(1, 9), some.integers(0, 10**6))
def test_mixtoken_conserves_mass(rows, columns, step):
    """The box's share of the patches is the share of the label, and each patch has one source."""
    mix = draw_token_mix(0, 3, step, 1, (rows, columns), 1.0)
    mask = token_mask([mix], (rows, columns), CPU)
    assert mask.shape == (1, rows * columns)
    assert mask.float().mean().item() == pytest.approx(1 - mix.lam, abs=1e-6)
    # Whose patch is it? Labels that name the image: one-hot of batch.
    sources = torch.eye(4)[:, None].expand(-1, rows * columns, -1)
    dense = mix_tokens(sources, mask)
    assert ((dense == 1).sum(-1) == 1).all()
    torch.testing.assert_close(dense.mean(1), blend(torch.eye(4), [mix]), rtol=1e-5, atol=1e-6)


def test_mixtokens_box_is_drawn_as_cutmix_draws_one():
    """Beta(1, 1): the mean share of an unclipped box is one half, boxes vary, and no draw is that of CutMix at the same place."""
    draws = [draw_token_mix(0, 0, step, 0, (14, 14), 1.0) for step in range(300)]
    pixels = [draw_mix(0, 0, step, 0, (14, 14), 0.0, 1.0) for step in range(300)]
    shares = np.array([draw.lam for draw in draws])
    assert 0.5 < shares.mean() < 0.75  # clipping at the rim leaves more of the image
    assert len({draw.box for draw in draws}) > 200
    assert sum(a == b for a, b in zip(draws, pixels, strict=True)) < 30
    assert draws[7] == draw_token_mix(0, 0, 7, 0, (14, 14), 1.0)
    assert draws[7] != draw_token_mix(0, 0, 7, 1, (14, 14), 1.0)
    assert draws[7] != draw_token_mix(1, 0, 7, 0, (14, 14), 1.0)


def test_mixing_twice_is_the_identity():
    tokens, mask = torch.randn(5, 12, 3), torch.rand(1, 12) < 0.4
    assert torch.equal(mix_tokens(mix_tokens(tokens, mask), mask), tokens)
    mixed = mix_tokens(tokens, mask)
    for place in range(12):
        for row in range(5):
            assert torch.equal(mixed[row, place], tokens[4 - row if mask[0, place] else row, place])


def test_mixing_predictions_or_labels_is_the_same_loss():
    torch.manual_seed(3)
    logits, labels = torch.randn(4, 12, 5, dtype=torch.float64, requires_grad=True), torch.randn(4, 12, 5).double().softmax(-1)
    mask = torch.rand(1, 12) < 0.5
    answers = token_loss(mix_tokens(logits, mask), labels)
    expected = token_loss(logits, mix_tokens(labels, mask))
    torch.testing.assert_close(answers, expected, rtol=1e-12, atol=0)
    (one,), (two,) = torch.autograd.grad(answers, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-15)


def test_the_dense_loss_is_its_definition():
    """(1 / N) sum over patches of - sum of y log softmax(x), mean over the batch, in double precision by hand."""
    torch.manual_seed(5)
    logits, labels = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 4).double().softmax(-1)
    total = 0.0
    for image in range(2):
        for patch in range(3):
            row = logits[image, patch].tolist()
            normal = math.log(sum(math.exp(value) for value in row))
            total -= sum(y * (x - normal) for x, y in zip(row, labels[image, patch].tolist(), strict=True)) / 3
    assert token_loss(logits, labels).item() == pytest.approx(total / 2, rel=1e-12)
    assert token_loss(logits.bfloat16(), labels).dtype == torch.float32


def test_gradients():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 4, 3).double().requires_grad_(), torch.randn(2, 4, 3).double().softmax(-1)
    mask = torch.tensor([[True, False, True, False]])
    assert gradcheck(lambda x: token_loss(x, labels), logits)
    assert gradcheck(lambda x: token_loss(mix_tokens(x, mask), labels), logits)
