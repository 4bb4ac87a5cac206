"""Claims: every variant builds a network, one claim is trained up to its table; provenance of results, and the printed page."""

import json
import re
import shlex
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import trials
from benchmarks.evidence.__main__ import main
from benchmarks.evidence.claims import CLAIMS
from benchmarks.evidence.findings import FINDINGS
from benchmarks.evidence.page import RESULTS, Field, table
from benchmarks.evidence.provenance import FILES, commit, common, describe_file, difference, load_results, needs
from vitrail.models.registry import create
from vitrail.recipes import lookup

VARIANTS = [(name, variant) for name, claim in CLAIMS.items() for variant in claim.variants]


@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=lambda part: part)
def test_a_variant_builds_a_network(name, variant):
    claim = CLAIMS[name]
    changes = {key: value for key, value in (claim.base | claim.variants[variant]).items() if key not in FILES.values()}
    changes.pop("first", None)
    recipe = lookup(claim.recipe).set(changes)
    if claim.recipe == "finetune":
        return
    size, patch = (64, 8) if claim.data == "tiny-imagenet" else (32, 4)
    parts = {"patch_size": patch} | recipe.architecture
    with torch.device("meta"):
        create(recipe.model, 10, size, **parts)


SMALL = [
    "--device=cpu",
    "--set=precision=fp32",
    "--set=architecture.width=48",
    "--set=architecture.heads=2",
    "--set=batch_size=64",
]
RUN = ["run", "class attention", "--data=digits", "--epochs=1", *SMALL, "--set=architecture.depth=2"]
SHA = "0" * 64
TEACHER = {"name": "teacher.pt", "sha256": SHA}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A directory with results of two variants of a claim, two seeds each."""
    folder = tmp_path_factory.mktemp("results")
    main([*RUN, "--seeds=2", f"--results={folder}", "--variants", "class token", "mean"])
    return folder


def rejected(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main([*words])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_from_variants_to_a_table(results, capsys):
    file = results / "class-attention.json"
    content = file.read_text()
    runs = json.loads(content)["runs"]
    assert [(run["cell"], run["seed"]) for run in runs] == [("class token", 0), ("mean", 0), ("class token", 1), ("mean", 1)]
    assert all(0 <= run["top1"] <= 1 and run["versions"]["torch"] and run["seconds"] > 0 for run in runs)
    main(["table", f"--results={results}"])
    page = capsys.readouterr().out
    assert "## Class attention" in page
    assert "| class token | 0.1 M |" in page
    assert page.count(" | 2 | ") == 2
    assert "Not confirmed" not in page  # the findings are about other results


def test_results_record_their_data(results, capsys):
    runs = json.loads((results / "class-attention.json").read_text())["runs"]
    assert {run["data"] for run in runs} == {"digits"}  # not the claim's own set
    assert {len(run["fingerprint"]) for run in runs} == {16}
    assert runs[0]["set"]["architecture.depth"] == runs[0]["changes"]["architecture.depth"] == "2"
    main(["table", f"--results={results}"])
    assert f"On digits (fingerprint {runs[0]['fingerprint']}) at 8 pixels" in capsys.readouterr().out


def test_stored_runs_are_not_repeated(results, capsys):
    before = (results / "class-attention.json").read_text()
    main([*RUN, "--seeds=2", f"--results={results}", "--variants", "mean"])
    assert (results / "class-attention.json").read_text() == before
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2].partition(":")[0] for line in said] == ["mean, seed 0", "mean, seed 1"]
    assert all("already stored" in line for line in said)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--data=pets"], "has results on digits, not on pets"),
        (["--set=batch_size=32"], "has results with --set precision=fp32"),
    ],
    ids=["data", "set"],
)
def test_other_settings_are_rejected(results, capsys, words, why):
    before = (results / "class-attention.json").read_text()
    said = rejected(capsys, *RUN, *words, "--seeds=1", f"--results={results}")
    assert why in said
    assert "--results" in said
    assert (results / "class-attention.json").read_text() == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"data": "flowers"}, "on flowers"),
        ({"fingerprint": "b"}, "other images"),
        ({"set": {"batch_size": "64"}}, "with --set batch_size=64"),
        ({"changes": {"distillation.kind": "soft"}}, "other changes"),
        ({"files": {"teacher": TEACHER | {"name": "moved.pt"}}}, None),
        ({"files": {"teacher": TEACHER | {"sha256": "1" * 64}}}, "another --teacher"),
        ({"files": {"teacher": TEACHER | {"beside": SHA}}}, "another --teacher"),
        ({"files": {}}, "do not record their --teacher"),
        ({"epochs": 7.0}, None),
    ],
)
def test_compatible_results(change, why):
    plan = {"data": "cifar10", "fingerprint": "a", "set": {}, "changes": {"distillation.kind": "hard"}}
    plan |= {"files": {"teacher": TEACHER}}
    stored = plan | {"cell": "hard", "seed": 0, "epochs": 5.0} | change
    found = difference(CLAIMS["distillation"], stored, plan, "hard")
    assert (why in found) if why else found is None
    del stored["fingerprint"]  # of data without a fingerprint the name has to do
    if not why:
        assert difference(CLAIMS["distillation"], stored, plan, "hard") is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["run", "distillation", "--epochs=1"], "needs --teacher"),
        (["run", "distillation", "--epochs=1", "--teacher=nowhere.pt"], "no teacher at"),
        (["run", "stems", "--epochs=1", "--set=optimizer.rat=1"], "optimizer.lr"),
        (["run", "stems", "--epochs=1", "--weights=x"], "would not use --weights"),
        (["run", "stems", "--epochs=1", "--variants", "hmpl"], "no variant hmpl"),
        (["run", "pre-training", "--epochs=1", "--tokenizer=nowhere.safetensors"], "no tokenizer at"),
        (["run", "stems", "--epochs=1", "--set=batch"], "has no value"),
        (["run", "stems", "--epochs=1", "--set=seed=3"], "use --seeds"),
        (["run", "scopes", "--epochs=1", "--set=init.weights=x", "--weights=y"], "use --weights"),
        (["run", "stems", "--epochs=1", "--set=architecture.stem=conv"], "differs between the variants of stems"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_settings_that_would_be_dropped_are_rejected(capsys, tmp_path, words, why):
    said = rejected(capsys, *words, "--data=digits", "--device=cpu", f"--results={tmp_path}")
    assert why in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_files_by_name_and_digest(tmp_path):
    file, store, sums = tmp_path / "teacher.pt", tmp_path / "store", {b"a": "ca978112ca1bbdca", b"b": "3e23e8160039594a"}
    file.write_bytes(b"a")
    store.mkdir()
    (store / "manifest.json").write_bytes(b"b")
    for path, content in ((file, b"a"), (store, b"b")):
        found = describe_file(str(path))
        assert found["name"] == path.name
        assert found["sha256"].startswith(sums[content])
        assert "beside" not in found
        assert str(tmp_path) not in json.dumps(found)
    both = describe_file(f"{file}+{store}/")
    assert (both["name"], len(both["sha256"])) == ("teacher.pt+store", 2 * 64 + 1)
    (tmp_path / "teacher.pt.teacher.json").write_bytes(b"b")
    assert describe_file(str(file))["beside"].startswith(sums[b"b"])
    assert describe_file("vitrail_tiny")["name"] == "vitrail_tiny"
    assert len(describe_file("vitrail_tiny")["sha256"]) == 64
    assert describe_file("timm:resnet50") == {"name": "timm:resnet50", "sha256": None}


def test_a_file_is_recorded_with_the_run_and_in_the_command(tmp_path, capsys, monkeypatch):
    trained = []

    def train(images, claim, changes, epochs):
        trained.append(changes)
        return {"top1": 0.5, "seconds": 1.0, "size": [64, 64], "images": 9, "parameters": 1, "operations": 1}

    monkeypatch.setattr(trials, "train_in_stages", train)
    words = [
        "run",
        "scopes",
        "--data=digits",
        "--epochs=2",
        "--seeds=1",
        "--weights=vitrail_tiny",
        "--device=cpu",
        "--set=batch_size=64",
    ]
    main([*words, f"--results={tmp_path}", "--variants", "ffn"])
    assert trained[0]["init.weights"] == "vitrail_tiny"
    (run,) = json.loads((tmp_path / "scopes.json").read_text())["runs"]
    assert run["files"]["weights"] == describe_file("vitrail_tiny")
    assert "init.weights" not in run["changes"]
    capsys.readouterr()
    main(["table", f"--results={tmp_path}"])
    page = capsys.readouterr().out
    assert "--weights vitrail_tiny --set=batch_size=64 --variants ffn --results again" in page
    assert run["files"]["weights"]["sha256"][:16] in page


def test_changed_code_is_marked(tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True, capture_output=True
        )

    assert commit(tmp_path) == "unknown"
    code, result = tmp_path / "vitrail" / "code.py", tmp_path / "benchmarks" / "evidence" / "results" / "stems.json"
    for file in (code, result):
        file.parent.mkdir(parents=True)
        file.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    result.write_text("2")  # a training writes it itself
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "stems.json").write_text("2")
    assert commit(tmp_path) == clean
    code.write_text("2")
    assert commit(tmp_path) == f"{clean}+changes"


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[1] / "docs" / "evidence.md"
    assert page.read_text() == table(RESULTS), "python -m benchmarks.evidence table > docs/evidence.md"


def test_every_table_has_its_command():
    page = table(RESULTS)
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith("    python -m benchmarks.evidence run ")]
    assert len(commands) == page.count("\n| --- |")
    for words in commands:
        claim = CLAIMS[words[words.index("run") + 1]]
        assert words[words.index("--data") + 1] == claim.data
        assert {word[2:] for word in words} & FILES.keys() == {
            option for variant in claim.variants for option in needs(claim, variant)
        }


def test_results_match_the_claims():
    for file in sorted(RESULTS.glob("*.json")):
        content = load_results(file)
        claim = CLAIMS[content["claim"]]
        for run in content["runs"]:
            own = {key: value for key, value in (claim.base | claim.variants[run["cell"]]).items() if key not in FILES.values()}
            assert run["changes"] == own
            assert common(claim, run) == {}


def test_numbers_of_findings_come_from_the_results():
    assert not [name for name, text in FINDINGS.items() if re.search(r"p = [\d.]|p [<>≈]", text)]
    runs = [
        {"cell": cell, "seed": seed, "epochs": float(epochs), "top1": top1 + seed / 100}
        for cell, epochs, top1 in (("a", 5, 0.5), ("b", 5, 0.6), ("a", 15, 0.7), ("b", 15, 0.75))
        for seed in range(3)
    ]
    points = Field(runs, "mean")
    assert points["a|b|5"] == pytest.approx(10)
    assert points["b|a|15"] == pytest.approx(-5)
    assert points["a|b|5|15"] == pytest.approx(-5)
    with pytest.raises(KeyError):
        points["a|b"]
    runs[-1]["top1"] += 0.01  # differences of 5, 5 and 6
    assert Field(runs, "p")["a|b|15"] == pytest.approx(0.0039, abs=1e-4)


def test_runs_of_other_data_are_not_in_one_table(tmp_path):
    content = json.loads((RESULTS / "stems.json").read_text())
    for run in content["runs"][:3]:
        run["data"] = "digits"
    (tmp_path / "stems.json").write_text(json.dumps(content))
    page = table(tmp_path)
    assert page.count("\n| --- |") == 2
    assert "--data digits" in page
    assert "--data cifar10" in page


def test_a_variant_of_two_stages(tmp_path):
    words = ["run", "resolution", "--data=digits", "--epochs=1", "--seeds=1", "--set=architecture.depth=1"]
    main([*words, *SMALL, f"--results={tmp_path}"])
    once, twice = json.loads((tmp_path / "resolution.json").read_text())["runs"]
    assert once["size"] == twice["size"] == [32, 32]
    assert abs(once["steps"] - twice["steps"]) <= 2


def test_runs_of_another_process_are_kept(tmp_path, monkeypatch):
    """Two processes train variants of one claim at the same time; pre-training is named beside the epochs with labels."""
    result = {"top1": 0.5, "seconds": 1.0, "size": [8, 8], "images": 9, "parameters": 1, "operations": 1}
    words = ["run", "pre-training of MLPs", "--data=digits", "--epochs=2", "--seeds=1", "--device=cpu"]
    words += [f"--results={tmp_path}", "--variants"]

    def train_the_other_meanwhile(images, claim, changes, epochs):
        monkeypatch.setattr(trials, "train_in_stages", lambda *_: result)
        main([*words, "DINO, then labels"])
        return result

    monkeypatch.setattr(trials, "train_in_stages", train_the_other_meanwhile)
    main([*words, "labels alone"])
    runs = json.loads((tmp_path / "pre-training-of-MLPs.json").read_text())["runs"]
    assert {run["cell"] for run in runs} == {"labels alone", "DINO, then labels"}
    assert "at 8 pixels, 2 epochs with labels (pre-training: 30 epochs without), evaluated on 9 images" in table(tmp_path)


def test_runs_that_end_at_the_same_time_are_kept(tmp_path, monkeypatch):
    """While one process writes its run, the other, whose training has ended too, waits."""
    result = {"top1": 0.5, "seconds": 1.0, "size": [8, 8], "images": 9, "parameters": 1, "operations": 1}
    words = [
        "run",
        "stems",
        "--data=digits",
        "--epochs=2",
        "--seeds=1",
        "--device=cpu",
        f"--results={tmp_path}",
        "--variants=linear",
    ]
    other = threading.Thread(target=main, args=([*words, "--first-seed=5"],))
    write = trials.atomic_write_text

    def write_slowly(path, text):
        monkeypatch.setattr(trials, "atomic_write_text", write)
        other.start()
        other.join(2)
        write(path, text)

    monkeypatch.setattr(trials, "train_in_stages", lambda *_: result)
    monkeypatch.setattr(trials, "atomic_write_text", write_slowly)
    main(words)
    other.join()
    assert {run["seed"] for run in json.loads((tmp_path / "stems.json").read_text())["runs"]} == {0, 5}


def test_stages_of_a_variant():
    claim = CLAIMS["pre-training of MLPs"]
    changes = claim.base | claim.variants["DINO, then labels"] | {"seed": 3, "loss.label_smoothing": 0.2, "architecture.width": 8}
    (first, early), (second, late) = trials.divide_into_stages(claim, changes, 15)
    assert (first, second) == ("dino_small", claim.recipe)
    assert (early["schedule.length"], late["schedule.length"]) == ("30 epochs", "15 epochs")
    assert early["task_options.fixed_grid"] == "none"
    assert early["seed"] == late["seed"] == 3
    assert "loss.label_smoothing" not in early  # not of the claim
    assert early["architecture.width"] == 8  # or the weights would not fit
    assert late.keys() == {*claim.base, "seed", "loss.label_smoothing", "architecture.width", "schedule.length"}
    claim = CLAIMS["resolution"]
    changes = claim.base | claim.variants["24 pixels, then 32"]
    (_, early), (_, late) = trials.divide_into_stages(claim, changes, 10)
    assert (early["schedule.length"], late["schedule.length"]) == ("8 epochs", "2 epochs")
    assert (early["optimizer.lr"], late["optimizer.lr"]) == (1e-3, 2e-4)
