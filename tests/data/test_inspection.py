"""`vitrail data inspect` finds every planted problem and nothing else."""

import json
import multiprocessing
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.test_main import run
from tests.data.test_datasets import png, write_folder, write_parquet
from tests.images import make_folder
from vitrail.cli import data as commands
from vitrail.data.contact_sheet import MARGIN, TILE, augmented_views, contact_sheet
from vitrail.data.datasets.digits import PixelSource
from vitrail.data.datasets.lookup import open_source, open_sources
from vitrail.data.decode import decode
from vitrail.data.duplicates import NEAR_BITS, exact_groups, fingerprint, near_groups
from vitrail.data.inspection import inspect
from vitrail.data.inspection_report import findings, percent_of
from vitrail.data.source import Labels
from vitrail.data.transforms.pipeline import Augmentation
from vitrail.errors import UserError


def scene(seed: int, width: int = 120, height: int = 90) -> Image.Image:
    """Smooth random colors, which have a unique perceptual hash like a photograph."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Train and val with three classes and one problem of every kind."""
    root = tmp_path_factory.mktemp("planted") / "data"
    seed = 0
    for split, counts in {"train": {"ant": 12, "bee": 30, "cow": 3}, "val": {"ant": 4, "bee": 4}}.items():
        for name, count in counts.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                seed += 1
                scene(seed, 300 if number else 100, 240).save(root / split / name / f"{number:02d}.png")
    train, val = root / "train", root / "val"
    Image.open(train / "ant" / "05.png").save(val / "ant" / "same_pixels.bmp")
    Image.open(train / "bee" / "07.png").resize((150, 120)).save(val / "bee" / "smaller.jpg", quality=60)
    shutil.copy(train / "ant" / "06.png", train / "bee" / "other_label.png")
    bright = np.asarray(Image.open(train / "bee" / "08.png")) * 0.8 + 40
    Image.fromarray(bright.astype(np.uint8)).save(train / "bee" / "brighter.jpg", quality=80)
    (train / "ant" / "empty.jpg").touch()
    (train / "ant" / "text.png").write_text("no image")
    (val / "bee" / "torn.png").write_bytes((train / "ant" / "09.png").read_bytes()[:2000])
    Image.new("RGB", (300, 240), (255, 255, 255)).save(train / "bee" / "white.png")
    Image.new("RGB", (300, 240), (250, 250, 250)).save(val / "bee" / "nearly_white.png")
    return str(root)


@pytest.fixture(scope="module")
def report(planted):
    return inspect(planted, open_sources(planted), workers=2)


def test_counts_of_splits(report):
    train, validation = report.splits["train"], report.splits["validation"]
    assert (train.images, validation.images) == (50, 12)
    assert train.classes == {"ant": 14, "bee": 33, "cow": 3}
    assert validation.classes == {"ant": 5, "bee": 7, "cow": 0}
    assert train.formats == {"PNG RGB": 47, "JPEG RGB": 1}
    assert train.resolution["width"] == [100, 300, 300, 300, 300]
    assert train.resolution["height"] == [240] * 5
    assert train.resolution["aspect"][0] == pytest.approx(100 / 240)
    assert train.resolution["megapixels"][-1] == pytest.approx(0.072)
    assert train.below_default_size == 3
    assert train.bytes > 10_000


def test_unreadable_files_are_listed_with_the_reason(report):
    unreadable = {
        problem.location.rpartition("/")[2]: problem.reason for split in report.splits.values() for problem in split.unreadable
    }
    assert set(unreadable) == {"empty.jpg", "text.png", "torn.png"}
    assert unreadable["empty.jpg"] == "the file is empty"
    assert "truncated" in unreadable["torn.png"]


def test_duplicates_leaks_and_different_labels(report):
    found = {frozenset(member.location.rpartition("/")[2] for member in group.members): group for group in report.groups}
    assert {names: group.exact for names, group in found.items()} == {
        frozenset({"05.png", "same_pixels.bmp"}): True,
        frozenset({"07.png", "smaller.jpg"}): False,
        frozenset({"06.png", "other_label.png"}): True,
        frozenset({"08.png", "brighter.jpg"}): False,
    }
    assert [group.labels_differ for group in found.values()].count(True) == 1
    leak = report.leaks["train", "validation"]
    assert (leak.exact, leak.near) == (1, 1)
    repeats = report.repeats["train"]
    assert (repeats.exact, repeats.near) == (1, 1)
    assert report.repeats["validation"].total == 0


