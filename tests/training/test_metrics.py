"""Metrics on disk: exact, valid JSON, the same after an interruption."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import UserError
from vitrail.formatting import format_significant
from vitrail.training.metrics import FILE, TOP1, Metric, MetricsWriter, SmoothedValue, read_metrics


def write(folder, steps, resume_step=None, speed=1.0):
    with MetricsWriter(folder, resume_step) as metrics:
        for step in steps:
            metrics.write("train", step, step / 10, {"loss": 1 / (step + 3), "images_per_second": speed * step, "memory": None})
            if step % 10 == 0:
                metrics.write("validation", step, step // 10, {"top1": 0.1 * step / 7, "best": step > 10})


def without_speed(folder):
    return [{name: value for name, value in line.items() if name != "speed"} for line in read_metrics(folder)]


def test_values_are_exact_and_speed_is_separate(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(
            "train", 1, 0.1, {"loss": 0.1 + 0.2, "lr": torch.tensor(0.5), "data_wait": np.float32(0.25), "flops_share": None}
        )
    assert read_metrics(tmp_path) == [
        {
            "step": 1,
            "epoch": 0.1,
            "kind": "train",
            "loss": 0.1 + 0.2,
            "lr": 0.5,
            "speed": {"data_wait": 0.25, "flops_share": None},
        }
    ]


@given(value=st.floats())
def test_every_float_comes_back_and_the_file_stays_json(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("run")
    metrics = MetricsWriter.__new__(MetricsWriter)
    metrics._written, metrics._board = {}, None
    with (folder / FILE).open("w") as metrics._file:
        metrics.write("train", 1, 0.5, {"loss": value, "seconds": value})
    json.loads((folder / FILE).read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (line,) = read_metrics(folder)
    assert repr(line["loss"]) == repr(value) == repr(line["speed"]["seconds"])


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path):
    write(tmp_path / "uninterrupted", range(1, 31))
    write(tmp_path / "parts", range(1, 18))
    write(tmp_path / "parts", range(11, 31), resume_step=10, speed=2.0)
    assert without_speed(tmp_path / "parts") == without_speed(tmp_path / "uninterrupted")
    speeds = [line["speed"]["images_per_second"] for line in read_metrics(tmp_path / "parts") if line["kind"] == "train"]
    assert speeds[9] == 10
    assert speeds[10] == 22


def test_existing_lines_are_not_written_twice(tmp_path):
    write(tmp_path, range(1, 11))
    before = (tmp_path / FILE).read_bytes()
    write(tmp_path, [10], resume_step=10)
    assert (tmp_path / FILE).read_bytes() == before
    write(tmp_path, [], resume_step=0)
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("torn", [b'{"step": 4, "epoch": 0.4, "ki', b"\0\0\0\0", b"\0\0\0\n", b"17\n", b'{"step": 4}\n'])
def test_an_incomplete_last_line_is_ignored_and_removed(tmp_path, torn):
    write(tmp_path, range(1, 4))
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole + torn)
    assert len(read_metrics(tmp_path)) == 3
    write(tmp_path, [], resume_step=3)
    assert (tmp_path / FILE).read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_rejected(tmp_path):
    write(tmp_path, range(1, 4))
    lines = (tmp_path / FILE).read_bytes().split(b"\n")
    (tmp_path / FILE).write_bytes(b"\n".join([lines[0], b"oops", *lines[2:]]))
    with pytest.raises(UserError, match=r"Line 2 of .* is damaged"):
        read_metrics(tmp_path)


def test_a_new_run_does_not_append_to_the_file_of_another(tmp_path):
    write(tmp_path, [1])
    with pytest.raises(UserError, match="another run"):
        MetricsWriter(tmp_path)
    assert read_metrics(tmp_path / "nowhere") == []


def test_tensorboard_gets_the_same_values_and_drops_repeated_steps(tmp_path):
    write(tmp_path, range(1, 18))
    write(tmp_path, range(11, 21), resume_step=10)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, 21))
    assert losses[4].value == pytest.approx(1 / 8)
    assert [event.step for event in events.Scalars("validation/top1")] == [10, 20]


def test_without_tensorboard_a_warning_is_given(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.warns(UserWarning, match="TensorBoard cannot be imported"), MetricsWriter(tmp_path) as metrics:
        metrics.write("train", 1, 0.1, {"loss": 1.0})
    assert len(read_metrics(tmp_path)) == 1


@given(value=st.floats(-10, 10), gaps=st.lists(st.floats(1e-6, 0.5), min_size=1, max_size=20))
def test_smoothing_keeps_a_constant(value, gaps):
    smoothed, progress = SmoothedValue(), 0.0
    for gap in gaps:
        progress += gap
        assert smoothed.add(progress, value) == pytest.approx(value, abs=1e-9)


def test_smoothing_hardly_depends_on_the_logging_interval():
    ends = []
    for points in (1000, 4000):
        smoothed = SmoothedValue()
        for index in range(1, points + 1):
            end = smoothed.add(index / points, math.exp(-index / points))
        ends.append(end)
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
    assert math.isnan(smoothed.add(1.0, math.nan))
    assert smoothed.add(1.0, ends[1]) == pytest.approx(ends[1])


def test_format_significant():
    assert [format_significant(value) for value in (1.4, 0.0312, 12345.0, math.nan)] == ["1.400", "0.03120", "1.234e+04", "nan"]


def test_intervals_end_at_possible_values():
    assert TOP1.show_interval(-0.1, 1.4655) == "0.00 to 100.00"
    assert TOP1.show_interval(0.3606, 0.9) == "36.06 to 90.00"
    assert Metric("loss", "loss", higher_is_better=False).show_interval(-0.1, 1.5) == "0.0000 to 1.5000"
    assert Metric("score", "score").show_interval(-0.1, 1.5) == "-0.1000 to 1.5000"
    assert TOP1.show_interval(None, None) == ""
