"""The stream is the order's, whatever the workers, the cut and the start; damage is accounted for; nothing is left behind."""

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
from vitrail.data.loader import IGNORE, Batch, Loader, Plan, StoredLoader, choose_store, fill_store, free_memory
from vitrail.data.sampler import Order
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError

COUNT, BATCH = 37, 8


@dataclass
class Images(Source):
    """Images of many sizes made of their number, in memory; those in `broken` are damaged."""

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

    def where(self, index: int) -> str:
        return f"image {index}"


def file(pixels, kind):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def stream(loader, epoch=0, start_step=0):
    found = list(loader.batches(epoch, start_step))
    loader.close()
    return found


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
def order():
    return Order(COUNT, BATCH, seed=3)


def test_a_batch_holds_what_the_order_says(order):
    source = Images()
    batches = stream(Loader(source, order, workers=0, masks=True), epoch=2)
    assert len(batches) == order.steps
    for step, batch in enumerate(batches):
        samples = order.micro_batch(2, step)
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
def test_any_number_of_workers_gives_the_same_stream(order, workers):
    alone = Loader(Images(), order, workers=0, masks=True)
    loader = Loader(Images(), order, workers=workers, masks=True)
    for epoch, start_step in ((0, 0), (1, 0), (1, 3), (0, order.steps)):
        assert same(list(loader.batches(epoch, start_step)), list(alone.batches(epoch, start_step)))
    assert same(list(alone.batches(1, 3)), list(alone.batches(1))[3:])
    loader.close()


@pytest.mark.parametrize("broken", [(), (1, 2, 3, 17)])
@pytest.mark.parametrize("units", [2, 4])
def test_any_cut_gives_the_same_stream(order, micro_batches, broken):
    source = Images(broken=broken)
    whole = stream(Loader(source, order, workers=0, warn=print))
    for micro_batch in range(micro_batches):
        for part, batch in zip(
            stream(Loader(source, order, micro_batch, micro_batches, workers=0, warn=print)), whole, strict=True
        ):
            assert torch.equal(part.index, batch.index[micro_batch::micro_batches])
            assert torch.equal(part.repeat, batch.repeat[micro_batch::micro_batches])
            assert torch.equal(part.position, batch.position[micro_batch::micro_batches])
            height, width = part.pixels.shape[2:]
            assert torch.equal(part.pixels, batch.pixels[micro_batch::micro_batches, :, :height, :width])


def test_a_loop_may_be_left_early(order):
    loader = Loader(Images(), order, workers=2)
    first = next(iter(loader.batches(0)))
    assert same([first], list(loader.batches(0))[:1])
    loader.close()


def test_large_images_come_scaled(order):
    class Large(Images):
        def size(self, index):
            return 120, 160

    source = Large()
    jpegs = Order(COUNT, COUNT, shuffle=False)
    (batch,) = stream(Loader(source, jpegs, workers=0, at_least=50, masks=True))
    assert batch.sizes[1].tolist() == [60, 80]
    assert batch.sizes[0].tolist() == [120, 160]
    assert (batch.masks[1, :60, :80] == 1).all()
    assert (batch.masks[1, 60:] == IGNORE).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_replaced_and_told(workers):
    order = Order(COUNT, 6, shuffle=False)
    told = []
    loader = Loader(Images(broken=(1, 2, 5, 36)), order, workers=workers, warn=told.append)
    batch, *_ = list(loader.batches(0))
    assert batch.index.tolist() == [0, 3, 3, 3, 4, 0]  # the next readable one, round the end of the step
    assert batch.position.tolist() == list(range(6))
    assert batch.labels.tolist() == [0, 3, 3, 3, 4, 0]
    assert [problem.where for problem in loader.problems] == ["image 1", "image 2", "image 5"]
    assert all("truncated" in problem.reason for problem in loader.problems)
    assert len(told) == 1
    assert told[0].startswith("images: 3 images could not be read and others stood in; the first: image 1 (")
    list(loader.batches(1))
    assert len(loader.problems) == 3
    assert len(told) == 1
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_may_be_fatal(workers):
    loader = Loader(Images(broken=(9,)), Order(COUNT, 6, shuffle=False), workers=workers, bad="fatal")
    batches = loader.batches(0)
    assert next(batches).index.tolist() == list(range(6))
    with pytest.raises(UserError, match=r"^image 9 cannot be read: damaged or truncated .*skipped\.$"):
        list(batches)


