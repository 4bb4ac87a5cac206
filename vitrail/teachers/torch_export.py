"""Programs of `torch.export`. Loading one can run code, so its content is checked against allow-lists first."""

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
from vitrail.teachers.fixed_shape import FixedShapeNetwork, first_line, fixed_dimensions

OPERATIONS = re.compile(r"torch\.ops\.(aten|higher_order)\.\w+(\.\w+)?|_operator\.\w+|math\.\w+|torch\.sym_\w+")
# Expressions of dynamic sizes are evaluated with Python's `eval`: only these functions are allowed.
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


class ExportedNetwork(FixedShapeNetwork):
    """A program saved with `torch.export.save`."""

    def __init__(self, path: Path, device: torch.device | None):
        super().__init__()
        for content in find_unsafe_content(path):
            raise UserError(f"{path} contains {content}, which could run code, and was not opened: use a plain exported model.")
        try:
            program = torch.export.load(path)
            if device is not None:
                program = move_to_device_pass(program, device)
            shape = input_shape(program)
            # Guards are Python code in the file and are not run.
            self.module: nn.Module = program.module(check_guards=False)
            self.fixed_batch_size, self.fixed_size = fixed_dimensions(shape)
        except Exception as error:  # torch raises exceptions of many classes here
            raise UserError(f"{path} cannot be opened as an exported program ({first_line(error)}): export it again.") from None

    def run(self, images: Tensor) -> Tensor:
        out: Tensor = self.module(images)
        return out

    def train(self, mode: bool = True) -> "ExportedNetwork":
        return self  # train() of an exported module raises an error


def input_shape(program: torch.export.ExportedProgram) -> list[int | None]:
    """The shape of the only input; None for dynamic dimensions."""
    inputs = program.graph_signature.user_inputs
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    if len(nodes) != 1:
        raise ValueError(f"it has {len(nodes)} inputs, not one")
    return [side if isinstance(side, int) else None for side in nodes[0].meta["val"].shape]


def find_unsafe_content(path: Path) -> Iterator[str]:
    """Descriptions of everything in an archive that is not a tensor or a graph of torch's own operations."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.namelist()
            names = {entry.split("/", 1)[-1]: entry for entry in entries}
            if "archive_format" not in names or archive.read(names["archive_format"]) != b"pt2":
                raise UserError(f"{path} is not an exported program of torch 2.8 or later: save it again with torch.export.save.")
            if len(names) != len(entries) or len({entry.split("/", 1)[0] for entry in entries}) != 1:
                yield "two files of the same name"  # another reader could use the other one
            for name, entry in names.items():
                if name.startswith(("data/aotinductor", "data/executorch")) or name.endswith((".so", ".dylib", ".dll")):
                    yield f"compiled code ({name})"
                elif name.startswith("data/sample_inputs/") and not has_only_tensors(archive.read(entry)):
                    yield f"more than tensors ({name})"
                elif name.endswith(".json"):
                    yield from find_unsafe_records(json.loads(archive.read(entry)), name.rpartition("/")[0], archive, names)
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is not an exported program, or is damaged ({first_line(error)}).") from None


def find_unsafe_records(content: Any, folder: str, archive: zipfile.ZipFile, names: dict[str, str]) -> Iterator[str]:
    for record in iterate_records(content):
        target, expression, name, data = (record.get(key) for key in ("target", "expr_str", "name", "path_name"))
        if isinstance(target, str) and not OPERATIONS.fullmatch(target):
            yield f"the operation {target!r}"
        if expression is not None and not is_arithmetic(str(expression)):
            yield f"the expression {expression!r}"
        if isinstance(name, str) and not re.fullmatch(r"[\w.]*", name):
            yield f"the name {name!r}"
        if isinstance(data, str):
            pickled = record.get("use_pickle", True)
            if data.startswith(("custom_obj", "opaque_obj")):
                yield f"an object ({data})"
            elif pickled and not has_only_tensors(archive.read(names[f"{folder}/{data}"])):
                yield f"more than tensors ({data})"


def iterate_records(content: Any) -> Iterator[dict[str, Any]]:
    """All dictionaries in a JSON value, at any depth."""
    if isinstance(content, dict):
        yield content
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from iterate_records(value)


def is_arithmetic(expression: str) -> bool:
    """Whether an expression is arithmetic of symbols and numbers; the only strings are names of symbols."""
    text = re.sub(r"'(\w+)'", r"\1", re.sub(r"\d+\.\d+", "0", expression))
    allowed = ARITHMETIC.fullmatch(text) and "__" not in text and not re.search(r"\)\s*\(", text)
    return bool(allowed) and FUNCTIONS.issuperset(CALL.findall(text))


def has_only_tensors(data: bytes) -> bool:
    """Whether a pickle contains only tensors and plain containers."""
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # any failure: the file is not opened
        return not data
    return True
