"""One device to many: the same training, whoever computes it, and nobody is left waiting."""

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
    alone,
    environment,
    free_port,
    prepared,
    run,
    side_by_side,
    start,
    trained,
)
from vitrail.checkpoints.training_checkpoints import read_checkpoint
from vitrail.cli.main import is_teller
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.workers import Workers
from vitrail.errors import UserError
from vitrail.models.registry import build
from vitrail.recipes import Recipe
from vitrail.runs.nan_recorder import record
from vitrail.runs.run_directory import choose_folder, fingerprint
from vitrail.runs.train import resume, train
from vitrail.tasks.classification import Supervised
from vitrail.tasks.targets import Targets
from vitrail.training.distributed import Devices, connected, cut, has_idle_heads
from vitrail.training.trainer import NonFiniteLoss, Options
from vitrail.training.training_state import gather, load_state, save_artifact

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
LAMB = {"optimizer.kind": "lamb"}
SKIP = Options(on_nan="skip")
# name: recipe, options, units, what else
ALIKE = {
    "adamw": ({}, Options(), 2, {}),
    "adamw, four units": ({}, Options(), 4, {}),
    "lamb": (LAMB, SKIP, 2, {"poison": 12}),
    "dense head": (DENSE, Options(), 2, {}),
    "batch norms": (BATCH_NORMS, SKIP, 2, {"poison": 12}),
}
SHARDED = {
    "adamw": ({}, Options(sharding="full", on_nan="skip", save_steps=5), 2, {"poison": 12}),
    "lamb": (LAMB, Options(sharding="full", on_nan="skip", recompute=True), 4, {"poison": 12}),
}
FACTS = {"source": "digits", "recipe": TINY.to_dict(), "options": {}, "micro_batches": 1, "unreadable": "skip"}
FACTS["data"] = {"fingerprint": fingerprint(open_splits("digits"))}
UNEVEN = (1, 33)  # validation images: nothing for the second process; one batch fewer for it


def result_of(training):
    """What must be equal: weights, running mean, metrics, skipped steps; and which images each unit has seen."""
    weights = {f"model {name}": tensor.clone() for name, tensor in gather(training.model, training.options.sharding).items()}
    with training.average.applied(training.model):
        mean = gather(training.model, training.options.sharding)
        weights |= {f"mean {name}": tensor.clone() for name, tensor in mean.items()}
    return {"weights": weights, "best": training.best, "skipped": training.skipped, "seen": training.seen}


def work(rank, port, folder):
    """What each of two processes does; results go to files."""
    torch.set_num_threads(1)
    os.environ.update(environment(rank, port=port))
    with connected("cpu") as two:
        found = {}
        for name, (changes, options, micro_batches, more) in ALIKE.items():
            options = dataclasses.replace(options, recompute=name == "batch norms")
            devices = dataclasses.replace(two, micro_batches=micro_batches)
            found[name] = result_of(trained(folder / name, devices, changes, options, **more))
        for name, (changes, options, micro_batches, more) in SHARDED.items():
            devices = dataclasses.replace(two, micro_batches=micro_batches)
            training = trained(folder / f"sharded {name}", devices, changes, options, **more)
            found[f"sharded {name}"] = result_of(training)
            weights = gather(training.model, "full")
            if two.first:
                save_artifact(folder / f"{name}.safetensors", training.model, training.recipe, {}, weights)
        found |= go_on(folder, dataclasses.replace(two, micro_batches=2))
        for count in UNEVEN:
            for sharding in ("none", "full"):
                training = prepared(folder / "never", two, options=Options(sharding=sharding), validation=count)
                found[f"accuracy {count} {sharding}"] = training.evaluate()
        for sharding in ("none", "full"):
            training = prepared(folder / f"bad {sharding}", two, options=Options(sharding=sharding, log_steps=4))
            training.poison = 6
            with pytest.raises(NonFiniteLoss) as stopped:
                run(training)
            found[f"bundle {sharding}"] = record(training, stopped.value.step, FACTS | {"micro_batches": 2})
        found["disagreement"] = disagree(two)
        with pytest.raises(UserError, match="The batch of 15 does not divide by 2 processes"):
            train(recipe=TINY, changes={"batch_size": 15}, out=folder / "refused", device="cpu")
        if two.first:
            (folder / "three").mkdir()
            (folder / "three" / "run.json").write_text(json.dumps(FACTS | {"micro_batches": 3}))
        two.wait()
        with pytest.raises(UserError, match="3 parts, which 2 processes cannot share evenly"):
            resume(folder / "three", device="cpu")
        torch.save(found, folder / f"found-{rank}.pt")


