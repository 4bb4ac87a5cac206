"""`vitrail delta` and `vitrail train --scope`, as a person types them."""

import json

import pytest
from typer.testing import CliRunner

import vitrail
from tests.models.test_every_model import randomize
from vitrail.checkpoints.delta import read_delta
from vitrail.cli import main
from vitrail.errors import UserError

PARTS = {"width": 64, "depth": 2, "heads": 1, "patch_size": 8}


def run_cli(*words):
    """What the command prints; errors as they are."""
    result = CliRunner().invoke(main.app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base in a foreign format, and a run that has tuned its attention."""
    where = tmp_path_factory.mktemp("tuning")
    vitrail.save(randomize(vitrail.create("deit_tiny_patch16", 7, 32, **PARTS)), where / "base.pth", "deit")
    changes = ["batch_size=16", "schedule.length=2 steps", "augmentation.image_size=24x32", "validation.at_start=false"]
    words = [word for change in changes for word in ("--set", change)]
    run_cli(
        "train", "digits", "--from", where / "base.pth", "--scope", "attention", "--workers", 0, "--out", where / "run", *words
    )
    return where


def test_the_scope_is_in_the_recipe_of_the_run(folder):
    recipe = json.loads((folder / "run" / "run.json").read_text())["recipe"]
    assert (recipe["name"], recipe["init"]["scope"]) == ("finetune", "attention")
    assert recipe["init"]["weights"] == str(folder / "base.pth")


def test_make_show_and_apply(folder):
    said = run_cli("delta", "make", folder / "base.pth", folder / "run", "--out", folder / "delta.safetensors")
    assert "tensors" in said
    assert "% of the" in said
    shown = run_cli("delta", "info", folder / "delta.safetensors")
    assert "24x32 pixels" in shown
    assert "finetune, scope attention" in shown
    assert "blocks.*.mix.branches.*.body.qkv.weight" in shown
    assert "ffn" not in shown
    facts = json.loads(run_cli("delta", "info", folder / "delta.safetensors", "--json"))
    assert facts["class_names"] == [str(digit) for digit in range(10)]
    assert facts["recipe"]["init"]["scope"] == "attention"
    assert facts["base"]["sha256"] == read_delta(folder / "delta.safetensors").base
    run_cli("delta", "apply", folder / "base.pth", folder / "delta.safetensors", "--out", folder / "whole.safetensors")
    assert (folder / "whole.safetensors").read_bytes() == (folder / "run" / "best.safetensors").read_bytes()


def test_one_sentence_for_what_is_wrong(folder, cli_error, tmp_path):
    other = vitrail.save(vitrail.create("deit_tiny_patch16", 7, 32, **PARTS), tmp_path / "other.safetensors")
    run_cli("delta", "make", folder / "base.pth", folder / "run", "--out", tmp_path / "delta.safetensors")
    said = cli_error("delta", "apply", other, tmp_path / "delta.safetensors", "--out", tmp_path / "whole.safetensors")
    assert "was made from the weights" in said
    assert not (tmp_path / "whole.safetensors").exists()
    for words, sentence in (
        (("delta", "info", tmp_path / "nothing"), "There is no file"),
        (("delta", "info", tmp_path), "is a folder, not a delta"),
        (("delta", "info", folder / "base.pth"), "is not a delta"),
        (("delta", "info", other), "is not a delta"),
        (("delta", "make", other, other, "--out", tmp_path / "d.safetensors"), "same weights"),
        (("train", "digits", "--scope", "heads", "--out", tmp_path / "run"), r"init\.scope='heads' is not known"),
    ):
        with pytest.raises(UserError, match=sentence):
            run_cli(*words)
    assert not (tmp_path / "run").exists()


def test_what_is_read_is_not_overwritten(folder, cli_error, tmp_path):
    delta, run = tmp_path / "delta.safetensors", folder / "run"
    before = (run / "best.safetensors").read_bytes()
    assert "would be overwritten" in cli_error("delta", "make", folder / "base.pth", run, "--out", run / "best.safetensors")
    assert (run / "best.safetensors").read_bytes() == before
    run_cli("delta", "make", folder / "base.pth", run, "--out", delta)
    kept = delta.read_bytes()
    assert "would be overwritten" in cli_error("delta", "apply", folder / "base.pth", delta, "--out", delta)
    assert delta.read_bytes() == kept


def test_a_part_is_trained_only_of_weights(cli_error):
    assert "give --from" in cli_error("train", "digits", "--scope", "attention")
    assert "init.scope='last:' is not known" in cli_error("train", "digits", "--scope", "last:")
