"""Several processes at a time: devices, failures, stopping, what is left of an earlier call."""

import fcntl
import os
import signal
import sys

import pytest

from vitrail.errors import UserError
from vitrail.runs import process_pool
from vitrail.runs.process_pool import Job, run_jobs

# Stands for a training: its words are what it does.
STAND_IN = """
import os, signal, sys
place, deed = sys.argv[1:3]
print(*sys.argv[1:], os.environ.get("OMP_NUM_THREADS"), flush=True)
if deed == "fail": sys.exit("no luck today\\n")
if deed == "die": os.kill(os.getpid(), signal.SIGKILL)
if deed == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    open(place + ".ready", "w").close()
    sys.stdin.read()
    sys.exit(7)
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(process_pool, "ATTENDED", (sys.executable, "-S", "-I", str(script)))
    monkeypatch.setattr(process_pool, "POLL", 0.01)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def make_job(tmp_path, name, deed="work"):
    folder = tmp_path / name
    return Job(folder, [str(folder), deed, "begin"], [str(folder), deed, "resume"], tmp_path / f"{name}.log")


def run(jobs, at_once=2, devices=(), look=lambda: None):
    seen = []
    whole = run_jobs(jobs, at_once, devices, look, lambda job: seen.append((job.folder.name, job.state)))
    return whole, seen


def test_one_that_fails_leaves_the_others_alone(tmp_path):
    jobs = [make_job(tmp_path, "a"), make_job(tmp_path, "b", "fail"), make_job(tmp_path, "c", "die"), make_job(tmp_path, "d")]
    whole, seen = run(jobs)
    assert whole
    assert [job.state for job in jobs] == ["done", "failed", "failed", "done"]
    assert jobs[1].reason() == "no luck today"
    assert jobs[2].reason() == "It was killed by signal 9."
    assert make_job(tmp_path, "e").reason() == "it has said nothing"
    running = 0
    for _, state in seen:
        running += 1 if state == "running" else -1
        assert 0 <= running <= 2


def test_what_was_begun_goes_on(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{}")
    jobs = [make_job(tmp_path, "a"), make_job(tmp_path, "b")]
    run(jobs, devices=("cuda:0", "cuda:1"))
    assert "resume --device cuda:" in jobs[0].log.read_text()
    assert "begin --device cuda:" in jobs[1].log.read_text()
    assert {job.device for job in jobs} == {"cuda:0", "cuda:1"}


def test_cores_are_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    jobs = [make_job(tmp_path, "a"), make_job(tmp_path, "b")]
    run(jobs)
    assert jobs[0].log.read_text().split()[-1] == "4"
    alone = make_job(tmp_path, "c")
    run([alone], at_once=1)
    assert alone.log.read_text().split()[-1] == "None"


def interrupt_when_ready(jobs):
    """Ctrl-C once all of them wait."""
    done = []

    def look():
        if not done and all(job.folder.with_name(job.folder.name + ".ready").exists() for job in jobs):
            done.append(os.kill(os.getpid(), signal.SIGINT))

    return look


def test_ctrl_c_stops_all_and_begins_no_more(tmp_path):
    jobs = [make_job(tmp_path, name, "wait") for name in "abc"]
    before = signal.getsignal(signal.SIGINT)
    whole, _ = run(jobs, look=interrupt_when_ready(jobs[:2]))
    assert not whole
    assert [job.state for job in jobs] == ["stopped", "stopped", "waiting"]
    assert signal.getsignal(signal.SIGINT) is before


def test_trouble_here_leaves_no_process_behind(tmp_path):
    jobs = [make_job(tmp_path, "a", "wait")]

    def look():
        if (tmp_path / "a.ready").exists():
            raise RuntimeError("trouble")

    with pytest.raises(RuntimeError, match="trouble"):
        run(jobs, look=look)
    assert jobs[0].process.wait(10) == 130


def test_one_that_is_still_saving_is_waited_for(tmp_path):
    (tmp_path / "a").mkdir()
    lock = tmp_path / "a" / ".lock"
    lock.touch()
    jobs, looks = [make_job(tmp_path, "a"), make_job(tmp_path, "b")], []
    ready, go = os.pipe()
    child = os.fork()
    if not child:  # locks are held by processes: it takes another one
        with lock.open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            (tmp_path / "locked").touch()
            os.close(go)
            os.read(ready, 1)
            os._exit(0)
    os.close(ready)
    while not (tmp_path / "locked").exists():
        pass

    def look():
        if jobs[1].state == "done" and not looks:
            looks.append(jobs[0].state)
            os.close(go)
            os.waitpid(child, 0)

    run(jobs, look=look)
    assert looks == ["waiting"]
    assert jobs[0].state == "done"


def test_one_that_cannot_be_started(tmp_path, monkeypatch):
    monkeypatch.setattr(process_pool, "ATTENDED", (str(tmp_path / "nothing"),))
    with pytest.raises(UserError, match="cannot be started"):
        run([make_job(tmp_path, "a")])
