"""Distributed training: the same results with any number of processes, and no process hangs after an error."""

import dataclasses
import fcntl
import json
import os
import signal

import pytest
import torch
import torch.distributed as dist

import vitrail
from tests.small import structures
from tests.training.processes import (
    BATCH_NORMS,
    DENSE,
    TINY,
    environment,
    finetuned,
    free_port,
    one_process,
    poison_last,
    prepared,
    run,
    side_by_side,
    start,
    train_images,
    trained,
)
from vitrail.checkpoints.training_checkpoints import read_checkpoint
from vitrail.cli.main import reports_errors
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.workers import Workers
from vitrail.errors import UserError
from vitrail.models.registry import build
from vitrail.recipes import Recipe
from vitrail.runs.nan_recorder import record_step
from vitrail.runs.run_directory import choose_folder, fingerprint
from vitrail.runs.train import resume, train
from vitrail.tasks.classification import ClassificationModule
from vitrail.tasks.targets import ClassificationTargets
from vitrail.training.checkpointing import gather_weights, load_checkpoint, save_artifact
from vitrail.training.distributed import Devices, choose_micro_batches, has_unused_parameters, init_distributed
from vitrail.training.trainer import NonFiniteLoss, Options

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
LAMB = {"optimizer.kind": "lamb"}
SKIP = Options(on_nan="skip")
# The weights do not change, so the second validation is not better than the first.
PATIENCE = {"validation.patience": 1, "validation.every": "2 steps", "optimizer.lr": 1e-30, "schedule.warmup_lr": 0.0}
# name: recipe changes, options, micro-batches, other arguments
UNMIXED = {"mixing.mixup": 0.0, "mixing.cutmix": 0.0}
ALIKE = {
    "adamw": ({}, Options(), 2, {}),
    "adamw, four micro-batches": ({}, Options(), 4, {}),
    "lamb": (LAMB, SKIP, 2, {"poison": 12}),
    "dense head": (DENSE, Options(), 2, {}),
    "batch norms": (BATCH_NORMS, SKIP, 2, {"poison": 12}),
    "batch norms of groups": (BATCH_NORMS | {"group_size": 4}, Options(), 2, {}),
    "skipping drop-path": ({"architecture.drop_path_kind": "skip"}, Options(), 4, {}),
    "patience": (PATIENCE, Options(), 2, {}),
    "skipping drop-path without mixing": (UNMIXED | {"architecture.drop_path_kind": "skip", "group_size": 8}, Options(), 4, {}),
    "mixed groups": (DENSE | {"group_size": 4, "token_labels.mixtoken": 1.0}, Options(), 2, {}),
}
SHARDED = {
    "adamw": ({}, Options(sharding="full", on_nan="skip", save_steps=5), 2, {"poison": 12}),
    "lamb": (LAMB, Options(sharding="full", on_nan="skip", recompute=True), 4, {"poison": 12}),
}
RUN = {"source": "digits", "recipe": TINY.to_dict(), "options": {}, "micro_batches": 1, "unreadable": "skip"}
RUN["data"] = {"fingerprint": fingerprint(open_splits("digits"))}
UNEVEN = (1, 33)  # validation images: none, or one batch fewer, for the second process


def result_of(training):
    """What must be equal: weights, EMA, metrics, skipped steps, and the images of each micro-batch."""
    weights = {
        f"model {name}": tensor.clone() for name, tensor in gather_weights(training.model, training.options.sharding).items()
    }
    with training.ema.applied(training.model):
        ema = gather_weights(training.model, training.options.sharding)
        weights |= {f"ema {name}": tensor.clone() for name, tensor in ema.items()}
    return {"weights": weights, "best": training.best, "skipped": training.skipped, "seen": training.task.seen}


