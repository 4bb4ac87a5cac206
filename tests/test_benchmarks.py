"""Benchmarks that have no test of their own still run: in miniature, on a CPU."""

import importlib.util
import json
import runpy
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.images import make_masked_folder
from tests.models.test_every_model import randomize
from tests.shapes import make_parquet
from vitrail.data.datasets.lookup import open_source
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.tasks.registry import find_task

ROOT = Path(__file__).parents[1]
MODEL = "deit_tiny_patch16"


@pytest.fixture
def run_benchmark(monkeypatch, capsys):
    """A benchmark as it is typed, in this process and without a GPU: its exit code, standard output and standard error."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()

    def run(words, folder="benchmarks"):
        program, *options = words.split()
        monkeypatch.setattr(sys, "argv", [str(ROOT / folder / program), *options])
        code = 0
        try:
            runpy.run_path(str(ROOT / folder / program), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    yield run
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("serve.py --soak 0.03", "0 lost, 0 of another request, 0 wrong, 0 duplicated"),
        ("serve.py --in-process --clients 2 --seconds 0.2 --rounds 1", "batcher / handler, threads, throughput (p99): 2 clients"),
        (f"finetuning.py --model {MODEL} --size 32 --device cpu --batch-size 2 --rounds 1 --repeats 1 --classes 5", "attention"),
        (
            "fused_paths.py branches vit_tiny_patch16_12x2_ls --device cpu --batch-size 1 --size 32 --depth 1 --mode eager "
            "--rounds 1",
            "sequential, ms",
        ),
        (
            "fused_paths.py branches vit_tiny_patch16_12x2 --errors --device cpu --batch-size 2 --size 32 --depth 1 --rounds 1",
            "joined",
        ),
        (
            "fused_paths.py skip cait_xxs24 --device cpu --batch-size 4 --size 32 --depth 1 --mode eager --rounds 1 --drop 0.5",
            "skipped, ms",
        ),
        ("fused_paths.py scales cait_xxs24 --errors --device cpu --batch-size 2 --size 32 --depth 1 --rounds 1", "folded"),
        (f"optimizers.py {MODEL} --device cpu --rounds 1 --repeats 1", "ema"),
        (
            f"gpu.py pairs {MODEL} --device cpu --batch-size 1 --rounds 1 --modes eager --no-timm --precision fp32 --out OUT",
            MODEL,
        ),
        (f"gpu.py latency {MODEL} --device cpu --rounds 1 --no-timm --precision fp32 --out OUT", "inference, 1"),
        (
            "self_supervised.py --device cpu --batch-size 2 --size 32 --local-size 16 --depth 1 --outputs 64 --rounds 1 "
            "--repeats 1",
            "as the authors' code",
        ),
        ("imagenette.py table --out OUT", "| stem | epochs | n |"),
        ("search.py --count 1000 --width 16 --rounds 1 --queries 1 3 --threads 1", "| 3 |"),
        ("coarse_labels.py table --out OUT", "| trunk | method |"),
        ("detection.py operators --small --repeats 1 --device cpu", "| RoIAlign of 2 x 50 boxes"),
        ("walks.py predict", "vitrail predict: "),
        (f"explain.py cost --model {MODEL} --size 32 --rounds 1", "| the same and the figures of the papers | "),
        (f"export.py parity {MODEL} --depth 1 --size 32 --images 2 --formats torch-export", f"| {MODEL} | torch-export |"),
        ("overhead.py --device cpu --rounds 1 --repeats 1", "| backward |"),
        ("forecast.py --rounds 1 -- --epochs 0.2 --device cpu --set architecture.width=16", "estimated / actual"),
    ],
    ids=lambda text: " ".join(text.replace(".py", "").split()[:2]),
)
def test_it_runs(run_benchmark, words, expected, tmp_path):
    code, out, err = run_benchmark(words.replace("OUT", str(tmp_path)))
    assert code == 0, err
    assert expected in out


def test_other_programs_end_with_the_forecast(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command: started.append(popen(command)) or started[-1])
    with importlib.import_module("forecast").other_programs(2):
        assert [program.poll() for program in started] == [None, None]
    assert [program.wait() for program in started] == [-signal.SIGKILL] * 2


def test_segmentations_are_compared(run_benchmark, tmp_path):
    make_masked_folder(tmp_path / "data" / "camvid", 8, (32, 32))
    words = (
        "--from vitrail_tiny nosuch --methods ridge U-Net --seeds 1 --epochs 1 --size 32 --batch-size 4 --device cpu --parallel 2"
    )
    code, out, err = run_benchmark(f"segmentation.py heads {tmp_path}/data --out {tmp_path}/out {words}")
    assert code == 1, err
    assert f"camvid-nosuch-ridge-0 failed: see {tmp_path}/out/camvid-nosuch-ridge-0/log.txt." in err
    assert "| camvid | vitrail_tiny | ridge | " in out
    assert "| camvid | from scratch | U-Net | " in out
    assert out.endswith(f"\nCPU, torch {torch.__version__}, vitrail {vitrail.__version__}\n")


def test_detections_are_compared_and_continued(run_benchmark, tmp_path):
    """The first call ends within its time limit; the second one finishes."""
    folder = tmp_path / "data" / "voc2012"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        make_parquet(folder / f"{split}.parquet", 20)
    words = "--methods trained --steps 2 --size 64 --small --batch-size 4 --device cpu --set optimizer.layer_decay=0.9"
    for minutes, expected in (("0.001", "0 of 1 trainings are finished"), ("9", "| vitrail_tiny | trained | ")):
        code, out, err = run_benchmark(f"detection.py voc {tmp_path}/data --out {tmp_path}/out {words} --minutes {minutes}")
        assert code == 0, err
        assert expected in out
    assert "20 images" in out
    result = json.loads((tmp_path / "out" / "vitrail_tiny-trained-0" / "result.json").read_text())
    assert (result["images"], result["changes"]["optimizer.layer_decay"]) == (20, "0.9")
    assert result["machine"]["device"] == "CPU"
    code, _, err = run_benchmark(f"detection.py voc {tmp_path}/data --out {tmp_path}/out {words} --set optimizer.lr=1e-3")
    assert code == 2
    assert "with other settings" in err


def test_a_server_that_does_not_start_is_left_out(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    serve = importlib.import_module("serve")
    options = Namespace(weights="nowhere", device="cpu", precision="fp32", packages=None)
    with pytest.raises(UserError, match="did not start"), serve.run_process(None, options):
        pass


def test_packages_of_a_folder_are_found_by_all_servers(run_benchmark, monkeypatch, tmp_path):
    """Also those that `vitrail serve` needs, where they are not installed."""
    find = importlib.util.find_spec

    def find_starlette(name):
        return find(name) if name != "starlette" or str(tmp_path) in sys.path else None

    def start(command, env, **options):
        raise UserError(env["PYTHONPATH"])

    monkeypatch.setattr(importlib.util, "find_spec", find_starlette)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, _, err = run_benchmark("serve.py")
    assert (code, "give --packages or --in-process" in err) == (2, True)
    code, _, err = run_benchmark(f"serve.py --packages {tmp_path}")
    assert code == 2
    assert f"serve.py: {tmp_path}" in err


def test_comparisons_of_dense_predictions_are_fair(monkeypatch, tmp_path):
    """A baseline with one learning rate, a ResMLP with its own grid, and the same training images for all methods."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    detection, segmentation = importlib.import_module("detection"), importlib.import_module("segmentation")
    name, changes = detection.describe_baseline("vitrail_tiny")
    assert (name, changes["optimizer.layer_decay"]) == ("vitrail_tiny", 1.0)
    unknown = vitrail.create("vitrail_mini", 0, 32, width=16, depth=1)
    unknown.name = ""
    with pytest.raises(UserError, match="cannot be built for the baseline"):
        detection.describe_baseline(str(vitrail.save(unknown, tmp_path / "unknown.safetensors")))
    job = {"size": 256, "changes": {}}
    segmentation.keep_grid(job)
    recipe = lookup("segment").set(job["changes"])
    assert recipe.augmentation.factors == (1.0, 4.0)  # of 128: the shorter side has 128 to 512 pixels, as with crops of 256
    assert (recipe.task_options["window"], recipe.task_options["stride"]) == (128, 43)
    for split, count in (("train", 20), ("validation", 4)):
        make_masked_folder(tmp_path / "data" / split, count)
    train, test, split = segmentation.open_set(str(tmp_path / "data"), 0)
    assert (len(train), len(test), split) == (18, 4, "validation")


