"""Weights by name, from a stand-in for the hub and for the servers of the authors."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from huggingface_hub import constants
from PIL import Image

import vitrail
from tests.checkpoints.hub_server import COMMIT, running
from vitrail.cache import cache_folder
from vitrail.checkpoints import bundled, hub
from vitrail.checkpoints.download import check_url, download
from vitrail.checkpoints.hub import Weights, find_named, is_built_by_timm, parse_name, released
from vitrail.evaluation.model import open_model
from vitrail.models.registry import list_models, lookup
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.runs.prepare import prepare, prepare_resumed
from vitrail.runs.request import TrainRequest, describe_pretrained, resolve_recipe
from vitrail.teachers.lookup import open_teacher
from vitrail.training.distributed import Devices

REPOSITORY = "/timm/deit3_small_patch16_224.fb_in1k"
CARD = "---\nlicense: apache-2.0\ndatasets:\n- imagenet-1k\n- imagenet-21k\n---\n# license: none of this\n"
CONFIG = {
    "architecture": "deit3_small_patch16_224",
    "label_names": ["a", "b", "c"],
    "pretrained_cfg": {"crop_pct": 0.9, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "interpolation": "bilinear"},
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The bytes of a small DeiT III in timm's format."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    vitrail.save(vitrail.create("deit3_small_patch16", classes=3, image_size=32, depth=1, width=64, heads=1), file, "timm")
    return file.read_bytes()


@pytest.fixture
def server(tmp_path, monkeypatch, weights):
    """The stand-in, with one repository; the current folder and both caches are empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for forget in (hub.verified_file, hub.announce, bundled.announce_bundled):
        forget.cache_clear()
    with running() as server:
        server.files = {
            f"{REPOSITORY}/model.safetensors": weights,
            f"{REPOSITORY}/config.json": json.dumps(CONFIG).encode(),
            f"{REPOSITORY}/README.md": CARD.encode(),
        }
        set_endpoint(monkeypatch, server.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "huggingface"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield server


def set_endpoint(monkeypatch, address):
    """What HF_ENDPOINT does, which huggingface_hub reads when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


def fail(name):
    with pytest.raises(vitrail.UserError) as error:
        find_named(name)
    return str(error.value)


def url_weights(monkeypatch, server, name, data):
    """Released weights at a URL of the stand-in."""
    server.files[f"/files/{name}"] = data
    known = {"thing_224.ours": Weights("thing_224.ours", f"{server.address}/files/{name}", license="MIT", data="photographs")}
    monkeypatch.setattr(hub, "spellings", lambda: known | {"thing": known["thing_224.ours"]})


@pytest.mark.parametrize(
    ("text", "name"),
    {
        "deit3_small": "deit3_small_patch16_224.fb_in1k",
        "deit3_small_384": "deit3_small_patch16_384.fb_in1k",
        "deit3_small.fb_in22k_ft_in1k": "deit3_small_patch16_224.fb_in22k_ft_in1k",
        "DeiT3_Small": "deit3_small_patch16_224.fb_in1k",
        "deit_small_patch16_LS": "deit3_small_patch16_224.fb_in1k",
        "vit_small": "vit_small_patch16_224.augreg_in21k_ft_in1k",
        "cait_S24": "cait_s24_384.fb_dist_in1k",
        "cait_s36": "cait_s36_384.fb_dist_in1k",
        "S60": "patchconvnet_s60_224.fb_in1k",
        "timm:vit_small_patch16_224": "vit_small_patch16_224.augreg_in21k_ft_in1k",
        "timm:vit_small_patch16_224.augreg_in21k": "vit_small_patch16_224.augreg_in21k",
        "timm:resnet50.a1_in1k": "timm:resnet50.a1_in1k",
        "hf:/owner/name": "hf://owner/name",  # as a Path
        "regnety_160": "regnety_160.deit_in1k",
    }.items(),
)
def test_spellings(text, name):
    assert parse_name(text).name == name


@pytest.mark.parametrize(
    "text", ["photos", "cait_s36_224", "vitrail_mini", "resmlp_b24", "deit3_small.other", "a/b.pth", "", "runs/x"]
)
def test_other_names_are_paths(text):
    assert parse_name(text) is None


def test_released_weights_are_those_of_known_models():
    for name, weights in released().items():
        model = re.sub(r"_\d{3}$", "", name.partition(".")[0])
        assert model in list_models() or name == "regnety_160.deit_in1k"
        assert weights.license
        assert weights.data
        if weights.source.startswith("timm/") and "resmlp" not in name:
            assert weights.source == f"timm/{name}"
            assert lookup(name)[0] == model
        elif "://" in weights.source:
            assert check_url(weights.source)


def test_a_name_is_downloaded_once_and_described(server, capfd, weights):
    model = vitrail.load("deit3_small")
    assert (model.class_names, model.preprocessing.crop_ratio) == (["a", "b", "c"], 0.9)
    file = find_named("deit3_small")
    assert file.read_bytes() == weights
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    for part in (f"{server.address}{REPOSITORY}", COMMIT[:12], "license Apache-2.0", "trained on ImageNet-1k", "MB; ", str(file)):
        assert part in message.replace(" kB;", " MB;")
    gets = server.paths()
    assert [path for path in gets if path.endswith("model.safetensors")] == [f"{REPOSITORY}/resolve/{COMMIT}/model.safetensors"]
    server.requests.clear()
    hub.verified_file.cache_clear()
    assert torch.equal(vitrail.load("timm:deit3_small_patch16_224.fb_in1k").head.weight, model.head.weight)
    assert server.requests == []


def test_cached_weights_need_no_network(server, monkeypatch):
    first = find_named("hf://timm/deit3_small_patch16_224.fb_in1k")
    server.requests.clear()
    hub.verified_file.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_named("hf://timm/deit3_small_patch16_224.fb_in1k") == first
    assert server.requests == []


def test_weights_whose_folder_was_removed_are_downloaded_again(server):
    """Of the same process too, such as a server that gets SIGHUP."""
    name = "hf://timm/deit3_small_patch16_224.fb_in1k"
    first = find_named(name)
    server.files[f"{REPOSITORY}/model.safetensors"] = b"newer"
    assert find_named(name).read_bytes() != b"newer"
    shutil.rmtree(first.parent)
    assert find_named(name).read_bytes() == b"newer"


def test_license_and_data_of_other_repositories_are_those_of_their_card(server, capfd):
    find_named("hf://timm/deit3_small_patch16_224.fb_in1k@v1")
    assert "license apache-2.0; trained on imagenet-1k, imagenet-21k;" in capfd.readouterr().err
    server.files = {
        path.replace("timm/deit3_small_patch16_224.fb_in1k", "owner/name"): data for path, data in server.files.items()
    }
    server.files["/owner/name/README.md"] = b"\xff no header\nlicense: mit\n"
    find_named("hf://owner/name")
    assert "license not stated; trained on not stated;" in capfd.readouterr().err


def test_a_pickle_is_taken_without_safetensors_and_read_safely(server, weights):
    server.files[f"{REPOSITORY}/pytorch_model.bin"] = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00truetR."
    assert find_named("deit3_small").name == "model.safetensors"
    server.files["/o/n/pytorch_model.bin"] = server.files[f"{REPOSITORY}/pytorch_model.bin"]
    with pytest.raises(vitrail.UserError, match=r"could run code|damaged"):
        vitrail.load("hf://o/n")


def test_an_interrupted_download_continues(server, weights):
    half = len(weights) // 2
    server.stop_after = half
    assert re.search(r"the connection was closed\); \d+ [kM]B are kept, and the same command continues", fail("deit3_small"))
    server.requests.clear()
    assert find_named("deit3_small").read_bytes() == weights
    assert [each[2] for each in server.requests if each[0] == "GET" and each[1].endswith(".safetensors")] == [f"bytes={half}-"]
    assert not list(cache_folder("weights").rglob("*.part")) + list(cache_folder("weights").rglob("*.etag"))


def test_another_version_of_an_interrupted_file_is_downloaded_from_its_start(server, tmp_path):
    server.files["/files/a.pth"] = bytes(100_000)
    server.stop_after = 60_000
    with pytest.raises(vitrail.UserError, match="60 kB are kept"):
        download(f"{server.address}/files/a.pth", tmp_path / "a.pth", 1 << 20)
    server.files["/files/a.pth"] = bytes([1]) * 90_000
    download(f"{server.address}/files/a.pth", tmp_path / "a.pth", 1 << 20)
    assert (tmp_path / "a.pth").read_bytes() == bytes([1]) * 90_000
    (tmp_path / ".a.pth.part").write_bytes(bytes(90_000))  # killed before the rename
    (tmp_path / ".a.pth.etag").write_text('"{}"'.format(hashlib.sha256(server.files["/files/a.pth"]).hexdigest()))
    download(f"{server.address}/files/a.pth", tmp_path / "a.pth", 1 << 20)
    assert (tmp_path / "a.pth").read_bytes() == bytes([1]) * 90_000


def test_a_wrong_digest_is_rejected(server, monkeypatch, weights):
    server.etags[f"{REPOSITORY}/model.safetensors"] = "ab" * 32
    assert "its SHA-256 is" in fail("deit3_small")
    assert find_named_files() == []
    url_weights(monkeypatch, server, "thing-0123abcd.pth", weights)
    assert "and not 0123abcd…: it was discarded" in fail("thing")
    assert find_named_files() == []


def find_named_files():
    return [path.name for path in cache_folder("weights").rglob("*.*") if path.suffix in (".safetensors", ".pth", ".part")]


def test_released_weights_at_a_url(server, monkeypatch, capfd, weights):
    name = f"thing-{hashlib.sha256(weights).hexdigest()[:8]}.pth"
    url_weights(monkeypatch, server, name, weights)
    server.stop_after = 5000
    assert "5 kB are kept" in fail("thing")
    assert vitrail.load("thing").architecture.classes == 3
    assert re.search(
        rf"thing_224.ours: weights from {server.address}.*license MIT; trained on photographs", capfd.readouterr().err
    )
    assert [each[2] for each in server.requests] == [None, "bytes=5000-"]


def test_damage_in_the_cache_is_found(server):
    file = find_named("deit3_small")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    hub.verified_file.cache_clear()
    assert "are damaged: remove that folder" in fail("deit3_small")
    (file.parent / "source.json").write_text(json.dumps({"weights": "../../x", "files": {}}))
    assert "are damaged" in fail("deit3_small")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hf://owner/missing", ["there is no such repository", "hf download owner/missing"]),
        ("timm:deit3_smal_patch16_224", ["there is no such repository", "similar names: deit3_small_patch16_224.fb_in1k"]),
        ("hf://timm/deit3_small_patch16_224.fb_in1k@nowhere", ["no revision nowhere"]),
        ("hf://owner", ["write hf://owner/name"]),
        ("hf://owner/../..", ["write hf://owner/name"]),
        ("hf://owner/a--b", ["write hf://owner/name"]),
        (f"hf://owner/{'a' * 100}", ["write hf://owner/name"]),
        ("timm:a.git", ["write timm:MODEL.TRAINING"]),
        ("timm:../x", ["write timm:MODEL.TRAINING"]),
    ],
)
def test_what_does_not_exist(server, name, parts):
    message = fail(name)
    assert all(part in message for part in parts), message
    assert "\n" not in message


def test_a_repository_without_weights(server):
    server.files["/o/n/config.json"] = b"{}"
    assert "contains none of model.safetensors" in fail("hf://o/n")


def test_a_url_without_a_file(server, monkeypatch):
    url_weights(monkeypatch, server, "thing.pth", b"")
    server.files.clear()
    assert re.search(r"is not available \(HTTP 404\): download http.*thing.pth elsewhere and give the file", fail("thing"))


def test_offline(server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert re.search(r"HF_HUB_OFFLINE is set\): run `hf download timm/deit3_small_patch16_224.fb_in1k`", fail("deit3_small"))
    url_weights(monkeypatch, server, "thing.pth", b"1")
    assert "HF_HUB_OFFLINE is set" in fail("thing")
    assert server.requests == []


def test_no_connection(server, monkeypatch):
    set_endpoint(monkeypatch, "http://127.0.0.1:1")
    assert re.search(r"127.0.0.1:1 cannot be reached: .*\): run `hf download", fail("deit3_small"))
    url_weights(monkeypatch, server, "thing.pth", b"1")
    server.redirects["/files/thing.pth"] = "http://127.0.0.1:1/thing.pth"
    assert "is not available (Connection refused): download" in fail("thing")


def test_files_of_the_hub_cache_are_used(server, tmp_path, weights):
    snapshot = tmp_path / "huggingface" / "models--timm--deit3_small_patch16_224.fb_in1k"
    (snapshot / "refs").mkdir(parents=True)
    (snapshot / "refs" / "main").write_text(COMMIT)
    (snapshot / "snapshots" / COMMIT).mkdir(parents=True)
    for name, data in {"model.safetensors": weights, "config.json": json.dumps(CONFIG).encode()}.items():
        (snapshot / "snapshots" / COMMIT / name).write_bytes(data)
    assert vitrail.load("deit3_small").class_names == ["a", "b", "c"]
    assert server.requests == []


def test_local_files_and_bundled_weights_take_precedence(server, tmp_path, weights):
    (tmp_path / "deit3_small").mkdir()
    (tmp_path / "deit3_small" / "model.safetensors").write_bytes(weights)
    assert find_named("deit3_small") is None
    assert vitrail.load("deit3_small").architecture.classes == 3
    assert find_named("vitrail_tiny") == bundled.find_bundled("vitrail_tiny")
    assert server.requests == []


def test_a_misspelled_name_suggests(server):
    with pytest.raises(vitrail.UserError, match=r"no file deit3_smal\. .*similar names: deit3_small_patch16_224.fb_in1k"):
        vitrail.load("deit3_smal")
    with pytest.raises(vitrail.UserError, match=r"no file deit3_small\.pth\. Without the suffix, deit3_small is the name"):
        vitrail.load("deit3_small.pth")
    assert server.requests == []


def test_sizes_are_limited(server, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "MAX_WEIGHTS", 1000)
    assert "more than 1 kB: download it by hand" in fail("deit3_small")
    assert find_named_files() == []


def test_only_encrypted_addresses(server, tmp_path):
    server.redirects["/files/a.pth"] = "http://example.org/a.pth"
    for url in (f"{server.address}/files/a.pth", "http://example.org/a.pth", "file:///etc/passwd", "ftp://127.0.0.1/a"):
        with pytest.raises(vitrail.UserError, match="is not an https address"):
            download(url, tmp_path / "a.pth", 100)
    with pytest.raises(vitrail.UserError, match="is not an https address"):
        check_url("http://127.0.0.1.example.org/a")


def test_a_token_is_not_sent_to_other_hosts(server, tmp_path):
    with running() as other:
        other.files["/files/a.pth"] = b"1"
        server.redirects["/files/a.pth"] = f"{other.address}/files/a.pth"
        download(f"{server.address}/files/a.pth", tmp_path / "a.pth", 100, credentials={"Authorization": "Bearer x"})
        assert (server.requests[0][3], other.requests[0][3]) == ("Bearer x", None)


def test_teachers_and_timm(server):
    assert is_built_by_timm("timm:resnest50d.in1k")
    assert not is_built_by_timm("timm:resnet50.a1_in1k")
    assert is_built_by_timm("timm:deit3_small_patch16_224@weights.pth")
    assert not is_built_by_timm("timm:deit3_small_patch16_224.fb_in1k")
    teacher = open_teacher("timm:deit3_small_patch16_224.fb_in1k")
    assert (teacher.classes, teacher.preprocessing.crop_ratio) == (3, 0.9)
    assert isinstance(open_model("timm:deit3_small_patch16_224.fb_in1k", "cpu"), VisionTransformer)
    request = TrainRequest(recipe="laptop", changes={"distillation.teacher": "deit3_small"})
    assert resolve_recipe(request, "cpu").distillation.teacher == str(find_named("deit3_small"))


def test_commands(server, run_cli, tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "cat.jpg")
    done = run_cli("predict", "hf://timm/deit3_small_patch16_224.fb_in1k", "cat.jpg", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["classes"][0]["name"] in "abc"
    assert run_cli("convert", "timm:deit3_small_patch16_224.fb_in1k", "copy.safetensors").returncode == 0
    assert vitrail.load("copy.safetensors").class_names == ["a", "b", "c"]
    failed = run_cli("predict", "hf://o/n", "cat.jpg")
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)


def test_a_run_records_the_file_and_its_digest(server, tmp_path, weights):
    cpu = Devices(torch.device("cpu"))
    changes = {"init.weights": "deit3_small", "epochs": 1, "batch_size": 4, "augmentation.image_size": 32}
    request = TrainRequest(source="digits", changes=changes, workers=0)
    run = prepare(request, resolve_recipe(request, "cpu"), cpu, lambda message: None).run
    file = find_named("deit3_small")
    assert run["recipe"]["init"]["weights"] == str(file)
    assert run["weights"] == {"path": str(file), "sha256": hashlib.sha256(weights).hexdigest()}
    (tmp_path / "run.json").write_text(json.dumps(run))  # as if it had been stopped before the first checkpoint
    assert prepare_resumed(tmp_path, cpu, None, 0, {}).resumed
    file.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(vitrail.UserError, match=r"is not what .* was started from"):
        prepare_resumed(tmp_path, cpu, None, 0, {})


def test_license_of_bundled_weights_is_printed(server, capfd):
    model = open_model("vitrail_tiny", "cpu")
    assert capfd.readouterr().err.count("non-commercial research") == 1
    recipe = resolve_recipe(TrainRequest(changes={"init.weights": "vitrail_tiny"}), "cpu")
    assert "non-commercial research" in describe_pretrained(model, recipe, ["a"])[-1]
