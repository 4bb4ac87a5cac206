"""The examples in README and docs run."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitrail
from docs.draw_grid import draw
from tests.checkpoints.test_formats import little
from tests.cli.test_main import run
from vitrail.heads.task_heads import DetectionConfig, SegmentationConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
EXAMPLES = [page for page in sorted((DOCS / "how-to").glob("*.md")) if "```python" in page.read_text()]
PAGES = [*sorted((DOCS / "papers").glob("*.md")), *EXAMPLES, DOCS / "data.md", DOCS / "training.md"]


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_python_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (120, 90), "gray").save("cat.jpg")
    scope: dict = {}
    for code in blocks(README, "python"):
        exec(code, scope)
    assert scope["inputs"].shape == (1, 3, 128, 128)  # as the comment says
    assert scope["logits"].shape == (2, 10)
    assert scope["features"].tokens.shape == (2, 192, 384)
    assert scope["features"].grid == (12, 16)
    assert scope["attention"].shape == (2, 6, 193, 193)
    torch.testing.assert_close(scope["attention"].sum(-1), torch.ones(2, 6, 193))


def test_tables_of_the_readme():
    for command, output in re.findall(r"\$ (vitrail models .*?)\n(.*?)\n```", README, re.DOTALL):
        found = run(*shlex.split(command)[1:]).stdout
        assert found.startswith(output)


def test_conversions_of_the_readme(tmp_path):
    vitrail.save(little("deit_small_patch16"), tmp_path / "deit_small_patch16_224.pth", "deit")
    vitrail.save(little("vit_base_patch16"), tmp_path / "ViT-B_16.npz", "npz")
    commands = re.findall(r"^(vitrail convert .*)$", README, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        result = run(*shlex.split(command)[1:], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
        assert result.returncode == 0, result.stderr
        assert "largest logit difference 0 " in result.stdout


def write_files(folder, text):
    """The files that examples open: photographs, weights that segment and detect, an exported model."""
    for name in ("cat.jpg", "street.jpg"):
        Image.new("RGB", (120, 90), "gray").save(folder / name)
    heads = {
        "runs/camvid-segment": SegmentationConfig(("road", "sky"), (0, 1), 32, kind="linear"),
        "runs/voc-detect": DetectionConfig(("cat", "dog"), 32, channels=8, hidden=8),
    }
    for path, config in heads.items():
        if path in text:
            (folder / path).mkdir(parents=True)
            model = vitrail.create("vitrail_mini", 0, 32).set_task_head(config)
            vitrail.save(model, folder / path / "best.safetensors")
    if "photos.onnx" in text:
        vitrail.export(vitrail.create("vitrail_mini", 2, 32), folder / "photos.onnx")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_of_the_papers_pages(page, tmp_path, monkeypatch):
    """Every example runs as it stands; only the random numbers that models start from are cheaper here."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, page.read_text())
    for start in ("trunc_normal_", "xavier_uniform_", "kaiming_uniform_"):
        monkeypatch.setattr(torch.nn.init, start, lambda tensor, *args, **kwargs: tensor.data.fill_(0.01))
    codes = blocks(page.read_text(), "python")
    assert codes
    scope: dict = {}
    for code in codes:
        exec(code, scope)


def test_the_image_of_the_grid_is_current():
    assert (ROOT / "docs" / "grid.svg").read_text() == draw()


def test_size_of_files():
    """No model page above 150 lines, no file above 500."""
    for path in (ROOT / "vitrail" / "models").glob("*.py"):
        limit = 150 if path.stem in {"vit", "deit", "cait", "resmlp", "patchconvnet", "deit3", "three_things", "lvvit"} else 500
        assert len(path.read_text().splitlines()) <= limit, path
    for folder in ("vitrail", "tests", "benchmarks", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 500, path