def write_cifar(folder, split, count):
    """Binary records of CIFAR-100: a coarse label, a fine one, and a color around that of the fine class with noise."""
    rng = np.random.default_rng(count)
    fine = np.arange(count) % 4
    colors = np.array([(200, 40, 40), (200, 200, 40), (40, 40, 200), (40, 200, 40)])[fine] + rng.integers(-80, 81, (count, 3))
    planes = (colors[:, :, None] + rng.integers(-30, 31, (count, 3, 1024))).clip(0, 255)
    rows = np.concatenate([np.stack([fine // 2, fine], 1), planes.reshape(count, -1)], 1)
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.bin").write_bytes(rows.astype(np.uint8).tobytes())


def test_trainings_on_coarse_labels_are_compared_and_continued(run_benchmark, tmp_path):
    for split, count in (("train", 120), ("test", 40)):
        write_cifar(tmp_path / "cifar", split, count)
    out = tmp_path / "out"
    words = "--tiny --epochs 1 --seeds 1 --batch-size 27 --clusters 4 --shared-view --device cpu --parallel 2"
    command = f"coarse_labels.py train {tmp_path}/cifar --out {out} {words} --methods baseline clusterfit grafit"
    code, first, err = run_benchmark(command)
    assert code == 0, err
    rows = [line.split(" | ") for line in first.splitlines() if line.startswith("| resnet50 | ")]
    assert [row[1] for row in rows] == ["baseline", "clusterfit", "grafit"]
    assert [row[-2] for row in rows] == ["71.8, 42.5, 43.1", "72.5, 23.0, –", "77.7, 52.9, 55.7"]
    results = [json.loads(path.read_text()) for path in sorted(out.glob("*/result.json"))]
    assert all(0.2 < result["map_cosine"] < result["map_oracle"] < 1 for result in results)
    assert results[2]["changes"]["task_options.shared_view"] is True
    assert run_benchmark(f"{command} --minutes 0.0001")[:2] == (0, first)  # nothing is computed again
    assert run_benchmark(f"coarse_labels.py table --out {out}")[:2] == (0, first)


def test_pretrainings_on_imagenette_differ_in_the_stem(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    imagenette = importlib.import_module("imagenette")
    options = Namespace(data="imagenette", device="cpu", epochs=8.0, set=["batch_size=64"], tiny=False)
    for stem in imagenette.STEMS:
        recipe = lookup("dino_small").set(imagenette.make_job(options, stem, 3)["changes"])
        assert (recipe.batch_size, recipe.seed, recipe.schedule.length) == (64, 3, "8 epochs")
        model = vitrail.create(recipe.model, 10, recipe.augmentation.image_size, device="meta", **recipe.architecture)
        assert (model.grid, model.architecture.width) == ((8, 8), 384)
        assert find_task("dino")(recipe, open_source("digits"), torch.device("cpu")).options.local_size == 64


@pytest.mark.parametrize("problem", [None, "lost", "of another request", "duplicated"])
def test_a_soak_fails_if_answers_are_lost_or_duplicated(monkeypatch, tmp_path, problem):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    serve = importlib.import_module("serve")
    counts = {"sent": 9, "answered": 9, "lost": 0, "of another request": 0, "wrong": 0, "duplicated": 0}

    async def send_numbered(*arguments):
        return counts | ({problem: 1} if problem else {}), [100.0] * 10

    monkeypatch.setattr(serve, "running", lambda opponent, arguments: nullcontext([("http://127.0.0.1", 1)]))
    monkeypatch.setattr(serve, "send_numbered", send_numbered)
    options = Namespace(weights="vitrail_tiny", precision="fp32", device="cpu", soak=1.0, out=tmp_path / "soak.json")
    with pytest.raises(SystemExit) if problem else nullcontext() as end:
        serve.soak(options, [], [])
    assert problem is None or end.value.code == 1
    assert json.loads(options.out.read_text())["soak"]["sent"] == 9


def test_an_interrupt_is_a_message():
    words = "branches vit_tiny_patch16_12x2 --errors --device cpu --batch-size 2 --size 32 --depth 1 --rounds 2000"
    program = [sys.executable, "-u", ROOT / "benchmarks/fused_paths.py", *words.split()]
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore SIGINT
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, **pipes, cwd=ROOT, preexec_fn=default) as running:
        assert "n = 2000" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate()
    assert (running.returncode, errors) == (130, "fused_paths.py: Interrupted.\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("agreement.py missing.safetensors --data digits", "missing.safetensors"),
        ("annotate.py annotate --data MISSING", "MISSING"),
        ("annotate.py read --device abacus", "Unknown device 'abacus'"),
        ("coarse_labels.py train", "Give the folder of CIFAR-100"),
        ("coarse_labels.py train MISSING --methods clusterfit --out TMP", "needs the baseline of the same seeds"),
        ("cpu.py deit_small_patch16 vit_nosuch --ours-only", "vit_nosuch"),
        ("cpu.py --ours-only --out TMP", "is a directory: pass the name of a file"),
        ("data.py decode --images MISSING", "MISSING is not a directory with images"),
        ("data.py augment nosuch --device cpu", "There is no pipeline 'nosuch': choose from deit,"),
        ("finetuning.py", "This benchmark is made for a GPU, and torch finds none: pass options such as --device cpu --model"),
        ("finetuning.py --device cpu --model vit_nosuch", "vit_nosuch"),
        ("finetuning.py --device cpu --scopes full nosuch", "nosuch"),
        ("forecast.py --rounds 1 -- MISSING", "MISSING"),
        (f"gpu.py pairs {MODEL} vit_nosuch --device cpu --no-timm --out TMP", "vit_nosuch"),
        (f"gpu.py pairs {MODEL} --device cpu --no-timm --modes slow --out TMP", "unknown --mode slow"),
        (f"gpu.py pairs {MODEL} --device cpu --no-timm --out FILE", "is a file: give a folder"),
        (f"gpu.py pairs {MODEL} --device cpu --no-timm --register MISSING.py --out TMP", "is not a Python file"),
        ("imagenette.py train", "Give the folder of Imagenette"),
        ("imagenette.py train digits --set lr --out TMP", "--set takes KEY=VALUE"),
        (f"kernels.py {MODEL}", "This benchmark needs a GPU, and torch finds none."),
        ("optimize.py vit_nosuch", "vit_nosuch"),
        (f"optimize.py {MODEL} --device cuda", "No CUDA device is available"),
        ("optimizers.py vit_nosuch", "vit_nosuch"),
        ("overhead.py vit_nosuch", "vit_nosuch"),
        ("talking_heads.py", "This benchmark needs a GPU, and torch finds none."),
        ("talking_heads.py --shape 1,2,3", "--shape 1,2,3 is not batch size, tokens, heads and channels"),
        (f"fused_paths.py branches vit_small_patch16_18x2 {MODEL}", f"{MODEL} has no parallel branches"),
        (f"fused_paths.py skip {MODEL} --drop-path 0", "has no drop-path: pass --drop-path"),
        ("fused_paths.py branches vit_small_patch16_18x2 vit_nosuch", "vit_nosuch"),
        ("fused_paths.py branches --drop-path 1.5", "drop_path"),
        ("fused_paths.py branches --drop-path nan", "drop_path"),
        ("fused_paths.py branches --size 8 --device cpu", "8"),
        ("fused_paths.py branches --out FILE/paths.json", "cannot be written"),
        ("fused_paths.py skip --out TMP", "is a directory: pass the name of a file"),
        ("bundle_weights.py missing.safetensors vitrail_tiny", "missing.safetensors"),
    ],
)
def test_invalid_arguments_are_rejected(run_benchmark, tmp_path, words, message):
    """Before anything is printed."""
    (tmp_path / "file").touch()
    words = words.replace("FILE", str(tmp_path / "file")).replace("TMP", str(tmp_path))
    code, out, err = run_benchmark(words, "tools" if words.startswith("bundle") else "benchmarks")
    assert code == 2
    assert err.startswith(f"{words.split()[0]}: ")
    assert message in err
    assert "--device" not in err or "kernels.py" not in words
    assert out == "" or words.startswith("forecast")


def test_every_benchmark_reports_errors():
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "def main" not in text or text.endswith('if __name__ == "__main__":\n    run_program(main)\n')


@pytest.mark.parametrize(
    "words",
    [
        *(f"fused_paths.py branches --{option}" for option in ("batch-size 0", "rounds 0", "size -32", "depth 0", "rounds many")),
        *(f"overhead.py --{option}" for option in ("batch-size 0", "rounds 0", "repeats -1")),
        "agreement.py weights --data digits --max-images 0",
        "annotate.py read --rounds 0",
        "cpu.py --batch-sizes 1 0",
        "data.py augment --rounds 0",
        "finetuning.py --repeats 0",
        "forecast.py --rounds 0",
        "gpu.py pairs --rounds 0",
        f"kernels.py {MODEL} --batch-size 0",
        "optimize.py --batch-sizes 0",
        "optimizers.py --rounds 0",
        "talking_heads.py --rounds 0",
    ],
)
def test_counts_must_be_positive(run_benchmark, words):
    code, out, err = run_benchmark(words)
    assert (code, out) == (2, "")
    assert f"{words.split()[-1]!r} is not an integer of at least 1" in err


@pytest.mark.parametrize("option", ["--mode native", "--precision fp32", "--out errors.json"])
def test_errors_rejects_unused_options(run_benchmark, option):
    code, out, err = run_benchmark(f"fused_paths.py branches --errors {option}")
    assert (code, out) == (2, "")
    assert "remove --mode, --precision and --out" in err


def test_without_timm_the_benchmarks_own_option_is_named(run_benchmark, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "timm", None)
    code, out, err = run_benchmark(f"gpu.py pairs {MODEL} --device cpu --out {tmp_path}")
    assert (code, out) == (2, "")
    assert "pass --no-timm" in err
    assert "--against" not in err
    for name in ("timm.data", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = run_benchmark("data.py augment --device cpu")
    assert (code, out) == (2, "")
    assert "pass --no-others" in err


def test_results_of_a_benchmark_are_not_offered_to_git(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu = importlib.import_module("gpu")
    assert f"/{gpu.OUT.parts[0]}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_rows_of_the_gpu_table(monkeypatch, capsys):
    """A row names every configuration of timm, the fastest first, and compares with that one."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu = importlib.import_module("gpu")
    ours = gpu.Measurement("m", "vitrail", "m", "train", "bf16", "native", 8, (32, 32), 2, 10, 10, seconds=[1.0, 1.0])
    theirs = [
        replace(ours, project="timm", configuration=name, seconds=seconds, error=error)
        for name, seconds, error in (
            ("torch.compile", [4.0, 4.0], ""),
            ("reduce-overhead", [], "failed: no"),
            ("captured step", [2.0, 3.0], ""),
        )
    ]
    gpu.print_table([ours, *theirs], False)
    row = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert row[1:5] == [
        "train, 8",
        "1000 ±0.0%",
        "2500 ±10.0% captured step; 4000 ±0.0% torch.compile; failed: no reduce-overhead",
        "2.50 (2.00 to 3.00)",
    ]


def test_registered_files_may_import_their_neighbors(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu = importlib.import_module("gpu")
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "layers.py").write_text("found = 3")
    (tmp_path / "zoo" / "net.py").write_text("from .layers import *")
    gpu.register(tmp_path / "zoo" / "net.py")
    assert sys.modules.pop("zoo.net").found == 3


def test_the_batches_of_the_printed_tables(monkeypatch):
    """Large and deep networks are trained with 128 images, everything else has 256, and --batch-size overrides it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu = importlib.import_module("gpu")

    def batch_sizes(name, batch_size=None):
        options = Namespace(what="pairs", tasks="inference,train", modes="native", precision="bf16", batch_size=batch_size)
        ((_, settings),) = gpu.plan_settings(options, name, torch.device("cpu"))
        return {setting.task: setting.batch_size for setting in settings}

    assert batch_sizes("deit_small_patch16") == {"inference": 256, "train": 256}
    assert batch_sizes("deit3_large_patch16") == {"inference": 256, "train": 128}
    assert batch_sizes("deit3_large_patch16", 8) == {"inference": 8, "train": 8}
    assert set(gpu.TRAIN_BATCH_SIZES) < set(gpu.MODELS)


def test_agreement_of_other_precisions(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    agreement = importlib.import_module("agreement")
    model = vitrail.create("vitrail_mini", classes=10, image_size=8, patch_size=2, depth=2)
    model.class_names = [str(digit) for digit in range(10)]
    weights = vitrail.save(randomize(model), tmp_path / "model.safetensors")
    monkeypatch.setattr(sys, "argv", ["agreement.py", str(weights), "--data", "digits", "--device", "cpu"])
    agreement.main()
    assert torch.is_grad_enabled()  # for later tests
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == ["fp32", "bf16", "int8", "int8, synthetic images"]
    assert float(lines[2].split(" | ")[2].rstrip("%")) > 99
    monkeypatch.setattr(sys, "argv", ["agreement.py", str(weights), "--data", "pets", "--device", "cpu"])
    with pytest.raises(UserError, match="was trained on other classes than those of pets"):
        agreement.main()
