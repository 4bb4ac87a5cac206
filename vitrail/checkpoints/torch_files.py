"""Files of `torch.save`, loaded without running code and within memory of about their size."""

import argparse
import io
import os
import pickle
import pickletools
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
        size = file.seek(0, 2)
        file.seek(0)
        zipped = file.read(4) == b"PK\3\4"
        # An old file starts with five pickles: magic number, version, system, content, keys of the storages.
        check_pickles(check_archive(file) if zipped else file, 1 if zipped else 5)
        file.seek(0)
        # Tensors are mapped from the file that was checked, whatever its path leads to by now.
        opened = f"/proc/self/fd/{file.fileno()}" if isinstance(source, Path) else ""
        mapped = zipped and os.path.exists(opened)
        # Training files of DeiT contain the command line options; a Namespace holds values only.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            content = torch.load(opened if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
    if not zipped:
        check_storages(content, size)
    return torch.Tensor.detach(content) if isinstance(content, torch.Tensor) else content  # without attributes of the file


def check_pickles(file: IO[bytes], count: int) -> None:
    """Raise an exception if one of the pickles at the start of a file is damaged or calls `bytearray`.

    `bytearray` could reserve any amount of memory.
    """
    file.seek(0)
    for _ in range(count):
        for _, argument, _ in pickletools.genops(file):
            if isinstance(argument, str) and argument.split(" ")[-1] == "bytearray":
                raise pickle.UnpicklingError("it calls GLOBAL builtins.bytearray")


def check_storages(content: Any, size: int) -> None:
    """Raise ValueError if tensors of the format of old versions, which torch may leave without data, are larger than the file."""
    storages: dict[int, int] = {}
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    if sum(storages.values()) > size:
        raise ValueError("its tensors are larger than the file")


def check_archive(file: IO[bytes]) -> IO[bytes]:
    """The pickle of an archive. Raises ValueError if the archive is not as torch writes it: uncompressed members, one directory.

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
    with zipfile.ZipFile(file) as archive:
        pickles = [member for member in members if member.filename.endswith("data.pkl")]
        if len(pickles) != 1:
            raise ValueError("it has no data.pkl")
        return io.BytesIO(archive.read(pickles[0]))