def work(rank, port, folder):
    """Work of each of two processes; writes its results to a file."""
    torch.set_num_threads(1)
    os.environ.update(environment(rank, port=port))
    with init_distributed("cpu") as two:
        found = {}
        for name, (changes, options, micro_batches, more) in ALIKE.items():
            options = dataclasses.replace(options, recompute=name == "batch norms")
            devices = dataclasses.replace(two, micro_batches=micro_batches)
            found[name] = result_of(trained(folder / name, devices, changes, options, **more))
        for name, (changes, options, micro_batches, more) in SHARDED.items():
            devices = dataclasses.replace(two, micro_batches=micro_batches)
            training = trained(folder / f"sharded {name}", devices, changes, options, **more)
            found[f"sharded {name}"] = result_of(training)
            weights = gather_weights(training.model, "full")
            if two.is_main:
                save_artifact(folder / f"{name}.safetensors", training.model, training.recipe, {}, weights)
        trained(folder / "synchronized", two, BATCH_NORMS, Options(), until=10)
        found |= resume_sharded(folder, dataclasses.replace(two, micro_batches=2))
        for count in UNEVEN:
            for sharding in ("none", "full"):
                training = prepared(folder / "never", two, options=Options(sharding=sharding), validation=count)
                found[f"accuracy {count} {sharding}"] = training.evaluate()
        for sharding in ("none", "full"):
            training = prepared(folder / f"bad {sharding}", two, options=Options(sharding=sharding, log_steps=4))
            poison_last(training, 6)
            with pytest.raises(NonFiniteLoss) as stopped:
                run(training)
            run_json = RUN | {"micro_batches": 2}
            found[f"bundle {sharding}"] = record_step(training, train_images(training), stopped.value.step, run_json)
        found["fitted"] = finetuned(folder / "fitted")
        found["fitted sharded"] = finetuned(folder / "fitted sharded", sharding="full")["best"]
        found["error"] = raise_on_second(two)
        with pytest.raises(UserError, match="batch_size=15 is not divisible by 2 processes"):
            train(recipe=TINY, changes={"batch_size": 15}, out=folder / "rejected", device="cpu")
        if two.is_main:
            (folder / "three").mkdir()
            (folder / "three" / "run.json").write_text(json.dumps(RUN | {"micro_batches": 3}))
        two.barrier()
        with pytest.raises(UserError, match="3 micro-batches, which 2 processes cannot share evenly"):
            resume(folder / "three", device="cpu")
        torch.save(found, folder / f"found-{rank}.pt")


