import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.default_recipes.__main__ import RESULTS, main, table
from vitrail.aliases import upgrade_run
from vitrail.errors import UserError

PAGE = Path(__file__).parents[1] / "docs" / "default-recipes.md"


@pytest.mark.parametrize("data", ["tiny-imagenet", "cifar10"])
def test_the_page_has_the_stored_runs(data):
    assert table(data) in PAGE.read_text(encoding="utf-8")


def test_stored_runs_are_reproducible():
    for path in RESULTS.glob("*.json"):
        run = upgrade_run(json.loads(path.read_text(encoding="utf-8")))
        assert run["command"].startswith(f"vitrail train {run['data']['name']}/ --recipe {run['recipe']['name']}")
        assert {"torch", "python"} <= run["versions"].keys()
        assert run["git"]
        assert run["device"]
        assert run["validations"][-1]["epoch"] == pytest.approx(float(run["recipe"]["schedule"]["length"].split()[0]))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run directory; results are stored next to it."""
    monkeypatch.setattr("benchmarks.default_recipes.__main__.RESULTS", tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    recipe = {
        "batch_size": 4,
        "schedule": {"length": "1 epochs"},
        "tokens": {"labels": "/far/away/store"},
        "about": {"paper": "house"},
    }
    facts = {"source": "/far/data", "recipe": recipe, "seconds": 2.0, "steps": 3, "model": {"parameters": 1e6, "macs": 2e9}}
    facts |= {"command": "vitrail train /far/data --recipe small --out /far/run --set token_labels.store=/far/away/store"}
    facts |= {"machine": {"device": "a card"}, "data": {"name": "/far/data", "train": 8, "validation": 2, "fingerprint": "f"}}
    (run / "run.json").write_text(json.dumps(facts))
    speed = {"images_per_second": 6.0}
    lines = [{"step": step, "epoch": step / 3, "kind": "train", "speed": speed} for step in (1, 2, 3)]
    lines += [{"step": 3, "epoch": 1.0, "kind": "validation", "top1": 0.5, "top5": 1.0, "loss": 1.0, "images": 2}]
    write_lines(run, lines)
    return run


def write_lines(run, lines):
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_machine_paths_are_removed(run, tmp_path, capsys):
    main(["keep", str(run), "mine", "--data", "flowers"])
    text = (tmp_path / "flowers-mine.json").read_text()
    assert "/far" not in text
    assert json.loads(text)["command"] == "vitrail train flowers/ --recipe small --set token_labels.store=store"
    main(["table", "flowers"])
    assert "| `mine` | 1.0 M | 2.00 G | 1 | 50.00 % | 50.00 % of 1 | 0.0 | 6 | 6 |  |" in capsys.readouterr().out


def rejected(message, *args):
    with pytest.raises(UserError, match=message):
        main(list(map(str, args)))


def test_a_run_of_few_classes_and_steps(run, tmp_path):
    speed = {"images_per_second": 6.0}
    lines = [{"step": 1, "epoch": 1.0, "kind": "train", "speed": speed}]
    lines += [{"step": 1, "epoch": 1.0, "kind": "validation", "top1": 0.5, "loss": 1.0, "images": 2}]
    write_lines(run, lines)
    main(["keep", str(run), "mine", "--data", "flowers"])
    found = json.loads((tmp_path / "flowers-mine.json").read_text())
    assert found["validations"] == [{"epoch": 1.0, "top1": 0.5, "loss": 1.0}]
    assert found["fastest_images_per_second"] == 6.0
    assert "| `mine` |" in table("flowers")


def test_what_is_no_finished_run_is_rejected(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    for name in ("missing", "empty", "image.png"):
        rejected("is not a run directory", "keep", tmp_path / name, "mine", "--data", "flowers")
    facts = json.loads((run / "run.json").read_text())
    for change, message in (
        ({"steps": None, "seconds": None}, "is not finished: continue it with `vitrail resume"),
        ({"command": None}, "does not describe a training: it has no command"),
        ({"recipe": {"name": "small"}}, "does not describe a training: it has no batch_size"),
        (dict.fromkeys(facts), "does not describe a training"),
    ):
        (run / "run.json").write_text(json.dumps({key: value for key, value in (facts | change).items() if value is not None}))
        rejected(message, "keep", run, "mine", "--data", "flowers")
    (run / "run.json").write_text(json.dumps(facts))
    write_lines(run, [])
    rejected("has no validations", "keep", run, "mine", "--data", "flowers")
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("word", ["", "..", "../mine", "a/b", "a..b", ".mine", "mine\n"])
def test_names_cannot_leave_the_directory(run, word):
    rejected("becomes part of a file name", "keep", run, word, "--data", "flowers")
    rejected("becomes part of a file name", "keep", run, "mine", "--data", word)


def test_stored_runs_are_not_replaced_by_default(run, tmp_path):
    path = tmp_path / "flowers-mine.json"
    path.write_text("precious")
    rejected("flowers-mine.json already exists", "keep", run, "mine", "--data", "flowers")
    assert path.read_text() == "precious"
    main(["keep", str(run), "mine", "--data", "flowers", "--replace"])
    assert json.loads(path.read_text())["name"] == "mine"


def test_invalid_tables(run, tmp_path):
    rejected("No run on 'nosuch' is stored; there are runs on no data yet", "table", "nosuch")
    main(["keep", str(run), "mine", "--data", "flowers"])
    rejected("No run on 'nosuch' is stored; there are runs on flowers", "table", "nosuch")
    for text in ("{}", "[]", "no JSON", '{"data": {"name": "flowers"}, "validations": []}'):
        (tmp_path / "foreign.json").write_text(text)
        rejected("foreign.json is not a stored run", "table", "flowers")


def test_errors_on_the_command_line(tmp_path):
    words = [sys.executable, "-m", "benchmarks.default_recipes", "keep", tmp_path / "missing", "mine", "--data", "flowers"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=PAGE.parents[1])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("default_recipes: ")
    assert done.stderr.count("\n") == 1
