"""The command line on real files.

Most tests call the entry point in this process, because starting another takes seconds; each kind of exit is also tested in a
process of its own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
import yaml
from typer.main import get_command

import vitrail
from tests.checkpoints.test_formats import SUFFIX, little
from tests.convnets import small_resnet
from tests.images import make_folder, write_invalid_image
from vitrail.cli import main, train
from vitrail.heads.embedding import EmbeddingConfig
from vitrail.recipes import list_recipes, lookup
from vitrail.recipes.arguments import open_recipe

ROOT = Path(__file__).parents[2]


def run(*words, **options):
    command = [sys.executable, "-m", "vitrail", *map(str, words)]
    options.setdefault("env", os.environ | {"OMP_NUM_THREADS": "1"})  # as many threads as the tests: sums depend on them
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture(scope="module")
def deit_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "deit.pth"
    return vitrail.save(little("deit_base_patch16"), path, "deit")


def test_help_lists_the_commands_in_panels():
    text = run("--help").stdout
    positions = [text.index(f"─ {panel} ─") for panel in ("Train", "Evaluate", "Models", "Data", "Deploy")]
    assert positions == sorted(positions)
    assert run("--version").stdout.strip() == vitrail.__version__


def test_every_command_has_an_example():
    commands = dict(get_command(main.app).commands)
    while commands:
        name, command = commands.popitem()
        if hasattr(command, "commands"):
            commands |= {f"{name} {sub}": each for sub, each in command.commands.items()}
        else:
            assert f"vitrail {name.split()[0]} " in command.help.partition("Example")[2], name


def test_models_as_a_table_and_as_json(run_cli):
    table = run("models", "cait").stdout
    assert all(text in table for text in ("cait_xxs24", "12.0 M", "2.52 G", "cait_m48"))
    rows = json.loads(run_cli("models", "cait", "--json")[1])
    assert rows[0]["name"] == "cait_xxs24"
    assert (rows[0]["parameters"], rows[0]["tokens"], rows[0]["image_size"]) == (11_956_264, 196, [224, 224])
    assert rows[0]["macs"] == 2_523_475_200
    assert "CaiT" in rows[0]["paper"]


def test_info_of_a_name_at_another_size(run_cli):
    text = run_cli("info", "cait_s24", "--image-size", "384")[1]
    assert all(part in text for part in ("47.1 M", "32.1 G", "talking_heads", "class_attention", "crop_ratio"))
    content = json.loads(run_cli("info", "deit_tiny_patch16", "--image-size", "192x256", "--json")[1])
    assert content["cost"]["tokens"] == 12 * 16 + 1
    assert content["architecture"]["image_size"] == [192, 256]


def test_info_of_bundled_weights(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = run_cli("info", "vitrail_tiny")[1]
    for part in ("218,132 images, 200 classes", "% of 10,000 validation images at 128 x 128", "docs/weights.md"):
        assert part in text
    assert "at 128 x 128" in run_cli("info", "vitrail_tiny", "--image-size", "96")[1]  # the size that it was measured at
    card = (ROOT / "docs" / "weights.md").read_text()
    facts = json.loads(run_cli("info", "vitrail_tiny", "--json")[1])["bundled_weights"]
    assert facts["card"] == "docs/weights.md"
    assert f"{facts['train']:,} training images of {facts['data']}" in card
    stated = float(re.search(r"validation top-1 .*\| ([\d.]+) %", card)[1])
    assert round(stated, 1) == round(100 * facts["top1"], 1)
    assert json.loads(run_cli("info", "vitrail_mini", "--json")[1])["bundled_weights"] is None
    assert "weights" not in run_cli("info", "vitrail_mini")[1]
    (tmp_path / "vitrail_tiny").mkdir()
    text = run_cli("info", "vitrail_tiny")[1]
    assert "validation images" not in text
    assert "Bundled weights named vitrail_tiny exist, but the file or folder vitrail_tiny in this folder is used instead." in text


def test_models_marks_bundled_weights(run_cli):
    text = run_cli("models", "vitrail")[1]
    assert re.search(r"^vitrail_tiny \*  ", text, re.MULTILINE)
    assert text.count("*") == 2
    assert text.endswith("* trained weights are bundled, see `vitrail info vitrail_tiny`\n")
    assert "*" not in run_cli("models", "deit3")[1]
    rows = json.loads(run_cli("models", "vitrail", "--json")[1])
    assert {row["name"]: row["bundled_weights"] for row in rows if row["bundled_weights"]} == {"vitrail_tiny": True}


def test_info_of_a_file(deit_file, run_cli):
    assert "assumed" in run_cli("info", deit_file)[1]
    assert json.loads(run_cli("info", deit_file, "--json")[1])["format"] == "deit"


@pytest.mark.parametrize("format", ["vitrail", "deit", "timm", "hf"])
def test_convert_and_check(format, deit_file, run_cli, tmp_path):
    out = tmp_path / f"out{SUFFIX[format]}"
    code, said, complaints = run_cli("convert", deit_file, out, "--format", format, "--check")
    assert code == 0, complaints
    assert "largest logit difference 0 " in said
    image = torch.randn(1, 3, 32, 32)
    assert torch.equal(vitrail.load(out)(image), vitrail.load(deit_file)(image))


def test_a_projector_is_counted_and_left_out_on_request(run_cli, cli_error, tmp_path):
    model = vitrail.build(small_resnet(classes=0)).set_task_head(EmbeddingConfig("mlp", 6, 10)).eval()
    file = vitrail.save(model, tmp_path / "grafit.safetensors")
    cost = json.loads(run_cli("info", file, "--json")[1])["cost"]
    assert cost["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert "with the head of the task" in run_cli("info", file)[1]
    assert "task_head" in cli_error("convert", file, tmp_path / "trunk.pth")
    assert run_cli("convert", file, tmp_path / "trunk.pth", "--trunk", "--check")[0] == 0
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(vitrail.load(tmp_path / "trunk.pth").features(images).pooled, model.features(images).pooled)


def test_convert_rejects_what_the_format_cannot_store(deit_file, run_cli, cli_error, tmp_path):
    assert "activation=gelu" in cli_error("convert", deit_file, tmp_path / "out.npz", "--format", "npz")
    assert not list(tmp_path.iterdir())
    assert run_cli("convert", deit_file, tmp_path / "out.npz", "--format", "npz", "--approximate", "--check")[0] == 0
    assert "choose from vitrail, deit" in cli_error("convert", deit_file, tmp_path / "x.onnx", "--format", "onnx")


def test_bad_input_gives_one_message(deit_file, run_cli, cli_error, tmp_path):
    result = run("convert", tmp_path / "none.pth", tmp_path / "out.safetensors")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "no file" in result.stderr
    assert "nearest are" in cli_error("info", "deit_smal")
    assert "No model matches" in cli_error("models", "zzz")
    assert "not an image size" in cli_error("info", "deit_tiny_patch16", "--image-size", "big")
    assert "smaller than one patch" in cli_error("info", "deit_tiny_patch16", "--image-size", "8")
    (tmp_path / "text.pth").write_text("hello, this is not a checkpoint")
    assert "not a safetensors" in cli_error("info", tmp_path / "text.pth")
    assert "EMA" in cli_error("convert", deit_file, tmp_path / "out.safetensors", "--ema")
    (tmp_path / "folder.safetensors").mkdir()
    assert "is a folder" in cli_error("convert", deit_file, tmp_path / "folder.safetensors")
    assert "must end in .npz" in cli_error("convert", deit_file, tmp_path / "out.pth", "--format", "npz")
    assert "is also the input" in cli_error("convert", deit_file, deit_file, "--overwrite")
    (tmp_path / "old.safetensors").write_bytes(b"old")
    assert "exists: give another name, or --overwrite" in cli_error("convert", deit_file, tmp_path / "old.safetensors")
    assert (tmp_path / "old.safetensors").read_bytes() == b"old"
    assert run_cli("convert", deit_file, tmp_path / "old.safetensors", "--overwrite")[0] == 0
    assert "no file" in cli_error("info", "deit_small_patch16_224.pth")
    assert "no model" in cli_error("info", "x" * 300)
    assert "cannot be written" in cli_error("convert", deit_file, "/etc/passwd/x.safetensors")
    assert "exceeds the limit of 2000" in cli_error("info", "vit_small_patch16_99999x9")
    assert "not an image size" in cli_error("info", "deit_tiny_patch16", "--image-size", "²")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_keeps_the_old_file(deit_file, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        (disk / "out.safetensors").write_text("the old file")
        result = run("convert", deit_file, disk / "out.safetensors", "--overwrite")
        assert result.returncode == 2, result.stderr
        assert "Traceback" not in result.stderr
        assert "could not be written" in result.stderr
        assert [entry.name for entry in disk.iterdir()] == ["out.safetensors"]
        assert (disk / "out.safetensors").read_text() == "the old file"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- training

SHORT = ("--set", "architecture.width=16", "--set", "architecture.depth=1", "--set", "batch_size=8", "--workers", "0")


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """Six steps on the built-in images, in a process of its own."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    options = ("--set", "schedule.length=6 steps", "--save-steps", 3, "--log-steps", 1, "--seed", 3)
    result = run("train", "digits", *SHORT, *options, "--out", folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_train(digits_run):
    folder, result = digits_run
    assert "digits: 1,295 training and 142 validation images, 10 classes" in result.stderr
    assert "image size set to 8 x 8: the images' median shorter side is 8 pixels" in result.stderr
    assert "batch size 8 = 1 x CPU x 1 accumulation x 8" in result.stderr
    assert "test top-1" in result.stderr
    assert result.stderr.strip().endswith(f"weights {folder / 'best.safetensors'}")
    assert "best" in result.stdout
    facts = json.loads((folder / "run.json").read_text())
    assert facts["command"].startswith("vitrail train digits --set architecture.width=16")
    assert (facts["steps"], facts["best"]["step"], facts["recipe"]["seed"]) == (6, 6, 3)
    assert facts["test"]["images"] == 360
    assert sum(map(sum, facts["confusion"]["matrix"])) == 142
    assert len(facts["mistakes"]) == 16
    assert vitrail.load(folder).class_names == list("0123456789")


def test_resume_continues_and_writes_the_report(digits_run, tmp_path):
    folder = shutil.copytree(digits_run[0], tmp_path / "run")
    before = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "checkpoints" / "step-000000006.safetensors").unlink()
    (folder / "report.html").unlink()
    result = run("resume", folder, "--device", "cpu", "--workers", "0")
    assert result.returncode == 0, result.stderr
    assert "resuming at step 3 of 6" in result.stderr
    after = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) | {"speed": 0} for line in after] == [json.loads(line) | {"speed": 0} for line in before]
    assert (folder / "report.html").exists()