def resume_sharded(folder, devices):
    """Sharded trainings that are interrupted, whose newest checkpoint is damaged, or that were started without sharding."""
    changes, options, _, more = SHARDED["adamw"]
    found = {}
    for name, until in (("interrupted", 10), ("damaged", 15)):
        trained(folder / name, devices, changes, options, until=until, **more)
        newest = folder / name / "checkpoints" / f"step-{until:09d}.sharded"
        if name == "damaged" and devices.is_main:
            data = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
            content = bytearray(data.read_bytes())
            content[len(content) // 2] ^= 1
            data.write_bytes(content)
        devices.barrier()
        training = trained(folder / name, devices, changes, options, **more)
        found[name] = result_of(training) | {"from": min(training.task.seen)[0]}
    trained(folder / "unsharded first", devices, changes, dataclasses.replace(options, sharding="none"), until=10, **more)
    found["unsharded first"] = result_of(trained(folder / "unsharded first", devices, changes, options, **more))
    return found


def raise_on_second(devices):
    """An error of the second process only."""
    try:
        with devices.sync_errors():
            if not devices.is_main:
                raise UserError("There is no data here.")
    except UserError as error:
        return str(error), error.report_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shared by all xdist workers, which run different tests of this file."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "many"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="module")
def found(folder):
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first worker computes, the others wait and read
        if not (folder / "found-1.pt").exists():
            torch.multiprocessing.spawn(work, (free_port(), folder), nprocs=2)
    return [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The same trainings in one process, each computed once."""
    known, folder = {}, tmp_path_factory.mktemp("one")

    def compute(changes, options, micro_batches, more):
        key = (json.dumps(changes), micro_batches, *more.items())
        if key not in known:
            plain = dataclasses.replace(options, sharding="none")
            known[key] = result_of(trained(folder / f"one-{len(known)}", one_process(micro_batches), changes, plain, **more))
        return known[key]

    return compute


def check_equal(ours, theirs, tolerance=0.0):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def check_metrics(ours, theirs):
    exact = ("step", "epoch", "top1", "top5", "images")
    assert [ours[name] for name in exact] == [theirs[name] for name in exact]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)


def samples(seen):
    """(step, image, repeat) of every sample."""
    return [(step, *sample) for (step, _), (images, repeats) in seen.items() for sample in zip(images, repeats, strict=True)]


@pytest.mark.parametrize("name", ALIKE)
def test_two_processes_equal_one(found, one, name):
    """One process computes the batch as a whole."""
    changes, options, _, more = ALIKE[name]
    expected = one(changes, options, 1, more)
    check_equal(found[0][name]["weights"], expected["weights"], 5e-5 if "batch norms" in name else 1e-6)
    for theirs in found:
        check_metrics(theirs[name]["best"], expected["best"])
        assert theirs[name]["skipped"] == expected["skipped"] == len(ALIKE[name][3])
    ours = samples(found[0][name]["seen"]), samples(found[1][name]["seen"])
    assert sorted(ours[0] + ours[1]) == sorted(samples(expected["seen"]))
    assert (max(expected["seen"])[0] < 19) == (name == "patience")  # which ends all processes early, at the same step


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_equals_one_process(found, folder, one, name):
    changes, options, _, more = SHARDED[name]
    expected = one(changes, options, 1, more)
    ours = found[0][f"sharded {name}"]
    check_equal(ours["weights"], expected["weights"], 1e-6)
    check_metrics(ours["best"], expected["best"])
    assert ours["skipped"] == 1
    model = vitrail.load(folder / f"{name}.safetensors")
    check_equal({f"model {key}": tensor for key, tensor in model.state_dict().items()}, part(ours["weights"], "model"))


def test_all_processes_start_with_the_same_fitted_classifier(found, tmp_path):
    """That of the first process, also in the EMA; the task cannot set sharded weights, which are trained without it."""
    ours, theirs, alone = found[0]["fitted"], found[1]["fitted"], finetuned(tmp_path / "fitted")
    for step in (0, 1):  # before the first step and after the last; the first process validates the best weights once more
        assert torch.equal(ours["heads"][step], theirs["heads"][step])
    torch.testing.assert_close(ours["heads"][0], alone["heads"][0], rtol=0, atol=1e-3)
    assert ours["heads"][0].any()
    check_metrics(ours["best"], alone["best"])
    assert found[0]["fitted sharded"] == found[1]["fitted sharded"]


def part(weights, kind):
    return {name: tensor for name, tensor in weights.items() if name.startswith(kind)}


def test_a_sharded_training_resumes(found, folder, one):
    expected = found[0]["sharded adamw"]
    for name, begun in (("interrupted", 10), ("damaged", 10)):
        check_equal(found[0][name]["weights"], expected["weights"])
        assert found[0][name]["from"] == begun
        assert found[0][name]["best"] == expected["best"]
    check_equal(found[0]["unsharded first"]["weights"], expected["weights"], 1e-6)
    kept = sorted(path.name for path in (folder / "interrupted" / "checkpoints").iterdir())
    assert kept == ["step-000000015.sharded", "step-000000020.sharded"]


@pytest.mark.parametrize("begun", ["sharded", "replicated"])
def test_one_process_resumes_a_training_of_two(found, folder, one, begun):
    changes, options, micro_batches, more = SHARDED["adamw"]
    run_folder = folder / ("sharded adamw" if begun == "sharded" else "unsharded first")
    newest = run_folder / "checkpoints" / "step-000000020.sharded"
    if newest.exists():
        newest.rename(run_folder / "newest")
    training = trained(run_folder, one_process(micro_batches), changes, Options(on_nan="skip"), **more)
    assert min(training.task.seen)[0] == 15
    check_equal(result_of(training)["weights"], one(changes, options, 1, more)["weights"], 1e-6)


def test_one_process_resumes_synchronized_norms(found, folder, one):
    """It computes the batch at once; in two micro-batches the statistics would be others."""
    with pytest.raises(UserError, match="BatchNorm needs the statistics of groups of 16 images"):
        prepared(folder / "never", one_process(2), BATCH_NORMS)
    training = trained(folder / "synchronized", one_process(1), BATCH_NORMS, Options())
    assert min(training.task.seen)[0] == 10
    check_equal(result_of(training)["weights"], one(BATCH_NORMS, Options(), 1, {})["weights"], 5e-5)


@pytest.mark.parametrize("count", UNEVEN)
def test_every_validation_image_is_counted_once(found, folder, count):
    expected = prepared(folder / "never", one_process(1), validation=count).evaluate()
    for theirs in found:
        for sharding in ("none", "full"):
            ours = theirs[f"accuracy {count} {sharding}"]
            assert [ours[name] for name in ("top1", "top5", "images")] == [expected["top1"], expected["top5"], count]
            assert ours["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_a_nan_stops_all_processes_before_the_step(found, folder):
    """Only the second process has the NaN; the first writes the full checkpoint."""
    expected = result_of(trained(folder / "six", one_process(2), until=6))["weights"]
    for sharding in ("none", "full"):
        bundle = found[0][f"bundle {sharding}"]
        assert found[1][f"bundle {sharding}"] == bundle
        step, groups, _ = read_checkpoint(bundle / "state.safetensors")
        assert step == 6
        check_equal({f"model {name}": tensor for name, tensor in groups["model"].items()}, part(expected, "model"), 1e-6)


def test_an_error_of_one_process_is_raised_on_all_and_reported_once(found):
    assert [theirs["error"] for theirs in found] == [("There is no data here.", True), ("There is no data here.", False)]


def torchrun(*args, restarts=0):
    return start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", restarts, *args)


def two_nodes(*args):
    """Run torchrun twice, as on two machines; returns their standard errors."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    machine = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-id", "both", *rendezvous, *args]
    nodes = [start(*machine) for _ in range(2)]
    outputs = [node.communicate(timeout=100)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    return outputs


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.json"
    path.write_text(json.dumps(TINY.to_dict()))
    return path


def check_like_two_processes(out, folder):
    """The final checkpoint equals that of an uninterrupted training of two processes, bit for bit."""
    _, groups, metadata = read_checkpoint(out / "checkpoints" / "step-000000020.safetensors")
    _, expected, others = read_checkpoint(folder / "adamw" / "checkpoints" / "step-000000020.safetensors")
    for group, tensors in expected.items():
        check_equal(groups[group], tensors)
    assert metadata["best"] == others["best"]


def logged_steps(out):
    return [line["step"] for line in map(json.loads, (out / "metrics.jsonl").open()) if line["kind"] == "train"]


def test_a_killed_process_is_restarted(found, folder, recipe):
    out = folder / "killed"
    outputs = killed_once(out, recipe)
    check_like_two_processes(out, folder)
    assert logged_steps(out) == [4, 8, 12, 16, 20]
    assert "Traceback (most recent call last)" not in outputs
    with pytest.raises(UserError, match="already holds a run"):
        train(recipe=TINY, out=out, device="cpu")
    (out / "last.safetensors").unlink()
    assert resume(out, device="cpu", workers=0).finished
    assert vitrail.load(out / "last.safetensors").architecture.classes == 10


def killed_once(out, recipe, *more):
    """Standard error of a torchrun that loses a process at step 13 and restarts."""
    args = ["train", "digits", "--recipe", recipe, "--out", out, "--workers", 0, "--save-steps", 5, *more]
    process = torchrun("-m", "tests.training.failing", "kill:13", *args, restarts=2)
    _, outputs = process.communicate(timeout=100)
    assert process.returncode == 0, outputs
    for message in ("batch size 16 = 2 x CPU x 1", "resuming at step 10 of 20", "best validation"):
        assert outputs.count(message) == 1, message
    assert outputs.count("lost the connection to the others") <= 1, "torchrun may end the other process before it reports"
    return outputs


def test_a_killed_process_of_a_sharded_training_is_restarted(found, folder, recipe):
    """One process loads the checkpoint of the two, which equals that of a training that was neither sharded nor killed."""
    out = folder / "killed sharded"
    killed_once(out, recipe, "--shard")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000000015.sharded", "step-000000020.sharded"]
    assert logged_steps(out) == [4, 8, 12, 16, 20]
    training = prepared(out, one_process(2))
    assert load_checkpoint(training, print)
    ours, expected = result_of(training), found[0]["adamw"]
    check_equal(ours["weights"], expected["weights"], 1e-6)
    check_metrics(ours["best"], expected["best"])


def test_two_nodes_equal_one_with_two_processes(found, folder, recipe):
    """Each process is the first of its machine; only one of them prints and writes."""
    out = folder / "nodes"
    outputs = two_nodes("-m", "vitrail", "train", "digits", "--recipe", recipe, "--out", out, "--workers", 0)
    for message in ("batch size 16 = 2 x CPU x 1", "best validation"):
        assert sum(each.count(message) for each in outputs) == 1, message
    check_like_two_processes(out, folder)
    assert logged_steps(out) == [4, 8, 12, 16, 20]


def test_sigterm_to_torchrun(folder, recipe):
    out = folder / "stopped"
    args = ["--recipe", recipe, "--out", out, "--workers", 0, "--log-steps", 1, "--set", "schedule.length=100000 steps"]
    process = torchrun("-m", "vitrail", "train", "digits", *args)
    line = process.stdout.readline()  # the first logged step
    process.send_signal(signal.SIGTERM)
    _, outputs = process.communicate(timeout=100)
    assert "step" in line
    assert outputs.count("Stopped at step") == 1
    (saved,) = (out / "checkpoints").iterdir()
    assert f"Stopped at step {read_checkpoint(saved)[0]} of 100000" in outputs


def test_one_error_message_for_all_processes(folder, recipe):
    commands = [
        ["-m", "vitrail", "train", source, "--recipe", recipe, "--out", folder / "rejected"] for source in ("digits", "/no")
    ]
    codes, outputs = side_by_side(*commands)
    assert codes == [2, 2]
    (line,) = "".join(errors for _, errors in outputs).splitlines()
    assert "/no" in line
    assert not (folder / "rejected").exists()


def test_an_error_of_one_process_during_training(folder, recipe):
    args = ["train", "digits", "--recipe", recipe, "--out", folder / "error", "--workers", 0]
    codes, outputs = side_by_side(*[["-m", "tests.training.failing", "error:4", *args]] * 2)
    assert codes == [2, 2]
    assert outputs[1][1] == "Error in process 1.\n"
    assert "Process" not in outputs[0][1] + outputs[0][0]
    assert "Traceback" not in outputs[0][1]


def test_the_death_of_a_process_is_reported_by_another(folder, recipe):
    args = ["train", "digits", "--recipe", recipe, "--out", folder / "lost", "--workers", 0]
    codes, outputs = side_by_side(*[["-m", "tests.training.failing", "kill:4", *args]] * 2)
    assert codes == [2, -signal.SIGKILL]
    assert (
        outputs[0][1].splitlines()[-1]
        == "Process 0 lost the connection to the others: one of them has ended, or the network failed."
    )
    assert "Traceback" not in outputs[0][1]


def test_micro_batches():
    assert [choose_micro_batches(64, 4, largest) for largest in (64, 16, 15, 5, 1)] == [4, 4, 8, 16, 64]
    shares = [Devices(torch.device("cpu"), rank, 2, 6).own_micro_batches for rank in range(2)]
    assert shares == [(0, 2, 4), (1, 3, 5)]
    with pytest.raises(UserError, match="multiple of 3"):
        choose_micro_batches(64, 3, 64)


def test_rank_without_master_address_is_rejected(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="start several processes with torchrun"), init_distributed("cpu"):
        pass


def test_a_restart_resumes_its_run(tmp_path, monkeypatch):
    """After a failure, which torchrun counts, and after a change of machines, which it does not count."""
    (tmp_path / "run.json").write_text(json.dumps(RUN | {"launch": "monday"}))
    with pytest.raises(UserError, match="already holds a run"):
        choose_folder(tmp_path, "digits", "tiny")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tuesday")
    with pytest.raises(UserError, match="already holds a run"):
        choose_folder(tmp_path, "digits", "tiny")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "monday")
    assert choose_folder(tmp_path, "digits", "tiny") == (tmp_path, True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert choose_folder(tmp_path, "digits", "tiny") == (tmp_path, True)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(UserError, match="needs a fixed run directory: give it with --out"):
        choose_folder(None, "digits", "tiny")


def test_without_a_process_group_the_first_of_each_machine_reports(monkeypatch):
    assert reports_errors(None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not reports_errors(None)
    assert reports_errors(True)


def group_of(task):
    return os.getpgrp()


def test_data_loader_processes_survive_a_stop_signal():
    """torchrun signals the expected process group; data loader processes must finish the current step."""
    workers = Workers(group_of, 1)
    assert list(workers.run([0])) != [os.getpgrp()]
    workers.close()


def test_unused_parameters():
    """DDP must know beforehand: without a dense head every parameter of every structure gets a gradient."""
    for name, architecture in structures().items():
        model = build(architecture)
        targets = torch.full((2, architecture.classes), 1 / architecture.classes)
        images = torch.randn(2, 3, *architecture.image_size)
        ClassificationModule(model, Recipe())(images, ClassificationTargets(targets)).backward()
        unused = [key for key, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
        assert bool(unused) == has_unused_parameters(model), (name, unused)


def test_sharding_needs_torchrun(tmp_path):
    with pytest.raises(UserError, match="start with torchrun"):
        train(recipe=TINY, out=tmp_path / "run", options=Options(sharding="full"), device="cpu")
    assert not (tmp_path / "run").exists()
