"""Predictions: from files, images and arrays to class names."""

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.images import make_folder, make_image, write_invalid_image
from vitrail.checkpoints.model_io import find_weights
from vitrail.data.decode import decode
from vitrail.data.loader import Problem
from vitrail.data.transforms.config import Augmentation
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.predict import ImageList, iterate_predictions, open_images, parse_path_list
from vitrail.heads.task_heads import SegmentationConfig
from vitrail.models.preprocessing import Preprocessing, min_decode_side


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = vitrail.create("deit_tiny_patch16", 4, 16, patch_size=4, width=16, depth=1, heads=2)
    model.class_names = ["red", "green", "blue", "<b>[bold]"]
    return model


def test_files_and_folders_in_the_order_given(tmp_path):
    make_folder(tmp_path / "many", ["b", "a"], 2)
    make_image(tmp_path / "one.jpg")
    (tmp_path / "many" / "notes.txt").write_text("not an image")
    (tmp_path / "many" / ".hidden.png").write_text("")
    os.symlink(tmp_path / "many", tmp_path / "many" / "a" / "round")
    (tmp_path / "empty").mkdir()
    odd = tmp_path / "no ending"
    for path in (odd, tmp_path / "many" / "scan"):
        path.write_bytes((tmp_path / "one.jpg").read_bytes())
    source, problems = open_images([tmp_path / "one.jpg", tmp_path / "many", odd, tmp_path / "empty", tmp_path / "gone.png"])
    found = [os.path.relpath(source.location(index), tmp_path) for index in range(len(source))]
    assert found == ["one.jpg", "many/a/000.png", "many/a/001.png", "many/b/000.png", "many/b/001.png", "many/scan", "no ending"]
    assert problems == [
        Problem(str(tmp_path / "empty"), "the folder contains no images"),
        Problem(str(tmp_path / "gone.png"), "no such file"),
    ]


def test_an_empty_path_is_rejected(tmp_path):
    with pytest.raises(UserError, match="The path of an image is empty: give files"):
        open_images([make_image(tmp_path / "one.jpg"), ""])


def found_in(source, folder):
    return [os.path.relpath(source.location(index), folder) for index in range(len(source))]


def test_patterns_that_no_shell_expanded(tmp_path):
    make_folder(tmp_path, ["b", "a"], 2)
    make_image(tmp_path / "a" / "deep" / "x.JPG")
    make_image(tmp_path / "odd [1].png")
    (tmp_path / "a" / "notes.txt").write_text("")
    (tmp_path / "a" / "folder.png").mkdir()
    make_folder(tmp_path / "full.png", ["c"], 1)
    source, problems = open_images([tmp_path / "**" / "*"])
    everything = ["a/000.png", "a/001.png", "a/deep/x.JPG", "b/000.png", "b/001.png", "full.png/c/000.png", "odd [1].png"]
    assert found_in(source, tmp_path) == everything
    assert problems == [Problem(str(tmp_path / "a" / "folder.png"), "a folder with an image extension in its name")]
    assert found_in(open_images([tmp_path / "?" / "00[01].png"])[0], tmp_path) == [*everything[:2], *everything[3:5]]
    assert found_in(open_images([tmp_path / "odd [1].png"])[0], tmp_path) == ["odd [1].png"]  # a file, not a pattern
    source, problems = open_images([tmp_path / "*.gif"])
    assert (len(source), problems) == (0, [Problem(str(tmp_path / "*.gif"), "no such file")])


def test_pipes_and_broken_links_are_reported(tmp_path):
    make_image(tmp_path / "good.png")
    os.mkfifo(tmp_path / "pipe.png")
    os.symlink(tmp_path / "nowhere.png", tmp_path / "link.png")
    (tmp_path / "folder.jpg").mkdir()
    for paths in ([tmp_path], [tmp_path / "*"], [tmp_path / "**" / "*.*g"], sorted(tmp_path.iterdir())):
        source, problems = open_images(paths)
        assert found_in(source, tmp_path) == ["good.png"]
        assert {(os.path.basename(each.location), each.reason) for each in problems} in (
            {("pipe.png", "not a file"), ("link.png", "broken symbolic link"), ("folder.jpg", reason)}
            for reason in ("a folder with an image extension in its name", "the folder contains no images")
        )