def test_a_run_directory_inside_the_data_is_rejected(cli_error, tmp_path):
    make_folder(tmp_path / "photos", {"ant": 3, "bee": 3})
    said = cli_error("train", tmp_path / "photos", "--out", tmp_path / "photos" / "run")
    assert "is inside the data" in said
    assert not (tmp_path / "photos" / "run").exists()


def test_resume_of_a_finished_run(digits_run, run_cli, cli_error, tmp_path):
    code, _, said = run_cli("resume", digits_run[0], "--workers", "0")
    assert code == 0
    assert "This run is finished" in said
    assert "has no run.json" in cli_error("resume", tmp_path)
    assert "is not a run directory" in cli_error("resume", tmp_path / "nowhere")


def test_train_with_a_recipe_file(digits_run, run_cli, cli_error, tmp_path):
    code, _, said = run_cli(
        "train", "digits", "--recipe", digits_run[0] / "recipe.yaml", "--workers", "0", "--out", tmp_path / "run"
    )
    assert code == 0, said
    first, second = vitrail.load(digits_run[0]), vitrail.load(tmp_path / "run")
    assert all(torch.equal(tensor, first.state_dict()[name]) for name, tensor in second.state_dict().items())
    for name, text, sentence in (
        ("missing.yaml", None, "No such file"),
        ("broken.yaml", "a: [1,", "is not YAML"),
        ("list.yaml", "- 1", "is a group of settings, not [1]"),
        ("unknown.yaml", "optimizr: {lr: 1}", "A recipe has no 'optimizr'"),
        ("numbers.yaml", "optimizer: {lr: fast}", "optimizer.lr='fast' should be a number"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        assert sentence in cli_error("train", "digits", "--recipe", tmp_path / name)
    (tmp_path / "own.yaml").write_text("optimizer: {lr: 1e-3}")  # which YAML takes for text
    assert open_recipe(str(tmp_path / "own.yaml")).optimizer.lr == 1e-3


def test_from_weights(digits_run, run_cli, tmp_path):
    options = ("--from", digits_run[0], "--workers", "0", "--set", "schedule.length=1 steps", "--set", "init.scope=head")
    code, _, said = run_cli("train", "digits", *options, "--out", tmp_path / "run")
    assert code == 0, said
    assert "starting from" in said
    before, after = vitrail.load(digits_run[0]), vitrail.load(tmp_path / "run")
    changed = [name for name, tensor in after.state_dict().items() if not torch.equal(tensor, before.state_dict()[name])]
    assert {name for name in changed if "running" not in name and "tracked" not in name} <= {"head.weight", "head.bias"}


def memory(said):
    return int(re.search(r"; (\d+) MB of ", said)[1])


def test_plan_has_the_options_of_train():
    """A training is planned by replacing `train` by `plan` in its command."""
    assert signature(train.plan).parameters.keys() == signature(train.train).parameters.keys()


def test_plan_writes_nothing(run_cli, cli_error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, whole, _ = run_cli("plan", "digits", "--device", "cpu")
    assert code == 0
    assert "608,906 parameters" in whole
    assert "30 epochs of 20 steps, about" in whole
    code, said, _ = run_cli(
        "plan", "digits", "--recipe", "deit_tiny", "--set", "augmentation.image_size=32", "--micro-batch-size", "8"
    )
    assert "batch size 1024 = 1 x CPU x 128 accumulation x 8" in said
    words = (
        "--recompute --no-compile --seed 3 --seeds 2 --workers 0 --bad fatal --on-nan skip --save-steps 5 --keep 1 --log-steps 2"
    )
    code, fewer, _ = run_cli("plan", "digits", "--out", "run", "--save-every", "0.5", *words.split())
    assert code == 0
    assert "30 epochs of 20 steps, about" in fewer
    assert "; all 2 trainings about" in fewer
    assert memory(fewer) < memory(whole)  # blocks are computed again
    assert "start with torchrun" in cli_error("plan", "digits", "--shard")
    assert "starts from pre-trained weights" in cli_error("plan", "digits", "--recipe", "deit_base_to_384")
    assert list(tmp_path.iterdir()) == []


def test_recipes_as_a_table_and_as_json(run_cli, cli_error):
    _, table, _ = run_cli("recipes", "--all")
    assert max(map(len, table.splitlines())) <= 120
    assert all(f"\n  {name} " in table for name in list_recipes())
    _, table, _ = run_cli("recipes", "deit*384")
    assert re.search(r"deit_base_to_384 +512  30 epochs", table)
    assert "    from deit_base\n" in "\n".join(line.rstrip() for line in table.splitlines())
    assert "83.1 % top-1 on ImageNet" in table
    assert "starts from weights given with --from" in table
    assert "cait" not in table
    _, text, _ = run_cli("recipes", "--json", "laptop")
    assert list(json.loads(text)) == ["laptop"]
    assert "No recipe matches 'zzz'" in cli_error("recipes", "zzz")
    assert "Usage" in run_cli("recipes", "--help")[1]


def test_recipes_show(run_cli, cli_error):
    _, text, _ = run_cli("recipes", "show", "deit_small", "--set", "optimizer.lr=3e-4", "--set", "architecture.drop_path=0.2")
    assert "lr: 0.0003" in text
    assert yaml.safe_load(text)["architecture"] == {"drop_path": 0.2}
    _, text, _ = run_cli("recipes", "show", "deit_small", "--json")
    assert vitrail.Recipe.from_dict(json.loads(text)) == lookup("deit_small")
    assert "the nearest are" in cli_error("recipes", "show", "deit_smal")


def test_set_of_every_kind_of_value(run_cli, cli_error):
    settings = {
        "augmentation.image_size": ("24x32", [24, 32]),
        "augmentation.scale": ("[0.5, 1]", [0.5, 1.0]),
        "optimizer.betas": ("0.8", [0.8, 0.8]),
        "optimizer.nesterov": ("false", False),
        "ema.evaluate": ("yes", True),
        "batch_size": ("1e3", 1000),
        "optimizer.lr": ("3e-4", 3e-4),
        "schedule.length": ("20000 steps", "20000 steps"),
        "init.scope": ("last:3", "last:3"),
        "architecture.stem": ("hmlp", "hmlp"),
        "architecture.qkv_bias": ("false", False),
        "architecture.stem_strides": ("[4, 2, 2]", [4, 2, 2]),
        "name": ("mine = a, b", "mine = a, b"),
    }
    changes = [word for key, (text, _) in settings.items() for word in ("--set", f"{key}={text}")]
    tree = json.loads(run_cli("recipes", "show", "deit_small", "--json", *changes)[1])
    for key, (_, value) in settings.items():
        node = tree
        for part in key.split("."):
            node = node[part]
        assert node == value, key
    for change, sentence in (
        ("optimizer.lrr=1", "the nearest are optimizer.lr"),
        ("architecture.drop_pth=0.1", "did you mean drop_path"),
        ("optimizer=adam", "optimizer is a group of settings: set one of them, such as optimizer.kind"),
        ("seed", "--set takes KEY=VALUE, not 'seed'"),
        ("augmentation.image_size=[1,2,3]", "should be 2 numbers"),
        ("optimizer.nesterov=maybe", "should be true or false"),
        ("optimizer.kind=sgdm", "choose from adamw"),
    ):
        assert sentence in cli_error("recipes", "show", "deit_small", "--set", change)


def test_a_nan_loss_is_recorded_and_replayed(run_cli, cli_error, tmp_path):
    wild = (*SHORT, "--set", "optimizer.lr=1e30", "--set", "schedule.warmup=0 steps", "--set", "schedule.length=9 steps")
    code, _, errors = run_cli("train", "digits", *wild, "--log-steps", "1", "--out", tmp_path / "run")
    assert code == 2
    (bundle,) = (tmp_path / "run").glob("not-finite-*")
    assert f"`vitrail replay {bundle}` shows where it started" in errors.splitlines()[-1]
    code, said, _ = run_cli("replay", bundle, "--device", "cpu")
    assert code == 0
    assert "first output with NaN or Inf" in said
    assert "The run recorded the same." in said
    found = json.loads(run_cli("replay", bundle, "--json", "--device", "cpu")[1])
    assert found["recorded"]["step"] == found["replayed"]["step"]
    assert "is not a complete bundle" in cli_error("replay", tmp_path)
    assert "give the folder that the error message named" in cli_error("replay", tmp_path / "nothing")


def test_convert_checks_for_nan_weights(cli_error, tmp_path):
    model = vitrail.create("vitrail_mini", 2, 32, depth=1)
    torch.nn.init.constant_(model.head.weight, torch.nan)
    vitrail.save(model, tmp_path / "nan.safetensors")
    said = cli_error("convert", tmp_path / "nan.safetensors", tmp_path / "out.safetensors", "--check")
    assert f"The logits of {tmp_path / 'nan.safetensors'} are NaN or Inf: its weights are damaged." in said


def test_invalid_options_of_train(run_cli, cli_error, tmp_path):
    out = ("--out", tmp_path / "run")
    assert "does not exist" in cli_error("train", tmp_path / "nowhere", *out)
    for epochs in ("-1", "0", "inf", "nan"):
        assert f"epochs={epochs} is not a valid length" in cli_error("train", "digits", "--epochs", epochs, *out)
    assert "less than one step" in cli_error("train", "digits", "--epochs", "0.001", *out)
    assert "the nearest are deit_small" in cli_error("train", "digits", "--recipe", "deit_smal", *out)
    assert "--on-nan wait is not known: choose stop or skip" in cli_error("train", "digits", "--on-nan", "wait", *out)
    assert "--unreadable hide is not known: choose skip or fatal" in cli_error("train", "digits", "--bad", "hide", *out)
    if not torch.cuda.is_available():
        assert "No CUDA device is available: give --device cpu." in cli_error("train", "--device", "cuda", *out)
    for words in (("--micro-batch-size", "0"), ("--workers", "-1"), ("--epochs", "many"), ("--log-steps", "-1"), ("--nonsense",)):
        code, _, said = run_cli("train", "digits", *words, *out)
        assert code == 2
        assert words[0] in said
    assert list(tmp_path.iterdir()) == []


def test_three_lines_of_python(tmp_path):
    changes = {"schedule.length": "1 steps", "architecture.depth": 1}
    run = vitrail.train("digits", recipe="laptop", out=tmp_path / "run", changes=changes, device="cpu", workers=0)
    model = vitrail.load(run.artifact)
    assert (model.class_names[run.best["top1"] > 1], run.finished) == ("0", True)
    assert {"train", "resume", "Recipe"} <= set(dir(vitrail))


def test_the_command_starts_without_torch():
    code = "import sys, vitrail.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_openmp_spinning_is_limited_unless_configured(monkeypatch):
    for environment, expected in (
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ):
        monkeypatch.setattr("os.environ", dict(environment))
        main.limit_openmp_spinning()
        assert os.environ == expected


# --- predicting


def test_predict(digits_run, run_cli, tmp_path):
    source = make_folder(tmp_path / "some [bold]", ["x"], 2, (8, 8))
    code, said, _ = run_cli("predict", digits_run[0], source, "--top", "2", "--device", "cpu")
    assert code == 0
    assert "some [bold]/x/000.png" in said
    assert max(map(len, said.splitlines())) <= 120
    bad = write_invalid_image(tmp_path / "bad.png")
    code, said, complaints = run_cli("predict", digits_run[0] / "best.safetensors", source, "--json", bad)
    assert code == 1
    assert "bad.png: not a JPEG" in complaints
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["image"] for line in lines] == [str(source / "x" / "000.png"), str(source / "x" / "001.png")]
    assert all(len(line["classes"]) == 5 and line["classes"][0].keys() == {"index", "name", "probability"} for line in lines)


def test_predict_the_built_in_images(digits_run):
    result = run("predict", digits_run[0], "digits", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert "test image 15 of digits" in result.stdout
    assert "label" in result.stdout.splitlines()[0].split()


def test_predict_without_readable_images(digits_run, run_cli, cli_error, tmp_path):
    for bad in (tmp_path / "none.png", write_invalid_image(tmp_path / "bad.png")):
        code, said, errors = run_cli("predict", digits_run[0], bad)
        assert (code, said, errors.splitlines()[1:]) == (2, "", ["No image could be read."])
    message = cli_error("predict", tmp_path / "none.safetensors", tmp_path / "bad.png")
    assert "There is no file" in message
    assert message.endswith("Give a checkpoint, a run directory, or one of the names in docs/weights.md.")
    assert "is not a safetensors" in cli_error("predict", tmp_path / "bad.png", tmp_path / "bad.png")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_full_standard_output():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vitrail", "models"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "The disk is full: free disk space, or write elsewhere.\n")
