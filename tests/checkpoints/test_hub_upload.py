"""Models pushed to a stand-in for the hub, loaded back, and described by their card; the token is never shown."""

import json
import logging

import pytest
import torch
import yaml
from huggingface_hub import constants

import vitrail
from tests.checkpoints.hub_server import running
from tests.checkpoints.test_hub import set_endpoint
from vitrail.checkpoints import hub
from vitrail.checkpoints.model_io import logit_difference
from vitrail.data.transforms.config import NO_ANTIALIAS
from vitrail.heads.task_heads import DetectionConfig, SegmentationConfig

TOKEN = "hf_secretsecretsecretsecret"
RECIPE = {
    "name": "finetune",
    "task": "classification",
    "batch_size": 64,
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "init": {"weights": "/home/me/secret-folder/deit3_small.pth"},
    "data": {"decode_scale": 1.5},
}
NOTES = {
    "recipe": json.dumps(RECIPE),
    "metrics": json.dumps({"top1": 0.9137, "loss": 0.31, "images": 460}),
    "data": json.dumps({"name": "pets", "train": 1840, "validation": 460}),
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "huggingface"))
    for forget in (hub.verified_file, hub.announce):
        forget.cache_clear()
    with running() as server:
        server.token = TOKEN
        set_endpoint(monkeypatch, server.address)
        yield server


def make_model(name, **changes):
    torch.manual_seed(0)
    model = vitrail.create(name, classes=3, image_size=32, depth=2, width=64, heads=2, **changes).eval()
    torch.nn.init.normal_(model.head.weight)
    model.class_names, model.notes = ["cat", "dog", "<b>|*fox*"], dict(NOTES)
    model.preprocessing = model.preprocessing._replace(interpolation=NO_ANTIALIAS, crop_ratio=0.7)
    return model


@pytest.mark.parametrize("name", ["deit_small_patch16", "cait_xxs24"])
def test_a_pushed_model_is_the_same_after_loading(server, name):
    model = make_model(name)
    assert vitrail.push(model, "me/photos", license="mit") == "hf://me/photos"
    loaded = vitrail.load("hf://me/photos")
    assert logit_difference(model, loaded)[0] == 0
    assert (loaded.class_names, loaded.preprocessing, loaded.name) == (model.class_names, model.preprocessing, model.name)
    for note in ("metrics", "data"):
        assert loaded.notes[note] == NOTES[note]
    assert json.loads(loaded.notes["recipe"])["data"] == RECIPE["data"]
    assert model.notes == NOTES
    files = {path.rpartition("/")[2] for path in server.files}
    assert files == {"model.safetensors", "config.json", "README.md"} | (
        {"preprocessor_config.json"} if name.startswith("deit") else set()
    )
    assert not any(b"secret-folder" in content for content in server.files.values())
    vitrail.push(make_model(name, drop_path=0.1), "me/photos")  # again, into the same repository
    assert {"mit"} != {yaml.safe_load(server.files["/me/photos/README.md"].split(b"---")[1]).get("license")}


def test_private_weights_are_not_uploaded_to_a_public_repository(server):
    vitrail.push(make_model("cait_xxs24"), "me/photos")
    before = dict(server.files)
    with pytest.raises(vitrail.UserError, match="me/photos exists and is public"):
        vitrail.push(make_model("cait_xxs24", drop_path=0.1), "me/photos", private=True)
    assert server.files == before
    vitrail.push(make_model("cait_xxs24"), "me/other", private=True)
    vitrail.push(make_model("cait_xxs24"), "me/other", private=True)  # again: it is private
    assert server.private == {"me/photos": False, "me/other": True}


def test_files_of_an_earlier_format_are_deleted(server):
    for name, files in (("deit_small_patch16", 4), ("cait_xxs24", 3)):  # cait: without preprocessor_config.json
        vitrail.push(make_model(name), "me/photos")
        assert len(server.files) == files
    assert vitrail.load("hf://me/photos").name.startswith("cait")


