"""What a static page stores: which images, and how much of the attention."""

import base64
import gzip
import json
import re

import numpy as np
import pytest

from tests.explore.models import CLASSES, explored
from tests.explore.test_collection import collect
from tests.images import make_folder
from vitrail.explore import static_page
from vitrail.explore.explorer import Explorer
from vitrail.explore.static_page import choose_rows, plan_layers, write_static_page


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("images") / "photos", CLASSES, 4, (48, 48))
    model = explored()
    return Explorer([model], collect(folder, model))


def read_data(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def test_confident_errors_and_others_at_equal_distances(explorer):
    first = explorer.collection.scans[0]
    rows = choose_rows(explorer.collection, 6)
    wrong = np.flatnonzero(first.wrong)
    assert (len(rows), rows) == (6, sorted(set(rows)))
    most_confident = wrong[np.argsort(-first.probability[wrong], kind="stable")][:3]
    assert set(most_confident.tolist()) <= set(rows)
    assert choose_rows(explorer.collection, 99) == list(range(12))


def test_attention_is_reduced_to_the_budget():
    model = explored()  # 3 layers of 2 heads and 16 x 16 weights
    assert plan_layers(model, 6 * 256) == [(0, 2), (1, 2), (2, 2)]
    assert plan_layers(model, 6 * 256 - 1) == [(0, 1), (1, 1), (2, 1)]
    assert plan_layers(model, 3 * 256 - 1) == [(0, 1), (2, 1)]
    assert plan_layers(model, 256) == [(2, 1)]
    assert plan_layers(model, 255) == []


def test_the_bytes_are_those_of_the_server(explorer, tmp_path, monkeypatch):
    model = explorer.models[0]
    write_static_page(tmp_path / "page.html", "small", explorer, 2)
    data = read_data(tmp_path / "page.html")
    row = int(choose_rows(explorer.collection, 2)[0])
    opened = model.opened[f"c{row}"]
    (entry,) = data["stored"]["images"][0]
    block = gzip.decompress(base64.b64decode(entry["block"]))
    layer, start, queries = entry["attention"][1]
    expected, prefix = model.attention(opened, layer, 3)
    assert queries == 17  # the class token first
    place = 4 * 2  # maps before those of patch 3: two heads of each query
    assert np.allclose(np.frombuffer(block, "<f4", 2, start + 4 * place), expected.peaks)
    assert np.allclose(np.frombuffer(block, "<f4", 2, start + 4 * 34 + 4 * place), prefix)
    stored = np.frombuffer(block, np.uint8, 32, start + 8 * 34 + 16 * place).reshape(2, 16)
    assert np.abs(stored.astype(int) - expected.values).max() <= 2
    for method, target, start, peak in entry["maps"]:
        found = model.relevance(opened, method, target)
        assert (block[start : start + 16], peak) == (found.values.tobytes(), found.peaks[0])
    assert data["collection"]["notes"] == []

    monkeypatch.setattr(static_page, "ATTENTION_BYTES", 2 * 600)
    smaller = write_static_page(tmp_path / "page.html", "small", explorer, 2)
    data = read_data(tmp_path / "page.html")
    assert [layer["heads"] for layer in data["models"][0]["layers"]] == [1, 1]
    assert data["collection"]["notes"] == ["of the attention of small this file has 2 of 3 blocks and the mean of the heads"]
    assert explorer.describe()["collection"]["notes"] == []
    assert smaller == (tmp_path / "page.html").stat().st_size
