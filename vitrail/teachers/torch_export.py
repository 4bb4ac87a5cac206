"""Programs of `torch.export`, read and run without `torch.export.load`.

That function unpickles members of the archive, evaluates sizes as Python expressions and looks operators up by name, so a file
can run code. Here the archive is opened once, by `zipfile`; weights are raw bytes, the graph is JSON. Its nodes are calls of the
operators of `export_operators.py`, and sizes are integers that other nodes compute from the size of the input.
"""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.devices import free_memory
from vitrail.errors import UserError
from vitrail.formatting import format_bytes
from vitrail.teachers.export_operators import find_operator
from vitrail.teachers.fixed_shape import FixedShapeNetwork, first_line, fixed_dimensions

SCHEMA = 8  # the major version of torch's format
GRAPH = "models/model.json"
WEIGHTS, CONSTANTS = "data/weights/", "data/constants/"
CONFIGS = {WEIGHTS: "model_weights_config.json", CONSTANTS: "model_constants_config.json"}
MEMBERS = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
)
SYMBOL = r"Symbol\('s\d+'(, (positive|integer)=True)*\)"
DYNAMIC = re.compile(rf"(\d+\*)?s\d+|{SYMBOL}|Mul\(Integer\(\d+\), {SYMBOL}\)")  # a size, or a multiple of one
# torch's numbers of dtypes and memory formats
DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}
MEMORY_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 4: torch.preserve_format}
STRIDED = 7  # torch's number of the layout
PLAIN = {"int": int, "float": float, "bool": bool, "string": str}
INFINITE = ("Infinity", "-Infinity", "NaN")  # floats that JSON has no numbers for
MAX_EXPANDED = 2**33  # bytes that a value would have if it were stored; larger ones would take long to add up
LARGEST = 2**63 - 1  # of integers; larger ones could grow with every node


class Name(NamedTuple):
    """A value that the program computes."""

    name: str


class DeviceOfImages:
    """Stands for every device in the file."""


class Call(NamedTuple):
    """A node of the graph."""

    function: Callable[..., Any]
    pieces: Callable[..., int] | None  # the number of tensors in the list that the function returns
    positional: list[Any]  # of functions of sizes
    named: dict[str, Any]  # of operators
    outputs: list[str]
    is_list: bool
    unused: list[str]  # values that no later call needs


class ExportedNetwork(FixedShapeNetwork):
    """A program saved with `torch.export.save`."""

    def __init__(self, path: Path):
        super().__init__()
        try:
            members = read_archive(path)
            program = json.loads(members[GRAPH])
            if program["schema_version"]["major"] != SCHEMA:
                raise ValueError("it was written by another version of torch")
            graph, signature = program["graph_module"]["graph"], program["graph_module"]["signature"]
            self.input_name, sources = parse_inputs(signature["input_specs"])
            self.output_name = parse_output(signature["output_specs"])
            tensors = {folder: read_tensors(members, folder) for folder in CONFIGS}
            self.weight_names = list(sources)
            self.weights = nn.ParameterList(
                nn.Parameter(find_tensor(tensors, name), requires_grad=False) for name in sources.values()
            )
            self.calls = parse_calls(graph["nodes"], {self.input_name, *sources}, self.output_name)
            sizes = graph["tensor_values"][self.input_name]["sizes"]
            self.fixed_batch_size, self.fixed_size = fixed_dimensions([parse_size(size) for size in sizes])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
            cause = f"there is no {error}" if isinstance(error, KeyError) else first_line(error)
            raise UserError(
                f"{path} cannot be opened as an exported program ({cause}): save it again with torch.export.save, or as ONNX."
            ) from None
        self.name = path.name
        self.fitting: set[torch.Size] = set()  # shapes of images for which the memory suffices

    def run(self, images: Tensor) -> Tensor:
        # Some operators need contiguous tensors, as when the program was exported; others change the images in place.
        images = images.clone(memory_format=torch.contiguous_format)
        if images.shape not in self.fitting:
            self.check_memory(images)
            self.fitting.add(images.shape)
        logits: Tensor = self.execute(images, list(self.weights), None)
        return logits

    def check_memory(self, images: Tensor) -> None:
        """Raise an error if the program needs more memory than there is, before any of it is allocated."""
        cuda = images.device.type == "cuda"
        available = torch.cuda.get_device_properties(images.device).total_memory if cuda else free_memory()
        meta = torch.device("meta")
        self.execute(images.to(meta), [weight.to(meta) for weight in self.weights], available or None)

    def execute(self, images: Tensor, weights: list[Tensor], limit: int | None) -> Any:
        """The output of the program; an error if its values need more than `limit` bytes at a time."""
        constants = dict(zip(self.weight_names, weights, strict=True))
        values: dict[str, Any] = {self.input_name: images}

        def resolve(argument: Any) -> Any:
            if isinstance(argument, Name):
                return values[argument.name] if argument.name in values else constants[argument.name]
            if isinstance(argument, list):
                return [resolve(each) for each in argument]
            return images.device if argument is DeviceOfImages else argument

        for call in self.calls:
            positional = [resolve(argument) for argument in call.positional]
            if not all(isinstance(argument, int | float) for argument in positional):
                raise ValueError("a size is computed from something else than numbers")
            named = {name: resolve(argument) for name, argument in call.named.items()}
            if call.pieces is not None and call.pieces(**named) != len(call.outputs):
                raise ValueError(f"a list has other than {len(call.outputs)} tensors")
            result = call.function(*positional, **named)
            if isinstance(result, int) and abs(result) > LARGEST:
                raise ValueError("a size is too large")
            if isinstance(result, list | tuple) is not call.is_list:
                raise ValueError("an operator returns another number of tensors")
            values.update(zip(call.outputs, result if call.is_list else [result], strict=True))
            if limit is not None:
                storages = [value.untyped_storage() for value in values.values() if isinstance(value, Tensor)]
                if sum({storage._cdata: storage.nbytes() for storage in storages}.values()) > limit:
                    raise UserError(
                        f"{self.name} needs more than the available {format_bytes(limit)} of memory for images of shape "
                        f"{list(images.shape)}: use a smaller batch size, or another teacher."
                    )
            if images.is_meta:  # before the program is run
                tensors = [value for value in values.values() if isinstance(value, Tensor)]
                if any(each.nbytes > max(MAX_EXPANDED, each.untyped_storage().nbytes()) for each in tensors):
                    raise UserError(f"{self.name} repeats values to more than {format_bytes(MAX_EXPANDED)}: use another teacher.")
            for name in call.unused:
                values.pop(name, None)
        return resolve(Name(self.output_name))


