"""Benchmarks that have no test of their own still run: in miniature, on a CPU."""

import importlib
import runpy
import signal
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch

import vitrail
from tests.models.test_every_model import randomize
from vitrail.errors import UserError

ROOT = Path(__file__).parents[1]
MODEL = "deit_tiny_patch16"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"finetuning.py --model {MODEL} --size 32 --device cpu --batch 2 --rounds 1 --repeats 1 --classes 5", "attention"),
        (
            "ways.py branches vit_tiny_patch16_12x2_ls --device cpu --batch 1 --size 32 --depth 1 --mode eager --rounds 1",
            "one after the other, ms",
        ),
        ("ways.py branches vit_tiny_patch16_12x2 --errors --device cpu --batch 2 --size 32 --depth 1 --rounds 1", "as one"),
        ("ways.py skip cait_xxs24 --device cpu --batch 4 --size 32 --depth 1 --mode eager --rounds 1 --drop 0.5", "left out, ms"),
        ("ways.py scales cait_xxs24 --errors --device cpu --batch 2 --size 32 --depth 1 --rounds 1", "inside products"),
        (f"optimizers.py {MODEL} --device cpu --rounds 1 --repeats 1", "running mean"),
        (f"gpu.py pairs {MODEL} --device cpu --batch 1 --rounds 1 --modes eager --no-timm --precision fp32 --out OUT", MODEL),
        (f"gpu.py latency {MODEL} --device cpu --rounds 1 --modes own --no-timm --precision fp32 --out OUT", "own"),
        ("overhead.py --device cpu --rounds 1 --repeats 1", "| backward |"),
        ("forecast.py --rounds 1 -- --epochs 0.2 --device cpu --workers 0 --set architecture.width=16", "said / reached"),
    ],
    ids=lambda text: " ".join(text.replace(".py", "").split()[:2]),
)
def test_it_runs(words, expected, tmp_path):
    program, *options = words.replace("OUT", str(tmp_path)).split()
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / program, *options], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_an_interrupt_is_a_word():
    words = "branches vit_tiny_patch16_12x2 --errors --device cpu --batch 2 --size 32 --depth 1 --rounds 2000"
    program = [sys.executable, "-u", ROOT / "benchmarks/ways.py", *words.split()]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # jobs in the background of a shell hear nothing
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, **pipes, cwd=ROOT, preexec_fn=heard) as running:
        assert "n = 2000" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        _, said = running.communicate()
    assert (running.returncode, said) == (130, "ways.py: Stopped.\n")