def go_on(folder, devices):
    """Sharded trainings that are cut off, whose newest state is damaged, or that began without sharding."""
    changes, options, _, more = SHARDED["adamw"]
    found = {}
    for name, until in (("cut off", 10), ("damaged", 15)):
        trained(folder / name, devices, changes, options, until=until, **more)
        newest = folder / name / "checkpoints" / f"step-{until:09d}.sharded"
        if name == "damaged" and devices.is_main:
            data = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
            content = bytearray(data.read_bytes())
            content[len(content) // 2] ^= 1
            data.write_bytes(content)
        devices.barrier()
        training = trained(folder / name, devices, changes, options, **more)
        found[name] = result_of(training) | {"from": min(training.seen)[0]}
    trained(folder / "whole first", devices, changes, dataclasses.replace(options, sharding="none"), until=10, **more)
    found["whole first"] = result_of(trained(folder / "whole first", devices, changes, options, **more))
    return found


def disagree(devices):
    """Trouble that only the second process has."""
    try:
        with devices.sync_errors():
            if not devices.is_main:
                raise UserError("There is no data here.")
    except UserError as error:
        return str(error), error.report_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all test processes, which get different tests of this file."""
    own = tmp_path_factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "many"
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture(scope="module")
def found(folder):
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first to come computes, the others wait and read
        if not (folder / "found-1.pt").exists():
            torch.multiprocessing.spawn(work, (free_port(), folder), nprocs=2)
    return [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The same by one process, each computed once."""
    known, folder = {}, tmp_path_factory.mktemp("one")

    def compute(changes, options, micro_batches, more):
        key = (json.dumps(changes), micro_batches, *more.items())
        if key not in known:
            plain = dataclasses.replace(options, sharding="none")
            known[key] = result_of(trained(folder / f"one-{len(known)}", alone(micro_batches), changes, plain, **more))
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


@pytest.mark.parametrize("name", ALIKE)
def test_two_processes_are_one_with_twice_the_accumulation(found, one, name):
    expected = one(*ALIKE[name])
    check_equal(found[0][name]["weights"], expected["weights"], 1e-6)
    for theirs in found:
        check_metrics(theirs[name]["best"], expected["best"])
        assert theirs[name]["skipped"] == expected["skipped"] == len(ALIKE[name][3])
    assert found[0][name]["seen"] | found[1][name]["seen"] == expected["seen"]
    assert not found[0][name]["seen"].keys() & found[1][name]["seen"].keys()


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_processes_are_one(found, folder, one, name):
    expected = one(*SHARDED[name])
    ours = found[0][f"sharded {name}"]
    check_equal(ours["weights"], expected["weights"], 1e-6)
    check_metrics(ours["best"], expected["best"])
    assert ours["skipped"] == 1
    model = vitrail.load(folder / f"{name}.safetensors")
    check_equal({f"model {key}": tensor for key, tensor in model.state_dict().items()}, part(ours["weights"], "model"))


def part(weights, kind):
    return {name: tensor for name, tensor in weights.items() if name.startswith(kind)}


def test_a_sharded_training_goes_on(found, folder, one):
    whole = found[0]["sharded adamw"]
    for name, begun in (("cut off", 10), ("damaged", 10)):
        check_equal(found[0][name]["weights"], whole["weights"])
        assert found[0][name]["from"] == begun
        assert found[0][name]["best"] == whole["best"]
    check_equal(found[0]["whole first"]["weights"], whole["weights"], 1e-6)
    kept = sorted(path.name for path in (folder / "cut off" / "checkpoints").iterdir())
    assert kept == ["step-000000015.sharded", "step-000000020.sharded"]


@pytest.mark.parametrize("begun", ["sharded", "replicated"])
def test_one_process_goes_on_where_two_have_begun(found, folder, one, begun):
    changes, options, micro_batches, more = SHARDED["adamw"]
    place = folder / ("sharded adamw" if begun == "sharded" else "whole first")
    newest = place / "checkpoints" / "step-000000020.sharded"
    if newest.exists():
        newest.rename(place / "newest")
    training = trained(place, alone(micro_batches), changes, Options(on_nan="skip"), **more)
    assert min(training.seen)[0] == 15
    check_equal(result_of(training)["weights"], one(changes, options, micro_batches, more)["weights"], 1e-6)


@pytest.mark.parametrize("count", UNEVEN)
def test_every_validation_image_counts_once(found, folder, count):
    expected = prepared(folder / "never", alone(1), validation=count).evaluate()
    for theirs in found:
        for sharding in ("none", "full"):
            ours = theirs[f"accuracy {count} {sharding}"]
            assert (ours.top1, ours.top5, ours.images) == (expected.top1, expected.top5, count)
            assert ours.loss == pytest.approx(expected.loss, abs=1e-6)


def test_a_step_that_is_not_finite_stops_all_before_it(found, folder):
    """Its images were the second process's alone; the first writes down the state, whole."""
    expected = result_of(trained(folder / "six", alone(2), until=6))["weights"]
    for sharding in ("none", "full"):
        bundle = found[0][f"bundle {sharding}"]
        assert found[1][f"bundle {sharding}"] == bundle
        step, groups, _ = read_checkpoint(bundle / "state.safetensors")
        assert step == 6
        check_equal({f"model {name}": tensor for name, tensor in groups["model"].items()}, part(expected, "model"), 1e-6)


def test_trouble_of_one_is_told_once_and_known_to_all(found):
    assert [theirs["disagreement"] for theirs in found] == [("There is no data here.", True), ("There is no data here.", False)]


def torchrun(*words, restarts=0):
    return start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", restarts, *words)


def two_nodes(*words):
    """A torchrun of each of two machines, which here are one: what they say in the end."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    machine = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-id", "both", *place, *words]
    nodes = [start(*machine) for _ in range(2)]
    said = [node.communicate(timeout=100)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    return said


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.json"
    path.write_text(json.dumps(TINY.to_dict()))
    return path


def check_like_two_processes(out, folder):
    """A run that has ended has the state of the one that two processes have computed undisturbed, to the last bit."""
    _, groups, facts = read_checkpoint(out / "checkpoints" / "step-000000020.safetensors")
    _, expected, others = read_checkpoint(folder / "adamw" / "checkpoints" / "step-000000020.safetensors")
    for group, tensors in expected.items():
        check_equal(groups[group], tensors)
    assert facts["best"] == others["best"]


def logged_steps(out):
    return [line["step"] for line in map(json.loads, (out / "metrics.jsonl").open()) if line["kind"] == "train"]


def test_a_killed_process_is_started_again(found, folder, recipe):
    out = folder / "killed"
    said = killed_once(out, recipe)
    check_like_two_processes(out, folder)
    assert logged_steps(out) == [4, 8, 12, 16, 20]
    assert "Traceback (most recent call last)" not in said
    with pytest.raises(UserError, match="holds a run already"):
        train(recipe=TINY, out=out, device="cpu")
    (out / "last.safetensors").unlink()
    assert resume(out, device="cpu", workers=0).finished
    assert vitrail.load(out / "last.safetensors").architecture.classes == 10


def killed_once(out, recipe, *more):
    """What torchrun says that has lost a process at step 13 and goes on."""
    words = ["train", "digits", "--recipe", recipe, "--out", out, "--workers", 0, "--save-steps", 5, *more]
    process = torchrun("-m", "tests.training.failing", "kill:13", *words, restarts=2)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    for sentence in ("batch 16 = 2 x CPU x 1", "going on at step 10 of 20", "best validation"):
        assert said.count(sentence) == 1, sentence
    assert said.count("has lost the others") <= 1, "torchrun may end the other one before it has told"
    return said


def test_a_killed_process_of_a_sharded_training_is_started_again(found, folder, recipe):
    """One process reads what the two have written, and finds the training that was neither sharded nor killed."""
    out = folder / "killed sharded"
    killed_once(out, recipe, "--shard")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000000015.sharded", "step-000000020.sharded"]
    assert logged_steps(out) == [4, 8, 12, 16, 20]
    training = prepared(out, alone(2))
    assert load_state(training, print)
    training.seen = {}
    ours, expected = result_of(training), found[0]["adamw"]
    check_equal(ours["weights"], expected["weights"], 1e-6)
    check_metrics(ours["best"], expected["best"])


def test_two_nodes_are_one_with_two_processes(found, folder, recipe):
    """Each process is the first of its machine; one of them tells and writes."""
    out = folder / "nodes"
    said = two_nodes("-m", "vitrail", "train", "digits", "--recipe", recipe, "--out", out, "--workers", 0)
    for sentence in ("batch 16 = 2 x CPU x 1", "best validation"):
        assert sum(each.count(sentence) for each in said) == 1, sentence
    check_like_two_processes(out, folder)
    assert logged_steps(out) == [4, 8, 12, 16, 20]


def test_torchrun_is_asked_to_stop(folder, recipe):
    out = folder / "stopped"
    words = ["--recipe", recipe, "--out", out, "--workers", 0, "--log-steps", 1, "--set", "schedule.length=100000 steps"]
    process = torchrun("-m", "vitrail", "train", "digits", *words)
    line = process.stdout.readline()  # the first logged step
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=100)
    assert "step" in line
    assert said.count("Stopped at step") == 1
    (saved,) = (out / "checkpoints").iterdir()
    assert f"Stopped at step {read_checkpoint(saved)[0]} of 100000" in said


def test_one_sentence_for_all(folder, recipe):
    commands = [
        ["-m", "vitrail", "train", source, "--recipe", recipe, "--out", folder / "refused"] for source in ("digits", "/no")
    ]
    codes, said = side_by_side(*commands)
    assert codes == [2, 2]
    (told,) = "".join(errors for _, errors in said).splitlines()
    assert "/no" in told
    assert not (folder / "refused").exists()


def test_trouble_in_the_middle(folder, recipe):
    words = ["train", "digits", "--recipe", recipe, "--out", folder / "trouble", "--workers", 0]
    codes, said = side_by_side(*[["-m", "tests.training.failing", "trouble:4", *words]] * 2)
    assert codes == [2, 2]
    assert said[1][1] == "Process 1 is in trouble.\n"
    assert "Process" not in said[0][1] + said[0][0]
    assert "Traceback" not in said[0][1]


def test_the_death_of_one_is_told_by_the_other(folder, recipe):
    words = ["train", "digits", "--recipe", recipe, "--out", folder / "lost", "--workers", 0]
    codes, said = side_by_side(*[["-m", "tests.training.failing", "kill:4", *words]] * 2)
    assert codes == [2, -signal.SIGKILL]
    assert said[0][1].splitlines()[-1] == "Process 0 has lost the others: one of them has ended, or the connection has."
    assert "Traceback" not in said[0][1]


def test_the_batch_is_cut_evenly():
    assert [cut(64, 4, largest) for largest in (64, 16, 15, 5, 1)] == [4, 4, 8, 16, 64]
    shares = [Devices(torch.device("cpu"), rank, 2, 6).own_micro_batches for rank in range(2)]
    assert shares == [(0, 2, 4), (1, 3, 5)]
    with pytest.raises(UserError, match="multiple of 3"):
        cut(64, 3, 64)


def test_a_rank_without_a_meeting_place_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="start several processes with torchrun"), connected("cpu"):
        pass


def test_a_restart_finds_its_run(tmp_path, monkeypatch):
    """After a death, which is counted, and after a change of machines, which is not."""
    (tmp_path / "run.json").write_text(json.dumps(FACTS | {"launch": "monday"}))
    with pytest.raises(UserError, match="holds a run already"):
        choose_folder(tmp_path, "digits", "tiny")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tuesday")
    with pytest.raises(UserError, match="holds a run already"):
        choose_folder(tmp_path, "digits", "tiny")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "monday")
    assert choose_folder(tmp_path, "digits", "tiny") == (tmp_path, True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert choose_folder(tmp_path, "digits", "tiny") == (tmp_path, True)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(UserError, match="give its folder with --out"):
        choose_folder(None, "digits", "tiny")


def test_before_they_meet_the_first_of_each_machine_tells(monkeypatch):
    assert is_teller(None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not is_teller(None)
    assert is_teller(True)


def group_of(task):
    return os.getpgrp()


def test_a_stopped_group_keeps_its_loading_processes():
    """torchrun asks every process of the group to stop; those that load must go on until the step in hand is done."""
    workers = Workers(group_of, 1)
    assert list(workers.run([0])) != [os.getpgrp()]
    workers.close()


def test_only_heads_without_labels_are_idle():
    """What `replicate` must know beforehand: every other parameter of every structure gets a gradient."""
    for name, architecture in structures().items():
        model = build(architecture)
        targets = torch.full((2, architecture.classes), 1 / architecture.classes)
        Supervised(model, Recipe())(torch.randn(2, 3, *architecture.image_size), Targets(targets)).backward()
        idle = [key for key, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
        assert bool(idle) == has_idle_heads(model), (name, idle)


def test_sharding_needs_processes(tmp_path):
    with pytest.raises(UserError, match="start with torchrun"):
        train(recipe=TINY, out=tmp_path / "run", options=Options(sharding="full"), device="cpu")
    assert not (tmp_path / "run").exists()
