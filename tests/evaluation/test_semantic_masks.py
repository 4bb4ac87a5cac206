"""Inference of segmentations: sizes, padding, windows, tiles, scales and flips."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import vitrail
from vitrail.data.decode import decode_mask
from vitrail.errors import UserError
from vitrail.evaluation import semantic_masks
from vitrail.evaluation.segmented_images import change_protocol, segment
from vitrail.evaluation.semantic_masks import (
    Protocol,
    View,
    enlarge_to_window,
    positions,
    predict_classes,
    predict_logits,
    slide,
    working_size,
)
from vitrail.heads.task_heads import SegmentationConfig


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = vitrail.create("vitrail_mini", 0, 32, width=16, depth=1, patch_size=4)
    model.set_task_head(SegmentationConfig(("a", "b", "c"), (0, 4, 9), 32, kind="linear"))
    torch.nn.init.normal_(model.task_head.decoder.classifier.weight)
    return model.eval()


@pytest.fixture(scope="module")
def pixels():
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 37, 50), dtype=np.uint8))


def test_rows_of_resized_logits_are_torchs():
    logits = torch.randn(2, 5, 7, 9)
    expected = F.interpolate(logits, (40, 31), mode="bilinear", align_corners=False)
    parts = [View(logits).resize_rows((40, 31), torch.arange(top, min(top + 11, 40))) for top in range(0, 40, 11)]
    torch.testing.assert_close(torch.cat(parts, 2), expected)


def test_padding_is_cut_off():
    """Logits of 5 x 4 cells, of which the image covers 80 % and 75 %."""
    logits = torch.arange(20.0).view(1, 1, 5, 4)
    out = View(logits, (0.8, 0.75)).resize_rows((4, 3), torch.arange(4))
    torch.testing.assert_close(out, logits[:, :, :4, :3])


def test_sizes():
    assert working_size((180, 240), 90, 1.0) == (90, 120)
    assert working_size((180, 240), 90, 0.5) == (45, 60)
    assert working_size((100, 1000), 50, 1.0) == (20, 200)  # the longer side at most four times the shorter one of the protocol
    assert working_size((100, 1000), 0, 1.0) == (100, 1000)
    for size, enlarged in {
        (300, 400): (300, 400),
        (100, 200): (224, 448),
        (20, 100): (224, 896),
        (4, 896): (224, 896),
        (20, 4000): (224, 4000),
    }.items():
        assert enlarge_to_window(size, 224) == enlarged
        assert enlarge_to_window(size, 0) == size
    assert positions(50, 16, 10) == [0, 10, 20, 30, 34]
    assert positions(16, 16, 10) == [0]


def test_bands_do_not_change_the_result(model, pixels, monkeypatch):
    whole = predict_classes(model, pixels, Protocol(32))
    assert whole.shape == (2, 37, 50)
    assert len(whole.unique()) > 1
    monkeypatch.setattr(semantic_masks, "BAND", 500)
    assert torch.equal(predict_classes(model, pixels, Protocol(32)), whole)


def test_one_window_of_the_size_of_the_image_is_the_whole_image(model):
    images = torch.randn(2, 3, 32, 32)
    expected = F.interpolate(predict_logits(model, images), (32, 32), mode="bilinear", align_corners=False)
    torch.testing.assert_close(slide(model, images, 32, 16), expected)


def test_windows_average_where_they_overlap(model):
    images = torch.randn(1, 3, 16, 24)
    parts = [
        F.interpolate(predict_logits(model, images[..., left : left + 16]), (16, 16), mode="bilinear", align_corners=False)
        for left in (0, 8)
    ]
    found = slide(model, images, 16, 8)
    torch.testing.assert_close(found[..., :8], parts[0][..., :8])
    torch.testing.assert_close(found[..., 8:16], (parts[0][..., 8:] + parts[1][..., :8]) / 2)
    torch.testing.assert_close(found[..., 16:], parts[1][..., 8:])


def test_flips_make_the_result_symmetric(model, pixels):
    """Of sizes that need no padding, and windows that divide them."""
    pixels = pixels[:, :, :32, :48]
    for window in (0, 16):
        plain, flipped = (Protocol(32, window, window, (1.0, 1.5), flip) for flip in (False, True))
        assert (predict_classes(model, pixels, plain) != predict_classes(model, pixels.flip(-1), plain).flip(-1)).any()
        found, mirrored = predict_classes(model, pixels, flipped), predict_classes(model, pixels.flip(-1), flipped)
        assert (found != mirrored.flip(-1)).float().mean() < 0.002  # rounding


def test_large_images_in_tiles(model, monkeypatch):
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (1, 3, 150, 170), dtype=np.uint8))
    protocol = Protocol(0, 16, 16)
    whole = predict_classes(model, pixels, protocol)
    monkeypatch.setattr(semantic_masks, "TILE", 3 * 80 * 80)
    tiles = predict_classes(model, pixels, protocol)
    assert tiles.shape == whole.shape
    assert (tiles == whole).float().mean() > 0.5  # windows start elsewhere
    monkeypatch.setattr(semantic_masks, "TILE", 3 * 150 * 170)
    assert torch.equal(predict_classes(model, pixels, protocol), whole)


def test_wide_images_in_tiles_of_one_window(model, monkeypatch):
    """A tile that contains one window of the smallest scale is larger than the limit, and is not cut again."""
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (1, 3, 32, 96), dtype=np.uint8))
    protocol = Protocol(32, 32, 32, (0.5, 1.0))
    whole = predict_classes(model, pixels, protocol)
    monkeypatch.setattr(semantic_masks, "TILE", 3 * 8 * 8)
    assert predict_classes(model, pixels, protocol).shape == whole.shape


def test_python_and_protocol(model):
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    (found,) = segment(model, image)
    assert found.classes.shape == (40, 60)
    assert sum(each.share for each in found.shares) == pytest.approx(1)
    assert found.overlay().width == 80  # at least as wide as its legend needs
    ids = decode_mask(found.mask_png())
    assert np.array_equal(np.array([0, 4, 9])[found.classes], ids)
    assert vitrail.segment is segment
    assert Image.open(io.BytesIO(found.mask_png())).mode == "P"
    with pytest.raises(UserError, match=r"call vitrail\.segment"):
        vitrail.predict(model, image)
    with pytest.raises(UserError, match=r"from 0\.1 to 8"):
        change_protocol(model, [0.0])
    with pytest.raises(UserError, match="has no segmentation head"):
        segment(vitrail.create("vitrail_mini", 3, 32, width=16, depth=1), image)


def test_models_of_one_size_need_a_window():
    model = vitrail.create("resmlp_s12", 0, 32, width=16, depth=1)
    config = SegmentationConfig(("a", "b"), (0, 1), 32, 32, 20, kind="linear")
    found = segment(model.set_task_head(config), np.zeros((50, 70, 3), dtype=np.uint8), window=None)
    assert found[0].classes.shape == (50, 70)
    with pytest.raises(UserError, match="windows of 32 pixels only"):
        change_protocol(model, window=64)
    assert "windows of 32 with stride 20" in Protocol.of(config).describe()


def test_an_artifact_keeps_head_and_protocol(model, pixels, tmp_path):
    path = vitrail.save(model, tmp_path / "seg.safetensors")
    loaded = vitrail.load(path)
    assert loaded.task_head.config == model.task_head.config
    assert torch.equal(predict_classes(loaded, pixels, Protocol(32)), predict_classes(model, pixels, Protocol(32)))
    other = dataclasses.replace(model.task_head.config, class_names=("a", "b", "d"))
    assert loaded.set_task_head(other).task_head.config != model.task_head.config