def test_very_similar_images_are_not_a_leak(tmp_path):
    noise = np.random.default_rng(0)
    base = np.asarray(scene(1), dtype=np.int64)
    for split, count in (("train", 110), ("val", 20)):
        for number in range(count):
            folder = tmp_path / split / ("ant" if number % 2 else "bee")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (base + noise.integers(-3, 4, base.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    messages = list(findings(inspect(str(tmp_path), open_sources(str(tmp_path)), workers=0)))
    assert any("too similar" in message for message in messages)
    assert not any("LEAK" in message for message in messages)


def test_findings_are_sorted_by_importance(report):
    messages = list(findings(report))
    assert messages[0].startswith("LEAK: 1 image of validation (9.09 %) also in train (equal pixels)")
    assert messages[1].startswith("Possible LEAK: 1 image of validation")
    text = " ".join(messages)
    assert "1 group of duplicates has different labels" in text
    assert "2 of 50 train images cannot be read" in text
    assert "1 class of train with fewer than 10 images: cow." in text
    assert "The largest class of train has 11 times as many images as the smallest." in text
    assert "1 class without an image in validation: cow." in text


def test_workers_do_not_change_the_report(planted, report):
    assert inspect(planted, open_sources(planted), workers=0) == report


def test_an_interrupt_stops_the_workers(planted):
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inspect(planted, open_sources(planted), workers=2, advance=interrupt)
    assert not multiprocessing.active_children()


def test_labels_masks_and_pixel_arrays(tmp_path):
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "coarse_label": {"names": ["animal"]}}
    images = [png(number, 4) for number in range(6)]
    path = write_parquet(tmp_path / "train.parquet", [0, 0, 0, 0, 0, 1], features, images, masks=True)
    split = inspect(path, open_sources(path), workers=0).splits["train"]
    assert split.extra_labels == {"coarse_label": 1}
    assert split.masks == 0  # the masks of the helper are color images, which are rejected
    assert split.unreadable[0].reason.startswith("mask: ")
    assert "No class labels in train" in " ".join(findings(inspect_folder_without_labels(tmp_path)))
    digits = inspect("digits", open_sources("digits"), workers=0)
    assert digits.splits["train"].formats == {"pixels RGB": 1437}
    assert digits.leaks["train", "test"].exact == 0


def inspect_folder_without_labels(tmp_path):
    (tmp_path / "flat").mkdir()
    scene(1).save(tmp_path / "flat" / "one.png")
    return inspect("flat", open_sources(str(tmp_path / "flat")), workers=0)


def test_the_index_finds_all_near_pairs():
    rng = np.random.default_rng(0)
    count = 600
    hashes = rng.integers(0, 1 << 63, count, dtype=np.uint64)
    for row in range(count // 2, count):  # the second half: the first with 0 ... 9 bits changed
        flips = rng.choice(63, rng.integers(0, 10), replace=False)
        hashes[row] = np.bitwise_xor.reduce([hashes[row - count // 2], *(np.uint64(1 << int(bit)) for bit in flips)])
    thumbnails = np.tile(rng.integers(0, 256, (1, 8, 8, 3), dtype=np.uint8), (count, 1, 1, 1))
    group = near_groups(np.arange(count), hashes, thumbnails)
    for row in range(count // 2, count):
        distance = (int(hashes[row]) ^ int(hashes[row - count // 2])).bit_count()
        assert (group[row] == group[row - count // 2]) == (distance <= NEAR_BITS)
    # Equal hashes alone are not enough, and images of a single color are never near duplicates.
    noise = rng.integers(0, 256, thumbnails.shape, dtype=np.uint8)
    assert len(np.unique(near_groups(np.arange(count), hashes, noise))) == count
    plain = np.full_like(thumbnails, 200)
    assert len(np.unique(near_groups(np.arange(count), hashes, plain))) == count


def test_chains_of_near_duplicates_are_one_group():
    thumbnails = np.tile(np.arange(192, dtype=np.uint8).reshape(1, 8, 8, 3), (4, 1, 1, 1))
    hashes = np.array([0b0, 0b11111, 0b1111111111, 1 << 62 | 0xFFFF0000], dtype=np.uint64)
    assert near_groups(np.arange(4), hashes, thumbnails).tolist() == [0, 0, 0, 3]
    assert exact_groups(np.array([b"b", b"a", b"b", b"a"])).tolist() == [0, 1, 0, 1]


def test_fingerprints_depend_on_size_and_pixels():
    pixels = np.asarray(scene(3))
    changed = pixels.copy()
    changed[0, 0, 0] ^= 1
    digests = {fingerprint(each).digest for each in (pixels, changed, pixels.reshape(60, 180, 3))}
    assert len(digests) == 3
    assert (fingerprint(pixels).hash ^ fingerprint(changed).hash).bit_count() <= 2


def test_paths_are_not_wrapped(tmp_path):
    folder = make_folder(tmp_path / "photos", ["a", "b"], 2)
    long = "a photograph with a long file name of the summer of 2019, the second of the three that were taken.png"
    (folder / "a" / long).write_text("no image")
    assert f"/{long}: " in run("data", "inspect", folder, "--workers", "0").stdout


def test_the_command_prints_80_plain_columns_and_draws(planted, tmp_path):
    result = run("data", "inspect", planted, "--out", tmp_path / "sheet.png", "--workers", "2", env={"PATH": ""})
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    lines = [line for line in result.stdout.splitlines() if str(tmp_path) not in line]
    assert max(len(line) for line in lines if "not a JPEG" not in line) <= 80
    assert all(
        text in result.stdout for text in ("LEAK", "validation", "largest class", "bee: 33", "text.png", "other_label.png")
    )
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width == 2 * MARGIN + 12 * TILE + 11 * 4


def test_the_command_as_json(planted, run_cli):
    content = json.loads(run_cli("data", "inspect", planted, "--json").stdout)
    assert content["splits"]["train"]["classes"]["bee"] == 33
    assert content["leaks"] == [{"from": "train", "to": "validation", "exact": 1, "near": 1}]
    assert len(content["duplicates"]) == 4
    assert len(content["splits"]["train"]["unreadable"]) == 2
    assert content["findings"][0].startswith("LEAK")


def test_invalid_input_is_rejected(cli_error, tmp_path):
    assert "does not exist" in cli_error("data", "inspect", tmp_path / "missing")
    with pytest.raises(UserError, match="must be a PNG file"):
        commands.inspect("digits", out=tmp_path / "sheet.jpg")


def source_of(classes: int, per_class: int, name: str = "a class with a rather long name, number") -> PixelSource:
    values = np.repeat(np.arange(classes), per_class)
    pixels = np.random.default_rng(0).integers(0, 200, (len(values), 6, 9, 3), dtype=np.uint8)
    return PixelSource("made", Labels(values, [f"{name} {number}" for number in range(classes)]), lambda: pixels)


@pytest.mark.parametrize("classes", [1, 2, 5, 10, 20, 30, 50, 300])
def test_contact_sheets_have_a_limited_size_and_clip_nothing(classes):
    source = source_of(classes, 9, "Ünïcödé, 猫 and a name that is far too long for the space that it has here " * 2)
    sheet = np.asarray(contact_sheet(source, "a title that is much too long for its sheet " * 9))
    assert sheet.shape[1] < 1800
    assert sheet.shape[0] < 3000
    inside = np.zeros(sheet.shape[:2], dtype=bool)
    inside[MARGIN - 10 : 1 - MARGIN, MARGIN - 1 : 1 - MARGIN] = True
    assert (sheet[~inside] == 255).all()
    assert (sheet[inside] < 255).any()


def test_contact_sheets_depend_on_the_seed_and_skip_unreadable_images(tmp_path):
    source = open_source(write_folder(tmp_path / "data", {"a": 30, "b": 30}))
    first, again, other = (np.asarray(contact_sheet(source, "x", seed)) for seed in (0, 0, 1))
    assert (first == again).all()
    assert first.shape == other.shape
    assert (first != other).any()
    for file in (tmp_path / "data" / "b").iterdir():
        file.write_bytes(b"")
    assert contact_sheet(source, "x").size == (first.shape[1], first.shape[0])


def test_augmented_views_are_the_network_inputs():
    """Without augmentation the views equal the stored images, one class after the other."""
    source = source_of(10, 4)
    augmentation = Augmentation(image_size=(6, 9), crop="squash", hflip=0.0)
    sheet = np.asarray(augmented_views(source, augmentation, "as they are", count=4, views=2))
    tiles = [tuple(decode(source.encoded(index)).reshape(-1).tolist()) for index in range(len(source))]
    found = [
        index for index, tile in enumerate(tiles) if occurrences(sheet, np.array(tile, dtype=np.uint8).reshape(6, 9, 3)) == 3
    ]
    assert len(found) == 4
    assert len({index // 4 for index in found}) == 4
    mixed = np.asarray(augmented_views(source, augmentation, "as they are", count=4, views=2, mixup=0.8, cutmix=1.0))
    assert mixed.shape == sheet.shape
    assert sum(occurrences(mixed, np.array(tiles[index], dtype=np.uint8).reshape(6, 9, 3)) for index in found) < 12


def occurrences(sheet: np.ndarray, tile: np.ndarray) -> int:
    """Count the occurrences of an enlarged tile in the sheet."""
    factor = -(-128 // 6)
    large = tile.repeat(factor, axis=0).repeat(factor, axis=1)
    corners = np.argwhere((sheet[: -large.shape[0], : -large.shape[1]] == large[0, 0]).all(axis=2))
    height, width = large.shape[:2]
    return sum((sheet[top : top + height, left : left + width] == large).all() for top, left in corners)


def test_augmented_views_depend_on_the_seed(tmp_path):
    for number in range(3):
        scene(number).save(tmp_path / f"{number}.jpg")
    source = open_source(str(tmp_path))
    augmentation = Augmentation(image_size=(64, 48), policy="rand", random_erasing=0.5)
    state = torch.get_rng_state()
    first, again, other = (augmented_views(source, augmentation, "rand", seed, views=3) for seed in (0, 0, 1))
    assert first.tobytes() == again.tobytes() != other.tobytes()
    assert torch.equal(state, torch.get_rng_state())


def test_percent():
    assert [percent_of(part, 10_000_000) for part in (0, 1, 50_000, 1_234_567, 9_999_999, 10_000_000)] == [
        "0 %",
        "< 0.01 %",
        "0.5 %",
        "12.3 %",
        "> 99.9 %",
        "100 %",
    ]
