"""Deltas: base and delta make the trained model to the bit, and nothing else does."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vitrail
from tests.models.test_every_model import randomize
from tests.small import structures
from vitrail.checkpoints.artifact import DELTA
from vitrail.checkpoints.delta import Delta, attach, fingerprint, make_delta, read_delta, save_delta, summarize
from vitrail.errors import UserError
from vitrail.training.scope import apply_scope

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def make_base(seed=0, **parts):
    torch.manual_seed(seed)
    parts = {"width": 64, "depth": 3, "heads": 1, "patch_size": 8} | parts
    return randomize(vitrail.create("deit_tiny_patch16", 7, 32, **parts)).eval()


def tune(base, scope="attention", steps=2):
    """A copy whose weights inside the scope have taken some real steps."""
    model = vitrail.build(base.architecture, base.name)
    model.load_state_dict(base.state_dict())
    apply_scope(model, scope)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for step in range(steps):
        image = torch.randn(4, 3, *base.architecture.image_size, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(model(image), torch.arange(4) % base.architecture.classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.class_names = [f"class {index}" for index in range(base.architecture.classes)]
    model.notes = {"recipe": json.dumps({"name": "little", "init": {"scope": scope}})}
    model.preprocessing = model.preprocessing._replace(crop_ratio=0.9)
    return model.eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A base, a model tuned from it, and the delta between them."""
    folder = tmp_path_factory.mktemp("delta")
    base = make_base()
    tuned = tune(base)
    vitrail.save(base, folder / "base.safetensors")
    vitrail.save(tuned, folder / "tuned.safetensors")
    save_delta(make_delta(base, tuned), folder / "delta.safetensors")
    return folder


def same_model(one, two):
    assert list(one.state_dict()) == list(two.state_dict())
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())
    assert (one.architecture, one.preprocessing, one.class_names) == (two.architecture, two.preprocessing, two.class_names)
    assert (one.name, one.notes) == (two.name, two.notes)
    with torch.inference_mode():
        assert torch.equal(one(IMAGE), two(IMAGE))


def test_base_and_delta_are_the_trained_model_to_the_bit(files):
    base, delta, tuned = (str(files / f"{name}.safetensors") for name in ("base", "delta", "tuned"))
    whole = vitrail.load(tuned)
    for loaded in (vitrail.load(f"{base}+{delta}"), vitrail.load(base, delta=delta)):
        same_model(loaded, whole)
        assert all(parameter.requires_grad for parameter in loaded.parameters())
        assert not loaded.training
    assert vitrail.load(base, delta=delta, drop_path=0.2).architecture.drop_path == 0.2
    assert vitrail.load(base, delta=delta, image_size=48).architecture.image_size == (48, 48)
    with pytest.raises(UserError, match="heads cannot be changed"):
        vitrail.load(base, delta=delta, heads=4)


def test_a_delta_holds_what_was_trained_and_no_more(files):
    delta = read_delta(files / "delta.safetensors")
    model = vitrail.load(files / "base.safetensors")
    apply_scope(model, "attention")
    assert set(delta.tensors) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    content = summarize(delta)
    assert content["recipe"]["init"]["scope"] == "attention"
    assert content["class_names"] == [f"class {index}" for index in range(7)]
    assert content["preprocessing"]["crop_ratio"] == 0.9
    assert content["parts"]["blocks.*.mix.branches.*.body.qkv.weight"]["tensors"] == 3
    assert content["base"]["sha256"] == fingerprint(model.state_dict())


@pytest.mark.parametrize("format", ["deit", "timm", "hf"])
def test_the_same_weights_in_another_format_are_the_same_base(files, tmp_path, format):
    base = vitrail.load(files / "base.safetensors")
    where = tmp_path / {"deit": "base.pth", "timm": "base.bin", "hf": "folder"}[format]
    vitrail.save(base, where, format, approximate=True)
    same_model(vitrail.load(f"{where}+{files / 'delta.safetensors'}"), vitrail.load(files / "tuned.safetensors"))


@pytest.mark.parametrize("name", structures())
def test_every_network_with_other_classes_and_size(name, tmp_path):
    """A new classifier and resampled tables have other shapes and are held in full."""
    base = randomize(vitrail.build(structures()[name]))
    step = base.architecture.patch_size
    height, width = base.architecture.image_size
    grown = vitrail.build(base.architecture)
    grown.load_state_dict(base.state_dict())
    grown.resize(height + step, width)
    tuned = randomize(vitrail.build(grown.architecture.replace(classes=3)))
    kept = {
        key: value
        for key, value in grown.state_dict().items()
        if key in tuned.state_dict() and tuned.state_dict()[key].shape == value.shape and not key.startswith("head")
    }
    tuned.load_state_dict(tuned.state_dict() | kept)
    save_delta(make_delta(base, tuned.eval()), tmp_path / "delta.safetensors")
    made = attach(base, tmp_path / "delta.safetensors")
    for parameter, other in zip(made.parameters(), tuned.parameters(), strict=True):
        other.requires_grad_(parameter.requires_grad)  # torch multiplies weights that are trained by another kernel
    image = torch.randn(1, 3, height + step, width)
    assert torch.equal(made(image), tuned(image))
    before = base.state_dict()
    fitting = {key for key in kept if before[key].shape == kept[key].shape}
    assert set(read_delta(tmp_path / "delta.safetensors").tensors) == set(tuned.state_dict()) - fitting