def test_transformers_reads_what_it_can(tmp_path):
    from transformers import AutoConfig, AutoModelForImageClassification

    model = make_model("deit_small_patch16")
    vitrail.push(model, "me/photos", out=tmp_path / "repository")
    theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "repository").eval()
    assert AutoConfig.from_pretrained(tmp_path / "repository").id2label[1] == "dog"
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(theirs(images).logits, model(images), atol=1e-5, rtol=1e-4)


def test_the_card_says_what_the_artifact_knows(tmp_path):
    vitrail.push(make_model("cait_xxs24"), "me/photos", license="apache-2.0", out=tmp_path / "repository")
    text = (tmp_path / "repository" / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header["license"] == "apache-2.0"
    assert (header["library_name"], header["pipeline_tag"], header["datasets"]) == ("vitrail", "image-classification", ["pets"])
    result = header["model-index"][0]["results"][0]
    assert result["metrics"][0]["value"] == 0.9137
    for part in ("91.37 %", "460 validation images", "1,840 training images", "finetune", "adamw", "hf://me/photos"):
        assert part in text
    assert "also an image of something else" in text
    assert "deit3\\_small.pth: the license and the biases" in text
    assert "<b>" not in text.replace("label_names", "")
    assert "transformers" not in text
    bare = vitrail.create("deit_small_patch16", classes=0, image_size=32, depth=1, width=64, heads=1)
    vitrail.push(bare, "me/bare", out=tmp_path / "bare")
    text = (tmp_path / "bare" / "README.md").read_text()
    assert text.count("Not stated in the artifact.") == 3
    assert "No license was stated" in text
    assert "pipeline_tag: image-feature-extraction" in text


DENSE = {  # the head, the metrics of its artifact, and what the card says of them
    "segmentation": (
        SegmentationConfig(("road", "<sky>"), (0, 1), 64, window=32, stride=20, kind="linear"),
        {"miou": 0.4567, "pixel_accuracy": 0.9, "mean_accuracy": 0.625},
        ("| miou | 45.67 % |", "| mean\\_accuracy | 62.50 % |", "64 pixels, windows of 32", "vitrail.segment("),
    ),
    "detection": (
        DetectionConfig(("road", "<sky>"), 0, channels=8, hidden=8),
        {"ap": 0.3104, "ap75": 0.25, "mask_ap50": 0.5},
        ("| ap | 31.04 % |", "| ap75 | 25.00 % |", "| mask\\_ap50 | 50.00 % |", "own size, whole images", "vitrail.detect("),
    ),
}


@pytest.mark.parametrize("task", DENSE)
def test_the_card_of_dense_prediction(task, tmp_path):
    config, metrics, parts = DENSE[task]
    model = vitrail.create("deit_small_patch16", classes=0, image_size=32, depth=1, width=64, heads=1).set_task_head(config)
    model.notes = {"metrics": json.dumps(metrics)}
    vitrail.push(model, "me/photos", out=tmp_path / "repository")
    text = (tmp_path / "repository" / "README.md").read_text()
    for part in (*parts, "2 classes: road, \\<sky\\>."):
        assert part in text
    assert "center crop" not in text


HOSTILE = {
    "deep": {"recipe": '{"a":' * 900 + "1" + "}" * 900},
    "large": {"metrics": '{"top1": 1' + "0" * 400 + ', "loss": -1' + "0" * 400 + ', "images": true}', "data": '{"train": true}'},
    "not finite": {"metrics": '{"top1": NaN, "loss": Infinity}'},
    "surrogates": {"data": '{"name": "\\ud800"}', "recipe": '{"name": "\\udcffx"}', "metrics": '{"top1": 0.5}'},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_notes_of_strangers(case, tmp_path):
    model = make_model("cait_xxs24")
    model.notes = HOSTILE[case]
    vitrail.push(model, "me/photos", out=tmp_path / "repository")
    text = (tmp_path / "repository" / "README.md").read_text(encoding="utf-8")
    yaml.safe_load(text.split("---")[1])
    assert ("ud800" in text) == (case == "surrogates")
    assert not any(word in text for word in ("nan", "inf ", "0000000000", "True"))


def test_names_are_not_links(tmp_path):
    model, name = make_model("cait_xxs24"), "x\n---\nsee https://evil.example www.evil.example @user &lt; hf://me/x@main"
    model.notes = {"data": json.dumps({"name": name}), "metrics": '{"top1": 0.5}'}
    vitrail.push(model, "me/photos", out=tmp_path / "repository")
    header, text = (tmp_path / "repository" / "README.md").read_text(encoding="utf-8").split("---\n")[1:]
    assert yaml.safe_load(header)["model-index"][0]["results"][0]["dataset"]["name"] == "validation images"
    assert not any(link in text for link in ("https://", "www.", "@user", " &lt;"))
    assert "hf://me/x@main" in text


def test_paths_in_notes_are_shortened(tmp_path):
    model = make_model("cait_xxs24")
    model.notes = {
        "a": "/home/secret/x",
        "b": '"/home/secret/x"',
        "c": '{"/home/secret/x": ["/home/secret/y"]}',
        "d": "plain / text",
    }
    model.notes["e"] = "[" * 99 + '"/home/secret/x"' + "]" * 99
    vitrail.push(model, "me/photos", out=tmp_path / "repository")
    notes = vitrail.load(tmp_path / "repository" / "model.safetensors").notes
    expected = {"a": "x", "b": '"x"', "c": '{"x": ["y"]}', "d": "plain / text"}
    assert {name: notes.get(name) for name in "abcde"} == expected | {"e": None}


def test_the_command_uploads_a_run(server, run_cli, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    model = make_model("cait_xxs24")
    del model.notes["data"]
    (tmp_path / "run").mkdir()
    vitrail.save(model, tmp_path / "run" / "best.safetensors")
    data = {"name": "my-photos", "train": 12, "validation": 3, "classes": [], "fingerprint": ""}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"recipe": RECIPE, "data": data, "source": str(tmp_path)}))
    done = run_cli("push", tmp_path / "run", "me/photos", "--private")
    assert done.returncode == 0, done.stderr
    assert "hf://me/photos" in done.stdout
    assert server.private == {"me/photos": True}
    assert b"my-photos: 12 training images and 3 validation images" in server.files["/me/photos/README.md"]
    assert TOKEN not in done.stdout + done.stderr + caplog.text
    assert {authorization for method, *_, authorization in server.requests if method == "PUT"} == {None}


