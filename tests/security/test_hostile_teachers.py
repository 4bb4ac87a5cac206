"""Teachers from strangers: no file runs code, reads or writes other files, waits, or allocates without bounds."""

import io
import json
import os
import pickle
import random
import struct
import zipfile
from contextlib import suppress

import pytest
import torch

from tests.teachers.test_lookup import Exploit
from tests.teachers.test_teacher import HALF
from tests.teachers.test_torch_export import PROGRAM
from vitrail.errors import UserError
from vitrail.teachers import open_teacher


@pytest.fixture(scope="module")
def members():
    """The members of the archive of a program that takes any size, by name without the folder."""
    with zipfile.ZipFile(PROGRAM) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def pack(members, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"it/{name}", data)
    return buffer.getvalue()


GRAPH, WEIGHTS, CONSTANTS = (
    "models/model.json",
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)


def edit(members, name, change):
    value = json.loads(members[name])
    change(value)
    members[name] = json.dumps(value).encode()


def saved(marker):
    buffer = io.BytesIO()
    torch.save(Exploit(marker), buffer)
    return buffer.getvalue()


def make_node(target, output, **inputs):
    named = [{"name": name, "arg": arg, "kind": 1} for name, arg in inputs.items()]
    return {"target": target, "inputs": named, "outputs": [{"as_tensor": {"name": output}}], "metadata": {}, "name": output}


def set_expressions(value, text):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "expr_str":
                value[key] = text
            else:
                set_expressions(inner, text)
    elif isinstance(value, list):
        for inner in value:
            set_expressions(inner, text)


def legacy_weights(members, marker):
    members["data/weights/model.pt"] = saved(marker)


def legacy_constants(members, marker):
    members["data/constants/model.pt"] = saved(marker)


def pickled_weight(members, marker):
    edit(members, WEIGHTS, lambda value: value["config"]["0.weight"].update(use_pickle=True))
    members["data/weights/weight_0"] = saved(marker)


def object_constant(members, marker):
    meta = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    edit(members, CONSTANTS, lambda value: value.update(config={"it": meta}))
    members["data/constants/opaque_obj_0"] = pickle.dumps(Exploit(marker))


def sample_inputs(members, marker):
    members["data/sample_inputs/model.pt"] = saved(marker)


def evaluated_size(members, marker):
    edit(members, GRAPH, lambda value: set_expressions(value, f"__import__('os').mkdir('{marker}')"))


def other_name(members, marker):
    evaluated_size(members, marker)
    members["models/model.yaml"] = members.pop(GRAPH)


def second_model(members, marker):
    other = dict(members)
    evaluated_size(other, marker)
    members["models/modex.json"] = other[GRAPH]
    for name in ("data/weights/{}_weights_config.json", "data/constants/{}_constants_config.json", "data/sample_inputs/{}.pt"):
        members[name.format("modex")] = members[name.format("model")]


def write_a_file(members, marker):
    arguments = {"filename": {"as_string": str(marker)}, "shared": {"as_bool": True}, "size": {"as_int": 4}}

    def change(value):
        graph = value["graph_module"]["graph"]
        graph["nodes"].insert(0, make_node("torch.ops.aten.from_file.default", "opened", **arguments))
        graph["tensor_values"]["opened"] = graph["tensor_values"]["p_0_bias"]

    edit(members, GRAPH, change)


def call_by_name(members, marker):
    node = make_node("torch.os.mkdir", "made", path={"as_string": str(marker)})
    edit(members, GRAPH, lambda value: value["graph_module"]["graph"]["nodes"].insert(0, node))


def library(members, marker):
    members["data/aotinductor/model/it.so"] = b"\x7fELF"


HOSTILE = [
    *(legacy_weights, legacy_constants, pickled_weight, object_constant, sample_inputs, evaluated_size, other_name, second_model),
    *(write_a_file, call_by_name, library),
]


def open_members(members, tmp_path, **options):
    """The teacher, or the message of the error."""
    (tmp_path / "it.pt2").write_bytes(pack(members, **options))
    return open_file(tmp_path / "it.pt2")


def open_file(path):
    try:
        return open_teacher(path, preprocessing=HALF)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("attack", HOSTILE, ids=lambda attack: attack.__name__)
