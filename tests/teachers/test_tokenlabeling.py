"""Label maps of TokenLabeling: found by name, stored without a change, rejected if classes are ambiguous."""

import shutil

import pytest
import torch

from tests.teachers.predictions import make_source
from vitrail.data.datasets.lookup import open_source
from vitrail.errors import UserError
from vitrail.teachers.label_store import LabelStore
from vitrail.teachers.tokenlabeling import import_token_labels, read_label_map


def write_maps(folder, source, classes=1000, kept=5, grid=(6, 6)):
    """As the released script does: the largest logits and their numbers, stacked, in half precision."""
    made = []
    for index in range(len(source)):
        torch.manual_seed(index)
        values, numbers = (torch.randn(*grid, classes) * 5).topk(kept)
        maps = torch.stack([values.half(), numbers.half()]).permute(0, 3, 1, 2)
        path = folder / ("/".join(source.location(index).split("/")[-2:]).split(".")[0] + ".pt")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(maps, path)
        made.append((values.half().movedim(-1, 0).float(), numbers.movedim(-1, 0)))
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_published_maps_become_a_store(workers, tmp_path):
    source = make_source(tmp_path / "p", 5)
    made = write_maps(tmp_path / "maps", source)
    result = import_token_labels(tmp_path / "maps", source, tmp_path / "s", 1000, workers, shard_size=4)
    assert (result.images, result.shards) == (15, 4)
    store = LabelStore.open(tmp_path / "s")
    rows = store.rows(source)
    values, classes = store.tokens(rows)
    assert torch.equal(values, torch.stack([each for each, _ in made]))
    assert torch.equal(classes, torch.stack([each for _, each in made]))
    assert (store.covers, store.grid, store.classes, store.outputs, store.class_names) == (
        "center",
        (6, 6),
        1000,
        ["tokens"],
        None,
    )
    assert store.dense_targets(rows[:2]).shape == (2, 1000, 6, 6)
    with pytest.raises(UserError, match="zero or drop"):
        store.dense_targets(rows[:2], outside="spread")
    with pytest.raises(UserError, match="contains tokens, not logits"):
        store.logits(rows)


def test_interrupted_import_continues_to_the_same_bytes(tmp_path):
    source = make_source(tmp_path / "p", 4)
    write_maps(tmp_path / "maps", source)
    import_token_labels(tmp_path / "maps", source, tmp_path / "whole", 1000, 0, shard_size=4)
    spare = tmp_path / "maps" / "red" / "003.pt"
    content = spare.read_bytes()
    spare.write_bytes(content[:100])
    with pytest.raises(UserError, match=r"red/003\.pt is damaged"):
        import_token_labels(tmp_path / "maps", source, tmp_path / "cut", 1000, 0, shard_size=4)
    assert (tmp_path / "cut" / "shard-00001.safetensors").exists()
    spare.write_bytes(content)
    result = import_token_labels(tmp_path / "maps", source, tmp_path / "cut", 1000, 0, shard_size=4)
    assert result.reused_shards == 2
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "cut" / file.name).read_bytes() == file.read_bytes()


def test_the_sources_own_classes(tmp_path):
    source = make_source(tmp_path / "p", 2)
    write_maps(tmp_path / "maps", source, classes=3, kept=2)
    import_token_labels(tmp_path / "maps", source, tmp_path / "s", workers=0)
    store = LabelStore.open(tmp_path / "s")
    assert store.class_names == ["blue", "green", "red"]
    assert store.match(["red", "blue"]).tolist() == [2, 0]


def test_classes_that_half_precision_cannot_represent(tmp_path):
    source = make_source(tmp_path / "p", 2)
    write_maps(tmp_path / "maps", source, classes=2048)
    import_token_labels(tmp_path / "maps", source, tmp_path / "s", 2048, 0)
    with pytest.raises(UserError, match="at most 2,048 classes, not 2,049"):
        import_token_labels(tmp_path / "maps", source, tmp_path / "t", 2049, 0)
    torch.save(torch.tensor([5.0, 2051.0]).view(2, 1, 1, 1), tmp_path / "x.pt")  # float32 holds it
    assert read_label_map(tmp_path / "x.pt", 3000)[1].item() == 2051


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (torch.zeros(2, 5, 6), "not a label map"),
        (torch.zeros(3, 5, 6, 6), "not a label map"),
        (torch.zeros(2, 0, 6, 6), "not a label map"),
        (torch.zeros(2, 5, 6, 6, dtype=torch.int64), "not a label map"),
        ({"maps": torch.zeros(2, 5, 6, 6)}, "not a label map"),
        (torch.full((2, 5, 6, 6), torch.nan), "not logits or classes"),
        (torch.full((2, 5, 6, 6), 0.5), "not logits or classes"),
        (torch.full((2, 5, 6, 6), -1.0), "not logits or classes"),
        (torch.full((2, 5, 6, 6), 1000.0), "contains class 1000"),
        (print, "contains more than a tensor"),
    ],
)
def test_files_that_are_not_maps(content, words, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(UserError, match=words):
        read_label_map(tmp_path / "x.pt", 1000)


def test_images_and_maps_that_do_not_match(tmp_path):
    source = make_source(tmp_path / "p", 2)
    write_maps(tmp_path / "maps", source)
    out = tmp_path / "s"
    (tmp_path / "maps" / "green" / "001.pt").unlink()
    with pytest.raises(UserError, match=r"no label map for 1 of 6 images, such as .*green/001\.png"):
        import_token_labels(tmp_path / "maps", source, out, 1000, 0)
    torch.save(torch.zeros(2, 5, 7, 7), tmp_path / "maps" / "green" / "001.pt")
    with pytest.raises(UserError, match="must have the same shape"):
        import_token_labels(tmp_path / "maps", source, out, 1000, 0)
    assert not out.exists()
    with pytest.raises(UserError, match="There is no folder"):
        import_token_labels(tmp_path / "nowhere", source, out, 1000, 0)
    with pytest.raises(UserError, match="has no image files"):
        import_token_labels(tmp_path / "maps", open_source("digits", "test"), tmp_path / "d", 1000, 0)
    shutil.rmtree(tmp_path / "maps")
    write_maps(tmp_path / "maps", source, kept=4)
    import_token_labels(tmp_path / "maps", source, out, 1000, 0)
    shutil.rmtree(tmp_path / "maps")
    write_maps(tmp_path / "maps", source)
    with pytest.raises(UserError, match="written with top k 4"):
        import_token_labels(tmp_path / "maps", source, out, 1000, 0)
    for name in ("same.one.png", "same.two.png"):
        shutil.copy(source.location(0 if "one" in name else 1), tmp_path / "p" / "red" / name)
    for name in ("000.png", "001.png"):
        (tmp_path / "p" / "blue" / name).unlink()
    (tmp_path / "p" / "blue").rmdir()
    with pytest.raises(UserError, match=r"share the label map .*same\.pt"):
        import_token_labels(tmp_path / "maps", open_source(str(tmp_path / "p")), tmp_path / "n", 1000, 0)
