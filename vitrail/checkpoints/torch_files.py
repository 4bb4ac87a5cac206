"""Files of `torch.save`, loaded without running code and within memory of about their size."""

import argparse
import struct
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

END, LOCATOR, ZIP64_END = b"PK\5\6", b"PK\6\7", b"PK\6\6"  # the last records of a zip archive


def load_pickled(source: Path | IO[bytes]) -> Any:
    """The content of a file of `torch.save`; a hostile or damaged file can raise any exception, but runs nothing."""
    with source.open("rb") if isinstance(source, Path) else source as file:
        zipped = file.read(4) == b"PK\3\4"
        if zipped:
            check_archive(file)
        file.seek(0)
        # Tensors are mapped from a file, except of the suffix that torch reads as another format.
        mapped = zipped and isinstance(source, Path) and source.suffix != ".safetensors"
        # Training files of DeiT contain the command line options; a Namespace holds values only.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            return torch.load(source if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)


def check_archive(file: IO[bytes]) -> None:
    """Raise ValueError if a zip archive is not as torch writes it: uncompressed members, and one directory at its end.

    This is checked with `zipfile` and loaded by torch's own reader. The two look for the directory in different ways, so that an
    archive could show each of them another one; here its place is the only one where both find it.
    """
    size = file.seek(0, 2)
    file.seek(max(size - 98, 0))
    tail = file.read()
    end = size - 22
    if len(tail) < 22 or tail[-22:-18] != END:
        raise ValueError("it does not end with a zip directory")
    directory_size, directory, comment = struct.unpack("<12x2LH", tail[-22:])
    if tail[-42:-38] == LOCATOR:  # torch writes the record of large archives into all of them
        end = size - 98
        mark, length, directory_size, directory = struct.unpack("<4sQ28x2Q", tail[:56]) if end >= 0 else (b"", 0, 0, 0)
        if (mark, length, *struct.unpack("<8xQ4x", tail[-42:-22])) != (ZIP64_END, 44, end):
            raise ValueError("its zip directory is damaged")
    if comment or directory + directory_size != end:
        raise ValueError("its zip directory is not at its end")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size for member in members):
        raise ValueError("it is compressed, which torch.save does not do")
    if sum(member.file_size for member in members) > size or len({member.filename for member in members}) < len(members):
        raise ValueError("its members overlap")
