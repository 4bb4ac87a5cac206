"""Training on a GPU: NCCL with DDP and FSDP2, compiled, in bfloat16, against a training without a process group; CUDA graphs.

Every training that creates a process group or captures a graph runs in a process of its own, with a time limit.
"""

import base64
import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitrail
from tests.shapes import make_coco
from tests.training.on_gpu import CHANGES
from tests.training.processes import ROOT, TINY, environment, free_port
from vitrail.data.datasets.lookup import open_splits
from vitrail.interpret.mistakes import draw_maps
from vitrail.layers.attention import scaled_dot_product_attention
from vitrail.training.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LIMIT = 240  # seconds


def run_python(*arguments, **more):
    """The output of Python with these arguments; a process that hangs is killed with its children."""
    own = {name: value for name, value in environment(**more).items() if name not in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
    visible = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
    command = [sys.executable, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(command, cwd=ROOT, env=own | visible, start_new_session=True, **pipes)
    try:
        output = child.communicate(timeout=LIMIT)[0]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        pytest.fail(f"{' '.join(command)} hung:\n{child.communicate()[0][-4000:]}")
    assert child.returncode == 0, output[-4000:]
    return output


def weights(folder, name):
    return torch.load(folder / f"{name}.pt", weights_only=True)["weights"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights of a training without a process group, and the initial weights."""
    folder = tmp_path_factory.mktemp("plain")
    run_python("-m", "tests.training.on_gpu", "plain", folder)
    return weights(folder, "plain"), weights(folder, "start")


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_one_process_of_nccl(sharding, plain, tmp_path):
    run_python("-m", "tests.training.on_gpu", "processes", tmp_path, sharding, rank=0, world=1, port=free_port())
    expected, start = plain
    distance = (expected - start).norm()
    assert distance > 0
    for name in ("complete", "resumed"):
        assert (weights(tmp_path, name) - expected).norm() <= 0.05 * distance


def test_torchrun_with_sharding(tmp_path):
    """From the command line: sharded, compiled, and resumed by one process without sharding."""
    out = tmp_path / "run"
    more = [f"--set={name}={value}" for name, value in CHANGES.items()]
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(TINY.to_dict()))  # JSON is valid YAML
    arguments = ["train", "digits", "--recipe", recipe, "--out", out, "--shard", "--workers", 0, *more]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1, "-m", "vitrail"]
    run_python(*launcher, *arguments)
    assert "This run is finished" in run_python("-m", "vitrail", "resume", out, "--workers", 0)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000000010.sharded"]
    assert vitrail.load(out / "best.safetensors").architecture.classes == 10


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Trainings with BatchNorm in the stem, drop path and EMA: with CUDA graphs, without, and with an interruption."""
    folder = tmp_path_factory.mktemp("graphs")
    for name in ("captured", "uncaptured", "interrupted", "resumed_graph"):
        run_python("-m", "tests.training.on_gpu", name, folder)
    return folder


def check_alike(folder, ours, theirs):
    """Compare weights and running statistics of two trainings, up to rounding."""
    expected = weights(folder, theirs)
    distance = (expected - weights(folder, "start")).norm()
    assert distance > 0
    assert (weights(folder, ours) - expected).norm() <= 0.01 * distance
    found, expected_statistics = (torch.load(folder / f"{name}.pt", weights_only=True)["statistics"] for name in (ours, theirs))
    assert found.keys() == expected_statistics.keys() != set()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected_statistics[name], rtol=1e-3, atol=1e-3)


def test_a_captured_step_is_the_same_step(graphs):
    """The graph draws the same random numbers and updates the same buffers."""
    check_alike(graphs, "captured", "uncaptured")


def test_a_captured_training_resumes(graphs):
    """The same images and learning rates in every step; the graph captured after resuming uses the loaded state."""
    complete, rest = (torch.load(graphs / f"{name}.pt", weights_only=True)["seen"] for name in ("captured", "resumed_graph"))
    assert rest == {key: images for key, images in complete.items() if key[0] >= 5}
    lines, others = ([line for line in read_metrics(graphs / name) if line["kind"] == "train"] for name in ("captured", "part"))
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [(line["step"], line["lr"]) for line in others] == [(line["step"], line["lr"]) for line in lines]
    assert [line["loss"] for line in others] == pytest.approx([line["loss"] for line in lines], rel=1e-2)
    check_alike(graphs, "resumed_graph", "captured")


@pytest.mark.parametrize("task", ["dino", "grafit"])
def test_it_is_captured_and_resumes_bit_for_bit(task, tmp_path):
    program = ["-m", "tests.tasks.trainings", "--gpu", tmp_path]
    assert run_python(*program, tmp_path / "whole", task).splitlines()[-1] == "captured"
    run_python(*program, tmp_path / "killed", f"{task}=6")
    run_python(*program, tmp_path / "killed", task)
    saved = f"{task}/checkpoints/step-000000008.safetensors"
    ours, theirs = (load_file(tmp_path / name / saved) for name in ("killed", "whole"))
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (65, 65), (192, 192), (196, 196), (320, 320), (1, 64), (2, 198)])
def test_attention_gradients_are_finite(queries, keys, compiled):
    """Large negative scores, as in a head that attends to few tokens."""
    query = torch.randn(2, 2, queries, 64, device="cuda", dtype=torch.bfloat16) * 0.1
    key, value = torch.randn(2, 2, 2, keys, 64, device="cuda", dtype=torch.bfloat16).mul(0.1).unbind(0)
    query[..., 0], key[..., 0] = 1.0, -120.0 * 8
    parts = [part.clone().requires_grad_() for part in (query, key, value)]
    attend = scaled_dot_product_attention
    out = (torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend)(*parts)
    out.backward(torch.randn_like(out))
    assert all(part.grad.isfinite().all() for part in parts)