def test_lists_of_paths():
    assert parse_path_list(b"a.png\nb c.png\r\n\n") == ["a.png", "b c.png"]
    assert parse_path_list(b"a\nb.png\0c.png\0") == ["a\nb.png", "c.png"]
    assert os.fsencode(parse_path_list(b"\xff.png\n")[0]) == b"\xff.png"
    assert parse_path_list(b"") == []


def test_files_without_read_permission(model, tmp_path, monkeypatch):
    """Simulated, so that the test also passes for a user who may read everything."""
    paths = [make_image(tmp_path / name) for name in ("a.png", "b.png")]
    read = ImageList.encoded

    def encoded(self, index):
        if index == 1:
            raise PermissionError(13, "Permission denied", self.location(index))
        return read(self, index)

    monkeypatch.setattr(ImageList, "encoded", encoded)
    results = list(iterate_predictions(model, open_images(paths)[0], workers=0))
    assert results[1] == Problem(str(paths[1]), "Permission denied")
    assert results[0].image == str(paths[0])


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos", "bilinear_no_antialias"])
@pytest.mark.parametrize(("resize", "crop"), [("shorter", "center"), ("square", "squash")])
@pytest.mark.parametrize("crop_ratio", [0.875, 0.9, 1.0])
def test_preprocessing_is_bit_equal_to_the_augmentation_pipeline(interpolation, resize, crop, crop_ratio):
    """The deterministic crops of `augment`, which validation used before `Preprocessing.apply` existed."""
    sizes = torch.tensor([[50, 70], [31, 17], [64, 64], [8, 90], [3, 2]])
    pixels = torch.zeros(len(sizes), 3, 64, 90, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for row, (height, width) in enumerate(sizes.tolist()):
        pixels[row, :, :height, :width] = torch.randint(256, (3, height, width), generator=generator, dtype=torch.uint8)
    for image_size in ((32, 32), (24, 40), (96, 96)):
        preprocessing = Preprocessing(image_size, crop_ratio, resize, interpolation, (0.4, 0.5, 0.6), (0.2, 0.3, 0.1))
        augmentation = Augmentation(
            image_size, crop, crop_ratio=crop_ratio, interpolation=interpolation, mean=preprocessing.mean, std=preprocessing.std
        )
        expected = augment(pixels, sizes, torch.zeros(len(sizes), dtype=torch.int64), augmentation).images
        assert torch.equal(preprocessing.apply(pixels, sizes), expected)


def test_preprocessing_settings_are_checked():
    for changes, message in (({"interpolation": "random"}, "choose from nearest"), ({"crop_ratio": 1.5}, "out of range")):
        with pytest.raises(UserError, match=message):
            Preprocessing(**changes).check()


def test_every_kind_of_image_gives_the_same_tensor(model, tmp_path):
    path = make_image(tmp_path / "wide.png", 1, (40, 24))
    pixels = decode(path.read_bytes())
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    expected = model.preprocess(path)
    assert (expected.shape, expected.dtype) == ((1, 3, 16, 16), torch.float32)
    assert torch.equal(expected, model.preprocessing.apply(tensor[None], torch.tensor([[24, 40]])))
    for image in (str(path), Image.open(path), Image.fromarray(pixels), pixels, tensor, [path], pixels[None], tensor[None]):
        assert torch.equal(model.preprocess(image), expected)
    together = model.preprocess([path, pixels, make_image(tmp_path / "other.png", 2, (30, 30))])
    assert together.shape == (3, 3, 16, 16)
    assert torch.equal(together[:2], expected.expand(2, -1, -1, -1))
    turned = Image.fromarray(pixels)
    turned.getexif()[274] = 6  # stored on its side
    assert torch.equal(model.preprocess(turned), model.preprocess(np.rot90(pixels, -1)))


def test_images_that_cannot_be_preprocessed(model, tmp_path):
    for image, message in (
        (tmp_path / "gone.png", "gone.png cannot be read: No such file"),
        (write_invalid_image(tmp_path / "bad.png"), "bad.png cannot be read: not a JPEG"),
        (np.zeros((4, 4, 3)), "The ndarray cannot be read: .* instead of uint8"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), r"The Tensor cannot be read: .*\[height, width, 3\]"),
        (np.zeros((4, 4), dtype=np.uint8), r"An array is an image \[height, width, 3\] or a batch of images, not \[4, 4\]"),
        ([], "at least one"),
    ):
        with pytest.raises(UserError, match=message):
            model.preprocess(image)


