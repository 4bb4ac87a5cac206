"""Batches do not depend on the workers, the micro-batches or the starting step; unreadable images are replaced; workers exit."""

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.decode import decode
from vitrail.data.image_cache import CachedLoader, CachePlan, build_cache, plan_cache
from vitrail.data.loader import IGNORE, Batch, WorkerLoader
from vitrail.data.sampler import EpochSampler
from vitrail.data.source import Labels, Source
from vitrail.devices import free_memory
from vitrail.errors import UserError

COUNT, BATCH = 37, 8


@dataclass
class Images(Source):
    """Generated images of many sizes; those in `broken` are truncated."""

    count: int = COUNT
    broken: tuple[int, ...] = ()
    has_masks: bool = True
    name: str = "images"
    wait: float = 0.0
    label: Labels | None = field(init=False)

    def __post_init__(self) -> None:
        self.label = Labels(np.arange(self.count) % 5, list("abcde"))
        self.extra = {"half": Labels(np.arange(self.count) // 2, [])}

    def __len__(self) -> int:
        return self.count

    def size(self, index: int) -> tuple[int, int]:
        return 20 + index % 7, 40 - index % 11

    def encoded(self, index: int) -> bytes | np.ndarray:
        time.sleep(self.wait)
        pixels = np.random.default_rng(index).integers(0, 256, (*self.size(index), 3), dtype=np.uint8)
        if index % 5 == 4 and index not in self.broken:
            return pixels
        encoded = file(pixels, "JPEG" if index % 2 else "PNG")
        return encoded[: len(encoded) // 2] if index in self.broken else encoded

    def mask(self, index: int) -> bytes | None:
        return None if index % 3 == 0 else file(np.full(self.size(index), index, dtype=np.uint8), "PNG")

    def location(self, index: int) -> str:
        return f"image {index}"


def file(pixels, kind):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def epoch_batches(loader, epoch=0, start_step=0):
    """The batches of an epoch from `start_step` on."""
    steps = loader.sampler.steps
    return loader.iterate_steps(epoch * steps + start_step, (epoch + 1) * steps)


def load(loader, epoch=0, start_step=0):
    batches = list(epoch_batches(loader, epoch, start_step))
    loader.close()
    return batches


def same(first: list[Batch], second: list[Batch]) -> bool:
    def equal(one, two):
        if isinstance(one, dict):
            return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
        return one is two if one is None or two is None else torch.equal(one, two)

    return len(first) == len(second) and all(
        equal(getattr(one, name), getattr(two, name))
        for one, two in zip(first, second, strict=True)
        for name in ("pixels", "sizes", "index", "repeat", "position", "labels", "extra", "masks")
    )


@pytest.fixture
def sampler():
    return EpochSampler(COUNT, BATCH, seed=3)


def test_a_batch_contains_the_samples_of_the_sampler(sampler):
    source = Images()
    batches = load(WorkerLoader(source, sampler, workers=0, masks=True), epoch=2)
    assert len(batches) == sampler.steps
    for step, batch in enumerate(batches):
        samples = sampler.micro_batch(2, step)
        assert np.array_equal(batch.index, samples.index)
        assert np.array_equal(batch.repeat, samples.repeat)
        assert np.array_equal(batch.position, samples.position)
        assert np.array_equal(batch.labels, samples.index % 5)
        assert np.array_equal(batch.extra["half"], samples.index // 2)
        assert batch.pixels.shape == (BATCH, 3, *batch.sizes.amax(0))
        assert batch.pixels.is_contiguous(memory_format=torch.channels_last)
        for row, index in enumerate(samples.index):
            height, width = batch.sizes[row]
            assert np.array_equal(batch.pixels[row, :, :height, :width].permute(1, 2, 0), decode(source.encoded(index)))
            assert batch.pixels[row].sum() == batch.pixels[row, :, :height, :width].sum()
            assert (batch.masks[row, :height, :width] == (IGNORE if index % 3 == 0 else index)).all()
            assert (batch.masks[row, height:] == IGNORE).all()


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_do_not_depend_on_the_number_of_workers(sampler, workers):
    alone = WorkerLoader(Images(), sampler, workers=0, masks=True)
    loader = WorkerLoader(Images(), sampler, workers=workers, masks=True)
    for epoch, start_step in ((0, 0), (1, 0), (1, 3), (0, sampler.steps)):
        assert same(list(epoch_batches(loader, epoch, start_step)), list(epoch_batches(alone, epoch, start_step)))
    assert same(list(epoch_batches(alone, 1, 3)), list(epoch_batches(alone, 1))[3:])
    loader.close()


@pytest.mark.parametrize("broken", [(), (1, 2, 3, 17)])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_batches_do_not_depend_on_the_number_of_micro_batches(sampler, micro_batches, broken):
    source = Images(broken=broken)
    whole = load(WorkerLoader(source, sampler, workers=0, log=print))
    for micro_batch in range(micro_batches):
        for part, batch in zip(
            load(WorkerLoader(source, sampler, [micro_batch], micro_batches, workers=0, log=print)), whole, strict=True
        ):
            rows = torch.searchsorted(batch.position, part.position)
            assert torch.equal(part.index, batch.index[rows])
            assert torch.equal(part.repeat, batch.repeat[rows])
            assert torch.equal(part.position, batch.position[rows])
            height, width = part.pixels.shape[2:]
            assert torch.equal(part.pixels, batch.pixels[rows, :, :height, :width])


def test_an_iteration_can_be_abandoned(sampler):
    loader = WorkerLoader(Images(), sampler, workers=2)
    first = next(iter(epoch_batches(loader, 0)))
    assert same([first], list(epoch_batches(loader, 0))[:1])
    loader.close()


def test_large_jpegs_are_decoded_at_reduced_size(sampler):
    class Large(Images):
        def size(self, index):
            return 120, 160

    source = Large()
    jpegs = EpochSampler(COUNT, COUNT, shuffle=False)
    (batch,) = load(WorkerLoader(source, jpegs, workers=0, min_side=50, masks=True))
    assert batch.sizes[1].tolist() == [60, 80]
    assert batch.sizes[0].tolist() == [120, 160]
    assert (batch.masks[1, :60, :80] == 1).all()
    assert (batch.masks[1, 60:] == IGNORE).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_replaced_and_reported(workers):
    sampler = EpochSampler(COUNT, 6, shuffle=False)
    messages = []
    loader = WorkerLoader(Images(broken=(1, 2, 5, 36)), sampler, workers=workers, log=messages.append)
    batch, *_ = list(epoch_batches(loader, 0))
    assert batch.index.tolist() == [0, 3, 3, 3, 4, 0]  # the next readable image, wrapping around at the end of the step
    assert batch.position.tolist() == list(range(6))
    assert batch.labels.tolist() == [0, 3, 3, 3, 4, 0]
    assert [problem.location for problem in loader.problems] == ["image 1", "image 2", "image 5"]
    assert all("truncated" in problem.reason for problem in loader.problems)
    assert len(messages) == 1
    assert messages[0].startswith("images: 3 unreadable images were replaced by others, first image 1 (")
    list(epoch_batches(loader, 1))
    assert len(loader.problems) == 3
    assert len(messages) == 1
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_can_be_fatal(workers):
    loader = WorkerLoader(Images(broken=(9,)), EpochSampler(COUNT, 6, shuffle=False), workers=workers, unreadable="fatal")
    batches = epoch_batches(loader, 0)
    assert next(batches).index.tolist() == list(range(6))
    with pytest.raises(UserError, match=r"^image 9 cannot be read: damaged or truncated .*skip unreadable images\.$"):
        list(batches)


def test_no_readable_image_and_indivisible_batch_size():
    with pytest.raises(UserError, match="None of the 8 images"):
        load(WorkerLoader(Images(broken=tuple(range(COUNT))), EpochSampler(COUNT, 8), workers=1, log=print))
    with pytest.raises(UserError, match="not divisible"):
        WorkerLoader(Images(), EpochSampler(COUNT, 8), [0], 3)


def test_an_exception_in_a_source_is_raised(sampler):
    class Wrong(Images):
        def encoded(self, index):
            raise KeyError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        load(WorkerLoader(Wrong(), sampler, workers=1))


def test_a_killed_worker_raises_a_user_error(sampler):
    loader = WorkerLoader(Images(wait=0.02), sampler, workers=2)
    batches = epoch_batches(loader, 0)
    next(batches)
    started = time.monotonic()
    processes = [process for process, _ in loader._workers.processes]
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"A loading process died \(SIGKILL\)"):
        list(batches)
    assert time.monotonic() - started < 5
    assert not any(process.is_alive() for process in processes)
    assert len(list(epoch_batches(loader, 0))) == sampler.steps
    loader.close()


SCRIPT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
from tests.data.test_loader import Images, epoch_batches
from vitrail.data.loader import WorkerLoader
from vitrail.data.sampler import EpochSampler

sampler = EpochSampler(37, 8)
loader = WorkerLoader(Images(wait=0.01), sampler, workers=3)
try:
    for epoch in range(1000):
        for batch in epoch_batches(loader, epoch):
            if epoch == 0 and int(batch.position[0]) == 0:
                print(*(process.pid for process, _ in loader._workers.processes), flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def alive(pid):
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_sigint_and_sigkill_leave_no_worker_processes(sent, tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    workers = [int(pid) for pid in run.stdout.readline().split()]
    assert len(workers) == 3
    assert all(map(alive, workers))
    if sent == signal.SIGINT:
        os.killpg(run.pid, sent)  # as a terminal does: also to the workers
    else:
        run.kill()
    _, errors = run.communicate(timeout=30)
    assert "Traceback" not in errors
    assert run.returncode == (130 if sent == signal.SIGINT else -sent)
    deadline = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    if sent == signal.SIGINT:
        assert not list(tmp_path.iterdir()), "folders of the sockets that share tensors"


def test_loaders_and_batches_can_be_pickled(sampler):
    loader = WorkerLoader(Images(), sampler, workers=2)
    expected = list(epoch_batches(loader, 0))
    assert same(load(pickle.loads(pickle.dumps(loader))), expected)
    assert same(pickle.loads(pickle.dumps(expected)), expected)
    loader.close()


@pytest.mark.parametrize("broken", [(), (0, 1, 9, 36)])
@pytest.mark.parametrize("workers", [0, 2])
def test_cached_batches_equal_decoded_batches(sampler, broken, workers):
    source = Images(broken=broken)
    messages = []
    cache = build_cache(source, workers=workers, masks=True)
    for micro_batch, micro_batches in ((0, 1), (1, 2)):
        cached = CachedLoader(cache, sampler, [micro_batch], micro_batches, log=messages.append)
        decoding = WorkerLoader(source, sampler, [micro_batch], micro_batches, workers=0, masks=True, log=print)
        for epoch, start_step in ((0, 0), (4, 2)):
            assert same(list(epoch_batches(cached, epoch, start_step)), list(epoch_batches(decoding, epoch, start_step)))
        assert {problem.location for problem in cached.problems} == {f"image {index}" for index in broken}
    assert len(messages) == (2 if broken else 0)
    if broken:
        with pytest.raises(UserError, match="image 0 cannot be read"):
            CachedLoader(cache, sampler, unreadable="fatal")


def test_a_cache_grows_and_handles_a_chunk_of_unreadable_images():
    source = Images(count=140, broken=tuple(range(64)))
    cache = build_cache(source, workers=0)
    assert (cache.sizes[:64] == 0).all()
    assert cache.pixels.shape == (140, 26, 40, 3)


def test_the_cache_location_depends_on_free_memory():
    plan = plan_cache(Images(broken=(0,)))
    assert plan.location == "memory"
    assert plan.message.startswith("images: 37 images, 115 kB decoded, cached in memory (")
    assert "\n" not in plan.message
    assert plan_cache(Images(), memory_fraction=0).location == "files"
    assert isinstance(plan, CachePlan)
    assert 0 < free_memory() < 1 << 50