@pytest.mark.parametrize("order", itertools.permutations(["optimized", "overhead", "training"]), ids=" ".join)
def test_graphs_of_several_kinds_in_one_process(order):
    assert "equal" in run_python("-m", "tests.training.graphs_together", *order)


@pytest.mark.parametrize("task", ["dino", "grafit", "masked", "beit", "tokenizer"])
def test_captured_steps_of_self_supervised_tasks(task):
    assert "equal" in run_python("-m", "tests.training.self_supervised_on_gpu", task)


def test_a_detection_step_is_a_graph(tmp_path):
    """Proposals, NMS, sampling and RoIAlign have fixed sizes and do not wait for the GPU."""
    data = make_coco(tmp_path / "shapes", 24)
    assert "equal" in run_python("-m", "tests.tasks.detection_on_gpu", data, tmp_path)


def test_the_report_of_a_compiled_training_shows_maps_of_mistakes(tmp_path):
    """In bfloat16: the maps are those of the saved weights on the CPU."""
    out, recipe = tmp_path / "run", tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(TINY.to_dict()))
    more = [f"--set={name}={value}" for name, value in CHANGES.items()]
    output = run_python("-m", "vitrail", "train", "digits", "--recipe", recipe, "--out", out, "--workers", 0, *more)
    assert "without maps" not in output
    assert "not evaluated again" not in output
    run = json.loads((out / "run.json").read_text())
    mistakes = run["mistakes"]
    assert mistakes
    page = (out / "report.html").read_text()
    assert page.count('alt="map of the prediction"') == len(mistakes)
    source = open_splits("digits")[1]
    rows = {source.location(index): index for index in range(len(source))}
    model = vitrail.load(out / "best.safetensors")
    images = np.array([rows[row["location"]] for row in mistakes])
    classes = np.array([model.class_names.index(row["prediction"]) for row in mistakes])
    for row, expected in zip(mistakes, draw_maps(model, source, images, classes), strict=True):
        ours, theirs = (np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))).astype(int) for text in (row["map"], expected))
        assert np.abs(ours - theirs).mean() < 4