@pytest.fixture
def typed(monkeypatch, capsys):
    """A benchmark as it is typed, in this process and without a GPU: its exit code, what it prints and what it complains of."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()

    def run(words, folder="benchmarks"):
        program, *options = words.split()
        monkeypatch.setattr(sys, "argv", [str(ROOT / folder / program), *options])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / folder / program), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    yield run
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("agree.py missing.safetensors --data digits", "missing.safetensors"),
        ("annotate.py annotate --data MISSING", "MISSING"),
        ("annotate.py read --device abacus", "There is no device 'abacus'"),
        ("cpu.py deit_small_patch16 vit_nosuch --alone", "vit_nosuch"),
        ("cpu.py --alone --out TMP", "is a folder: give the name of a file"),
        ("data.py decode --images MISSING", "MISSING is not a folder with images in it"),
        ("data.py augment nosuch --device cpu", "There is no pipeline 'nosuch': choose among deit,"),
        ("finetuning.py", "There is no GPU that torch can use here, for which this is made: give --device cpu --model"),
        ("finetuning.py --device cpu --model vit_nosuch", "vit_nosuch"),
        ("finetuning.py --device cpu --scopes full nosuch", "nosuch"),
        ("forecast.py --rounds 1 -- MISSING", "MISSING"),
        (f"gpu.py pairs {MODEL} vit_nosuch --device cpu --no-timm --out TMP", "vit_nosuch"),
        (f"gpu.py pairs {MODEL} --device cpu --no-timm --modes slow --out TMP", "--mode slow is not known"),
        (f"gpu.py pairs {MODEL} --device cpu --no-timm --out FILE", "is a file: give a folder"),
        (f"gpu.py pairs {MODEL} --device cpu --no-timm --register MISSING.py --out TMP", "is not a file of Python"),
        (f"kernels.py {MODEL}", "There is no GPU that torch can use here, and it is its kernels that are timed."),
        ("optimize.py vit_nosuch", "vit_nosuch"),
        (f"optimize.py {MODEL} --device cuda", "There is no GPU"),
        ("optimizers.py vit_nosuch", "vit_nosuch"),
        ("overhead.py vit_nosuch", "vit_nosuch"),
        ("talking_heads.py", "There is no GPU that torch can use here, and the kernels need one."),
        ("talking_heads.py --shape 1,2,3", "--shape 1,2,3 is not batch, tokens, heads and channels"),
        (f"ways.py branches vit_small_patch16_18x2 {MODEL}", f"{MODEL} has no parallel branches"),
        (f"ways.py skip {MODEL} --drop-path 0", "drops no images: give --drop-path"),
        ("ways.py branches vit_small_patch16_18x2 vit_nosuch", "vit_nosuch"),
        ("ways.py branches --drop-path 1.5", "drop_path"),
        ("ways.py branches --drop-path nan", "drop_path"),
        ("ways.py branches --size 8 --device cpu", "8"),
        ("ways.py branches --out FILE/ways.json", "cannot be written"),
        ("ways.py skip --out TMP", "is a folder: give the name of a file"),
        ("bundle_weights.py missing.safetensors vitrail_tiny", "missing.safetensors"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_sentence(typed, tmp_path, words, sentence):
    """Before anything is printed."""
    (tmp_path / "file").touch()
    words = words.replace("FILE", str(tmp_path / "file")).replace("TMP", str(tmp_path))
    code, out, err = typed(words, "tools" if words.startswith("bundle") else "benchmarks")
    assert code == 2
    assert err.startswith(f"{words.split()[0]}: ")
    assert sentence in err
    assert "--device" not in err or "kernels.py" not in words
    assert out == "" or words.startswith("forecast")


def test_every_benchmark_tells_it_so():
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "def main" not in text or text.endswith('if __name__ == "__main__":\n    run_program(main)\n')


@pytest.mark.parametrize(
    "words",
    [
        *(f"ways.py branches --{option}" for option in ("batch 0", "rounds 0", "size -32", "depth 0", "rounds many")),
        *(f"overhead.py --{option}" for option in ("batch 0", "rounds 0", "repeats -1")),
        "agree.py weights --data digits --most 0",
        "annotate.py read --rounds 0",
        "cpu.py --batches 1 0",
        "data.py augment --rounds 0",
        "finetuning.py --repeats 0",
        "forecast.py --rounds 0",
        "gpu.py pairs --rounds 0",
        f"kernels.py {MODEL} --batch 0",
        "optimize.py --batches 0",
        "optimizers.py --rounds 0",
        "talking_heads.py --rounds 0",
    ],
)
def test_numbers_that_count_begin_at_one(typed, words):
    code, out, err = typed(words)
    assert (code, out) == (2, "")
    assert f"{words.split()[-1]!r} is not a whole number of at least 1" in err


@pytest.mark.parametrize("option", ["--mode own", "--precision fp32", "--out errors.json"])
def test_errors_do_not_take_what_they_would_not_use(typed, option):
    code, out, err = typed(f"ways.py branches --errors {option}")
    assert (code, out) == (2, "")
    assert "leave --mode, --precision and --out out" in err


def test_without_timm_the_benchmarks_own_option_is_named(typed, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "timm", None)
    code, out, err = typed(f"gpu.py pairs {MODEL} --device cpu --out {tmp_path}")
    assert (code, out) == (2, "")
    assert "give --no-timm" in err
    assert "--against" not in err
    for name in ("timm.data", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = typed("data.py augment --device cpu")
    assert (code, out) == (2, "")
    assert "give --no-others" in err


def test_results_of_a_benchmark_are_not_offered_to_git(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu = importlib.import_module("gpu")
    assert f"/{gpu.OUT.parts[0]}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_batches_of_the_printed_tables(monkeypatch):
    """Large and deep networks are trained with 128 images, everything else has 256, and --batch says otherwise."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu = importlib.import_module("gpu")

    def batches(name, batch=None):
        options = Namespace(what="pairs", tasks="inference,train", modes="own", precision="bf16", batch=batch)
        ((_, settings),) = gpu.wanted(options, name, torch.device("cpu"))
        return {setting.task: setting.batch for setting in settings}

    assert batches("deit_small_patch16") == {"inference": 256, "train": 256}
    assert batches("deit3_large_patch16") == {"inference": 256, "train": 128}
    assert batches("deit3_large_patch16", 8) == {"inference": 8, "train": 8}
    assert set(gpu.TRAINED) < set(gpu.MODELS)


def test_how_often_other_precisions_agree(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    agree = importlib.import_module("agree")
    model = vitrail.create("vitrail_mini", classes=10, image_size=8, patch_size=2, depth=2)
    model.class_names = [str(digit) for digit in range(10)]
    weights = vitrail.save(randomize(model), tmp_path / "model.safetensors")
    monkeypatch.setattr(sys, "argv", ["agree.py", str(weights), "--data", "digits", "--device", "cpu"])
    agree.main()
    assert torch.is_grad_enabled()  # of whoever comes after it
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == ["fp32", "bf16", "int8", "int8, made-up images"]
    assert float(lines[2].split(" | ")[2].rstrip("%")) > 99
    monkeypatch.setattr(sys, "argv", ["agree.py", str(weights), "--data", "pets", "--device", "cpu"])
    with pytest.raises(UserError, match="answers other classes than pets has"):
        agree.main()
