"""Damaged data sets, from fixed seeds: every image is read, or reported as damaged, or there is a UserError."""

import gzip
import io
import os
import resource
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tests.data.test_datasets import FEATURES, png, samples, write_cifar, write_folder, write_idx, write_parquet, write_tar
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.decode import decode
from vitrail.data.loader import ImageReader, Problem
from vitrail.errors import UserError

ROUNDS = int(os.environ.get("VITRAIL_FUZZ_ROUNDS", "40"))  # per format
SECONDS, MEGABYTES = 5.0, 300


def jpeg(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 7), (value, 50, 7)).save(buffer, "JPEG", exif=bytes.fromhex("45786966000049492a0008000000000000000000"))
    return buffer.getvalue()


def make_folder(root: Path) -> Path:
    write_folder(root, {"a": 2, "b": 1})
    for ending in ("gif", "bmp", "tiff", "webp"):
        Image.new("RGB", (5, 4), (9, 8, 7)).save(root / "b" / f"x.{ending}")
    Image.fromarray(np.arange(12, dtype=np.uint16).reshape(3, 4)).save(root / "b" / "gray.png")
    (root / "a" / "y.jpg").write_bytes(jpeg(3))
    return root


def make_tar(root: Path) -> Path:
    root.mkdir()
    labels = b'{"label": "cat", "coarse_label": 3}'
    mask = (np.arange(16, dtype=np.uint8) % 3).reshape(4, 4)
    buffer = io.BytesIO()
    Image.fromarray(mask).save(buffer, "PNG")
    long = "c" * 120
    members = [("a.png", png(2)), ("a.cls", b"dog"), ("a.mask.png", buffer.getvalue()), ("b.jpg", jpeg(5)), ("b.json", labels)]
    members += [(f"{long}.png", png(4)), (f"{long}.txt", b"cow")]
    return Path(write_tar(root / "a.tar", members))


def make_parquet(root: Path, **options: object) -> Path:
    root.mkdir()
    return Path(write_parquet(root / "a.parquet", [0, 1, 1, 0], FEATURES, masks=True, **options))


def make_text_parquet(root: Path) -> Path:
    root.mkdir()
    return Path(write_parquet(root / "a.parquet", ["é" * 3, "b", "c", "c"], compression="zstd"))


def make_cifar(root: Path, hundred: bool, binary: bool) -> Path:
    write_cifar(root, hundred, binary, 2)
    return root


def make_idx(root: Path, ending: str) -> Path:
    root.mkdir()
    write_idx(root / f"train-images-idx3-ubyte{ending}", np.arange(3 * 4 * 5).reshape(3, 4, 5))
    write_idx(root / f"train-labels-idx1-ubyte{ending}", np.array([0, 1, 2]))
    return root


def make_table(root: Path) -> Path:
    write_folder(root, {"a": 2, "b": 1})
    (root / "t.csv").write_text('path,label,split\na/0.png,"x",train\na/1.png,y,val\nb/0.png,z,train\n')
    return root / "t.csv"


FORMATS: dict[str, Callable[[Path], Path]] = {
    "folder": make_folder,
    "tar": make_tar,
    "parquet": make_parquet,
    "compressed parquet": lambda root: make_parquet(root, compression="snappy", use_dictionary=False),
    "text parquet": make_text_parquet,
    "cifar10": lambda root: make_cifar(root, False, False),
    "cifar10 binary": lambda root: make_cifar(root, False, True),
    "cifar100": lambda root: make_cifar(root, True, False),
    "cifar100 binary": lambda root: make_cifar(root, True, True),
    "idx": lambda root: make_idx(root, ""),
    "idx gz": lambda root: make_idx(root, ".gz"),
    "table": make_table,
}


