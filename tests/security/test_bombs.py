"""Small files that would need much memory or time, and values that torch reads without checking them."""

import io
import json
import pickle
import pickletools
import shutil
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
import yaml

import vitrail
from tests.security.checkpoints import RUN
from vitrail.checkpoints.conversion import export_tensors
from vitrail.checkpoints.sharded_reader import overlap
from vitrail.checkpoints.torch_files import check_archive, check_pickles
from vitrail.checkpoints.training_checkpoints import read_checkpoint
from vitrail.data.datasets.cifar import PickledArray, PickledDtype, read_pickle
from vitrail.data.datasets.lookup import open_source
from vitrail.errors import UserError
from vitrail.recipes.schema import load_yaml
from vitrail.teachers.export_operators import find_operator
from vitrail.teachers.fixed_shape import fixed_dimensions
from vitrail.teachers.tokenlabeling import read_label_map
from vitrail.training.checkpointing import write_checkpoint_file


class Reserve:
    def __reduce__(self):
        return bytearray, (3_000_000_000,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_reserves_memory(zipped, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"weight": torch.zeros(2), "other": Reserve()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"builtins\.bytearray"):
        vitrail.load(path)


def test_a_file_of_the_old_format_without_data(tmp_path):
    """The list of storages is empty, so torch leaves the tensors as they were allocated."""
    path, content = tmp_path / "weights.pth", io.BytesIO()
    torch.save({"head.weight": torch.zeros(1000, 1000)}, content, _use_new_zipfile_serialization=False)
    content.seek(0)
    for _ in range(4):  # magic number, version, system, the dictionary
        assert list(pickletools.genops(content))
    path.write_bytes(content.getvalue()[: content.tell()] + pickle.dumps([], 2))
    with pytest.raises(UserError, match="its tensors are larger than the file"):
        vitrail.load(path)


def test_tensors_that_share_their_data(tmp_path):
    """Each of them is copied when it is assigned to a parameter."""
    data = torch.zeros(1 << 19)
    torch.save({f"blocks.{number}.weight": data for number in range(3)}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match="its tensors share data and would need more than 2 times the memory of the file"):
        vitrail.load(tmp_path / "weights.pth")


class Items:
    """A pickled OrderedDict with attributes in place of its methods."""

    def __init__(self, content):
        self.content = content

    def __reduce__(self):
        hidden = dict.fromkeys(["items", "get", "keys", "values", "__contains__"], "text")
        return OrderedDict, (), hidden, None, iter(self.content.items())


def test_attributes_that_hide_methods(tmp_path):
    model = vitrail.create("deit_tiny_patch16", 3, 16, depth=1, width=64, heads=1)
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in export_tensors(model, "deit").items()}
    for parameter in weights.values():
        parameter.numel = parameter.untyped_storage = parameter.dim = 5
    path = tmp_path / "weights.pth"
    torch.save({"model": Items(weights)}, path)
    assert torch.equal(vitrail.load(path).head.weight, model.head.weight)
    torch.save({"model": Items(weights)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="damaged or incomplete PyTorch file"):
        vitrail.load(path)
    torch.save(next(iter(weights.values())), path)
    with pytest.raises(UserError, match="is not a label map"):
        read_label_map(path, 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_a_shape_and_keys_that_are_no_names(tmp_path):
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    for content, message in (({"a": nested}, "is nested"), ({5: torch.zeros(2)}, "contains no tensors")):
        torch.save(content, tmp_path / "weights.pth")
        with pytest.raises(UserError, match=message):
            vitrail.load(tmp_path / "weights.pth")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_the_check_cannot_read(zipped, tmp_path):
    """A name that is not ASCII ended the check before the call that it looks for."""
    body = b"\x80\x02}(X\1\0\0\0ac\xc3\xa9\nname\n0" + pickle.dumps(Reserve(), 2)[2:-1] + b"u."
    path = tmp_path / "weights.pth"
    if zipped:
        writer = torch._C.PyTorchFileWriter(str(path))
        writer.write_record("data.pkl", body, len(body))
        writer.write_end_of_file()
    else:
        head = io.BytesIO()
        torch.save({}, head, _use_new_zipfile_serialization=False)
        head.seek(0)
        for _ in range(3):
            assert list(pickletools.genops(head))
        path.write_bytes(head.getvalue()[: head.tell()] + body + pickle.dumps([], 2))
    with path.open("rb") as file, pytest.raises(ValueError, match="ascii"):
        check_pickles(check_archive(file) if zipped else file, 1 if zipped else 5)
    with pytest.raises(UserError, match="damaged or incomplete PyTorch file"):
        vitrail.load(path)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b"])
def test_names_that_no_file_can_have(name, tmp_path):
    with pytest.raises(UserError, match="There is no file"):
        vitrail.load(name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="There is no file"):
        vitrail.load(tmp_path)


def test_a_training_checkpoint_without_weights(tmp_path):
    run = shutil.copytree(RUN, tmp_path / "run")
    path = next((run / "checkpoints").iterdir())
    step, groups, metadata = read_checkpoint(path)
    write_checkpoint_file(path, step, {"ema": groups["model"]}, metadata)
    with pytest.raises(UserError, match="the entry 'model' is missing"):
        vitrail.load(path)


def test_an_archive_of_another_compression(tmp_path):
    path, array = tmp_path / "weights.npz", io.BytesIO()
    np.save(array, np.zeros(1_000_000))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("weight.npy", array.getvalue())
    with pytest.raises(UserError, match="its compression is not that of numpy"):
        vitrail.load(path)


def test_chunks_that_overlap():
    assert overlap(((0, 0), (2, 2)), ((1, 1), (2, 2)))
    assert overlap(((0,), (2,)), ((0,), (2,)))
    assert not overlap(((0, 0), (2, 2)), ((2, 0), (2, 2)))


@pytest.mark.parametrize(
    "text", ["!!bool foo", "!!int ''", "!!python/name:os.system", "&a [*a]", "1:" * 6000 + "1", "x" * 20_000]
)
def test_yaml_with_tags_aliases_or_long_values(text):
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


def call(name, **arguments):
    return find_operator(f"torch.ops.aten.{name}").function(**arguments)


def test_operators_that_torch_does_not_check():
    images, ones = torch.zeros(1, 4, 8, 8), torch.ones(4)
    norm = {"input": images, "weight": ones, "running_mean": ones, "running_var": ones, "momentum": 0.1, "eps": 1e-5}
    call("_native_batch_norm_legit_no_training.default", **norm, bias=ones)
    with pytest.raises(ValueError, match="bias has the shape"):
        call("_native_batch_norm_legit_no_training.default", **norm, bias=ones[:1])
    resize = {"align_corners": False, "output_size": [4, 4]}
    call("_upsample_bicubic2d_aa.default", self=images, scales_h=0.5, scales_w=0.5, **resize)
    with pytest.raises(ValueError, match=r"is not 0\.001 times 8"):
        call("_upsample_bicubic2d_aa.default", self=images, scales_h=0.001, scales_w=0.5, **resize)
    lowest = torch.tensor([torch.iinfo(torch.int64).min])
    for name, more in (("div.Tensor_mode", {"rounding_mode": "trunc"}), ("floor_divide.default", {}), ("remainder.Tensor", {})):
        assert call(name, self=torch.tensor([7]), other=torch.tensor([2]), **more).item() in (1, 3)
        with pytest.raises(ValueError, match="overflows"):
            call(name, self=lowest, other=torch.tensor([-1]), **more)


def test_a_fixed_batch_of_any_size():
    with pytest.raises(ValueError, match="its batch size is 400000"):
        fixed_dimensions([400_000, 3, 8, 8])


def test_names_and_arrays_of_cifar(tmp_path):
    array = PickledArray()
    for state in (5, (1, (-2, -3), PickledDtype("u1"), False, b"123456"), (1, ("a", 2), PickledDtype("u1"), False, b"")):
        array.state = state
        assert array.array() is None
    nested: list = ["name"]
    for _ in range(40):
        nested = [nested, nested]
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": nested}))
    assert isinstance(read_pickle(str(tmp_path / "meta"))["fine_label_names"], list)


def test_a_table_of_many_columns(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("path," + ",".join(f"label_{number}" for number in range(5000)) + "\n")
    with pytest.raises(UserError, match="5,001 columns"):
        open_source(str(path))
