"""Measurements of a benchmark: candidates are measured in interleaved groups; failures become messages."""

import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from vitrail.bench.candidates import Candidate
from vitrail.bench.peak import Peak
from vitrail.bench.settings import CONFIGURATIONS, Setting
from vitrail.bench.timing import Run, Summary, choose_repeats, summarize, time_interleaved, time_run
from vitrail.bench.workloads import NOT_CAPTURED, CannotRun, make_run
from vitrail.devices import free_memory
from vitrail.errors import UserError
from vitrail.models.flops import Cost

OUT_OF_MEMORY = "out of memory"
FAILED = "failed"
LONG_RUN = 1.0  # seconds; for longer runs a warmup of two runs is enough
MEMORY_FRACTION = 0.9  # of the free memory that a run on the CPU may use
BYTES_PER_PARAMETER = 16  # in training: weight, gradient and two moments in float32
RECOMPILE_LIMIT = 4096  # of graphs per function: every model of a group has its own
SAME = ("model", "task", "precision", "mode", "batch_size", "size", "depth")  # fields of measurements that are compared


@dataclass
class Measurement:
    """One candidate in one setting. Values that were not measured are None."""

    model: str
    project: str
    network: str  # the name in its own project
    task: str
    precision: str
    mode: str
    batch_size: int
    size: tuple[int, int]
    depth: int
    parameters: int
    macs: int  # of one image, forward
    configuration: str = ""  # of timm's model in the mode native
    error: str = ""  # why there are no times
    interleaved: int = 0  # number of candidates that were timed in turns, including this one
    repeats: int = 0  # runs per round
    seconds: list[float] = field(default_factory=list)  # per run, one value for each round
    memory: int | None = None  # peak in bytes, including weights; GPUs only
    compile_seconds: float | None = None  # first run minus a usual run
    peak: float | None = None  # FLOP/s of the measured matrix product
    bandwidth: float | None = None  # bytes per second of the measured copy

    @property
    def n(self) -> int:
        return len(self.seconds)

    @property
    def median(self) -> float:
        return summarize(self.seconds).median if self.seconds else math.nan

    @property
    def spread(self) -> float:
        return summarize(self.seconds).spread if self.seconds else math.nan

    @property
    def images_per_second(self) -> float:
        return self.batch_size / self.median

    @property
    def flops(self) -> float:
        """FLOP/s: two per multiply-add; a training step counts three forward passes."""
        return self.images_per_second * self.macs * (6 if self.task == "train" else 2)

    @property
    def mfu(self) -> float | None:
        """Fraction of the measured peak."""
        return self.flops / self.peak if self.peak and self.seconds else None

    @property
    def lower_bounds(self) -> dict[str, float]:
        """Lower bounds of the seconds per run: the products at the measured peak, and in training the activations (peak memory
        minus weights, gradients and moments), written and read once."""
        bounds = {}
        if self.peak and self.seconds:
            bounds["products"] = self.flops * self.median / self.peak
        if self.bandwidth and self.memory and self.task == "train":
            bounds["memory"] = 2 * max(self.memory - BYTES_PER_PARAMETER * self.parameters, 0) / self.bandwidth
        return bounds

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        if self.seconds:
            values |= {
                "lower_bound_milliseconds": {name: 1e3 * value for name, value in self.lower_bounds.items()},
                "n": self.n,
                "milliseconds": 1e3 * self.median,
                "spread": self.spread,
                "images_per_second": self.images_per_second,
                "tflops": self.flops / 1e12,
                "mfu": self.mfu,
            }
        return values


def timm_counterpart(measurement: Measurement, measurements: Sequence[Measurement]) -> Measurement | None:
    """timm's measurement in the same setting as one of ours, in its fastest configuration, if both have times."""
    if measurement.project != "vitrail" or not measurement.seconds:
        return None
    return min(timm_measurements(measurement, measurements), key=lambda other: other.median, default=None)


def timm_measurements(measurement: Measurement, measurements: Sequence[Measurement]) -> list[Measurement]:
    """timm's measurements with times in the setting of a measurement, one for each configuration."""
    return [
        other
        for other in measurements
        if other.project == "timm" and other.seconds and all(getattr(other, name) == getattr(measurement, name) for name in SAME)
    ]


