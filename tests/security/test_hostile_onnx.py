"""ONNX teachers from strangers: standard operators and files of the same folder only, and bounded memory."""

from contextlib import suppress

import numpy as np
import pytest
import torch

from tests.teachers.test_teacher import HALF
from vitrail.errors import UserError
from vitrail.teachers import open_teacher

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
WEIGHT = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
POOL = ["GlobalAveragePool", ["images"], ["pooled"]], ["Flatten", ["pooled"], ["flat"]]


def make_model(nodes=(), weight=None):
    """Logits of the mean color; `nodes` change the name of the result."""
    helper = onnx.helper
    made = [helper.make_node(*node) for node in POOL]
    made += [helper.make_node("MatMul", ["flat", "weight"], ["logits"])]
    graph = helper.make_graph(
        [*made, *nodes],
        "teacher",
        [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["batch", 3, "height", "width"])],
        [helper.make_tensor_value_info("more" if nodes else "logits", onnx.TensorProto.FLOAT, None)],
        [weight or onnx.numpy_helper.from_array(WEIGHT, "weight")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def open_model(model, tmp_path):
    (tmp_path / "it.onnx").write_bytes(model.SerializeToString())
    return open_teacher(tmp_path / "it.onnx", preprocessing=HALF)


def outside(location, **entries):
    """The weight, whose values are in another file."""
    tensor = onnx.TensorProto(name="weight", dims=WEIGHT.shape, data_type=onnx.TensorProto.FLOAT, data_location=1)
    for key, value in ({"location": location, "offset": "0", "length": str(WEIGHT.nbytes)} | entries).items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def test_values_in_a_file_of_the_same_folder(tmp_path):
    (tmp_path / "it.onnx.data").write_bytes(WEIGHT.tobytes())
    teacher, images = open_model(make_model(weight=outside("it.onnx.data")), tmp_path), torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(teacher(images), images.mean((2, 3)) @ torch.from_numpy(WEIGHT), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("location", ["../secret", "{}/secret", "inner/../../secret", "..", "", "*/_ORT_MEM_ADDR_/*", "missing"])
def test_other_files_are_not_read(location, tmp_path):
    (tmp_path / "secret").write_bytes(WEIGHT.tobytes())
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(UserError, match="not a file of the same folder"):
        open_model(make_model(weight=outside(location.format(tmp_path))), tmp_path / "folder")


def node(kind, inputs=("logits",), outputs=("more",), **options):
    return onnx.helper.make_node(kind, list(inputs), list(outputs), **options)


def subgraph():
    helper = onnx.helper
    result = helper.make_tensor_value_info("kept", onnx.TensorProto.BOOL, [])
    return helper.make_graph([helper.make_node("Identity", ["condition"], ["kept"])], "body", [], [result])


HOSTILE = {
    "a loop": lambda: make_model([node("Loop", ("", "", "logits"), body=subgraph())]),
    "a subgraph": lambda: make_model([node("Relu", body=subgraph())]),
    "another domain": lambda: make_model([node("Relu", domain="com.microsoft")]),
    "an unknown operator": lambda: make_model([node("PythonOp", domain="com.microsoft")]),
    "randomness": lambda: make_model([node("RandomNormalLike")]),
    "a large initializer": lambda: make_model(weight=onnx.TensorProto(name="weight", dims=[3, 10**12], data_type=1)),
    "a negative side": lambda: make_model(weight=onnx.TensorProto(name="weight", dims=[-3, -4], data_type=1, raw_data=b"0" * 48)),
    "a large constant": lambda: make_model([node("Constant", (), value=onnx.TensorProto(dims=[10**12], data_type=1))]),
    "a large filled tensor": lambda: make_model(
        [
            node("Constant", (), ("shape",), value=onnx.numpy_helper.from_array(np.array([7, 10**8]))),
            node("ConstantOfShape", ("shape",), ("zeros",)),
            node("ReduceMax", ("zeros",), ("largest",)),
            node("Add", ("logits", "largest")),
        ]
    ),
    "an external constant": lambda: make_model([node("Constant", (), value=outside("it.onnx"))]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_rejected(what, tmp_path):
    with pytest.raises(UserError, match=r"cannot be opened as an ONNX file .*it contains") as caught:
        open_model(HOSTILE[what](), tmp_path)
    assert "\n" not in str(caught.value)


def test_functions_of_the_file_are_rejected(tmp_path):
    model = make_model([node("Mine", domain="mine")])
    function = onnx.helper.make_function(
        "mine", "Mine", ["a"], ["b"], [node("Relu", ("a",), ("b",))], [onnx.helper.make_opsetid("", 17)]
    )
    model.functions.append(function)
    with pytest.raises(UserError, match="it contains functions"):
        open_model(model, tmp_path)


@pytest.mark.parametrize("size", [10**12, 2**34])
def test_memory_is_limited(size, tmp_path, monkeypatch):
    """Also if the size is computed by the program."""
    monkeypatch.setattr("vitrail.teachers.onnx.free_memory", lambda: 1 << 30)
    half = onnx.numpy_helper.from_array(np.array([size // 2], np.int64))
    nodes = [
        node("Constant", (), ("half",), value=half),
        node("Add", ("half", "half"), ("shape",)),
        node("ConstantOfShape", ("shape",), ("zeros",)),
        node("ReduceSum", ("zeros",), ("sum",)),
        node("Add", ("logits", "sum")),
    ]
    with pytest.raises(UserError, match="fails on images of shape"):
        open_model(make_model(nodes), tmp_path)


def test_changed_bytes(tmp_path):
    content = make_model().SerializeToString()
    generator = np.random.default_rng(20)
    for _ in range(60):
        changed = bytearray(content)
        for place in generator.integers(0, len(content), 2):
            changed[place] = generator.integers(256)
        (tmp_path / "it.onnx").write_bytes(changed)
        with suppress(UserError):
            open_teacher(tmp_path / "it.onnx", preprocessing=HALF)