def damage(content: bytes, rng: np.random.Generator) -> bytes:
    """Flip, cut, splice, repeat, or overwrite with extreme values."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        start, stop = sorted(rng.integers(0, len(data) + 1, 2).tolist())
        at = int(rng.integers(0, max(len(data), 1)))
        match int(rng.integers(0, 7)):
            case 0 if data:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                del data[at:]
            case 2:
                del data[start:stop]
            case 3:
                data[at:at] = data[start : min(stop, start + 4000)]
            case 4:
                data[at : at + 8] = bytes(rng.choice([0, 255, 127, 128, 57], 1).astype(np.uint8)) * int(rng.integers(1, 9))
            case 5:
                data[at : at + 4] = rng.integers(0, 256, 4, dtype=np.uint8).tobytes()
            case 6:  # digits and separators, for text and headers in text
                data[at : at + 1] = bytes(rng.choice(np.frombuffer(b'0917,;"\n\r\t{}[]-.\0', np.uint8), 1))
    return bytes(data)


def read_all(path: Path) -> int:
    """The number of images that could be read, within the limits of time and memory."""
    started, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        return count_images(path)
    finally:
        assert time.monotonic() - started < SECONDS
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MEGABYTES * 1024


def count_images(path: Path) -> int:
    count = 0
    for source in open_sources(str(path)).values():
        reader = ImageReader(source, 8, False)
        for index in range(min(len(source), 50)):
            ImageReader(source, 8, source.has_masks).read_image(index)
            count += not isinstance(reader.read_image(index), Problem)
            assert isinstance(source.location(index), str)
        for labels in filter(None, (source.label, *source.extra.values())):
            assert len(labels.values) == len(source)
            assert labels.values.min(initial=0) >= -1
            assert labels.values.max(initial=0) < max(len(labels.names), 1)
            "".join(labels.names).encode()
    return count


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files(tmp_path: Path, name: str) -> None:
    path = FORMATS[name](tmp_path / "data")
    root = tmp_path / "data"
    images = read_all(path)
    assert images >= 2
    originals = {file: file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file() and file.suffix != ".npz"}
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    unharmed = 0
    for number in range(ROUNDS):
        file = list(originals)[int(rng.integers(0, len(originals)))]
        file.write_bytes(damage(originals[file], rng))
        try:
            unharmed += read_all(path) == images
        except UserError:
            pass
        except Exception as error:
            error.add_note(f"round {number}, {file}")
            raise
        finally:
            file.write_bytes(originals[file])
    assert 0 < unharmed < ROUNDS


def make_bomb_png(side: int) -> bytes:
    """A file of a few hundred bytes whose header states `side` x `side` pixels."""
    chunks = [(b"IHDR", side.to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0))), (b"IDAT", zlib.compress(bytes(10**5)))]
    packed = (len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big") for kind, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize("side", [60_000, 11_000])
def test_an_image_of_gigabytes(side: int) -> None:
    with pytest.raises(ValueError, match="rejected as a decompression bomb"):
        decode(make_bomb_png(side))


def test_a_compressed_idx_file_of_gigabytes(tmp_path: Path) -> None:
    root = make_idx(tmp_path / "data", ".gz")
    size = (1 << 16, 1 << 8, 1 << 8)
    header = bytes((0, 0, 8, 3)) + b"".join(side.to_bytes(4, "big") for side in size)
    zeros = gzip.compress(bytes(1 << 24), 9)
    (root / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header) + zeros * 256)
    with pytest.raises(UserError, match="would expand to more than 100 times its size"):
        read_all(root)


@pytest.mark.parametrize("column", ["image", "label"])
def test_a_compressed_parquet_file_of_gigabytes(tmp_path: Path, column: str) -> None:
    # A dictionary of one value would be small in memory; written plainly each row is stored, and compressed to nothing.
    large = ["x" * 1_000_000] * 80
    images = [png(1)] * 80 if column == "label" else [text.encode() for text in large]
    table = pa.table({"image": images, "label": large if column == "label" else ["a"] * 80})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    with pytest.raises(UserError, match="would expand to more than 100 times its size"):
        read_all(tmp_path / "a.parquet")


def test_unusual_members_of_a_tar(tmp_path: Path) -> None:
    """Links, devices and pipes are not followed."""
    (tmp_path / "secret.png").write_bytes(png(9))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(f"{number}.png")
            member.type, member.linkname = kind, str(tmp_path / "secret.png")
            archive.addfile(member)
        for name, content in samples(10, 2):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert read_all(tmp_path / "a.tar") == 2


def test_a_tar_that_returns_to_its_start(tmp_path: Path) -> None:
    """A negative size would lead back to the same header for ever."""
    path = Path(write_tar(tmp_path / "a.tar", samples(0, 1)))
    data = bytearray(path.read_bytes())
    data[124:136] = b"\xff" * 10 + (-512 & 0xFFFF).to_bytes(2, "big")
    data[148:156] = b" " * 8
    data[148:156] = f"{sum(data[:512]):06o}\0 ".encode()
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.tar is (truncated or )?damaged"):
        read_all(path)


@pytest.mark.parametrize("kind", [b"x", b"L"])
def test_long_headers_of_a_tar(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo("a.png")
    member.type, member.size = kind, 1 << 20
    content = member.tobuf(tarfile.GNU_FORMAT) + b"1" * (1 << 20)
    (tmp_path / "a.tar").write_bytes(content + bytes(1024))
    with pytest.raises(UserError, match="is damaged or not an uncompressed tar"):
        read_all(tmp_path / "a.tar")


@pytest.mark.parametrize(
    "name", ["t.csv", "t.tar", "t.parquet", "d/train-images-idx3-ubyte", "d/data_batch_1", "d/a/x.png", "d/train.parquet"]
)
def test_named_pipes(tmp_path: Path, name: str) -> None:
    """Opening one would wait for ever."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(UserError):
        read_all(tmp_path / name.split("/")[0])


def test_folders_in_folders(tmp_path: Path) -> None:
    write_folder(tmp_path / "data", {"a": 1, "b": 1})
    (tmp_path / "data" / "b" / "/".join("d" * 70)).mkdir(parents=True)
    with pytest.raises(UserError, match="more than 64 folders deep"):
        read_all(tmp_path / "data")
