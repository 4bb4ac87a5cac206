"""The trainings of an ablation: what is finished is left alone, what was begun goes on, the rest begins."""

import os
from collections.abc import Sequence

from vitrail.errors import UserError
from vitrail.runs.ablation import Ablation, Cell
from vitrail.runs.ablation_display import Standing
from vitrail.runs.process_pool import Job, run_jobs, share_of_cores
from vitrail.training.checkpointing import alone


def run_ablation(
    ablation: Ablation, devices: Sequence[str], at_once: int, micro_batch_size: int | None, workers: int | None
) -> tuple[bool, list[str]]:
    """Train what is unfinished; whether it was not stopped, and a sentence for each training that failed."""
    if "RANK" in os.environ:
        raise UserError("An ablation starts its own processes: leave torchrun out, and give --jobs or --devices.")
    if workers is None and at_once > 1:
        workers = share_of_cores(at_once)
    jobs = {(cell.name, seed): make_job(ablation, cell, seed, micro_batch_size, workers) for cell, seed in ablation.unfinished()}
    with alone(ablation.folder), Standing(ablation, jobs) as standing:
        whole = run_jobs(list(jobs.values()), at_once, devices, standing.look, standing.changed)
    failed = [job for job in jobs.values() if job.state == "failed"]
    return whole, [f"{job.folder} failed: {job.reason()} ({job.log} has all of it)" for job in failed]


def make_job(ablation: Ablation, cell: Cell, seed: int, micro_batch_size: int | None, workers: int | None) -> Job:
    folder = ablation.run_folder(cell, seed)
    decoding = [] if workers is None else ["--workers", str(workers)]
    begin = ["train", ablation.source, "--recipe", str(folder.parent / "recipe.yaml"), "--seed", str(seed), "--out", str(folder)]
    begin += [] if micro_batch_size is None else ["--micro-batch", str(micro_batch_size)]
    return Job(folder, [*begin, *decoding], ["resume", str(folder), *decoding], folder.with_name(f"{folder.name}.log"))