def test_the_public_function(model, tmp_path):
    folder = make_folder(tmp_path / "photos", ["a"], 3)
    path = folder / "a" / "000.png"
    weights = vitrail.save(model, tmp_path / "best.safetensors")
    (tmp_path / "run.json").write_text("{}")
    by_path = vitrail.predict(weights, path, device="cpu")
    assert by_path == model.predict(path) == vitrail.predict(tmp_path, str(path), device="cpu")  # a run directory
    assert (by_path[0].image, by_path[0].name, len(by_path[0].classes)) == (str(path), by_path[0].classes[0].name, 4)
    assert by_path[0].probability == by_path[0].classes[0].probability
    assert len(vitrail.predict(model, folder)) == len(vitrail.predict(model, f"{folder}/*/*.png")) == 3
    pixels = decode(path.read_bytes())
    mixed = vitrail.predict(model, [Image.open(path), pixels, folder], top=1)
    assert [each.image for each in mixed] == ["image 0", "image 1", *(str(folder / "a" / f"00{n}.png") for n in range(3))]
    assert mixed[0].classes == mixed[1].classes == mixed[2].classes
    assert vitrail.predict(model, pixels) == vitrail.predict(model, [pixels])
    for images, message in (
        (tmp_path / "gone.png", "gone.png cannot be read: no such file"),
        (np.zeros((4, 4, 3)), "image 0 cannot be read: .* instead of uint8"),
    ):
        with pytest.raises(UserError, match=message):
            vitrail.predict(model, images)


def test_a_run_directory_stands_for_its_best_weights(tmp_path):
    assert find_weights(tmp_path) == tmp_path
    (tmp_path / "run.json").write_text("{}")
    assert find_weights(tmp_path) == tmp_path / "best.safetensors"


def test_predictions_are_the_top_classes_of_the_logits(model, tmp_path):
    path = make_image(tmp_path / "wide.png", 1, (40, 24))
    (prediction,) = iterate_predictions(model, open_images([path])[0], top=3)
    probabilities, classes = model.eval()(model.preprocess(path)).softmax(1).topk(3)
    assert prediction.image == str(path)
    assert [each.probability for each in prediction.classes] == pytest.approx(probabilities[0].tolist(), rel=1e-5)
    assert [each.index for each in prediction.classes] == classes[0].tolist()
    assert [each.name for each in prediction.classes] == [model.class_names[index] for index in classes[0]]
    assert prediction.label is None


def test_batch_size_and_workers_do_not_change_predictions(model, tmp_path):
    source = open_images([make_folder(tmp_path, size=(20, 30), count=4)])[0]
    expected = list(iterate_predictions(model, source, batch_size=1))
    for batch_size, workers in ((5, 0), (100, 0), (5, 2)):
        results = list(iterate_predictions(model, source, batch_size=batch_size, workers=workers))
        assert [result.image for result in results] == [result.image for result in expected]
        for one, other in zip(expected, results, strict=True):
            probabilities = {each.name: each.probability for each in one.classes}
            assert {each.name: each.probability for each in other.classes} == pytest.approx(probabilities, rel=1e-4)


def test_unreadable_images_give_a_problem_in_their_position(model, tmp_path):
    paths = [
        make_image(tmp_path / "a.png"),
        write_invalid_image(tmp_path / "b.png"),
        make_image(tmp_path / "c.png"),
        write_invalid_image(tmp_path / "d"),
    ]
    for batch_size in (1, 2, 4):
        results = list(iterate_predictions(model, open_images(paths)[0], batch_size=batch_size))
        assert [isinstance(result, Problem) for result in results] == [False, True, False, True]
        assert [result[0] for result in results] == list(map(str, paths))


