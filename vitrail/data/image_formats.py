"""Image formats: suffixes, first bytes, and the optional packages that read some of them."""

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from vitrail.formatting import pluralize

SUFFIXES = {
    "JPEG": ("jpg", "jpeg"),
    "PNG": ("png",),
    "WEBP": ("webp",),
    "BMP": ("bmp",),
    "GIF": ("gif",),
    "TIFF": ("tif", "tiff"),
    "PPM": ("ppm", "pgm"),
    "AVIF": ("avif", "avifs"),
    "HEIF": ("heic", "heif", "hif"),
    "JXL": ("jxl",),
}
EXTRAS = {"AVIF": "avif", "HEIF": "heic", "JXL": "jxl"}  # formats that need a package, and Vitrail's extra that installs it
EXTENSIONS = frozenset(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
NOT_IMAGES = frozenset(("txt", "json", "xml", "csv", "npy"))  # often as many as images: they are not opened to look inside
HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
HEAD = 16  # bytes that `recognize` needs


@cache
def readable_formats() -> tuple[str, ...]:
    """Return Pillow's names of the formats that can be read; registers the packages that are installed."""
    found = [name for name in SUFFIXES if name not in EXTRAS]
    with suppress(ImportError):
        from PIL import AvifImagePlugin  # from Pillow 11.3 on

        found += ["AVIF"] if AvifImagePlugin.SUPPORTED else []
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
        found.append("HEIF")
    with suppress(ImportError):
        import pillow_jxl  # noqa: F401, registers itself

        found.append("JXL")
    return tuple(found)


def recognize(head: bytes) -> str | None:
    """Return the format of a file by its first 16 bytes.

    TIFF is left out: the raw files of many cameras start like it.
    """
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:2] == b"BM" and head[6:10] == bytes(4):
        return "BMP"
    if head.startswith((b"\xff\x0a", b"\x00\x00\x00\x0cJXL \r\n\x87\n")):
        return "JXL"
    if head[4:8] == b"ftyp":
        return "AVIF" if head[8:12] in (b"avif", b"avis") else "HEIF" if head[8:12] in HEIF_BRANDS else None
    return None


def suffix_of(name: str) -> str:
    """Return the suffix in lower case without its dot, "" if there is none."""
    return os.path.splitext(name)[1][1:].lower()


def is_image_file(path: str) -> bool:
    """Return whether a regular file is an image that can be read, by its suffix or, with another suffix, by its first bytes."""
    suffix = suffix_of(path)
    if suffix in NOT_IMAGES:
        return False
    if suffix in EXTENSIONS:
        return any(suffix in SUFFIXES[name] for name in readable_formats())
    try:
        with open(path, "rb") as file:
            return recognize(file.read(HEAD)) in readable_formats()
    except OSError:
        return False


def missing_extra(head: bytes) -> str | None:
    """Return the extra that would read a file with these first bytes, None if none is missing."""
    name = recognize(head)
    return EXTRAS.get(name) if name is not None and name not in readable_formats() else None


def describe_skipped(paths: Iterable[str]) -> str | None:
    """Return "12 files skipped: 9 .heic (install 'vitrail[heic]'), 3 .txt"; None if there are none."""
    counts = Counter(suffix_of(path) for path in paths)
    if not counts:
        return None
    parts = []
    for suffix, count in counts.most_common():
        format = next((name for name, suffixes in SUFFIXES.items() if suffix in suffixes), "")
        if format in readable_formats():
            note = " outside of the class folders"
        else:
            note = f" (install 'vitrail[{EXTRAS[format]}]')" if format else ""
        parts.append(f"{count:,} {f'.{suffix}' if suffix else 'without suffix'}{note}")
    return f"{pluralize(counts.total(), 'file')} skipped: {', '.join(parts)}"