def test_exported_programs_cannot_run_code(attack, members, tmp_path):
    members, marker = dict(members), tmp_path / "ran"
    attack(members, marker)
    outcome = open_members(members, tmp_path)
    assert not marker.exists()
    if attack is sample_inputs:  # which are not read
        assert outcome.classes == 4
    else:
        assert "cannot be opened as an exported program" in outcome
        assert "\n" not in outcome


@pytest.mark.parametrize("attack", [legacy_weights, pickled_weight, other_name, write_a_file], ids=lambda attack: attack.__name__)
def test_the_attacks_work_on_torch(attack, members, tmp_path):
    """Otherwise the test above would show nothing."""
    members, marker = dict(members), tmp_path / "ran"
    attack(members, marker)
    with suppress(Exception):
        torch.export.load(io.BytesIO(pack(members))).module()(torch.zeros(2, 3, 8, 8))
    assert marker.exists()


def test_two_central_directories(members, tmp_path):
    """A ZIP64 locator to another directory than the one before it, which is the one that Python reads."""
    marker, evil = tmp_path / "ran", dict(members)
    legacy_weights(evil, marker)
    first, second = pack(members), pack(evil)
    (tmp_path / "it.pt2").write_bytes(join_archives(first, second))
    open_teacher(tmp_path / "it.pt2", preprocessing=HALF)
    assert not marker.exists()


def join_archives(first, second):
    """An archive that is `first` for Python, and `second` for readers that follow the ZIP64 locator."""

    def split(archive):
        count, size, offset = struct.unpack("<HII", archive[-12:-2])
        return archive[:offset], archive[offset : offset + size], count

    def move(directory, by):
        moved, at = bytearray(directory), 0
        while at < len(moved):
            name, extra, comment = struct.unpack_from("<HHH", moved, at + 28)
            struct.pack_into("<I", moved, at + 42, struct.unpack_from("<I", moved, at + 42)[0] + by)
            at += 46 + name + extra + comment
        return bytes(moved)

    def end(count, size, offset):
        return struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)

    body, directory, count = split(first)
    other_body, other, other_count = split(second)
    other = move(other, len(body))
    content = body + other_body
    other_end = end(other_count, len(other), len(content))
    content += other
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(content), 1)
    content += other_end
    ends = end(count, len(directory), len(content)) + locator
    return content + directory + ends + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)


def test_a_size_that_is_an_endless_computation(members, tmp_path):
    members = dict(members)
    edit(members, GRAPH, lambda value: set_expressions(value, "9**9**9**9"))
    assert "'9**9**9**9' is not a size of its input" in open_members(members, tmp_path)


def insert(*nodes):
    """A change of the graph: nodes before its own, and their last result added to the images."""

    def change(value):
        graph = value["graph_module"]["graph"]
        added = make_node(
            "torch.ops.aten.add.Tensor", "changed", self={"as_tensor": {"name": "input"}}, other={"as_tensor": {"name": "last"}}
        )
        graph["nodes"][0]["inputs"][0]["arg"] = {"as_tensor": {"name": "changed"}}
        graph["nodes"] = [*nodes, added, *graph["nodes"]]

    return change


def number(target, output, *arguments):
    node = make_node(target, output, **{str(place): argument for place, argument in enumerate(arguments)})
    return node | {"outputs": [{"as_sym_int": {"as_name": output}}]}


def full(size, output="last"):
    return make_node("torch.ops.aten.full.default", output, size={"as_ints": size}, fill_value={"as_float": 1.0})


def name(of):
    return {"as_tensor": {"name": of}}


def integer(of):
    return {"as_sym_int": {"as_name": of}}