def fastest_configurations(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The measurements without those of timm that are slower than another configuration of the same model; failures are kept."""
    return [
        each
        for each in measurements
        if each.project != "timm"
        or not each.seconds
        or each is min(timm_measurements(each, measurements), key=lambda other: other.median)
    ]


def speedup(measurement: Measurement, other: Measurement) -> Summary:
    """Speed relative to the other, as the ratio in each round: disturbances of a round affect both."""
    return summarize([theirs / ours for ours, theirs in zip(measurement.seconds, other.seconds, strict=False)])


class Entry(NamedTuple):
    """A candidate in a setting, with its parameters and multiply-adds."""

    candidate: Candidate
    setting: Setting
    cost: Cost

    def new_measurement(self, peak: Peak | None) -> Measurement:
        candidate, architecture = self.candidate, self.candidate.at(self.setting)
        return Measurement(
            model=candidate.name,
            project=candidate.project,
            network=candidate.timm_model or candidate.name,
            task=self.setting.task,
            precision=self.setting.precision,
            mode=self.setting.mode,
            batch_size=self.setting.batch_size,
            size=architecture.image_size,
            depth=architecture.depth,
            parameters=self.cost.parameters,
            macs=self.cost.macs,
            configuration=candidate.configuration,
            peak=peak.flops.get(self.setting.precision) if peak else None,
            bandwidth=peak.bandwidth if peak else None,
        )


Group = list[Entry]  # timed in turns


def make_groups(
    ours: Sequence[Candidate], others: Sequence[Candidate], settings: Sequence[Setting], device_type: str = "cpu"
) -> list[Group]:
    """Groups to time in turns: each model with its counterpart in `others`; without others, all models of a setting.

    In the mode native the counterpart is measured in every configuration that the device supports.
    Impossible sizes and depths raise an error before anything is measured.
    """
    groups = []
    for setting in settings:
        entries = [Entry(candidate, setting, candidate.cost(setting)) for candidate in ours]
        configurations = CONFIGURATIONS[device_type] if setting.mode == "native" else ("",)
        if not others:
            groups.append(entries)
            continue
        for entry in entries:
            theirs = [
                Entry(dataclasses.replace(other, configuration=configuration), setting, entry.cost)
                for other in others
                if other.name == entry.candidate.name
                for configuration in configurations
            ]
            groups.append([entry, *theirs])
    return groups


def measure_groups(
    groups: Sequence[Group],
    rounds: int,
    device: torch.device,
    peak: Peak | None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[list[Measurement]]:
    """Yield the measurements of each group; after an interrupt, yield those of the current group so far, then raise."""
    # Static shapes: a second batch size must not make torch compile dynamic ones, which are slower.
    config = {
        "automatic_dynamic_shapes": False,
        "recompile_limit": RECOMPILE_LIMIT,
        "accumulated_recompile_limit": RECOMPILE_LIMIT,
    }
    with torch._dynamo.config.patch(config):
        for group in groups:
            measurements = [entry.new_measurement(peak) for entry in group]
            try:
                measure_group(group, measurements, rounds, device, advance)
            except KeyboardInterrupt:
                yield [measurement for measurement in measurements if measurement.seconds or measurement.error]
                raise
            yield measurements


def measure_group(
    group: Group, measurements: Sequence[Measurement], rounds: int, device: torch.device, advance: Callable[[int], None]
) -> None:
    """Fill in the measurements: timed in turns if all fit in memory together, otherwise one after the other."""
    runs: list[Run] = []
    ready: list[Measurement] = []
    separately = False
    try:
        for entry, measurement in zip(group, measurements, strict=True):
            measurement.error = prepare(entry, measurement, runs, device)
            if not measurement.error:
                ready.append(measurement)
            elif measurement.error in (OUT_OF_MEMORY, NOT_CAPTURED) and runs:
                separately = True
                break
        if not separately:
            for measurement in ready:
                measurement.interleaved = len(ready)
            repeats, times = [measurement.repeats for measurement in ready], [measurement.seconds for measurement in ready]
            error = describe_failure(lambda: time_interleaved(runs, repeats, times, rounds, device, advance))
            separately = error == OUT_OF_MEMORY and len(runs) > 1
            for measurement in ready if error else ():
                measurement.error = error
                measurement.seconds.clear()
    finally:
        runs.clear()
        clear(device)
    if separately:
        for entry, measurement in zip(group, measurements, strict=True):
            measure_group([entry], [measurement], rounds, device, advance)


def prepare(entry: Entry, measurement: Measurement, runs: list[Run], device: torch.device) -> str:
    """Build and warm up a run and append it to `runs`; returns an error message, empty on success."""
    cuda = device.type == "cuda"
    if not cuda and required_bytes(entry) > MEMORY_FRACTION * (free_memory() or math.inf):
        return OUT_OF_MEMORY  # otherwise the operating system would kill the process

    def warm_up() -> None:
        before = torch.cuda.memory_allocated(device) if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        run = make_run(entry.candidate, entry.setting, device)
        first = time_run(run, device)
        usual = time_run(run, device)
        if usual < LONG_RUN:
            usual = time_run(run, device, 2)
        measurement.compile_seconds = max(first - usual, 0.0) if entry.setting.mode != "eager" else None
        measurement.memory = torch.cuda.max_memory_allocated(device) - before if cuda else None
        measurement.repeats = choose_repeats(usual)
        runs.append(run)

    error = describe_failure(warm_up)
    if error:
        clear(device)
    return error


def describe_failure(work: Callable[[], None]) -> str:
    """Call `work`; returns a short message if it fails. UserError and KeyboardInterrupt are raised."""
    try:
        work()
    except (UserError, KeyboardInterrupt):
        raise
    except CannotRun as reason:
        return str(reason)
    except (torch.OutOfMemoryError, MemoryError):
        return OUT_OF_MEMORY
    except Exception as error:  # of a compiler, kernel or foreign model: the other measurements continue
        text = str(error).strip()
        if "allocate memory" in text or "out of memory" in text:
            return OUT_OF_MEMORY
        return f"{FAILED}: {text.splitlines()[0] if text else type(error).__name__}"
    return ""


def clear(device: torch.device) -> None:
    """Free the memory and the compiled code of the last group."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def required_bytes(entry: Entry) -> float:
    """Estimate in bytes: weights, in training with gradients and moments, and activations of the batch."""
    copies, kept = (4, 1.0) if entry.setting.task == "train" else (1, 2.0 / max(entry.candidate.at(entry.setting).depth, 2))
    return 4.0 * copies * entry.cost.parameters + kept * entry.cost.activation_bytes * entry.setting.batch_size