def test_nothing_readable_and_impossible_cuts():
    with pytest.raises(UserError, match="None of the 8 images"):
        stream(Loader(Images(broken=tuple(range(COUNT))), Order(COUNT, 8), workers=1, warn=print))
    with pytest.raises(UserError, match="does not divide"):
        Loader(Images(), Order(COUNT, 8), 0, 3)


def test_a_bug_in_a_source_is_shown(order):
    class Wrong(Images):
        def encoded(self, index):
            raise KeyError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        stream(Loader(Wrong(), order, workers=1))


def test_a_killed_worker_is_one_sentence(order):
    loader = Loader(Images(wait=0.02), order, workers=2)
    batches = loader.batches(0)
    next(batches)
    started = time.monotonic()
    processes = [process for process, _ in loader._workers.processes]
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"A loading process died \(SIGKILL\)"):
        list(batches)
    assert time.monotonic() - started < 5
    assert not any(process.is_alive() for process in processes)
    assert len(list(loader.batches(0))) == order.steps
    loader.close()


SCRIPT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
from tests.data.test_loader import Images
from vitrail.data.loader import Loader
from vitrail.data.sampler import Order

loader = Loader(Images(wait=0.01), Order(37, 8), workers=3)
try:
    for epoch in range(1000):
        for batch in loader.batches(epoch):
            if epoch == 0 and int(batch.position[0]) == 0:
                print(*(process.pid for process, _ in loader._workers.processes), flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def alive(pid):
    """Neither gone nor a dead child that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_sudden_death_leave_nothing_behind(how):
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    workers = [int(pid) for pid in run.stdout.readline().split()]
    assert len(workers) == 3
    assert all(map(alive, workers))
    if how == signal.SIGINT:
        os.killpg(run.pid, how)  # as a terminal does: to the workers too
    else:
        run.kill()
    _, errors = run.communicate(timeout=30)
    assert "Traceback" not in errors
    assert run.returncode == (130 if how == signal.SIGINT else -how)
    deadline = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))


def test_everything_can_be_pickled(order):
    loader = Loader(Images(), order, workers=2)
    expected = list(loader.batches(0))
    assert same(stream(pickle.loads(pickle.dumps(loader))), expected)
    assert same(pickle.loads(pickle.dumps(expected)), expected)
    loader.close()


@pytest.mark.parametrize("broken", [(), (0, 1, 9, 36)])
@pytest.mark.parametrize("workers", [0, 2])
def test_stored_images_are_the_decoded_ones(order, broken, workers):
    source = Images(broken=broken)
    told = []
    store = fill_store(source, workers=workers, masks=True)
    for micro_batch, micro_batches in ((0, 1), (1, 2)):
        stored = StoredLoader(store, order, micro_batch, micro_batches, warn=told.append)
        decoding = Loader(source, order, micro_batch, micro_batches, workers=0, masks=True, warn=print)
        for epoch, start_step in ((0, 0), (4, 2)):
            assert same(list(stored.batches(epoch, start_step)), list(decoding.batches(epoch, start_step)))
        assert {problem.where for problem in stored.problems} == {f"image {index}" for index in broken}
    assert len(told) == (2 if broken else 0)
    if broken:
        with pytest.raises(UserError, match="image 0 cannot be read"):
            StoredLoader(store, order, bad="fatal")


def test_a_store_grows_and_survives_a_chunk_of_damage():
    source = Images(count=140, broken=tuple(range(64)))
    store = fill_store(source, workers=0)
    assert (store.sizes[:64] == 0).all()
    assert store.pixels.shape == (140, 26, 40, 3)


def test_the_store_is_chosen_by_what_is_free():
    plan = choose_store(Images(broken=(0,)))
    assert plan.place == "memory"
    assert plan.sentence.startswith("images: 37 images, 0.00 GB decoded, kept in memory (")
    assert "\n" not in plan.sentence
    assert choose_store(Images(), memory_share=0).place == "files"
    assert isinstance(plan, Plan)
    assert 0 < free_memory() < 1 << 50
