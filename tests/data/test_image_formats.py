"""Which files of a folder are images, and what is said about the others."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.images import make_folder, make_image, write_invalid_image
from vitrail.data import image_formats
from vitrail.data.datasets.lookup import check_usable, open_source, open_sources
from vitrail.data.decode import decode
from vitrail.data.image_formats import describe_skipped, is_image_file, readable_formats, recognize
from vitrail.data.inspection import inspect
from vitrail.data.inspection_report import findings
from vitrail.errors import UserError

HEIC = b"\0\0\0\x18ftypheic" + bytes(40)
PIXELS = np.full((12, 16, 3), 90, dtype=np.uint8)


def encode(format):
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, format)
    return file.getvalue()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "AVIF", "HEIF", "JXL"])
def test_formats_are_recognized_by_their_first_bytes(tmp_path, format):
    if format not in readable_formats():
        pytest.skip(f"{format} is not readable: another Pillow, or its package is not installed")
    encoded = encode(format)
    assert recognize(encoded[:16]) == format
    np.testing.assert_allclose(decode(encoded).astype(int), PIXELS, atol=3)
    for name in ("photo", "photo.download", "photo.JPE"):
        (tmp_path / name).write_bytes(encoded)
        assert is_image_file(str(tmp_path / name))


def test_other_files_are_not_images(tmp_path):
    """Raw files of cameras start like TIFF."""
    for name, content in (("a.nef", encode("TIFF")), ("b.mp4", b"\0\0\0\x18ftypisom"), ("c", b"text"), ("d.txt", encode("PNG"))):
        (tmp_path / name).write_bytes(content)
        assert not is_image_file(str(tmp_path / name))
    assert not is_image_file(str(tmp_path / "missing"))
    assert decode(encode("PPM")).shape == (12, 16, 3)


def make_mixed(root):
    """Three colors, an image without suffix, two HEIC files, two other files, an image outside of the classes."""
    make_folder(root, count=3)
    (root / "red" / "000.png").rename(root / "red" / "000")
    for name in ("a.heic", "b.HEIC"):
        (root / "red" / name).write_bytes(HEIC)
    (root / "blue" / "notes.txt").write_text("text")
    (root / "blue" / "README").write_text("text")
    (root / "LICENSE").write_text("text")
    make_image(root / "lost.png")
    return root


@pytest.fixture
def without_heif(monkeypatch):
    known = tuple(name for name in readable_formats() if name != "HEIF")
    monkeypatch.setattr(image_formats, "readable_formats", lambda: known)


@pytest.mark.usefixtures("without_heif")
def test_skipped_files_are_counted_and_named(tmp_path, run_cli):
    source = open_source(make_mixed(tmp_path / "photos"))
    assert len(source) == 9
    assert np.bincount(source.label.values).tolist() == [3, 3, 3]
    expected = "5 files skipped: 2 .heic (install 'vitrail[heic]'), 1 .txt, 1 without suffix, 1 .png outside of the class folders"
    assert sorted(describe_skipped(source.skipped).split(": ")[1].split(", ")) == sorted(expected.split(": ")[1].split(", "))
    assert describe_skipped(()) is None
    inspected = run_cli("data", "inspect", tmp_path / "photos")
    assert all(f"\n  {path}\n" in inspected.stdout for path in source.skipped)
    planned = run_cli("plan", tmp_path / "photos", "--recipe", "laptop", "--epochs", "1", "--set", "batch_size=2")
    assert planned.returncode == 0, planned.stderr
    assert "5 files skipped: 2 .heic (install 'vitrail[heic]'), " in planned.stdout


@pytest.mark.usefixtures("without_heif")
def test_only_files_that_cannot_be_read(tmp_path):
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "a.heic").write_bytes(HEIC)
    with pytest.raises(UserError, match=r"holds no images \(1 file skipped: 1 \.heic \(install 'vitrail\[heic\]'\)\): give a"):
        open_source(tmp_path / "photos")
    with pytest.raises(ValueError, match=r"a HEIC image, which needs another package: install 'vitrail\[heic\]'"):
        decode(HEIC)  # a HEIC file that is called .jpg


def test_an_inspection_never_aborts(tmp_path, run_cli):
    """An empty class, a class with one image, one with unreadable images, and a class that only the validation has."""
    root = tmp_path / "photos"
    make_folder(root / "train", count=3)
    (root / "train" / "empty").mkdir()
    make_image(root / "train" / "single" / "a.png")
    write_invalid_image(root / "train" / "damaged" / "a.jpg")
    make_folder(root / "val", ("red", "new"), count=2)
    messages = list(findings(inspect("photos", open_sources(root), workers=0)))
    for text in (
        "1 of 11 train images cannot be read: fix or remove them.",
        f"The class folder {root}/train/empty holds no images: add some or remove it.",
        f"The class new of {root}/val is not a class of the training split: add it there or remove it.",
        "2 classes of train with a single image: damaged, single.",
    ):
        assert text in messages
    done = run_cli("data", "inspect", root, "--workers", "0", "--out", tmp_path / "sheet.png")
    assert done.returncode == 0, done.stderr
    with pytest.raises(UserError, match=r"The class folder .*empty holds no images"):
        check_usable(open_sources(root).values())


def test_an_inspection_of_unreadable_images_of_one_class(tmp_path):
    for name in ("a.jpg", "b.jpg"):
        write_invalid_image(tmp_path / "photos" / "cat" / name)
    messages = list(findings(inspect("photos", open_sources(tmp_path / "photos"), workers=0)))
    assert messages[:2] == [
        "2 of 2 train images cannot be read: fix or remove them.",
        "train has only one class, cat: a classifier needs at least two.",
    ]
