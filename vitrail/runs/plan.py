"""`vitrail plan`: what a training would do, with memory and time, without writing anything."""

from pathlib import Path

from vitrail.runs.prepare import prepare
from vitrail.runs.request import TrainRequest, resolve_recipe
from vitrail.training.distributed import init_distributed


def plan(request: TrainRequest, seeds: int = 1) -> list[str]:
    """The messages of `prepare`: data, model, division of the batch, memory and time. The main process has them."""
    messages: list[str] = []
    with init_distributed(request.device) as devices:
        with devices.sync_errors():
            recipe = resolve_recipe(request, devices.device.type)
        folder = Path(request.out).expanduser() if request.out is not None else None
        prepare(request, recipe, devices, messages.append, folder, [1.0] * (seeds - 1))
        return messages if devices.is_main else []
