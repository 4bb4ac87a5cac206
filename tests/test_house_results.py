import json
from pathlib import Path

import pytest

from benchmarks.house.__main__ import RESULTS, main, table

PAGE = Path(__file__).parents[1] / "docs" / "house.md"


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


def test_a_run_is_kept_without_its_machines_paths(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    run.mkdir()
    recipe = {
        "batch": 4,
        "schedule": {"length": "1 epochs"},
        "tokens": {"labels": "/far/away/store"},
        "about": {"paper": "house"},
    }
    facts = {"source": "/far/data", "recipe": recipe, "seconds": 2.0, "steps": 3, "model": {"parameters": 1e6, "macs": 2e9}}
    facts |= {"command": "vitrail train /far/data --recipe small --out /far/run --set tokens.labels=/far/away/store"}
    facts |= {"machine": {"device": "a card"}, "data": {"name": "/far/data", "train": 8, "validation": 2, "fingerprint": "f"}}
    (run / "run.json").write_text(json.dumps(facts))
    speed = {"images_per_second": 6.0}
    lines = [{"step": step, "epoch": step / 3, "kind": "train", "speed": speed} for step in (1, 2, 3)]
    lines += [{"step": 3, "epoch": 1.0, "kind": "validation", "top1": 0.5, "top5": 1.0, "loss": 1.0, "pictures": 2}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("benchmarks.house.__main__.RESULTS", tmp_path)
    main(["keep", str(run), "mine", "--data", "flowers"])
    text = (tmp_path / "flowers-mine.json").read_text()
    assert "/far" not in text
    assert json.loads(text)["command"] == "vitrail train flowers/ --recipe small --set tokens.labels=store"
    main(["table", "flowers"])
    assert "| `mine` | 1.0 M | 2.00 G | 1 | 50.00 % | 50.00 % of 1 | 0.0 | 6 | 6 |  |" in capsys.readouterr().out