def read_archive(path: Path) -> dict[str, bytes]:
    """The members of an archive by name, without the folder that contains all of them."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            folder = entries[0].filename.partition("/")[0] if entries else ""
            names = [entry.filename.removeprefix(f"{folder}/") for entry in entries]
            if "archive_format" not in names:
                raise ValueError("it is another archive")
            unknown = next((name for name in names if not MEMBERS.fullmatch(name)), None)
            if unknown is not None or len(set(names)) != len(names):
                raise ValueError(f"it contains {unknown!r}" if unknown else "two of its members have the same name")
            # torch compresses nothing, so that the members together are not larger than the file.
            stored = all(entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1 for entry in entries)
            if not stored or sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise ValueError("its members are compressed")
            members = {name: archive.read(entry) for name, entry in zip(names, entries, strict=True)}
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise ValueError(first_line(error)) from None
    if members["archive_format"] != b"pt2" or members.get("byteorder", b"little") != b"little":
        raise ValueError("it has another format")
    return members


def read_tensors(members: dict[str, bytes], folder: str) -> dict[str, Tensor]:
    """Weights or constants by name. Those that share memory in the file share it here."""
    stored: dict[str, bytearray] = {}
    tensors = {}
    for name, entry in json.loads(members[folder + CONFIGS[folder]])["config"].items():
        path, meta = entry["path_name"], entry["tensor_meta"]
        if entry["use_pickle"] is not False or meta["layout"] != STRIDED:
            raise ValueError(f"{name} is an object or a tensor of another layout")
        if path not in stored:
            stored[path] = bytearray(members[folder + path])  # writable: programs may have operators that work in place
        dtype = DTYPES[meta["dtype"]]
        flat = torch.frombuffer(stored[path], dtype=dtype) if stored[path] else torch.empty(0, dtype=dtype)
        sizes, strides = ([parse_integer(side["as_int"]) for side in meta[key]] for key in ("sizes", "strides"))
        tensors[name] = flat.as_strided(sizes, strides, parse_integer(meta["storage_offset"]["as_int"]))
        if tensors[name].numel() > flat.numel():  # a stride of 0 would allow any size
            raise ValueError(f"the shape of {name} is larger than its data")
    return tensors


def find_tensor(tensors: dict[str, dict[str, Tensor]], name: str) -> Tensor:
    """A weight, or a constant: buffers that are not persistent are stored with these."""
    return tensors[WEIGHTS][name] if name in tensors[WEIGHTS] else tensors[CONSTANTS][name]


def parse_inputs(specs: list[dict[str, Any]]) -> tuple[str, dict[str, str]]:
    """The name of the images in the graph, and the tensor that is stored for each of its other inputs."""
    images, stored = [], {}
    for kind, spec in (next(iter(spec.items())) for spec in specs):
        if kind == "user_input":
            images.append(spec["arg"]["as_tensor"]["name"])
        elif kind in ("parameter", "buffer", "tensor_constant"):
            stored[spec["arg"]["name"]] = spec[f"{kind}_name"]
        else:
            raise ValueError(f"it has an input of the kind {kind!r}")
    if len(images) != 1:
        raise ValueError(f"it has {len(images)} inputs, not one")
    return images[0], stored


def parse_output(specs: list[dict[str, Any]]) -> str:
    outputs = [spec["user_output"]["arg"]["as_tensor"]["name"] for spec in specs if "user_output" in spec]
    if len(outputs) != 1:
        raise ValueError(f"it has {len(outputs)} outputs, not one")
    name: str = outputs[0]
    return name


def parse_calls(nodes: list[dict[str, Any]], known: set[str], output: str) -> list[Call]:
    """The calls of a graph with the inputs `known`."""
    calls: list[Call] = []
    last_use: dict[str, int] = {}
    for node in nodes:
        operator = find_operator(parse_plain("string", node["target"]))
        if operator is None:  # an assertion
            continue
        arguments = {entry["name"]: parse_argument(entry["arg"]) for entry in node["inputs"]}
        if operator.needs_device:
            arguments["device"] = DeviceOfImages
        used = {each.name for value in arguments.values() for each in flatten(value) if isinstance(each, Name)}
        outputs = parse_outputs(node["outputs"])
        if not used <= known:
            raise ValueError(f"{min(used - known)[:80]!r} is used before it is computed")
        known.update(outputs)
        last_use |= dict.fromkeys((*used, *outputs), len(calls))
        is_list = len(node["outputs"]) != 1 or "as_tensors" in node["outputs"][0]
        positional, named = ([], arguments) if operator.named else (list(arguments.values()), {})
        calls.append(Call(operator.function, operator.pieces, positional, named, outputs, is_list, []))
    if output not in known:
        raise ValueError("its output is not computed")
    for name, index in last_use.items():
        if name != output:
            calls[index].unused.append(name)
    return calls


def parse_outputs(outputs: list[dict[str, Any]]) -> list[str]:
    values = flatten([parse_argument(output) for output in outputs])
    if not all(isinstance(value, Name) for value in values):
        raise ValueError("a node has an output without a name")
    return [value.name for value in values]


def flatten(value: Any) -> list[Any]:
    return [each for inner in value for each in flatten(inner)] if isinstance(value, list) else [value]


def parse_argument(argument: dict[str, Any]) -> Any:
    """An argument of a node: a plain value, a name, or a list of these."""
    ((kind, value),) = argument.items()
    kind = kind.removeprefix("as_")
    if kind == "none":
        return None
    if kind == "tensor":
        return Name(parse_plain("string", value["name"]))
    if kind == "tensors":
        return [Name(parse_plain("string", each["name"])) for each in value]
    if kind == "optional_tensors":
        return [parse_argument(each) for each in value]
    if kind in ("sym_int", "sym_float", "sym_bool"):
        return Name(parse_plain("string", value["as_name"])) if "as_name" in value else parse_argument(value)
    if kind in ("sym_ints", "sym_floats", "sym_bools"):
        return [parse_argument({f"as_{kind[:-1]}": each}) for each in value]
    if kind == "device":
        return DeviceOfImages
    if kind == "scalar_type":
        return DTYPES[value]
    if kind == "memory_format":
        return MEMORY_FORMATS[value]
    if kind == "layout" and value == STRIDED:
        return torch.strided
    if kind in PLAIN:
        return parse_plain(kind, value)
    if kind.endswith("s") and kind[:-1] in PLAIN:
        return [parse_plain(kind[:-1], each) for each in value]
    raise ValueError(f"an argument is of the kind {kind!r}")


def parse_plain(kind: str, value: Any) -> Any:
    if kind == "int":
        return parse_integer(value)
    if kind == "float" and (value in INFINITE or type(value) is int):
        return float(value)
    if type(value) is not PLAIN[kind]:
        raise ValueError(f"{str(value)[:80]!r} is not of the type {kind}")
    return value


def parse_integer(value: Any) -> int:
    if type(value) is not int or abs(value) > LARGEST:
        raise ValueError(f"{str(value)[:80]!r} is not an integer of 64 bits")
    return value


def parse_size(size: dict[str, Any]) -> int | None:
    """A size of the input; None if it is dynamic, which is a symbol without a value."""
    if "as_int" in size:
        return parse_integer(size["as_int"])
    expression = size["as_expr"]["expr_str"]
    if not DYNAMIC.fullmatch(expression):
        raise ValueError(f"{expression[:80]!r} is not a size of its input")
    return None
