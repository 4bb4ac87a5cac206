"""Programs of `torch.export`. Opening one trusts what it says, so it is looked through first for what could run code."""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from vitrail.errors import UserError
from vitrail.teachers.fixed_shape import Fixed, first_line, fixed_parts

OPERATIONS = re.compile(r"torch\.ops\.(aten|higher_order)\.\w+(\.\w+)?|_operator\.\w+|math\.\w+|torch\.sym_\w+")
# Sizes that vary are given as arithmetic, which goes through Python's `eval`: these functions and nothing else.
FUNCTIONS = frozenset(
    [
        *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "LShift"),
        *("RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt", "RoundToInt", "Max"),
        *("RoundDecimal", "ToFloat", "Identity", "Min", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "Abs", "Pow"),
        *("Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Equality", "Unequality", "LessThan", "GreaterThan"),
        *("StrictLessThan", "StrictGreaterThan"),
    ]
)
ARITHMETIC = re.compile(r"[\w\s()+\-*/,<>=&|~]*")
CALL = re.compile(r"([A-Za-z_]\w*)\s*\(")


class Exported(Fixed):
    """A program saved with `torch.export.save`."""

    def __init__(self, path: Path, device: torch.device | None):
        super().__init__()
        for danger in dangers(path):
            raise UserError(f"{path} holds {danger}, which could run code, and was not opened; ask for a plain exported model.")
        try:
            program = torch.export.load(path)
            if device is not None:
                program = move_to_device_pass(program, device)
            shape = input_shape(program)
            # Guards are lines of Python in the file; they are not run.
            self.module: nn.Module = program.module(check_guards=False)
            self.only_batch, self.only_size = fixed_parts(shape)
        except Exception as error:  # torch raises of every kind here
            raise UserError(f"{path} cannot be opened as an exported program ({first_line(error)}); export it again.") from None

    def call(self, images: Tensor) -> Tensor:
        return self.module(images)

    def train(self, mode: bool = True) -> "Exported":
        return self  # an exported module has one mode and refuses to be put into another


def input_shape(program: torch.export.ExportedProgram) -> list[int | None]:
    """The shape of the one input; None where it may vary."""
    inputs = program.graph_signature.user_inputs
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    if len(nodes) != 1:
        raise ValueError(f"it has {len(nodes)} inputs, not one")
    return [side if isinstance(side, int) else None for side in nodes[0].meta["val"].shape]


def dangers(path: Path) -> Iterator[str]:
    """What an archive holds beside tensors and a graph of torch's own operations."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.namelist()
            names = {entry.split("/", 1)[-1]: entry for entry in entries}
            if "archive_format" not in names or archive.read(names["archive_format"]) != b"pt2":
                raise UserError(f"{path} is no exported program of torch 2.8 or later; save it again with torch.export.save.")
            if len(names) != len(entries) or len({entry.split("/", 1)[0] for entry in entries}) != 1:
                yield "two files of one name"  # readers may differ in which of them they take
            for name, entry in names.items():
                if name.startswith(("data/aotinductor", "data/executorch")) or name.endswith((".so", ".dylib", ".dll")):
                    yield f"compiled code ({name})"
                elif name.startswith("data/sample_inputs/") and not only_tensors(archive.read(entry)):
                    yield f"more than tensors ({name})"
                elif name.endswith(".json"):
                    yield from dangers_in(json.loads(archive.read(entry)), name.rpartition("/")[0], archive, names)
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is no exported program, or a damaged one ({first_line(error)}).") from None


def dangers_in(content: Any, folder: str, archive: zipfile.ZipFile, names: dict[str, str]) -> Iterator[str]:
    for record in records(content):
        target, expression, name, data = (record.get(key) for key in ("target", "expr_str", "name", "path_name"))
        if isinstance(target, str) and not OPERATIONS.fullmatch(target):
            yield f"the operation {target!r}"
        if expression is not None and not harmless(str(expression)):
            yield f"the expression {expression!r}"
        if isinstance(name, str) and not re.fullmatch(r"[\w.]*", name):
            yield f"the name {name!r}"
        if isinstance(data, str):
            pickled = record.get("use_pickle", True)
            if data.startswith(("custom_obj", "opaque_obj")):
                yield f"an object ({data})"
            elif pickled and not only_tensors(archive.read(names[f"{folder}/{data}"])):
                yield f"more than tensors ({data})"


def records(content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, dict):
        yield content
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from records(value)


def harmless(expression: str) -> bool:
    """Arithmetic of symbols and numbers; the only strings are their names."""
    text = re.sub(r"'(\w+)'", r"\1", re.sub(r"\d+\.\d+", "0", expression))
    plain = ARITHMETIC.fullmatch(text) and "__" not in text and not re.search(r"\)\s*\(", text)
    return bool(plain) and FUNCTIONS.issuperset(CALL.findall(text))


def only_tensors(data: bytes) -> bool:
    """Whether a pickle asks for nothing but tensors and plain containers."""
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # whatever is wrong with it, it is not opened
        return not data
    return True
