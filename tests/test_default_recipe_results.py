import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.default_recipes.__main__ import RESULTS, main, table
from vitrail.errors import UserError

PAGE = Path(__file__).parents[1] / "docs" / "default-recipes.md"


@pytest.mark.parametrize("data", ["tiny-imagenet", "cifar10"])
def test_the_page_has_what_was_kept(data):
    assert table(data) in PAGE.read_text(encoding="utf-8")


def test_kept_runs_tell_how_to_make_them_again():
    for path in RESULTS.glob("*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        assert run["command"].startswith(f"vitrail train {run['data']['name']}/ --recipe {run['recipe']['name']}")
        assert {"torch", "python"} <= run["versions"].keys()
        assert run["git"]
        assert run["device"]
        assert run["validations"][-1]["epoch"] == pytest.approx(float(run["recipe"]["schedule"]["length"].split()[0]))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a finished run; what is kept of it goes beside it."""
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


def test_a_run_is_kept_without_its_machines_paths(run, tmp_path, capsys):
    main(["keep", str(run), "mine", "--data", "flowers"])
    text = (tmp_path / "flowers-mine.json").read_text()
    assert "/far" not in text
    assert json.loads(text)["command"] == "vitrail train flowers/ --recipe small --set token_labels.store=store"
    main(["table", "flowers"])
    assert "| `mine` | 1.0 M | 2.00 G | 1 | 50.00 % | 50.00 % of 1 | 0.0 | 6 | 6 |  |" in capsys.readouterr().out


def refused(sentence, *words):
    with pytest.raises(UserError, match=sentence):
        main(list(map(str, words)))


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


def test_what_is_no_finished_run_is_refused(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    for name in ("missing", "empty", "image.png"):
        refused("is not the folder of a run", "keep", tmp_path / name, "mine", "--data", "flowers")
    facts = json.loads((run / "run.json").read_text())
    for change, sentence in (
        ({"steps": None, "seconds": None}, "has not come to its end: finish it with `vitrail resume"),
        ({"command": None}, "does not describe a training: it has no command"),
        ({"recipe": {"name": "small"}}, "does not describe a training: it has no batch"),
        (dict.fromkeys(facts), "does not describe a training"),
    ):
        (run / "run.json").write_text(json.dumps({key: value for key, value in (facts | change).items() if value is not None}))
        refused(sentence, "keep", run, "mine", "--data", "flowers")
    (run / "run.json").write_text(json.dumps(facts))
    write_lines(run, [])
    refused("has no validations", "keep", run, "mine", "--data", "flowers")
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("word", ["", "..", "../mine", "a/b", "a..b", ".mine", "mine\n"])
def test_names_stay_in_their_folder(run, word):
    refused("becomes part of a file's name", "keep", run, word, "--data", "flowers")
    refused("becomes part of a file's name", "keep", run, "mine", "--data", word)


def test_what_was_kept_is_not_replaced_unasked(run, tmp_path):
    path = tmp_path / "flowers-mine.json"
    path.write_text("precious")
    refused("There is a flowers-mine.json already", "keep", run, "mine", "--data", "flowers")
    assert path.read_text() == "precious"
    main(["keep", str(run), "mine", "--data", "flowers", "--replace"])
    assert json.loads(path.read_text())["name"] == "mine"


def test_tables_that_cannot_be(run, tmp_path):
    refused("No run on 'nosuch' was kept; there are runs on nothing yet", "table", "nosuch")
    main(["keep", str(run), "mine", "--data", "flowers"])
    refused("No run on 'nosuch' was kept; there are runs on flowers", "table", "nosuch")
    for text in ("{}", "[]", "no JSON", '{"data": {"name": "flowers"}, "validations": []}'):
        (tmp_path / "foreign.json").write_text(text)
        refused("foreign.json is not a run that was kept here", "table", "flowers")


def test_the_command_line_tells_it(tmp_path):
    words = [sys.executable, "-m", "benchmarks.default_recipes", "keep", tmp_path / "missing", "mine", "--data", "flowers"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=PAGE.parents[1])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("house: ")
    assert done.stderr.count("\n") == 1