SQUARES = [number("_operator.mul", f"n{step + 1}", integer(f"n{step}"), integer(f"n{step}")) for step in range(40)]
HALVES = make_node("torch.ops.aten.unbind.int", "last", self=name("many"))
COSTLY = {
    "a large tensor": ([full([10**6, 10**6])], "more than the available"),
    "a large tensor that is not used": ([full([2**31], "other"), full([1])], "more than the available"),
    "a pair in place of a tensor": (
        [full([8], "many"), make_node("torch.ops.aten.sort.default", "last", self=name("many"))],
        "another number",
    ),
    "many tensors": (
        [
            *(full([2**27], f"x{index}") for index in range(9)),
            make_node(
                "torch.ops.aten.cat.default", "last", tensors={"as_tensors": [{"name": f"x{index}"} for index in range(9)]}
            ),
        ],
        "more than the available",
    ),
    "a value repeated without memory": (
        [
            full([1], "one"),
            make_node("torch.ops.aten.expand.default", "many", self=name("one"), size={"as_ints": [2**45]}),
            make_node("torch.ops.aten.sum.default", "last", self=name("many")),
        ],
        "repeats values to more than 8.6 GB",
    ),
    "a list without end": ([full([2**27], "many"), HALVES], "a list has other than 1 tensors"),
    "a number without end": (
        [number("_operator.add", "n0", {"as_int": 9}, {"as_int": 0}), *SQUARES, full([1])],
        "a size is too large",
    ),
    "a power": ([number("_operator.pow", "n0", {"as_int": 9}, {"as_int": 10**9}), full([1])], "math range error"),
    "a repeated text": ([number("_operator.mul", "n0", {"as_string": "x"}, {"as_int": 10**12}), full([1])], "else than numbers"),
    "a huge integer": ([full([10**30])], "not an integer of 64 bits"),
    "a name that is not computed": ([full([1], "other")], "used before it is computed"),
    "a subgraph": ([make_node("torch.ops.aten.relu.default", "last", self={"as_graph": {}})], "of the kind 'graph'"),
    "an object": ([make_node("torch.ops.aten.relu.default", "last", self={"as_custom_obj": {}})], "of the kind 'custom_obj'"),
    "another type": ([make_node("torch.ops.aten.relu.default", "last", self={"as_int": "x"})], "not an integer"),
}


@pytest.mark.parametrize("what", COSTLY)
def test_time_and_memory_are_limited(what, members, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.teachers.torch_export.free_memory", lambda: 1 << 32)
    members, (nodes, says) = dict(members), COSTLY[what]
    edit(members, GRAPH, insert(*nodes))
    outcome = open_members(members, tmp_path)
    assert says in outcome
    assert "\n" not in outcome


def test_compressed_members(members, tmp_path):
    members = members | {"data/weights/weight_0": bytes(1 << 24)}
    assert "compressed" in open_members(members, tmp_path, compression=zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize(
    "change", [{"sizes": [2**20, 2**20], "strides": [0, 0]}, {"sizes": [2**40], "strides": [1]}, {"sizes": [-1]}]
)
def test_weights_larger_than_their_data(change, members, tmp_path):
    members = dict(members)
    sides = {key: [{"as_int": side} for side in value] for key, value in change.items()}
    edit(members, WEIGHTS, lambda value: value["config"]["0.weight"]["tensor_meta"].update(sides))
    assert "cannot be opened as an exported program" in open_members(members, tmp_path)


def test_changed_programs(members, tmp_path):
    """Random changes of the JSON files and of the bytes of the archive."""
    generator, values = random.Random(20), [None, -1, 2**70, 0.5, "x", "../x", [], {}, [[]], {"as_int": -1}, True]
    for round_ in range(150):
        changed, file = dict(members), generator.choice((GRAPH, WEIGHTS))
        value = json.loads(changed[file])
        place = generator.choice(list(containers(value)))
        key = generator.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place[key] = generator.choice(values)
        changed[file] = json.dumps(value).encode()
        content = bytearray(pack(changed if round_ % 3 else members))
        if round_ % 3 == 0:
            for _ in range(3):
                content[generator.randrange(len(content))] = generator.randrange(256)
        (tmp_path / "it.pt2").write_bytes(content)
        outcome = open_file(tmp_path / "it.pt2")
        assert not isinstance(outcome, str) or "\n" not in outcome


def containers(value):
    """All dictionaries and lists of a JSON value that are not empty."""
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def test_a_pipe_is_not_read(tmp_path):
    for name in ("it.pt2", "it.onnx"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match="not a regular file"):
            open_teacher(tmp_path / name, preprocessing=HALF)