def test_built_in_images_have_labels(model):
    results = list(iterate_predictions(model, open_images(["digits"])[0], top=99))
    assert len(results) == 16
    assert all(len(result.classes) == 4 for result in results)
    assert all(result.label in "0123456789" for result in results)


def test_no_images_and_no_classifier(model):
    assert list(iterate_predictions(model, open_images([])[0])) == []
    with pytest.raises(vitrail.UserError, match="no classifier"):
        list(iterate_predictions(vitrail.create("deit_tiny_patch16", 0, 16, patch_size=4, depth=1), open_images([])[0]))


def test_jpeg_files_are_decoded_as_in_training(model):
    preprocessing = model.preprocessing
    assert min_decode_side(preprocessing, {}) == 32
    assert min_decode_side(preprocessing, {"recipe": '{"data": {"decode_scale": 1.5}}'}) == 24
    assert min_decode_side(preprocessing, {"recipe": '{"data": {"decode_scale": 0.0}}'}) is None
    old = vitrail.load(Path(__file__).parents[1] / "old_files" / "finished_run")  # saved with an old name of the key
    assert min_decode_side(old.preprocessing, old.notes) == 12
    values = ('"x"', "1e999", "NaN", "1" + "0" * 400, "-5", "null", "[1.5]")
    scales = [f'{{"data": {{"decode_scale": {value}}}}}' for value in values]
    for damaged in ("", "[]", "3", '{"data": 3}', '{"a":' * 100_000, *scales):
        assert min_decode_side(preprocessing, {"recipe": damaged}) == 32
    with pytest.raises(vitrail.UserError, match="not three numbers"):
        preprocessing._replace(mean=(10**400, 0, 0)).check()


def test_nan_logits(model, tmp_path):
    make_folder(tmp_path, ["a"], 2, (8, 8))
    source, _ = open_images([tmp_path])
    bias = model.head.bias.detach().clone()
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with pytest.raises(UserError, match="NaN or Inf: its weights are damaged"):
        list(iterate_predictions(model, source, workers=0))
    with torch.no_grad():
        model.head.bias.copy_(bias)


@pytest.mark.parametrize(("size", "patch"), [((60000, 60000), 8), ((2049, 2048), 128), ((800, 800), 8)])
def test_weights_for_huge_images_are_refused(size, patch, tmp_path, cli_error):
    model = vitrail.create("deit_tiny_patch16", 4, 128, patch_size=patch, width=16, depth=1, heads=2, pos_embed="none")
    model.preprocessing = model.preprocessing._replace(image_size=size)
    vitrail.save(model, tmp_path / "huge.safetensors")
    reason = f"has inputs of {size[0]} x {size[1]} pixels; at most 4,194,304 pixels and 8,192 patches are supported: give weights"
    for command in ("predict", "evaluate", "explore"):
        assert reason in cli_error(command, tmp_path / "huge.safetensors", "digits")


@pytest.mark.parametrize("change", [{"short_side": 3000}, {"window": 3000, "stride": 1}])
def test_heads_for_huge_images_are_refused(change, model, tmp_path):
    segmenter = copy.deepcopy(model)
    segmenter.set_task_head(SegmentationConfig(("road", "sky"), (0, 1), kind="linear", **({"short_side": 32} | change)))
    vitrail.save(segmenter, tmp_path / "huge.safetensors")
    with pytest.raises(UserError, match="inputs of 3000 x 3000 pixels"):
        vitrail.segment(tmp_path / "huge.safetensors", "digits")


def test_huge_sizes_of_an_evaluation_are_refused(model, tmp_path, cli_error):
    vitrail.save(model, tmp_path / "small.safetensors")
    assert "has inputs of 60000 x 60000 pixels" in cli_error(
        "evaluate", tmp_path / "small.safetensors", "digits", "--sizes", "16,60000"
    )