def test_deltas_on_one_trunk_share_it():
    base = make_base(norm="batch", pooling="mean", mixer="linear")
    deltas = [make_delta(base, tune(base, scope, steps)) for scope, steps in (("head", 1), ("last:1", 1), ("head", 3))]
    models = [attach(base, delta) for delta in deltas]
    before = base(IMAGE)
    owned = dict(base.named_parameters())
    for model, delta in zip(models, deltas, strict=True):
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (name in delta.tensors)
            assert (parameter.data_ptr() == owned[name].data_ptr()) == (name not in delta.tensors)
    model = models[0].train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1.0)
    model(IMAGE).square().mean().backward()
    optimizer.step()
    assert torch.equal(base(IMAGE), before), "training one changed the trunk, or its statistics"


def test_a_delta_of_a_delta(files, tmp_path):
    first = f"{files / 'base.safetensors'}+{files / 'delta.safetensors'}"
    again = tune(vitrail.load(first), "head")
    save_delta(make_delta(vitrail.load(first), again), tmp_path / "second.safetensors")
    same_model(vitrail.load(f"{first}+{tmp_path / 'second.safetensors'}"), again)


def test_other_weights_are_refused(files, tmp_path):
    with pytest.raises(UserError, match=r"was made from the weights \w{12} .*, not from \w{12}"):
        attach(make_base(seed=1), files / "delta.safetensors")
    one_bit = make_base()
    raw = one_bit.blocks[1].ffn.branches[0].body.fc1.bias.data.view(torch.int32)
    raw[3] ^= 1
    with pytest.raises(UserError, match="was made from the weights"):
        attach(one_bit, files / "delta.safetensors")


def test_a_delta_alone_and_what_is_none(files, tmp_path):
    delta = str(files / "delta.safetensors")
    with pytest.raises(UserError, match="is a delta: give the weights"):
        vitrail.load(delta)
    with pytest.raises(UserError, match="is not a delta"):
        read_delta(files / "base.safetensors")
    with pytest.raises(UserError, match=r"There is no file .*nothing"):
        vitrail.load(files / "base.safetensors", delta=tmp_path / "nothing")
    with pytest.raises(UserError, match=r"There is no file .*nothing"):
        vitrail.load(f"{files / 'base.safetensors'}+{tmp_path / 'nothing'}")
    with pytest.raises(UserError, match="There is no file"):
        vitrail.load(f"{tmp_path / 'nobase'}+{delta}")
    base = make_base()
    with pytest.raises(UserError, match="same weights"):
        make_delta(base, base)
    with pytest.raises(UserError, match="Every tensor differs"):
        make_delta(base, make_base(width=48))
    with pytest.raises(UserError, match=r"must end in \.safetensors"):
        save_delta(make_delta(base, tune(base, "head", 1)), tmp_path / "delta.pth")


def test_a_file_with_a_plus_in_its_name_is_that_file(files, tmp_path):
    model = vitrail.load(files / "base.safetensors")
    vitrail.save(model, tmp_path / "a+b.safetensors")
    assert fingerprint(vitrail.load(tmp_path / "a+b.safetensors").state_dict()) == fingerprint(model.state_dict())
    delta = tmp_path / "c+d.safetensors"
    delta.write_bytes((files / "delta.safetensors").read_bytes())
    same_model(vitrail.load(f"{tmp_path / 'a+b.safetensors'}+{delta}"), vitrail.load(files / "tuned.safetensors"))


def test_damage_is_refused(files, tmp_path):
    whole = (files / "delta.safetensors").read_bytes()
    cut, flipped = tmp_path / "cut.safetensors", tmp_path / "flipped.safetensors"
    cut.write_bytes(whole[:-100])
    flipped.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    for path, words in ((cut, "damaged or incomplete"), (flipped, "is damaged")):
        with pytest.raises(UserError, match=words):
            read_delta(path)
    tensors = load_file(files / "delta.safetensors")
    with safe_open(files / "delta.safetensors", "pt") as file:
        content = json.loads(file.metadata()[DELTA])
    wrong = [
        {**content, "base": content["base"][::-1]},
        {**content, "header": "{}"},
        {"layout": 1},
        [],
        {**content, "base_bytes": "x"},
    ]
    wrong += [{**content, "header": content["header"].replace("class 0", "class O")}]
    for content in wrong:
        save_file(tensors, flipped, {DELTA: json.dumps(content)})
        with pytest.raises(UserError, match="is damaged"):
            read_delta(flipped)
    save_file(tensors, flipped, {DELTA: json.dumps(content | {"layout": 99})})
    with pytest.raises(UserError, match="newer version of Vitrail"):
        read_delta(flipped)
    save_file({key: tensors[key] for key in list(tensors)[1:]}, flipped, {DELTA: json.dumps(content)})
    with pytest.raises(UserError, match="is damaged"):
        read_delta(flipped)


def test_parts_that_do_not_fit_are_told(files):
    """A delta of a program's own making may be sealed and still not be a model."""
    base = vitrail.load(files / "base.safetensors")
    delta = read_delta(files / "delta.safetensors")
    tensors = delta.tensors | {"head.weight": torch.zeros(9, 64)}
    with pytest.raises(UserError, match=r"are not a complete model: head\.weight"):
        attach(base, Delta(tensors, delta.header, delta.base, delta.base_name, delta.base_bytes))


def test_the_fingerprint_sees_every_bit_and_no_order():
    tensors = {"a": torch.tensor([0.0, float("nan")]), "b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.tensor(3)}
    known = fingerprint(tensors)
    assert known == fingerprint(dict(reversed(tensors.items())))
    assert known == fingerprint(tensors | {"b": torch.ones(3, 2, dtype=torch.bfloat16).T})
    others = [{"a": torch.tensor([-0.0, float("nan")])}, {"b": torch.ones(3, 2, dtype=torch.bfloat16)}, {"c": torch.tensor(3.0)}]
    others += [{"b": torch.ones(2, 3)}, {"d": torch.zeros(0)}]
    found = {fingerprint(tensors | other) for other in others}
    assert len(found | {known}) == len(others) + 1