@pytest.mark.parametrize(("refusal", "words"), [(403, "write access"), (500, "HTTP 500"), (None, "write access")])
def test_refusals_do_not_show_the_token(server, cli_error, refusal, words, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    vitrail.save(make_model("cait_xxs24"), tmp_path / "model.safetensors")
    server.refusal = refusal
    if refusal is None:
        server.token = "another"
    message = cli_error("push", tmp_path / "model.safetensors", "me/photos")
    assert words in message
    assert TOKEN not in message + caplog.text


def test_errors_before_anything_is_sent(server, cli_error, tmp_path, monkeypatch):
    vitrail.save(make_model("cait_xxs24"), tmp_path / "model.safetensors")
    assert "owner/name" in cli_error("push", tmp_path / "model.safetensors", "photos")
    assert "identifier of a license" in cli_error(
        "push", tmp_path / "model.safetensors", "me/photos", "--license", "My own\nx: y"
    )
    assert "not an empty folder" in cli_error("push", tmp_path / "model.safetensors", "me/photos", "--out", tmp_path)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "hf auth login" in cli_error("push", tmp_path / "model.safetensors", "me/photos")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    set_endpoint(monkeypatch, "http://hub.example")
    assert "not an https address" in cli_error("push", tmp_path / "model.safetensors", "me/photos")
    assert not server.requests
